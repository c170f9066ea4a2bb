"""The byte model: the fewest bytes that a variant's algorithm must move per request, layer and step.

Every tensor is counted once per step that touches it (ideal caches); convolution, norms and GEMMs are not part of it.
How often a row folds and how long its history is on average is not guessed but simulated from the acceptance that the
run really used.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shape import Shape


@dataclass(frozen=True)
class FoldRule:
    """A row folds once its history exceeds `limit`: at the start of the next verify, or in the commit itself."""

    limit: int
    in_commit: bool = False


@dataclass(frozen=True)
class Cycle:
    """Averages over rows and timed steps: share of rows that fold, records that verify reads, tokens accepted."""

    fold_rate: float
    history: float
    folded: float
    accepted: float


def simulate(accepted: list[list[int]], rule: FoldRule, skip: int) -> Cycle:
    """Move the cursors of every row through `accepted` [steps][rows]; average over the steps after `skip`."""
    write_pos = [0] * len(accepted[0])
    folds = history = folded = tokens = count = 0
    for step, row_counts in enumerate(accepted):
        timed = step >= skip
        for row, n in enumerate(row_counts):
            seen = write_pos[row]
            fold_now = not rule.in_commit and seen > rule.limit
            write_pos[row] = n if fold_now else seen + n
            fold_after = rule.in_commit and write_pos[row] > rule.limit
            if timed:
                count += 1
                history += seen
                tokens += n
                if fold_now or fold_after:
                    folds += 1
                    folded += seen if fold_now else write_pos[row]
            if fold_after:
                write_pos[row] = 0
    return Cycle(folds / count, history / count, folded / max(folds, 1), tokens / count)


def state_bytes(shape: Shape, itemsize: int = 4) -> int:
    """Bytes of one request's checkpoint of one layer."""
    return shape.num_v_heads * shape.head_dim * shape.head_dim * itemsize


def activation_bytes(shape: Shape) -> int:
    """q, k, v, a, b read and o written for one request's window, bf16."""
    per_token = 2 * shape.num_k_heads * shape.head_dim + 2 * shape.num_v_heads * shape.head_dim + 2 * shape.num_v_heads
    return shape.draft_tokens * per_token * 2


def record_bytes(shape: Shape, per_v: int, per_k: int, per_head: int) -> int:
    """Bytes of one ring record: `per_v` a V element, `per_k` a K element of a key head, `per_head` a value head."""
    v_part = shape.num_v_heads * (shape.head_dim * per_v + per_head)
    return v_part + shape.num_k_heads * shape.head_dim * per_k


def floor_bytes(shape: Shape) -> int:
    """State read once plus activations: below this no algorithm with an fp32 state that reads it every step can go."""
    return state_bytes(shape) + activation_bytes(shape)
