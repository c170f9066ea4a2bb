"""The same problems on every machine, and no problem in two splits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_replayssm.demo_task import SPLITS, draw_register, draw_story
from sglang_replayssm.demo_task.splits import split_of

SHOW = (
    "from sglang_replayssm.demo_task import draw_register, draw_story;"
    "print(draw_register('test', 3, 2).question, draw_register('test', 3, 2).solution);"
    "print(draw_story('validation', 5).question, draw_story('validation', 5).solution)"
)


def test_the_splits_share_the_buckets_out():
    assert sorted(bucket for buckets in SPLITS.values() for bucket in buckets) == list(range(16))


@pytest.mark.parametrize("split", SPLITS)
def test_a_problem_belongs_to_the_split_that_drew_it(split):
    for index in range(100):
        assert split_of(draw_story(split, index).question) == split
        assert split_of(draw_register(split, index, rounds=1, fast=2, slow=1).question) == split


def test_splits_are_disjoint_even_where_problems_are_few():
    """Machines of two registers and one round: a few thousand in all, each drawn many times over."""
    drawn = {s: {draw_register(s, i, rounds=1, fast=2, slow=1).question for i in range(1500)} for s in SPLITS}
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))


def test_indices_give_different_problems():
    assert len({draw_register("test", index, rounds=1).question for index in range(200)}) == 200


def test_an_unknown_split_is_an_error():
    with pytest.raises(KeyError):
        draw_story("dev", 0)


def test_a_fresh_process_draws_the_same_without_torch():
    code = SHOW + ";import sys; assert 'torch' not in sys.modules"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    register, story = draw_register("test", 3, 2), draw_story("validation", 5)
    assert other == f"{register.question} {register.solution}\n{story.question} {story.solution}\n"
