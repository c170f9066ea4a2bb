"""Fold against its plain version in fp64, at the edges of the ring and of the decays."""

from dataclasses import replace

import pytest
import torch

from sglang_replayssm.kernels import Cursors, Ring, RingSpec, fold, fold_due
from sglang_replayssm.kernels.fold import naive
from sglang_replayssm.policies import POLICIES

ROW, SLOT = 2, 3
# Largest relative L2 error of a folded state: fp32 roundings; under bf16, half a unit in the last place of bf16.
TOLERANCE = {"fp32": 3e-7, "exact": 4e-7, "every-commit": 4e-7, "bf16": 2.0**-8}


def make(
    dtype: torch.dtype, device: str, layers: int = 2, fold: str = "fp32", **sizes
) -> tuple[torch.Tensor, Ring, Cursors]:
    """A state of 5 slots, a random ring whose log-decay is -0.1 a token, and cursors."""
    torch.manual_seed(0)
    shape = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 32, "head_v_dim": 64, "window": 10} | sizes
    drafts = shape["window"] if fold == "every-commit" else 4  # there a ring has room for one window
    spec = RingSpec(layers=layers, rows=3, max_draft_tokens=drafts, activation_dtype=dtype, fold=fold, **shape)
    ring = Ring.allocate(spec, device)
    for name in {"d", "k", "v"} & ring.tensors().keys():
        getattr(ring, name).normal_()
    if spec.policy.factors == "bfloat16":
        ring.k.div_(spec.head_k_dim**0.5)  # about normalised
    if ring.gates is not None:
        ring.gates[..., 1].uniform_()
    set_log_decay(ring, 0, -0.1)
    state = torch.randn(layers, 5, spec.num_v_heads, spec.head_v_dim, spec.head_k_dim, device=device)
    return state, ring, Cursors.allocate(spec, device)


def set_log_decay(ring: Ring, base: int, per_token: float, before: float = 0.0) -> None:
    """Log-decays of records base, base + 1, ...: accumulated, as high and low parts, and each token's own.

    `before`: extra log-decay of the first token."""
    records = ring.spec.records
    at = (base + torch.arange(records)) % records
    if ring.gates is not None:
        ring.gates[..., 0] = per_token
        ring.gates[..., base, 0] += before
    if ring.g is not None:
        total = before + per_token * torch.arange(1, records + 1, dtype=torch.float64, device=ring.g.device)
        ring.g[..., at, 0] = total.float()
        ring.g[..., at, 1] = (total - total.float()).float()


def check(state: torch.Tensor, ring: Ring, cursors: Cursors, rows: torch.Tensor, slots: torch.Tensor) -> None:
    expected, plain = state.double(), replace(cursors, position=cursors.position.clone())
    naive.fold(expected, ring, plain, rows, slots, dtype=torch.float64)
    fold(state, ring, cursors, rows, slots)
    assert ((state.double() - expected).norm() / expected.norm()).item() < TOLERANCE[ring.spec.fold]
    assert torch.equal(cursors.position, plain.position)


def indices(*values: int, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("fold", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("base", "count"), [(0, 0), (0, 1), (9, 10), (13, 10), (5, 7)])
def test_ring_phases(dtype: torch.dtype, base: int, count: int, fold: str, device: str) -> None:
    """Empty, one record, full, full and wrapped, partly filled and wrapped."""
    state, ring, cursors = make(dtype, device, layers=1, fold=fold)
    base %= ring.spec.records
    set_log_decay(ring, base, -0.1)
    cursors.position[ROW] = indices(base, count, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


@pytest.mark.parametrize("fold", POLICIES)
@pytest.mark.parametrize(
    ("per_token", "before"), [(0.0, 0.0), (-1e-6, 0.0), (-8.0, 0.0), (-80.0, 0.0), (-0.0123, -60.0)]
)
def test_decays(per_token: float, before: float, fold: str, device: str) -> None:
    """From none to one that underflows: exp(G_i) * exp(-G_j) would be 0 * inf. After a fast token, the differences of
    the slow ones are in the low parts."""
    state, ring, cursors = make(torch.bfloat16, device, layers=1, fold=fold)
    base = 12 % ring.spec.records
    set_log_decay(ring, base, per_token, before)
    cursors.position[ROW] = indices(base, 10, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


@pytest.mark.parametrize("policy", POLICIES)
def test_zero_keys_only_decay_the_checkpoint(policy: str, device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device, fold=policy)
    ring.k.zero_()
    cursors.position[ROW] = indices(0, 10, device=device)
    before = state.clone()
    fold(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))
    expected = before[:, SLOT] * torch.tensor(-1.0).exp().to(device)
    close = {"rtol": 2.0**-8, "atol": 0} if policy == "bf16" else {}
    torch.testing.assert_close(state[:, SLOT], expected, **close)


@pytest.mark.parametrize("policy", POLICIES)
def test_denormals(policy: str, device: str) -> None:
    """Kept or not (the interpreter misreads denormal bf16 parts), the error is a few of the smallest normal numbers."""
    state, ring, cursors = make(torch.bfloat16, device, fold=policy)
    tiny = 1e-40
    state.mul_(tiny)
    for name in {"d", "v"} & ring.tensors().keys():
        getattr(ring, name).mul_(tiny)
    cursors.position[ROW] = indices(0, 10, device=device)
    expected, plain = state.double(), replace(cursors, position=cursors.position.clone())
    rows, slots = indices(ROW, device=device), indices(SLOT, device=device)
    naive.fold(expected, ring, plain, rows, slots, dtype=torch.float64)
    fold(state, ring, cursors, rows, slots)
    assert (state.double() - expected).abs().max() < 16 * torch.finfo(torch.float32).tiny
    assert expected[:, SLOT].any()


@pytest.mark.parametrize("policy", POLICIES)
def test_only_live_rows_and_records_count(policy: str, device: str) -> None:
    """Row 0, slot -1, empty rows and NaN in dead records; what is not folded stays bit for bit."""
    state, ring, cursors = make(torch.bfloat16, device, layers=1, fold=policy)
    dead = (4 + torch.arange(3, ring.spec.records)) % ring.spec.records
    set_log_decay(ring, 4, -0.5)
    for tensor in ring.tensors().values():
        tensor[:, :, :, dead] = float("nan")
    cursors.position[:] = indices(4, 3, device=device)
    cursors.position[1, 1] = 0
    before = state.clone()
    rows, slots = indices(0, 1, 3, ROW, device=device), indices(0, 1, -1, SLOT, device=device, dtype=torch.int32)
    check(state, ring, cursors, rows, slots)
    others = [0, 1, 2, 4]
    assert torch.equal(state[:, others], before[:, others]) and not torch.equal(state[:, SLOT], before[:, SLOT])
    assert cursors.position.tolist() == [[4, 3], [4, 0], [7, 0], [4, 3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_due_rows_fold_after_a_commit(policy: str, device: str) -> None:
    """A row that can take another window keeps its records; policies whose verify folds keep all of them."""
    state, ring, cursors = make(torch.bfloat16, device, layers=1, fold=policy)
    spec = ring.spec
    room = spec.window - spec.max_draft_tokens
    cursors.position[1:3] = torch.tensor([[1, room], [1, room + 1]], dtype=torch.int32, device=device)
    cursors.plan[:4, :2] = torch.tensor([[4, 1], [SLOT, ROW], [-1, 0], [0, 0]], dtype=torch.int32, device=device)
    before, expected = state.clone(), state.double()
    plain = replace(cursors, position=cursors.position.clone(), counters=cursors.counters.clone())
    naive.fold_due(expected, ring, plain, 4, dtype=torch.float64)
    fold_due(state, ring, cursors, 4)
    assert ((state.double() - expected).norm() / expected.norm()).item() < TOLERANCE[policy]
    assert torch.equal(cursors.position, plain.position) and torch.equal(cursors.counters, plain.counters)
    folded = cursors.counters.tolist() == [0, 1, 0]
    assert folded == spec.policy.inputs == (not torch.equal(state[:, SLOT], before[:, SLOT]))
    assert torch.equal(state[:, [0, 1, 2, 4]], before[:, [0, 1, 2, 4]])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "sizes",
    [{"head_k_dim": 256, "head_v_dim": 16}, {"head_k_dim": 16, "window": 40}, {"num_k_heads": 2, "num_v_heads": 4}],
    ids=str,
)
def test_shapes(sizes: dict, policy: str, device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device, layers=1, fold=policy, **sizes)
    cursors.position[ROW] = indices(0, ring.spec.window, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


def test_errors(device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device)
    rows = indices(1, 2, device=device)
    with pytest.raises(ValueError, match="fp32 state"):
        fold(state[0], ring, cursors, rows, rows)
    with pytest.raises(ValueError, match="packed"):
        fold(state.transpose(3, 4).contiguous().transpose(3, 4), ring, cursors, rows, rows)
    with pytest.raises(ValueError, match="all layers"):
        fold(state, ring.layer(0), cursors, rows, rows)
    with pytest.raises(ValueError, match="one length"):
        fold(state, ring, cursors, rows, rows[:1])
    state, ring, cursors = make(torch.bfloat16, device, fold="exact")
    lines = cursors.spec.plan_lines
    with pytest.raises(ValueError, match=f"{lines + 1} batch rows"):
        fold_due(state, ring, cursors, lines + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_trap_12_indices_past_2_31(policy: str, device: str) -> None:
    """Slots and ring rows beyond 2^31 elements."""
    big = 2**31 // (256 * 256) + 2
    spec = RingSpec(1, 2, 1, 1, 256, 256, 8, 4, torch.bfloat16, policy)
    state = torch.zeros(1, big + 1, 1, 256, 256, device=device)
    ring, cursors = Ring.allocate(spec, device), Cursors.allocate(spec, device)
    for name, tensor in ring.tensors().items():
        if name not in ("g", "gates"):
            tensor.normal_()
    if ring.gates is not None:
        ring.gates[..., 1].uniform_()
    cursors.position[1, 1] = spec.window
    small = torch.zeros(1, 1, 1, 256, 256, device=device)
    naive.fold(
        small,
        ring,
        replace(cursors, position=cursors.position.clone()),
        indices(1, device=device),
        indices(0, device=device),
    )
    fold(state, ring, cursors, indices(1, device=device), indices(big, device=device))
    close = {"rtol": 2.0**-7, "atol": 1e-3} if policy == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(state[:, big], small[:, 0], **close)
    assert not state[:, :big].any()
