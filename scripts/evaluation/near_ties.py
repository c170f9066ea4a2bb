"""When two greedy runs of one prompt may differ: only where their candidates were as good as tied.

Kernels that round differently, and one server with other batch compositions, flip bf16 ties. So two runs are compared
at their first difference: the gap between the two candidates' logits must be at most FLIP_FACTOR times the largest gap
seen where stock differs from stock, or TIE_ULPS units in the last place of the top logit in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLIP_FACTOR = 4.0
TIE_ULPS = 2


@dataclass(frozen=True)
class Difference:
    """The first position where two runs differ.

    Attributes:
        prompt, position: where.
        gap: logit of the reference's token minus that of the other's, in the reference run; infinite if the other's
            token is not among the reference's candidates.
        ulp: one bf16 unit in the last place of the top logit there.
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
        reference, other: `Output`s (of `tests/engine/engine_harness.py`) in prompt order. The reference's carry
            `candidates`, and `probe` of a token whose logit is 0: softmax hides all logits behind one constant, and
            the probe shows it.

    Raises:
        ValueError: an answer goes on behind the end of the other.
    """
    found = []
    for prompt, (a, b) in enumerate(zip(reference, other, strict=True)):
        position = first_difference(a.tokens, b.tokens)
        if position is None:
            continue
        if position == min(len(a.tokens), len(b.tokens)):
            raise ValueError(f"prompt {prompt}: {len(a.tokens)} tokens against {len(b.tokens)}, equal so far")
        candidates = {token: logprob for logprob, token in a.candidates[position]}
        gap = candidates[a.tokens[position]] - candidates.get(b.tokens[position], -math.inf)
        top_logit = max(candidates.values()) - a.probe[position]
        found.append(Difference(prompt, position, gap, bf16_ulp(top_logit)))
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ, None if they are equal.

    Where one goes on behind the end of the other, it is the shorter one's length.
    """
    shorter = min(len(a), len(b))
    position = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return None if position == len(a) == len(b) else position


def bf16_ulp(x: float) -> float:
    """Distance of neighbouring bf16 numbers (8 significant bits) at x."""
    return 2.0 ** (math.frexp(x)[1] - 8)
