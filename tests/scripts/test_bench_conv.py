"""The benchmark of the convolution: both sides give the same bits, and one that does not is not timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_conv  # noqa: E402
from bench.shape import acceptance_table  # noqa: E402

DIM, DRAFTS = 40, 4


class Scatter:
    """SGLang's commit insists on CUDA tensors."""

    @staticmethod
    def fused_conv_window_scatter_with_mask(state, windows, slots, steps) -> None:
        for row, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
            state[:, slot] = windows[:, row, step]


@pytest.fixture
def sides(monkeypatch):
    """In fp32, which the interpreter computes as hardware does."""
    conv = pytest.importorskip("sglang.srt.layers.attention.mamba.causal_conv1d_triton")
    monkeypatch.setattr(bench_conv, "ACTIVATION", torch.float32)
    monkeypatch.setattr(bench_conv, "load_conv", lambda: conv)
    monkeypatch.setattr(bench_conv, "load_scatter", lambda: Scatter)
    setups = [bench_conv.make_setup(3, DRAFTS, 2, torch.device("cpu")) for _ in bench_conv.SIDES]
    return [side(setup, DIM) for side, setup in zip(bench_conv.SIDES, setups, strict=True)]


def run(sides) -> None:
    generator = torch.Generator().manual_seed(0)
    bench_conv.check(sides, acceptance_table(6, sides[0].setup.shape, generator), generator)


def test_both_sides_agree(sides) -> None:
    run(sides)


def test_another_result_is_not_timed(sides, monkeypatch) -> None:
    monkeypatch.setattr(sides[1], "commit", lambda: None)
    with pytest.raises(SystemExit, match="differs"):
        run(sides)


def test_byte_model(sides) -> None:
    """Of the tensors that move: stock writes T + 2 inputs and two states a channel, ours T inputs and one state."""
    theirs, ours = (side.bytes_per_window() // (2 * DIM) for side in sides)
    assert theirs == 4 + 4 + 3 + 3 + 6 + 3 + 3 and ours == 4 + 4 + 4 + 3 + 3 + 3
