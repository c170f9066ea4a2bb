"""What a running server says about the ring: a section of SGLang's internal state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_replayssm.plugin import activation
from sglang_replayssm.plugin.pool import RingPool, ring_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

SECTION = "gdn_replayssm"


def internal_state(original, self: Scheduler, recv_req):
    """AROUND Scheduler.get_internal_state: add the section (shown by /get_server_info and Engine.get_server_info)."""
    result = original(self, recv_req)
    pool = ring_of(self.req_to_token_pool)
    result.internal_state[SECTION] = {"active": activation.active(), "reasons": activation.reasons or []}
    if pool is not None:
        result.internal_state[SECTION] |= describe(pool)
    return result


def describe(pool: RingPool) -> dict[str, int | str]:
    """Policy, sizes and counters. Reading the counters waits for the device: for requests, not for the step."""
    from sglang_replayssm.plugin.memory import cursor_bytes  # here, since it imports the kernels

    return {
        "fold": pool.spec.fold,
        "window": pool.spec.window,
        "max_draft_tokens": pool.spec.max_draft_tokens,
        "ring_bytes_per_request": pool.spec.bytes_per_row + pool.window_bytes_per_row,
        "cursor_bytes": cursor_bytes(pool),
        "stock_scratch_bytes_per_request": pool.stock_scratch_bytes_per_row,
        "checkpoint_bytes_per_slot": pool.checkpoint_bytes_per_slot,
        **dict(zip(pool.cursors.COUNTERS, pool.cursors.counters.tolist(), strict=True)),
    }
