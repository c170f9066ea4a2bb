"""Which outputs count as loops."""

from __future__ import annotations

import random
import string
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts")]

from evaluation.loops import repetitions  # noqa: E402


@pytest.mark.parametrize("block", ["!", "ab", "Wait, let me check again. ", "x = 1\n", "再想想。", "a" * 30 + "b"])
@pytest.mark.parametrize("count", [50, 51, 200])
def test_counts_the_block(block, count):
    assert repetitions("A beginning: " + block * count + " the end?") == count


@pytest.mark.parametrize("block", ["!", "Wait, let me check again. "])
def test_fewer_than_the_limit_is_no_loop(block):
    assert repetitions("A beginning " + block * 49 + "~") == 0
    assert repetitions(block * 30 + "and" + block * 30) == 0


def test_an_unfinished_last_block_does_not_count():
    assert repetitions("Wait. " * 60 + "Wai") == 60


def test_the_longer_of_two_loops():
    assert repetitions("one two " * 70 + "." + "three " * 120) == 120


@pytest.mark.parametrize("layout", ["-", "=", " ", "\n", "| --- ", "* ", "."])
def test_layout_is_no_loop(layout):
    assert repetitions(layout * 300) == 0


@pytest.mark.parametrize("text", ["", "a", "a" * 49, "The quick brown fox jumps over the lazy dog. " * 3])
def test_short_texts(text):
    assert repetitions(text) == 0


def test_counted_text_that_is_almost_periodic_is_no_loop():
    assert repetitions("".join(f"step {n}: we add {n}.\n" for n in range(1000, 1400))) == 0


def test_long_outputs_are_quick():
    rng = random.Random(0)
    text = "".join(rng.choices(string.ascii_lowercase + "     ", k=130_000))
    begin = time.perf_counter()
    assert repetitions(text + "again and " * 200) == 200
    assert time.perf_counter() - begin < 20  # about a second; a shared machine may take longer
