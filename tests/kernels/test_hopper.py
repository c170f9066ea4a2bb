"""The Hopper kernel against the recurrence and against the portable kernel, over whole life cycles."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lifecycle import TRITON, Case, Lifecycle

from sglang_replayssm.kernels import Cursors, Ring, RingSpec, commit, plan_window
from sglang_replayssm.kernels.verify.hopper import CONFIGS, Config, choose_config, supports, verify_hopper

HOPPER = SimpleNamespace(**{**vars(TRITON), "verify": verify_hopper})


def case(**changes) -> Case:
    """Small in everything but the head, whose size is fixed."""
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128, "requests": 3}
    return Case(**{**sizes, **changes})


def table_cuts() -> list[tuple[tuple[int, int], Config]]:
    """(P, padded W) and cut of every entry of the table, once: `overlap` alone changes no kernel without a caller."""
    return sorted({(shape, c._replace(overlap=False)) for shape, entries in CONFIGS.items() for _, c in entries})


def configs() -> list[Config]:
    """Those of the table and the corners of what the kernel takes."""
    table = {config for _, config in table_cuts()}
    corners = {
        Config(16, 1, 168, True),
        Config(32, 1, 168, False),
        Config(64, 1, 255, True),
        Config(64, 4, 128, True),
        Config(64, 4, 128, False),
        Config(128, 4, 168, False),
    }
    return sorted(table | corners)


def name(config: Config) -> str:
    fold = "early" if config.fold_early else "late"
    return f"{config.block_v}w{config.warps}-r{config.max_registers}-{fold}{'-overlap' if config.overlap else ''}"


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ["slow", "mixed", "fast"])
@pytest.mark.parametrize("window", [8, 16, 24, 32])
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 5, 6, 7, 8])
def test_bars(draft_tokens: int, window: int, regime: str) -> None:
    """The accuracy bars over 40 steps: folds, wrap-around, random acceptance, padding, a ring full of NaN."""
    life = Lifecycle(case(max_draft_tokens=draft_tokens, window=window, regime=regime), "cuda", HOPPER)
    for _ in range(40):
        life.step()
    print(life.errors())
    assert life.folds
    life.errors().check(regime)


@pytest.mark.gpu
@pytest.mark.parametrize("draft_tokens", [4, 8])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 2), (2, 8)], ids=str)
def test_head_groups(heads: tuple[int, int], draft_tokens: int) -> None:
    sizes = {"num_k_heads": heads[0], "num_v_heads": heads[1]}
    life = Lifecycle(case(max_draft_tokens=draft_tokens, **sizes), "cuda", HOPPER)
    for _ in range(12):
        life.step()
    life.fold()
    life.errors().check("mixed")


@pytest.mark.gpu
@pytest.mark.parametrize("fold", ["fp32", "exact"])
@pytest.mark.parametrize("draft_tokens", [4, 8])
@pytest.mark.parametrize("config", configs(), ids=name)
def test_every_config_equals_portable(config: Config, draft_tokens: int, fold: str) -> None:
    """Every buffer: outputs, records, checkpoints; what is not written keeps its NaN."""
    this = case(max_draft_tokens=draft_tokens, fold=fold)
    ops = SimpleNamespace(**{**vars(TRITON), "verify": partial(verify_hopper, config=config)})
    ours, portable = Lifecycle(this, "cuda", ops), Lifecycle(this, "cuda")
    for _ in range(20):
        torch.testing.assert_close(ours.step(), portable.step(), rtol=1e-4, atol=1e-5)
    assert ours.folds >= 3
    rows = torch.arange(1, ours.spec.rows + 1, device="cuda")
    theirs = portable.ring.tensors()
    for buffer, mine in ours.ring.tensors().items():
        torch.testing.assert_close(mine[:, rows], theirs[buffer][:, rows], rtol=1e-4, atol=1e-5, equal_nan=True)
    if fold == "exact":  # whatever the replay reads is bit for bit the same
        for buffer in ("k", "v", "gates"):
            assert torch.equal(*(r[buffer][:, rows].nan_to_num() for r in (ours.ring.tensors(), theirs)))
    torch.testing.assert_close(ours.state, portable.state, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_draft_length_changes() -> None:
    life = Lifecycle(case(max_draft_tokens=8, window=12), "cuda", HOPPER)
    for T in (1, 2, 8, 4, 3, 8, 5, 1, 6, 7, 2, 8):
        life.step(T)
    assert life.folds
    life.errors().check("mixed")


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_padding_rows_touch_nothing(early: bool) -> None:
    life = Lifecycle(case(padding=2, requests=1), "cuda", HOPPER)
    life.ops = SimpleNamespace(**{**vars(TRITON), "verify": partial(verify_hopper, config=Config(64, 2, 168, early))})
    for _ in range(9):
        life.step()
    rings = (life.ring.d, life.ring.k, life.ring.g)
    before = [x.clone() for x in rings]
    state = life.state.clone()
    life.step(commit=False)  # asserts that padding outputs are zero
    others = torch.arange(life.spec.rows + 1, device="cuda") != life.rows[0]
    for old, new in zip(before, rings, strict=True):
        torch.testing.assert_close(new[:, others], old[:, others], rtol=0, atol=0, equal_nan=True)
    slots = torch.arange(state.shape[1], device="cuda") != life.slots[0]
    assert torch.equal(life.state[:, slots], state[:, slots])


@pytest.mark.gpu
def test_strided_out_and_state() -> None:
    """Outputs in a wider buffer, checkpoints in a pool whose slots have gaps."""
    plain, strided = Lifecycle(case(), "cuda", HOPPER), Lifecycle(case(), "cuda", HOPPER)
    heads, dim = plain.spec.num_v_heads, plain.spec.head_v_dim
    pool = torch.zeros(plain.state.shape[1], heads + 1, dim, dim, device="cuda")
    pool[:, :heads] = strided.state[0]
    strided.state = pool[None, :, :heads]
    wide = torch.full((4 * len(plain.rows), 2 * heads, dim), 7.0, dtype=torch.bfloat16, device="cuda")
    strided.ops = SimpleNamespace(**{**vars(TRITON), "verify": partial(verify_hopper, out=wide[:, :heads])})
    for _ in range(12):
        assert torch.equal(plain.step(), strided.step())
    assert plain.folds and torch.equal(plain.state, strided.state)
    assert (wide[:, heads:] == 7.0).all() and (pool[:, heads] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_cuda_graph(overlap: bool) -> None:
    """A step captured once and replayed while cursors, rows and folds move equals eager steps, bit by bit."""
    eager, captured = Lifecycle(case(), "cuda", HOPPER), Lifecycle(case(), "cuda", HOPPER)
    assert choose_config(len(captured.rows) * captured.spec.num_v_heads, 4, captured.spec.window).overlap
    inputs, gates = captured.inputs(4), (captured.A_log, captured.dt_bias)
    accepted = torch.ones_like(captured.rows)
    out = torch.empty(inputs[2].shape, dtype=torch.bfloat16, device="cuda")
    cursors, ring = captured.cursors, captured.ring.layer(0)

    def step() -> None:
        plan_window(cursors, captured.rows, captured.slots)
        torch.add(accepted, 0, out=accepted)  # with overlap, the kernel before verify must not be the one that plans
        verify_hopper(*inputs, *gates, captured.state[0], ring, cursors, 4, out=out, overlap_previous=overlap)
        TRITON.commit(cursors, captured.rows, accepted)

    saved = [x.clone() for x in (captured.state, ring.d, ring.k, ring.g, cursors.position)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor, value in zip((captured.state, ring.d, ring.k, ring.g, cursors.position), saved, strict=True):
        tensor.copy_(value)

    eager.inputs(4)  # the same random numbers as above
    for _ in range(20):
        new = eager.inputs(4)
        for static, value in zip(inputs, new, strict=True):
            static.copy_(value)
        accepted.copy_(eager.draw(1, 4))
        graph.replay()
        expected = eager.step(inputs=new, accepted=accepted.tolist())
        assert torch.equal(out, expected.bfloat16())
    assert eager.folds and torch.equal(captured.state, eager.state)


@pytest.mark.gpu
def test_graph_capture_rows() -> None:
    """Capture runs whole batches on row 0 and slot 0: finite, and no other row changes."""
    life = Lifecycle(case(padding=0), "cuda", HOPPER)
    live, state = life.rows.clone(), life.state.clone()
    inputs, gates = life.inputs(4), (life.A_log, life.dt_bias)
    life.rows.zero_()
    life.slots.zero_()
    plan_window(life.cursors, life.rows, life.slots)
    out = verify_hopper(*inputs, *gates, life.state[0], life.ring.layer(0), life.cursors, 4)
    assert out.isfinite().all() and torch.equal(life.state, state) and life.ring.d[:, live].isnan().all()


def test_supports() -> None:
    spec = RingSpec(1, 1, 16, 32, 128, 128, 16, 8, torch.bfloat16)
    assert all(supports(spec, T, (9, 0)) for T in range(1, 9))
    assert not supports(spec, 9, (9, 0)) and not supports(spec, 0, (9, 0))
    assert not supports(spec, 4, (8, 0)) and not supports(spec, 4, (10, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 128, 128, 16, 4, torch.bfloat16), 5, (9, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 128, 128, 33, 8, torch.bfloat16), 4, (9, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 64, 128, 16, 8, torch.bfloat16), 4, (9, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 128, 128, 16, 8, torch.float16), 4, (9, 0))
    assert supports(RingSpec(1, 1, 16, 32, 128, 128, 16, 8, torch.bfloat16, "exact"), 4, (9, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 128, 128, 16, 8, torch.bfloat16, "every-commit"), 4, (9, 0))
    assert not supports(RingSpec(1, 1, 16, 32, 128, 128, 16, 8, torch.bfloat16, "bf16"), 4, (9, 0))


def test_errors() -> None:
    life = Lifecycle(case(dtype=torch.float16))
    with pytest.raises(ValueError, match=r"use triton\.verify"):
        verify_hopper(*life.inputs(4), life.A_log, life.dt_bias, life.state[0], life.ring.layer(0), life.cursors, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("draft_tokens", "window", "config"),
    [(*shape, config) for shape, config in table_cuts()],
    ids=lambda value: name(value) if isinstance(value, Config) else str(value),
)
def test_many_programs(draft_tokens: int, window: int, config: Config) -> None:
    """Several waves of programs on every multiprocessor, against the portable kernel: the shared memory that one leaves
    behind must not reach the next. (Few rows never showed a barrier's place being used for something else.)"""
    B, H, HV, layers = 96, 16, 32, 2
    spec = RingSpec(layers, B, H, HV, 128, 128, window, draft_tokens, torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    state = 0.3 * normal(layers, B + 1, HV, 128, 128)
    states = [state, state.clone()]
    rings = [Ring.allocate(spec, "cuda") for _ in states]
    cursors = [Cursors.allocate(spec, "cuda") for _ in states]
    rows = torch.randperm(B, device="cuda", generator=generator) + 1
    slots = (torch.randperm(B, device="cuda", generator=generator) + 1).int()
    A_log, dt_bias = normal(HV), torch.linspace(-8, 1, HV, device="cuda")
    verifies = (partial(verify_hopper, config=config), TRITON.verify)
    for _ in range(12):
        accepted = torch.randint(1, draft_tokens + 1, (B,), device="cuda", generator=generator)
        for moved in cursors:
            plan_window(moved, rows, slots)
        for layer in range(layers):
            q, k, v = normal(B * draft_tokens, 2 * H + HV, 128).bfloat16().split([H, H, HV], dim=1)
            a, b = normal(B * draft_tokens, HV), normal(B * draft_tokens, HV)
            ours, portable = (
                verify(q, k, v, a, b, A_log, dt_bias, s[layer], r.layer(layer), c, draft_tokens)
                for verify, s, r, c in zip(verifies, states, rings, cursors, strict=True)
            )
            torch.testing.assert_close(ours, portable, rtol=2e-2, atol=2e-3)  # a bf16 rounding or two
        for moved in cursors:
            commit(moved, rows, accepted)
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-5)
