"""What a scheduler holds when it is idle: SGLang's internal state gets a section of its own, ring or not.

SGLang checks its pools whenever it idles and ends the scheduler on a leak; what its tree has locked counts as accounted
for there. Nothing may be locked once every request has ended, so here that is a leak too.
"""

from __future__ import annotations

import functools
from typing import Any

SECTION = "soak_pools"


def run_scheduler(*args, **kwargs):
    """SGLang's scheduler process, for `Engine.run_scheduler_process_func`, with that section."""
    from sglang.srt.managers import scheduler

    scheduler.Scheduler.get_internal_state = _with_pools(scheduler.Scheduler.get_internal_state)
    return scheduler.run_scheduler_process(*args, **kwargs)


def _with_pools(original):
    @functools.wraps(original)
    def get_internal_state(self, recv_req):
        result = original(self, recv_req)
        result.internal_state[SECTION] = _pools(self)
        return result

    return get_internal_state


def _pools(scheduler) -> dict[str, Any]:
    """Rows, slots and KV tokens that are neither free nor evictable, and memory in bytes."""
    import psutil
    import torch

    stats, rows = scheduler.pool_stats_observer.get_pool_stats(), scheduler.req_to_token_pool
    return {
        "rows": rows.size - len(rows.free_slots),
        "slots": stats.mamba_num_used,
        "tokens": stats.full_num_used,
        "memory": {
            "host": psutil.Process().memory_info().rss,
            "gpu": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        },
    }


def leaks(samples: list[dict[str, Any]], growth: dict[str, int]) -> list[str]:
    """What is wrong with the pools of one server.

    Args:
        samples: of idle moments, in order of time.
        growth: bytes by which each kind of memory may grow from the middle of the run to its end.
    """
    found = [
        f"{sample[name]} {name} held at idle, sample {number + 1} of {len(samples)}"
        for number, sample in enumerate(samples)
        for name in ("rows", "slots", "tokens")
        if sample[name]
    ]
    if len(samples) > 2:
        middle, last = samples[len(samples) // 2]["memory"], samples[-1]["memory"]
        for kind, allowed in growth.items():
            if last[kind] - middle[kind] > allowed:
                found.append(f"{kind} memory grew by {(last[kind] - middle[kind]) / 2**20:.0f} MiB")
    return found
