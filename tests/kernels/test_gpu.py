"""What only a GPU can show: tensor-core arithmetic at the model's sizes, long runs, CUDA graphs."""

import pytest
import torch
from lifecycle import TRITON, Case, Lifecycle, run

from sglang_replayssm.policies import POLICIES

pytestmark = pytest.mark.gpu

# Qwen3.5-35B-A3B's heads.
MODEL = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}


@pytest.mark.parametrize("regime", ["slow", "mixed", "fast"])
def test_bars_over_4096_tokens(regime: str) -> None:
    """A mean acceptance of 2.5 makes 1640 steps of it."""
    errors = run(Case(**MODEL, regime=regime, requests=3, padding=1), 1640, "cuda")
    print(errors)
    errors.check(regime)


@pytest.mark.parametrize("requests", [1, 40])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 8, 16])
def test_draft_lengths(T: int, requests: int) -> None:
    life = Lifecycle(Case(**MODEL, max_draft_tokens=T, requests=requests), "cuda")
    for _ in range(24):
        life.step()
    life.fold()
    errors = life.errors()
    print(errors)
    errors.check("mixed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (128, 128), (256, 256), (32, 256), (256, 64)])
def test_sizes_and_dtypes(K: int, V: int, dtype: torch.dtype) -> None:
    case = Case(num_k_heads=2, num_v_heads=8, head_k_dim=K, head_v_dim=V, window=24, dtype=dtype, requests=5)
    life = Lifecycle(case, "cuda")
    for _ in range(24):
        life.step()
    life.fold()
    errors = life.errors()
    print(errors)
    errors.check("mixed")


@pytest.mark.parametrize("window", [4, 16, 20, 32, 64])
def test_windows(window: int) -> None:
    errors = run(Case(**MODEL, window=window), 3 * window, "cuda")
    print(errors)
    errors.check("mixed")


@pytest.mark.parametrize("fold", POLICIES)
def test_trap_16_capture_and_replay(fold: str) -> None:
    """A captured step, replayed while the cursors move, equals the same steps launched one by one, bit for bit."""
    case = Case(**MODEL, requests=6, padding=2, fold=fold)
    eager, graphed = Lifecycle(case, "cuda"), Lifecycle(case, "cuda")
    static = [torch.empty_like(x) for x in graphed.inputs(4)]
    accepted = torch.zeros_like(graphed.rows)
    out = torch.empty(static[2].shape, dtype=case.dtype, device="cuda")

    def step(life: Lifecycle, inputs, accepted: torch.Tensor, out: torch.Tensor) -> None:
        TRITON.plan_window(life.cursors, life.rows, life.slots)
        TRITON.verify(*inputs, life.A_log, life.dt_bias, life.state[0], life.ring.layer(0), life.cursors, 4, out=out)
        TRITON.commit(life.cursors, life.rows, accepted)
        TRITON.fold_due(life.state, life.ring, life.cursors, life.rows.numel())

    # Compile and capture as a server does: on row 0 and slot 0.
    rows, slots = graphed.rows.clone(), graphed.slots.clone()
    graphed.rows.zero_()
    graphed.slots.zero_()
    for tensor in static:
        tensor.zero_()
    step(graphed, static, accepted, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(graphed, static, accepted, out)
    graphed.rows.copy_(rows)
    graphed.slots.copy_(slots)

    expected = torch.empty_like(out)
    for _ in range(40):
        inputs = eager.inputs(4)
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        accepted.copy_(eager.draw(1, 4))
        step(eager, inputs, accepted, expected)
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(graphed.state[:, 1:], eager.state[:, 1:], rtol=0, atol=0)
    assert torch.equal(graphed.cursors.position, eager.cursors.position)
    assert torch.equal(graphed.cursors.counters, eager.cursors.counters) and eager.cursors.counters[1] > 6


@pytest.mark.parametrize("fold", POLICIES)
def test_trap_12_slots_past_2_31_elements(fold: str, shift: int = 2**31 // 256**2) -> None:
    """The same requests in low and in high slots: equal, bit for bit, through steps and folds."""
    case = Case(head_k_dim=256, head_v_dim=256, num_v_heads=1, requests=2, fold=fold)
    low, high = Lifecycle(case, "cuda"), Lifecycle(case, "cuda")
    high.state = torch.zeros(1, shift + low.state.shape[1], *low.state.shape[2:], device="cuda")
    high.state[:, shift:] = low.state
    high.slots[high.live] += shift
    for _ in range(8):
        torch.testing.assert_close(high.step(), low.step(), rtol=0, atol=0)
    assert low.folds
    torch.testing.assert_close(high.state[:, shift:], low.state, rtol=0, atol=0)
    assert not high.state[:, :shift].any()
