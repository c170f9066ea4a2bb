r"""The long task: a register machine whose every step reads values that were written long before.

A problem gives initial digits to `fast` registers (a, b, ...) and `slow` ones (A, B, ...), the partner of b, and a
number of rounds. The partner of c is the register after b's partner, and so on, cyclically. A round counts down in
brackets, then

    [017]
    D3+f4=D7        the next slow register takes up the partner of a
    a4+D7=a1        a takes up that slow register
    b5+g2=b7        every other fast register takes up its partner
    c0+h9=c9
    ...

with sums modulo 10. After the last round three registers are read out and boxed as a number from 0 to 999.

Every step is an invertible map of the registers and all of them are linked in one ring, so a wrong digit never leaves
the machine and spreads over it. The order of names is known in advance, which is what drafts need; the digits are not.
A fast register waits a round (159 tokens at full size) for its next turn, a slow one `slow` rounds (4,134 tokens):
whoever forgets, or keeps a corrupted memory, is wrong from there on.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_replayssm.demo_task.grading import Grade, grade_text

FAST, SLOW = 16, 26
MODULUS = 10
MAX_ROUNDS = 999

_BOX = re.compile(r"\\boxed\{(\d{3})\}")


@dataclass(frozen=True)
class RegisterProblem:
    """One machine.

    Attributes:
        fast, slow: initial digits of a, b, ... and A, B, ...; 2 to 16 and 1 to 26 of them.
        stride: distance from a fast register to its partner, from 1 to len(fast) - 1 and coprime to len(fast).
        rounds: 1 to 999.
    """

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    stride: int
    rounds: int

    def __post_init__(self) -> None:
        sizes = 2 <= len(self.fast) <= FAST and 1 <= len(self.slow) <= SLOW
        digits = all(0 <= value < MODULUS for value in (*self.fast, *self.slow))
        ring = self.stride in strides(len(self.fast))
        if not (sizes and digits and ring and 1 <= self.rounds <= MAX_ROUNDS):
            raise ValueError(f"not a register problem: {self}")

    @property
    def question(self) -> str:
        """The user's turn."""
        names = string.ascii_lowercase[: len(self.fast)] + string.ascii_uppercase[: len(self.slow)]
        values = ",".join(f"{name}{value}" for name, value in zip(names, (*self.fast, *self.slow), strict=True))
        partner = string.ascii_lowercase[(1 + self.stride) % len(self.fast)]
        return f"Registers {values}.\nb reads {partner}. Rounds {self.rounds:03d}."

    @property
    def solution(self) -> str:
        """The assistant's turn, without a final newline."""
        return "".join(self.pieces())

    @property
    def answer(self) -> int:
        """The boxed number."""
        return int(self._machine().readout_digits())

    def pieces(self) -> Iterator[str]:
        """The solution in pieces: each round, then the ending."""
        machine = _Machine(self)
        for left in range(self.rounds, 0, -1):
            yield f"[{left:03d}]\n" + machine.round()
        yield machine.ending()

    def grade(self, text: str) -> Grade:
        """Judge a model's text; `correct` looks at the last box alone."""
        boxes = _BOX.findall(text)
        return grade_text(text, self.solution, self.answer, int(boxes[-1]) if boxes else None)

    def _machine(self) -> _Machine:
        machine = _Machine(self)
        for _ in range(self.rounds):
            machine.round()
        return machine


class _Machine:
    """The registers while the program runs."""

    def __init__(self, problem: RegisterProblem) -> None:
        self.fast_names = string.ascii_lowercase[: len(problem.fast)]
        self.slow_names = string.ascii_uppercase[: len(problem.slow)]
        self.values = dict(zip(self.fast_names + self.slow_names, (*problem.fast, *problem.slow), strict=True))
        self.stride = problem.stride
        self.rounds_done = 0

    def round(self) -> str:
        """Run one round; its lines."""
        slow = self.slow_names[self.rounds_done % len(self.slow_names)]
        lines = [self._add(slow, self._partner(0)), self._add("a", slow)]
        lines += [self._add(name, self._partner(i)) for i, name in enumerate(self.fast_names) if i > 0]
        self.rounds_done += 1
        return "".join(lines)

    def ending(self) -> str:
        shown = ",".join(f"{name}{self.values[name]}" for name in self._readout())
        return f"{shown}\n\\boxed{{{self.readout_digits()}}}"

    def readout_digits(self) -> str:
        return "".join(str(self.values[name]) for name in self._readout())

    def _readout(self) -> tuple[str, str, str]:
        """The first and last fast register, and the last slow one, which waits longest."""
        return "a", self.fast_names[-1], self.slow_names[-1]

    def _partner(self, index: int) -> str:
        return self.fast_names[(index + self.stride) % len(self.fast_names)]

    def _add(self, target: str, source: str) -> str:
        before, other = self.values[target], self.values[source]
        after = self.values[target] = (before + other) % MODULUS
        return f"{target}{before}+{source}{other}={target}{after}\n"


def strides(fast: int) -> list[int]:
    """Strides that link all `fast` registers in one ring."""
    return [stride for stride in range(1, fast) if math.gcd(stride, fast) == 1]


def random_problem(rng: random.Random, rounds: int, fast: int = FAST, slow: int = SLOW) -> RegisterProblem:
    """A problem with random digits and stride."""
    return RegisterProblem(
        tuple(rng.randrange(MODULUS) for _ in range(fast)),
        tuple(rng.randrange(MODULUS) for _ in range(slow)),
        rng.choice(strides(fast)),
        rounds,
    )


def question_tokens(fast: int = FAST, slow: int = SLOW) -> int:
    """Tokens of a question."""
    return 3 * (fast + slow) + 16


def round_tokens(fast: int = FAST) -> int:
    """Tokens of one round."""
    return 6 + 9 * (fast + 1)


ENDING_TOKENS = 9 + 7


def solution_tokens(rounds: int, fast: int = FAST) -> int:
    """Tokens of a solution, without the end token."""
    return rounds * round_tokens(fast) + ENDING_TOKENS


def rounds_within(tokens: int, fast: int = FAST) -> int:
    """The most rounds whose solution has at most that many tokens; 0 if none has."""
    return max(0, (tokens - ENDING_TOKENS) // round_tokens(fast))
