"""A finished request's live slot that goes to the prefix cache is complete: its row is folded first.

Only SGLang's mamba strategy `no_buffer` lets a live slot leave its request: the radix tree takes the slot itself, or an
int8 copy of it. (`extra_buffer` gives away slots that a commit has written, see `verify.py`.) A slot that is copied
while its request goes on, after a prefill, has an empty ring: verify has not run since the extend that folded the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_replayssm.plugin.launch import fold
from sglang_replayssm.plugin.pool import ring_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


def release_kv_cache(original, req: Req, tree_cache: BasePrefixCache, is_insert: bool = True):
    """AROUND release_kv_cache: fold the row of a request whose live slot its prefix cache may take over.

    The fold is ordered behind the request's last commit: without overlap scheduling, which SGLang does not allow with
    `no_buffer`, everything runs on one stream. It takes in every accepted token, also those that a stop, or a grammar,
    has cut off the output: so does the state that SGLang commits, and what the tree makes of it must not depend on us.
    """
    pool = ring_of(tree_cache.req_to_token_pool)
    if pool is not None and is_insert and req.req_pool_idx is not None and _live_slots_are_donated():
        state = tree_cache.req_to_token_pool.mamba_pool.mamba_cache.temporal
        row = torch.full((1,), req.req_pool_idx, dtype=torch.int64, device=state.device)
        fold(state, pool.ring, pool.cursors, row, req.mamba_pool_idx.view(1))
    return original(req, tree_cache, is_insert)


def _live_slots_are_donated() -> bool:
    from sglang.srt.server_args import get_global_server_args

    args = get_global_server_args()
    return not args.disable_radix_cache and not args.enable_mamba_extra_buffer()
