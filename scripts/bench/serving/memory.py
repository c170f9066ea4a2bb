"""How the server divided its memory, from its log, and how many requests of a given length that memory could hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30
NUMBER = r"([\d.]+)"


@dataclass(frozen=True)
class Pools:
    """GiB of each kind of memory; `scratch` is what speculation needs beyond the state (copies or ring, windows).

    Attributes:
        requests: requests at a time that state and scratch are sized for.
        kv_tokens: tokens of KV cache, of target and draft model together where both log one.
    """

    requests: int
    state: float
    scratch: float
    kv: float
    kv_tokens: int

    @property
    def total(self) -> float:
        return self.state + self.scratch + self.kv


def parse(log: str) -> Pools:
    """Read the pools off a server's log; ValueError when it does not say."""
    stock = re.search(rf"max_mamba_cache_size: (\d+), conv_state size: {NUMBER}GB, ssm_state size: {NUMBER}GB", log)
    if not stock:
        raise ValueError("no line about the mamba cache in the server's log")
    requests, state = int(stock[1]), float(stock[2]) + float(stock[3])
    ring = re.search(
        rf"ring allocated \(fold=\S+\): ring {NUMBER} GiB .*?conv windows {NUMBER} GiB, state {NUMBER} GiB", log
    )
    if ring:
        scratch, state = float(ring[1]) + float(ring[2]), float(ring[3])
    else:
        copies = re.search(rf"intermediate_ssm_state_cache size: {NUMBER}GB", log)
        windows = re.search(rf"intermediate_conv_window_cache size: {NUMBER}GB", log)
        scratch = sum(float(found[1]) for found in (copies, windows) if found)
    caches = re.findall(rf"KV Cache is allocated\. .*?#tokens: (\d+), K size: {NUMBER} GB, V size: {NUMBER} GB", log)
    if not caches:
        raise ValueError("no line about the KV cache in the server's log")
    kv = sum(float(k) + float(v) for _, k, v in caches)
    return Pools(requests, state, scratch, kv, min(int(tokens) for tokens, _, _ in caches))


def largest_batch(pools: Pools, tokens_per_request: int) -> int:
    """The largest N whose state, scratch and KV cache fit in the memory that these pools take together.

    State and scratch have one row more than requests (padding), the KV cache is `kv_tokens` long.
    """
    row = (pools.state + pools.scratch) / (pools.requests + 1)
    kv_per_request = pools.kv / pools.kv_tokens * tokens_per_request
    return int((pools.total - row) / (row + kv_per_request))
