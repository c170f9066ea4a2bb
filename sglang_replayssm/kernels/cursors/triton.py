"""The cursors' moves on the device: one tiny launch each, nothing allocated, nothing read back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import PLAN_BASE, PLAN_COLUMNS, PLAN_COUNT, PLAN_FOLD, PLAN_ROW, PLAN_SLOT, wrap
from ..ring import Cursors, check_indices

# Batch rows that one program handles.
BLOCK = 128

# Places in `Cursors.counters`.
VERIFY_ROWS, FOLDS, ACCEPTED_TOKENS = (tl.constexpr(i) for i in range(3))


@triton.jit(do_not_specialize=["batch"])
def _plan_window(
    position,
    plan,
    counters,
    rows,
    slots,
    batch,
    FULL: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < batch
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int32)
    slot = tl.load(slots + n, mask=inside, other=-1).to(tl.int32)
    base = tl.load(position + 2 * row, mask=inside, other=0)
    count = tl.load(position + 2 * row + 1, mask=inside, other=0)
    live = (row > 0) & (slot >= 0)
    # Padding and capture have no history, whatever their row holds: kernels may load it before they look at the slot.
    base = tl.where(live, base, 0)
    count = tl.where(live, count, 0)
    fold = live & (count >= FULL)

    line = plan + n * PLAN_COLUMNS
    tl.store(line + PLAN_SLOT, slot, mask=inside)
    tl.store(line + PLAN_ROW, row, mask=inside)
    tl.store(line + PLAN_BASE, base, mask=inside)
    tl.store(line + PLAN_COUNT, count, mask=inside)
    tl.store(line + PLAN_FOLD, fold.to(tl.int32), mask=inside)
    # From here on a folding row is empty: should its verify never be committed, the next plan is still right.
    tl.store(position + 2 * row, wrap(base + count, R), mask=fold)
    tl.store(position + 2 * row + 1, tl.zeros_like(count), mask=fold)
    tl.atomic_add(counters + VERIFY_ROWS, tl.sum(live.to(tl.int64), axis=0))
    tl.atomic_add(counters + FOLDS, tl.sum(fold.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["batch"])
def _commit(position, counters, rows, accepted, batch, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < batch
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int32)
    live = row > 0
    new = tl.load(accepted + n, mask=live, other=0).to(tl.int32)
    count = tl.load(position + 2 * row + 1, mask=live, other=0)
    tl.store(position + 2 * row + 1, count + new, mask=live)
    tl.atomic_add(counters + ACCEPTED_TOKENS, tl.sum(new.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["batch"])
def _reset(position, rows, batch, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < batch
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int32)
    tl.store(position + 2 * row, tl.zeros_like(row), mask=inside)
    tl.store(position + 2 * row + 1, tl.zeros_like(row), mask=inside)


def plan_window(cursors: Cursors, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Start a step: write `cursors.plan`, and empty the rows that fold in it.

    Which rows this step's verify folds is decided here and nowhere else (none, if the policy folds after commits, by
    `fold_due`). `verify` of every layer must follow: a folding row counts as folded from now on (its cursors already
    say so), while its plan still describes the history to fold.

    Args:
        rows: int32 or int64 [B], request row of each batch row; padding has row 0.
        slots: int32 or int64 [B], mamba slot of each batch row; padding has -1. A row 0 with a real slot (graph
            capture) is planned with an empty ring and its cursors never move.

    Raises:
        ValueError: more batch rows than `cursors.plan` has lines, or tensors that do not match.
    """
    check_indices("plan_window", "tensors", rows, slots)
    batch = rows.numel()
    if batch > cursors.plan.shape[0]:
        raise ValueError(
            f"plan_window got {batch} batch rows, but the plan has {cursors.plan.shape[0]} lines for "
            f"{cursors.spec.rows} request rows and padding: allocate the cursors for more request rows"
        )
    spec = cursors.spec
    if batch:
        _plan_window[(triton.cdiv(batch, BLOCK),)](
            cursors.position,
            cursors.plan,
            cursors.counters,
            rows,
            slots,
            batch,
            FULL=spec.full,
            R=spec.records,
            BLOCK=BLOCK,
        )


def commit(cursors: Cursors, rows: torch.Tensor, accepted: torch.Tensor) -> None:
    """End a step: keep the first `accepted[n]` records that its verify wrote for row `rows[n]`. `fold_due` must follow.

    Args:
        rows: int32 or int64 [B]; row 0 is skipped.
        accepted: int32 or int64 [B], 0..T tokens, the bonus token included.

    Raises:
        ValueError: tensors that do not match.
    """
    check_indices("commit", "tensors", rows, accepted)
    batch = rows.numel()
    if batch:
        _commit[(triton.cdiv(batch, BLOCK),)](cursors.position, cursors.counters, rows, accepted, batch, BLOCK=BLOCK)


def reset(cursors: Cursors, rows: torch.Tensor) -> None:
    """Empty the rings of `rows` (int32 or int64 [B]), which are given to new requests.

    Raises:
        ValueError: rows that are not contiguous.
    """
    check_indices("reset", "tensors", rows)
    batch = rows.numel()
    if batch:
        _reset[(triton.cdiv(batch, BLOCK),)](cursors.position, rows, batch, BLOCK=BLOCK)
