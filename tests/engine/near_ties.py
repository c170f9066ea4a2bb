"""When two greedy runs of one prompt may differ: only where their candidates were as good as tied.

Kernels that round differently, and one server with other batch compositions, flip bf16 ties. So two runs are compared
at their first difference: the gap between the two candidates' logits must be at most FLIP_FACTOR times the largest gap
seen where stock differs from stock, or TIE_ULPS units in the last place of the top logit in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

FLIP_FACTOR = 4.0
TIE_ULPS = 2
# Logits are bf16 numbers, so their differences are multiples of 2^-GRID_BITS for logits of at least 2^(7 - GRID_BITS).
GRID_BITS = 12


@dataclass(frozen=True)
class Difference:
    """The first position where two runs differ.

    Attributes:
        prompt, position: where.
        gap: logit of the reference's token minus that of the other's, in the reference run; infinite if the other's
            token is not among the reference's candidates.
        ulp: a lower bound of one bf16 unit in the last place of the top logit there.
    """

    prompt: int
    position: int
    gap: float
    ulp: float

    def is_near_tie(self, largest_stock_gap: float) -> bool:
        return self.gap <= max(FLIP_FACTOR * largest_stock_gap, TIE_ULPS * self.ulp)


def first_differences(reference: Iterable, other: Iterable) -> list[Difference]:
    """Compare runs of the same prompts.

    Args:
        reference, other: `Output`s in prompt order; the reference's carry `candidates`.
    """
    found = []
    for prompt, (a, b) in enumerate(zip(reference, other, strict=True)):
        position = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if position is None:
            if len(a.tokens) != len(b.tokens):
                raise ValueError(f"prompt {prompt}: {len(a.tokens)} tokens against {len(b.tokens)}, equal so far")
            continue
        candidates = {token: logprob for logprob, token in a.candidates[position]}
        gap = candidates[a.tokens[position]] - candidates.get(b.tokens[position], -math.inf)
        found.append(Difference(prompt, position, gap, _ulp(list(candidates.values()))))
    return found


def _ulp(logprobs: list[float]) -> float:
    """The greatest common divisor of the candidates' distances: all are multiples of the smallest ulp among them,
    which is at most that of the top logit. Softmax shifts all by one constant, so distances of logits remain."""
    steps = [round((max(logprobs) - x) * 2**GRID_BITS) for x in logprobs]
    return math.gcd(*steps) / 2**GRID_BITS
