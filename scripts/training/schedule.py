"""Learning rate and row length as functions of progress, which runs from 0 to 1 over the whole training."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP = 0.02
FINAL_RATE = 0.01


@dataclass(frozen=True)
class Stage:
    """Until progress reaches `until`, long rows have at most `longest` tokens, and a step about `tokens` in them."""

    until: float
    longest: int
    tokens: int


# Reading, adding and the order of names are learnt on short rows, in many small steps; what waits 4,134 tokens needs
# the long ones.
CURRICULUM = (
    Stage(0.12, 1024, 32768),
    Stage(0.24, 2048, 32768),
    Stage(0.38, 4096, 49152),
    Stage(0.60, 8192, 65536),
    Stage(0.85, 16384, 65536),
    Stage(1.00, 32768, 65536),
)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to `FINAL_RATE` of the peak."""
    if progress < WARMUP:
        return peak * max(progress, 1e-3) / WARMUP
    phase = min(1.0, (progress - WARMUP) / (1 - WARMUP))
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * phase)))


def stage_at(progress: float, stages: tuple[Stage, ...] = CURRICULUM) -> Stage:
    return next((stage for stage in stages if progress < stage.until), stages[-1])
