"""Intervals and paired tests against values computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts")]

from evaluation.stats import accuracy, paired  # noqa: E402


def single(right: int, wrong: int) -> dict[str, list[bool]]:
    return {str(i): [i < right] for i in range(right + wrong)}


def test_wilson_interval():
    """8 of 10, z = 1.96: centre (0.8 + z^2/20) / (1 + z^2/10), the textbook's 0.490 to 0.943."""
    result = accuracy(single(8, 2))
    assert result.value == 0.8
    assert (round(result.low, 3), round(result.high, 3)) == (0.490, 0.943)


def test_all_right_is_not_certain():
    result = accuracy(single(30, 0))
    assert result.value == 1 and result.high == 1 and 0.85 < result.low < 0.9


def test_repeats_of_one_question_do_not_narrow_the_interval():
    few = accuracy({str(i): [i % 2 == 0] * 2 for i in range(20)})
    many = accuracy({str(i): [i % 2 == 0] * 50 for i in range(20)})
    assert few.value == many.value == 0.5
    assert many.high - many.low == pytest.approx(few.high - few.low)
    assert many.high - many.low > 0.35  # as wide as 20 independent answers, not as 1000


def test_mcnemar_is_exact():
    """9 questions only B has right and 1 only A: p = 2 (1 + 10) / 2^10."""
    a = {str(i): [i >= 9] for i in range(50)}
    b = {str(i): [i != 49] for i in range(50)}
    result = paired(a, b)
    assert (result.only_a, result.only_b, result.test) == (1, 9, "exact McNemar")
    assert result.p_value == pytest.approx(22 / 1024)
    assert result.difference.value == pytest.approx(8 / 50)
    assert 0 < result.difference.low < 0.16 < result.difference.high


def test_equal_runs():
    result = paired(single(7, 3), single(7, 3))
    assert (result.p_value, result.difference.value, result.difference.low, result.difference.high) == (1, 0, 0, 0)


def test_repeats_are_tested_by_question():
    """Five questions, each better in B: of the 32 sign flips two are as extreme."""
    a = {str(i): [False, False] for i in range(5)}
    b = {str(i): [True, i % 2 == 0] for i in range(5)}
    result = paired(a, b)
    assert "sign-flip" in result.test and result.p_value == pytest.approx(2 / 32)
    assert (result.only_a, result.only_b) == (0, 8)


def test_equal_runs_with_repeats():
    runs = {str(i): [True, False] for i in range(5)}
    assert paired(runs, runs).p_value == 1


def test_different_questions_are_refused():
    with pytest.raises(ValueError, match="same questions"):
        paired(single(3, 1), single(3, 2))
