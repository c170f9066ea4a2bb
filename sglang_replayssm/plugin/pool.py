"""The ring of one scheduler process: buffers beside SGLang's mamba pool, and which rows are fresh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang.srt.server_args import ServerArgs

    from sglang_replayssm.kernels import Cursors, Ring, RingSpec

# The attribute of MambaPool that holds a RingPool. Not `replayssm_*`: SGLang's own decode ring reacts to those names.
_ATTRIBUTE = "gdn_verify_ring"


@dataclass
class RingPool:
    """Everything that the hooks share about the ring.

    Attributes:
        spec, ring, cursors: see `sglang_replayssm.kernels.ring`.
        checkpoint_bytes_per_slot: conv and recurrent state of one mamba slot, all layers.
        window_bytes_per_row: conv inputs of one window, all layers.
        stock_scratch_bytes_per_row: what stock's recurrent verify would keep per request row, all layers.
        fresh_rows: request rows that were given to a request and not yet reset on the forward stream.
    """

    spec: RingSpec
    ring: Ring
    cursors: Cursors
    checkpoint_bytes_per_slot: int
    window_bytes_per_row: int
    stock_scratch_bytes_per_row: int
    fresh_rows: set[int] = field(default_factory=set)

    def attach(self, mamba_pool: MambaPool) -> None:
        setattr(mamba_pool, _ATTRIBUTE, self)


def ring_of(req_to_token_pool: HybridReqToTokenPool) -> RingPool | None:
    """The ring beside this pool, None if the pool has none."""
    mamba_pool = getattr(req_to_token_pool, "mamba_pool", None)
    return getattr(mamba_pool, _ATTRIBUTE, None)


def ring_spec(
    params: BaseLinearStateParams, layers: int, rows: int, activation_dtype: torch.dtype, args: ServerArgs
) -> RingSpec:
    """Sizes of the ring from SGLang's state parameters: the one place that translates them."""
    from sglang_replayssm.kernels import RingSpec

    num_v_heads, head_v_dim, head_k_dim = params.shape.temporal
    return RingSpec(
        layers=layers,
        rows=rows,
        num_k_heads=params.shape.num_k_heads_per_tp,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        window=args.gdn_replayssm_cache_len,
        max_draft_tokens=args.max_speculative_num_draft_tokens,
        activation_dtype=activation_dtype,
        fold=args.gdn_replayssm_fold,
    )
