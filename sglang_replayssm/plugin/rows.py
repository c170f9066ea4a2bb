"""Life of a request row: fresh rows are reset, continued rows are folded, always on the forward stream.

SGLang gives rows on its scheduling thread while an earlier batch may still commit into the same row. Resetting at that
moment could be overtaken, so rows are only noted there; the next (non-verify) extend resets them on the forward
stream, behind every commit of the previous owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_replayssm.plugin.launch import fold, reset
from sglang_replayssm.plugin.pool import RingPool, ring_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def alloc(original, self: HybridReqToTokenPool, reqs: list):
    """AROUND HybridReqToTokenPool.alloc: note the rows that it newly gives to a request."""
    without_row = [req for req in reqs if req.req_pool_idx is None]
    result = original(self, reqs)
    pool = ring_of(self)
    if pool is not None and result is not None:
        pool.fresh_rows.update(req.req_pool_idx for req in without_row)
    return result


def before_extend(original, self: ModelRunner, forward_batch: ForwardBatch) -> None:
    """AROUND ModelRunner._maybe_execute_deferred_mamba_cow_and_clear, which runs on the forward stream.

    A row that goes through a plain extend must have its whole state in its slot: the extend reads and writes the slot.
    """
    pool, mode = ring_of(self.req_to_token_pool), forward_batch.forward_mode
    plain_extend = mode.is_extend() and not mode.is_target_verify() and not mode.is_draft_extend_v2()
    if pool is not None and plain_extend and not self.is_draft_worker:
        _reset_fresh_rows(pool)
        rows = forward_batch.req_pool_indices
        slots = self.req_to_token_pool.get_mamba_indices(rows)
        fold(self.req_to_token_pool.mamba_pool.mamba_cache.temporal, pool.ring, pool.cursors, rows, slots)
    original(self, forward_batch)


def _reset_fresh_rows(pool: RingPool) -> None:
    """Every noted row, also one whose own extend comes later: its previous owner has no commit behind this point."""
    if not pool.fresh_rows:
        return
    rows = torch.tensor(sorted(pool.fresh_rows), dtype=torch.int64)
    pool.fresh_rows.clear()
    device = pool.cursors.position.device
    if device.type == "cuda":
        rows = rows.pin_memory()  # a copy from pageable memory would synchronise
    reset(pool.cursors, rows.to(device, non_blocking=True))
