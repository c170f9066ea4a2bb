"""Verify against the recurrence: properties over life cycles, and the traps that others fell into, by name."""

import importlib

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lifecycle import NAIVE, NAIVE_FP64, TRITON, Case, Lifecycle

from sglang_replayssm.kernels import Cursors, Ring, RingSpec, plan_window, verify
from sglang_replayssm.policies import POLICIES

# Shrinking a failure takes the interpreter minutes; the case drawn first is small enough.
PROPERTY = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.reuse, Phase.generate]}
ACCURATE = ("fp32", "exact", "every-commit")  # fold policies whose only error is fp32 rounding
EXACT = 1e-6  # a few fp32 roundings; a wrong formula, record or mask is off by far more
BF16 = 2.0**-5  # the same of bf16


def check(life: Lifecycle, tolerance: float = EXACT) -> None:
    errors = life.errors()
    assert errors.out < tolerance and errors.state < tolerance, errors


@st.composite
def cases(draw, sizes=(16, 32, 64)) -> Case:
    heads, group, requests = draw(st.sampled_from([(1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1)]))
    max_draft_tokens = draw(st.sampled_from([1, 2, 3, 4, 4, 5, 8, 16]))
    return Case(
        num_k_heads=heads,
        num_v_heads=heads * group,
        head_k_dim=draw(st.sampled_from(sizes)),
        head_v_dim=draw(st.sampled_from(sizes)),
        window=max_draft_tokens + draw(st.integers(0, 20)),
        max_draft_tokens=max_draft_tokens,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        regime=draw(st.sampled_from(["slow", "mixed", "fast"])),
        requests=requests,
        padding=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 99)),
        fold=draw(st.sampled_from(ACCURATE)),
    )


def live_through(life: Lifecycle, data, actions: int) -> None:
    """A drawn sequence of verify (any draft length, any acceptance, commit lost or not), fold and restart."""
    for _ in range(actions):
        action = data.draw(st.sampled_from(["step", "step", "step", "step", "lost commit", "fold", "restart"]))
        if action == "fold":
            life.fold()
        elif action == "restart":
            life.restart(data.draw(st.integers(0, life.case.requests - 1)))
        else:
            T = data.draw(st.integers(1, life.spec.max_draft_tokens))
            batch = life.case.requests + life.case.padding
            accepted = data.draw(st.lists(st.integers(0, T), min_size=batch, max_size=batch))
            life.step(T, accepted, commit=action == "step")


@settings(max_examples=6, **PROPERTY)
@given(case=cases(), data=st.data())
def test_any_life_cycle_equals_the_recurrence(case: Case, data) -> None:
    life = Lifecycle(case)
    live_through(life, data, actions=4)
    check(life)


@pytest.mark.slow
@settings(max_examples=40, **PROPERTY)
@given(case=cases(), data=st.data())
def test_any_longer_life_cycle_equals_the_recurrence(case: Case, data) -> None:
    life = Lifecycle(case)
    live_through(life, data, actions=8)
    check(life)


@settings(max_examples=40, **PROPERTY)
@given(case=cases(sizes=(16,)), data=st.data())
def test_naive_is_exact_in_fp64(case: Case, data) -> None:
    object.__setattr__(case, "dtype", torch.float64)
    life = Lifecycle(case, ops=NAIVE_FP64, storage=torch.float64)
    live_through(life, data, actions=8)
    check(life, tolerance=1e-13)


def dtypes_and_policies() -> list:
    """bf16 with every policy, the other dtypes with a policy of each verify kernel; the rest is slow."""
    quick = ("fp32", "every-commit")
    return [
        pytest.param(dtype, fold, marks=() if dtype == torch.bfloat16 or fold in quick else pytest.mark.slow)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for fold in POLICIES
    ]


@pytest.mark.parametrize(("dtype", "fold"), dtypes_and_policies(), ids=str)
def test_kernel_equals_naive(dtype: torch.dtype, fold: str, device: str) -> None:
    """Every buffer: outputs, records, checkpoints, cursors; what is not written keeps its NaN."""
    case = Case(dtype=dtype, window=5, num_k_heads=2, num_v_heads=4, requests=1, fold=fold)
    ours, plain = Lifecycle(case, device), Lifecycle(case, device, ops=NAIVE)
    # A bf16 rounding that falls on the other side moves all that follows.
    near = {"rtol": 1e-2, "atol": 1e-2} if fold == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for T in (4, 2, 4):
        torch.testing.assert_close(ours.step(T), plain.step(T), **near)
    assert ours.folds > 0
    rows = torch.arange(1, ours.spec.rows + 1)
    for name, mine in ours.ring.tensors().items():
        # SGLang's log(1 + e^x), which the records of the raw inputs keep, is the less accurate softplus.
        close = {"rtol": 1e-3, "atol": 1e-6} if name == "gates" else near
        theirs = getattr(plain.ring, name)
        if name == "g":  # high and low part: a high part that is rounded the other way has another low part
            mine, theirs = (x.double().sum(-1) for x in (mine, theirs))
        torch.testing.assert_close(mine[:, rows], theirs[:, rows], equal_nan=True, **close)
    torch.testing.assert_close(ours.state, plain.state, **near)
    assert torch.equal(ours.cursors.position, plain.cursors.position)
    assert torch.equal(ours.cursors.counters, plain.cursors.counters)


@pytest.mark.parametrize(
    "case",
    [
        Case(head_k_dim=16, head_v_dim=256, window=8, requests=1),
        Case(head_k_dim=256, head_v_dim=16, window=8, requests=1, dtype=torch.float16),
        Case(head_k_dim=128, head_v_dim=64, window=8, requests=1, dtype=torch.float32),
        Case(num_v_heads=8, window=8, requests=1, padding=0),
        Case(max_draft_tokens=16, window=64, num_v_heads=1, requests=1),
        Case(max_draft_tokens=1, window=1, num_v_heads=1, requests=3),
        Case(max_draft_tokens=7, window=15, num_v_heads=1),
        *(Case(head_k_dim=128, head_v_dim=128, window=8, requests=1, padding=0, fold=fold) for fold in POLICIES),
    ],
    ids=lambda case: (
        f"H{case.num_k_heads}-HV{case.num_v_heads}-K{case.head_k_dim}-V{case.head_v_dim}-"
        f"T{case.max_draft_tokens}-W{case.window}-{str(case.dtype)[6:]}-{case.fold}"
    ),
)
def test_shapes(case: Case, device: str) -> None:
    """Three full windows: the third finds the ring full, but for that of 64 records."""
    life = Lifecycle(case, device)
    for _ in range(3):
        life.step(accepted=[case.max_draft_tokens] * (case.requests + case.padding))
    assert life.folds or case.window == 64
    life.fold()
    check(life, tolerance=BF16 if case.fold == "bf16" else EXACT)


def test_tiles_of_one_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over tiles, which the interpreter's configuration does not use."""
    kernel = importlib.import_module("sglang_replayssm.kernels.verify.triton")
    monkeypatch.setattr(kernel, "choose_config", lambda *shape: kernel.Config(16, 2, 2, 2, None))
    life = Lifecycle(Case(head_v_dim=64, window=8, num_v_heads=1, requests=1), device)
    for _ in range(4):
        life.step(accepted=[4, 0])
    assert life.folds
    check(life)


def test_bf16_outputs_are_rounded_to_nearest(device: str) -> None:
    life = Lifecycle(Case(padding=0), device)
    inputs = life.inputs(4)
    plan_window(life.cursors, life.rows, life.slots)
    out_fp32 = torch.empty_like(inputs[2], dtype=torch.float32, memory_format=torch.contiguous_format)
    gates = (life.A_log, life.dt_bias)
    out = verify(*inputs, *gates, life.state[0], life.ring.layer(0), life.cursors, 4, out_fp32=out_fp32)
    assert torch.equal(out, out_fp32.bfloat16())


# --- Traps (design.md, section 4) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", ACCURATE)
def test_trap_2_row_and_slot_reuse(fold: str, device: str) -> None:
    """A restarted row must not see its predecessor's records: they are NaN here."""
    life = Lifecycle(Case(fold=fold), device)
    life.step()
    life.step()
    life.restart(0)
    for _ in range(2):
        life.step()
    life.restart(1)
    life.step()
    life.fold()
    check(life)


def test_trap_3_padding_rows_touch_nothing(device: str) -> None:
    life = Lifecycle(Case(padding=2, requests=1), device)
    life.step()
    before = [x.clone() for x in (life.state, life.ring.d, life.ring.k, life.ring.g)]
    life.step(commit=False)  # asserts that padding outputs are zero
    count = int(life.cursors.position[life.rows[0], 1])
    written = (int(life.cursors.position[life.rows[0], 0]) + count + torch.arange(4)) % life.spec.records
    for old, new in zip(before[1:], (life.ring.d, life.ring.k, life.ring.g), strict=True):
        old[:, life.rows[0], :, written] = new[:, life.rows[0], :, written]
    for old, new in zip(before, (life.state, life.ring.d, life.ring.k, life.ring.g), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fold", ACCURATE)
def test_trap_3_graph_capture_rows(fold: str, device: str) -> None:
    """Capture runs whole batches on row 0 and slot 0: finite, and cursors and other rows stay as they are."""
    life = Lifecycle(Case(padding=0, requests=2, fold=fold), device)
    live_rows = life.rows.clone()
    before, state = life.cursors.position.clone(), life.state.clone()
    inputs, gates = life.inputs(4), (life.A_log, life.dt_bias)
    life.rows.zero_()
    life.slots.zero_()
    for _ in range(3):
        plan_window(life.cursors, life.rows, life.slots)
        out = verify(*inputs, *gates, life.state[0], life.ring.layer(0), life.cursors, 4)
        TRITON.commit(life.cursors, life.rows, torch.full_like(life.rows, 4))
        TRITON.fold_due(life.state, life.ring, life.cursors, len(life.rows))
        assert out.isfinite().all()
    assert torch.equal(life.cursors.position, before) and torch.equal(life.state, state)
    assert all(x[:, live_rows].isnan().all() for x in life.ring.tensors().values())
    assert not life.cursors.counters.any()


@pytest.mark.parametrize("fold", ACCURATE)
def test_trap_4_idle_batch(fold: str, device: str) -> None:
    life = Lifecycle(Case(fold=fold), device)
    inputs = [x[:0] for x in life.inputs(4)]
    out = verify(*inputs, life.A_log, life.dt_bias, life.state[0], life.ring.layer(0), life.cursors, 4)
    assert out.shape == (0, 2, 32)


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_trap_5_wrap_around_many_times(accepted: int, device: str) -> None:
    case = Case(max_draft_tokens=3, window=4, num_v_heads=1, requests=1, padding=0)  # 7 records
    life = Lifecycle(case, device)
    for _ in range(10):
        life.step(accepted=[accepted])
    assert life.folds >= 3
    check(life)


@pytest.mark.parametrize("fold", ACCURATE)
def test_trap_6_draft_length_changes(fold: str, device: str) -> None:
    """Folding by the current T instead of T_max would lose tokens when T grows again."""
    life = Lifecycle(Case(max_draft_tokens=4, window=6, num_v_heads=1, requests=1, fold=fold), device)
    for T in (1, 2, 1, 4, 3, 1, 1, 4):
        life.step(T, accepted=[T, 0])
        assert int(life.cursors.position[:, 1].max()) <= life.spec.window
    check(life)


def test_commit_never_arrives(device: str) -> None:
    """Also for a step that folded: its row must count as folded although the step never happened."""
    life = Lifecycle(Case(window=4, requests=1), device)
    life.step(accepted=[4, 0])
    for _ in range(3):
        life.step(commit=False)
    life.step(accepted=[2, 0])
    life.step(commit=False)
    life.fold()
    assert life.folds == 3
    check(life)


def test_fold_then_verify_equals_verify(device: str) -> None:
    plain, folded = (Lifecycle(Case(num_v_heads=1), device) for _ in range(2))
    for life in (plain, folded):
        life.step(accepted=[3, 2, 0])
    folded.fold()
    torch.testing.assert_close(plain.step(), folded.step(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fold", ACCURATE)
def test_keys_and_queries_of_zeros(fold: str, device: str) -> None:
    life = Lifecycle(Case(requests=1, fold=fold), device)
    for _ in range(2):
        inputs = life.inputs(4)
        inputs[0].zero_()
        inputs[1].zero_()
        assert not life.step(inputs=inputs).any()
    life.fold()
    check(life)


@pytest.mark.parametrize("fold", ACCURATE)
def test_extreme_gates(fold: str, device: str) -> None:
    """Softplus and sigmoid at both ends: decay 1 and 0, beta 0 and 1."""
    life = Lifecycle(Case(requests=1, dtype=torch.float32, fold=fold), device)
    for gate in (-100.0, 100.0, 19.99, 20.01):
        inputs = life.inputs(4)
        inputs[3].fill_(gate)
        inputs[4].fill_(-gate)
        assert life.step(inputs=inputs).isfinite().all()
    check(life)


def test_slow_decay_after_fast_keeps_its_digits(device: str) -> None:
    """Accumulated log-decay is a pair: next to -50, fp32 alone would round away what slow tokens add."""
    life = Lifecycle(Case(window=16, num_v_heads=1, requests=1, padding=0, dtype=torch.float32), device)
    life.A_log.zero_()
    life.dt_bias.zero_()
    gates = [50.0, *[-11.0 - t for t in range(11)]]  # g = -50, then -2e-5 down to -3e-10
    for step in range(3):
        inputs = life.inputs(4)
        inputs[3][:] = torch.tensor(gates[4 * step : 4 * step + 4], device=device)[:, None]
        life.step(inputs=inputs, accepted=[4])
    row = life.rows[0]
    at = (int(life.cursors.position[row, 0]) + torch.arange(12, device=device)) % life.spec.records
    stored = life.ring.g[0, row][:, at].double().sum(-1).diff(dim=-1)
    exact = -torch.log1p(torch.tensor(gates[1:], dtype=torch.float64, device=device).exp())
    torch.testing.assert_close(stored, exact.expand_as(stored), rtol=1e-6, atol=1e-12)


def test_errors(device: str) -> None:
    life = Lifecycle(Case(), device)
    q, k, v, a, b = life.inputs(4)
    gates = (life.A_log, life.dt_bias)
    ring, cursors = life.ring.layer(0), life.cursors
    for match, args in (
        ("draft_tokens=5", (q, k, v, a, b, *gates, life.state[0], ring, cursors, 5)),
        ("v of shape", (q, k, v[1:], a, b, *gates, life.state[0], ring, cursors, 4)),
        ("k as torch.bfloat16", (q, k.float(), v, a, b, *gates, life.state[0], ring, cursors, 4)),
        ("state as torch.float32", (q, k, v, a, b, *gates, life.state[0].half(), ring, cursors, 4)),
        ("only the first dimension", (q, k, v, a.T.contiguous().T, b, *gates, life.state[0], ring, cursors, 4)),
        ("ring.layer", (q, k, v, a, b, *gates, life.state[0], life.ring, cursors, 4)),
    ):
        with pytest.raises(ValueError, match=match):
            verify(*args)


@pytest.mark.parametrize("sizes", [(48, 64), (8, 64), (64, 512)])
def test_head_sizes_that_the_kernel_does_not_take(sizes: tuple[int, int]) -> None:
    spec = RingSpec(1, 1, 1, 1, *sizes, 4, 4, torch.bfloat16)
    q, v = torch.zeros(4, 1, sizes[0]).bfloat16(), torch.zeros(4, 1, sizes[1]).bfloat16()
    gate, bias, state = torch.zeros(4, 1), torch.zeros(1), torch.zeros(1, 1, sizes[1], sizes[0])
    with pytest.raises(ValueError, match="powers of two"):
        ring, cursors = Ring.allocate(spec, "cpu").layer(0), Cursors.allocate(spec, "cpu")
        verify(q, q, v, gate, gate, bias, bias, state, ring, cursors, 4)
