"""The order in which a grammar makes the scheduler work, without one (CPUSIM_GRAMMAR_SYNC=1), which takes a tokenizer.

With speculation, overlap scheduling and a grammar, a batch's results are processed between making the next batch and
running it. Here every other decode batch does so.
"""

from __future__ import annotations

import functools
import os


def install() -> None:
    if os.environ.get("CPUSIM_GRAMMAR_SYNC") != "1":
        return
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.is_disable_overlap_for_batch = _sometimes(Scheduler.is_disable_overlap_for_batch)


def _sometimes(original):
    decode_batches = 0

    @functools.wraps(original)
    def is_disable_overlap_for_batch(self, batch) -> bool:
        nonlocal decode_batches
        if batch and batch.forward_mode.is_decode() and self.result_queue:
            decode_batches += 1
            if decode_batches % 2:
                return True
        return original(self, batch)

    return is_disable_overlap_for_batch
