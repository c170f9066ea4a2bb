"""The state after a token inside the window (trap 11), against the fp64 oracle: every policy, ring phase and step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lifecycle import NAIVE, NAIVE_FP64, TRITON, Case, Lifecycle
from test_fold import TOLERANCE, indices, make

from sglang_replayssm.kernels import Cursors, Ring, RingSpec, materialize
from sglang_replayssm.kernels.fold import naive
from sglang_replayssm.policies import POLICIES

# Shrinking a failure takes the interpreter minutes.
PROPERTY = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.reuse, Phase.generate]}
SMALL = Case(num_v_heads=1, head_k_dim=16, head_v_dim=16, window=6, max_draft_tokens=3)


def live_and_track(case: Case, ops, device: str, steps: int, **kwargs) -> Lifecycle:
    """`steps` steps of random lengths and acceptance, each of which tracks a random step of every row, or none."""
    life = Lifecycle(case, device, ops, **kwargs)
    for _ in range(steps):
        T = int(life.draw(1, case.max_draft_tokens)[0])
        life.step(T, track=life.draw(-1, T - 1).tolist())
    return life


PHASES = {
    "regime": st.sampled_from(["slow", "mixed", "fast"]),
    "window": st.integers(3, 9),
    "seed": st.integers(0, 2**16),
}


def check_phases(steps: int, fold: str, **changes) -> None:
    """States at folds and tracked ones: a few fp32 roundings, where a record more or less would be off by far more."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    life = live_and_track(replace(SMALL, fold=fold, **changes), TRITON, device, steps=steps)
    life.fold()
    errors = life.errors()
    assert errors.state <= (2.0**-5 if fold == "bf16" else 1e-6), errors


@pytest.mark.parametrize("fold", POLICIES)
@settings(max_examples=3, **PROPERTY)
@given(**PHASES)
def test_any_phase(fold: str, regime: str, window: int, seed: int) -> None:
    check_phases(5, fold, regime=regime, window=window, seed=seed, requests=1)


@pytest.mark.slow
@pytest.mark.parametrize("fold", POLICIES)
@settings(max_examples=10, **PROPERTY)
@given(**PHASES)
def test_any_phase_of_two_requests(fold: str, regime: str, window: int, seed: int) -> None:
    check_phases(8, fold, regime=regime, window=window, seed=seed)


@pytest.mark.parametrize("fold", POLICIES)
def test_the_model_s_head(fold: str) -> None:
    """K = V = 128."""
    check_phases(3, fold, head_k_dim=128, head_v_dim=128, requests=1)


@pytest.mark.parametrize("fold", POLICIES)
def test_the_plain_version_is_the_formula(fold: str) -> None:
    """In fp64 nothing is left but what the policy's records have lost."""
    case = replace(SMALL, fold=fold, dtype=torch.float32)
    errors = live_and_track(case, NAIVE_FP64, "cpu", steps=12, storage=torch.float64).errors()
    assert errors.state < (2.0**-5 if fold == "bf16" else 1e-12)
    errors = live_and_track(case, NAIVE, "cpu", steps=12).errors()
    assert errors.state < (2.0**-5 if fold == "bf16" else 1e-6)


@pytest.mark.parametrize("fold", POLICIES)
def test_only_what_is_asked_for_is_written(fold: str, device: str) -> None:
    """Padding, no step, no target, row 0; NaN in dead records; two layers; a slot that is not next to its row's."""
    state, ring, cursors = make(torch.bfloat16, device, fold=fold)
    for tensor in ring.tensors().values():
        tensor[:, :, :, 7:] = float("nan")
    cursors.position[1:] = indices(0, 0 if fold == "every-commit" else 4, device=device)
    lines = [(1, 1), (3, 2), (-1, 3), (2, 0), (4, 3)]  # slot, row
    cursors.plan[:5, :2] = torch.tensor(lines, dtype=torch.int32, device=device)
    steps = indices(2, -1, 1, 1, 0, device=device)
    targets = indices(0, 2, 2, 2, -1, device=device, dtype=torch.int32)
    before, expected, position = state.clone(), state.double(), cursors.position.clone()
    naive.materialize(expected, ring, cursors, steps, targets, dtype=torch.float64)
    materialize(state, ring, cursors, steps, targets)
    assert torch.equal(state[:, 1:], before[:, 1:]) and torch.equal(cursors.position, position)
    assert ((state[:, 0] - expected[:, 0]).norm() / expected[:, 0].norm()).item() < TOLERANCE[fold]
    assert not torch.equal(state[:, 0], before[:, 0])


def test_no_rows(device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device)
    none = indices(device=device)
    materialize(state, ring, cursors, none, none)


def test_errors(device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device)
    one, two = indices(1, device=device), indices(1, 2, device=device)
    with pytest.raises(ValueError, match="steps and targets of one length"):
        materialize(state, ring, cursors, two, one)
    with pytest.raises(ValueError, match="fp32 state"):
        materialize(state.double(), ring, cursors, one, one)
    many = torch.zeros(cursors.spec.plan_lines + 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=f"{many.numel()} batch rows"):
        materialize(state, ring, cursors, many, many)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_trap_12_indices_past_2_31(policy: str, device: str) -> None:
    big = 2**31 // (256 * 256) + 2
    spec = RingSpec(1, 2, 1, 1, 256, 256, 8, 4, torch.bfloat16, policy)
    state = torch.zeros(1, big + 1, 1, 256, 256, device=device)
    ring, cursors = Ring.allocate(spec, device), Cursors.allocate(spec, device)
    for name, tensor in ring.tensors().items():
        if name not in ("g", "gates"):
            tensor.normal_()
    if ring.gates is not None:
        ring.gates[..., 1].uniform_()
    cursors.plan[0, :2] = torch.tensor([big, 1], dtype=torch.int32, device=device)
    step, small = indices(2, device=device), torch.zeros(1, 1, 1, 256, 256, device=device)
    materialize(state, ring, cursors, step, indices(big - 1, device=device))
    cursors.plan[0, 0] = 0
    naive.materialize(small, ring, cursors, step, indices(0, device=device))
    close = {"rtol": 2.0**-7, "atol": 1e-3} if policy == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(state[:, big - 1], small[:, 0], **close)
    assert not state[:, : big - 1].any() and not state[:, big].any()
