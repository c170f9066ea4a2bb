"""SGLang's crash with speculation, `extra_buffer` and overlap scheduling, repaired.

A request can finish while the next verify batch already holds it: with a grammar, SGLang processes a batch's results
between making the next batch and running it. Its track buffer is freed then, and the pinned release takes None for the
index of the slot to track into: a TypeError that ends the scheduler.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

# Slot 0 is SGLang's write target for padding: never allocated, and read by nobody.
NOBODYS_SLOT = 0


def set_mamba_track_indices_from_reqs(original, batch: ScheduleBatch) -> None:
    """AROUND set_mamba_track_indices_from_reqs: rows whose buffer is freed track into a slot that nobody reads.

    Not into one of their former slots: the prefix cache, or another request, may hold these by now.
    """
    indices = [req.mamba_next_track_idx for req in batch.reqs]
    if None not in indices:
        return original(batch)
    stand_in = SimpleNamespace(
        req_to_token_pool=batch.req_to_token_pool,
        req_pool_indices=batch.req_pool_indices,
        reqs=[SimpleNamespace(mamba_next_track_idx=index or 0) for index in indices],
    )
    original(stand_in)
    for n, index in enumerate(indices):
        if index is None:
            stand_in.mamba_track_indices[n] = NOBODYS_SLOT
    batch.mamba_track_indices = stand_in.mamba_track_indices
