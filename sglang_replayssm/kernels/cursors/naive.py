"""The cursors' moves in plain PyTorch; see `triton.py` for the contracts."""

from __future__ import annotations

import torch

from ..ring import CACHE_BASE, WRITE_POS, Cursors


def plan_window(cursors: Cursors, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the step's plan and empty the rows that fold."""
    for n, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        live = slot >= 0 and row > 0
        base, count = cursors.position[row].tolist() if live else (0, 0)
        fold = live and count >= cursors.spec.full
        cursors.plan[n, :5] = torch.tensor([slot, row, base, count, fold])
        if fold:
            cursors.position[row, CACHE_BASE] = (base + count) % cursors.spec.records
            cursors.position[row, WRITE_POS] = 0
        cursors.counters[0] += live
        cursors.counters[1] += fold


def commit(cursors: Cursors, rows: torch.Tensor, accepted: torch.Tensor) -> None:
    """Keep the first `accepted[n]` records that the last verify wrote for row `rows[n]`."""
    for row, count in zip(rows.tolist(), accepted.tolist(), strict=True):
        if row > 0:
            cursors.position[row, WRITE_POS] += count
            cursors.counters[2] += count


def reset(cursors: Cursors, rows: torch.Tensor) -> None:
    """Empty the rings of `rows`."""
    cursors.position[rows.long()] = 0
