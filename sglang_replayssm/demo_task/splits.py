"""Train, validation and test problems: functions of (split, index) alone, disjoint by construction.

A problem's split is decided by a hash of its question; whoever asks for a split draws until a problem belongs to it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

from sglang_replayssm.demo_task import registers, stories
from sglang_replayssm.demo_task.registers import RegisterProblem
from sglang_replayssm.demo_task.stories import StoryProblem

# Buckets of the hash, of 16.
SPLITS = {"test": range(0, 1), "validation": range(1, 2), "train": range(2, 16)}

Problem = TypeVar("Problem", RegisterProblem, StoryProblem)


def split_of(question: str) -> str:
    """The split that a question belongs to."""
    bucket = hashlib.sha256(question.encode()).digest()[0] % 16
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def draw_story(split: str, index: int) -> StoryProblem:
    """Story number `index` of a split; KeyError for an unknown split."""
    return _draw(split, random.Random(f"story/{split}/{index}"), stories.random_story)


def draw_register(
    split: str, index: int, rounds: int, fast: int = registers.FAST, slow: int = registers.SLOW
) -> RegisterProblem:
    """Register problem number `index` of a split; KeyError for an unknown split."""
    rng = random.Random(f"registers/{split}/{index}/{rounds}/{fast}/{slow}")
    return _draw(split, rng, lambda rng: registers.random_problem(rng, rounds, fast, slow))


def _draw(split: str, rng: random.Random, generate: Callable[[random.Random], Problem]) -> Problem:
    SPLITS[split]
    while True:
        problem = generate(rng)
        if split_of(problem.question) == split:
            return problem
