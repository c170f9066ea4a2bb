"""Where two greedy runs may differ."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts")]

from evaluation.near_ties import Difference, bf16_ulp, first_difference, first_differences  # noqa: E402


def run(tokens, candidates=(), probe=()):
    return SimpleNamespace(tokens=tokens, candidates=list(candidates), probe=list(probe))


@pytest.mark.parametrize(("x", "ulp"), [(1.0, 2**-7), (1.99, 2**-7), (4.0, 2**-5), (100.0, 0.5), (128.0, 1.0)])
def test_bf16_ulp(x, ulp):
    assert bf16_ulp(x) == ulp
    assert torch.tensor(x + ulp / 4).bfloat16() == torch.tensor(x).bfloat16()


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == first_difference([1], [1, 2]) == 1
    assert first_difference([], [4]) == 0


def test_equal_runs_have_no_difference():
    assert first_differences([run([1, 2])], [run([1, 2])]) == []


def test_the_gap_is_taken_at_the_first_difference():
    # Logits 4.0, 3.96875 and 3.5: log-probabilities relative to the probe's.
    candidates = [[(-0.1, 1)], [(-0.5, 2), (-0.53125, 7), (-1.0, 9)], [(-9.0, 3)]]
    (found,) = first_differences([run([1, 2, 3], candidates, [-1.0, -4.5, -1.0])], [run([1, 7, 8])])
    assert (found.prompt, found.position) == (0, 1)
    assert found.gap == pytest.approx(0.03125) and found.ulp == pytest.approx(0.03125)
    assert found.is_near_tie(largest_stock_gap=0.0)


def test_a_token_that_was_no_candidate_is_a_mismatch():
    (found,) = first_differences([run([1], [[(-0.5, 1), (-0.75, 2)]], [-3.0])], [run([3])])
    assert math.isinf(found.gap) and not found.is_near_tie(largest_stock_gap=100.0)


def test_a_clear_difference_is_a_mismatch_unless_stock_does_the_same():
    difference = Difference(prompt=0, position=3, gap=0.5, ulp=0.0625)
    assert not difference.is_near_tie(largest_stock_gap=0.1)
    assert difference.is_near_tie(largest_stock_gap=0.125)


def test_runs_of_different_length_are_an_error():
    with pytest.raises(ValueError, match="prompt 0"):
        first_differences([run([1, 2])], [run([1])])
