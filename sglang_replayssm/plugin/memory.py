"""Memory: the solver reserves what the ring takes, and the pool allocates no more than that, never the snapshots."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from sglang_replayssm.kernels import Cursors, Ring, kernel_name
from sglang_replayssm.plugin.pool import RingPool, ring_spec

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

GIB = 1 << 30

# What the solver of this process set aside for state, conv windows and ring; the pool that it sized compares with it.
reserved_bytes: int | None = None


def window_shapes(params: BaseLinearStateParams, layers: int, rows: int, drafts: int) -> list[tuple[int, ...]]:
    """Shapes of the conv windows, one per conv state: [layers, rows + 1, drafts, dim], the inputs of a step's windows.

    Stock keeps the `width` inputs before each window as well, which the conv state holds until the commit.
    """
    return [(layers, rows + 1, drafts, dim) for dim, _ in params.shape.conv]


def window_bytes_per_row(params: BaseLinearStateParams, layers: int, drafts: int) -> int:
    """Bytes of conv windows that one request row takes over all layers."""
    return layers * drafts * sum(dim for dim, _ in params.shape.conv) * params.dtype.conv.itemsize


def stock_scratch_bytes_per_row(params: BaseLinearStateParams, layers: int, drafts: int) -> int:
    """Bytes that stock's recurrent verify allocates per request row: a state per draft token, and the conv windows.

    Consecutive drafts' conv states overlap in all but one input and share a buffer (`conv_window_dedup_enabled`).
    """
    heads, v, k = params.shape.temporal
    snapshots = drafts * heads * v * k * params.dtype.temporal.itemsize
    windows = sum(dim * (drafts + width - 1) for dim, width in params.shape.conv) * params.dtype.conv.itemsize
    return layers * (snapshots + windows)


def handle_max_mamba_cache(original, self: ModelRunner, total_rest_memory: float) -> float:
    """AROUND ModelRunnerKVCacheMixin.handle_max_mamba_cache: charge ring and windows instead of snapshots.

    Every scratch term of the stock solver is `mamba_cache_per_req * requests * D`. Called with D replaced by the ratio
    of our bytes per row to `mamba_cache_per_req`, it reserves exactly ours. What exists once per worker (padding's row
    and slot, counters) is taken off first; stock forgets those.

    Args:
        total_rest_memory: GiB left for state and KV cache. Returns what is left for KV cache, GiB.
    """
    args, params = self.server_args, self.mambaish_config.mamba2_cache_params
    if args.speculative_num_draft_tokens is None:
        return original(self, total_rest_memory)
    layers = sum(self.start_layer <= layer < self.end_layer for layer in params.layers)
    spec = ring_spec(params, layers, 0, self.dtype, args)
    per_row = spec.bytes_per_row + window_bytes_per_row(params, layers, spec.max_draft_tokens)
    once = per_row + params.mamba_cache_per_req + spec.cursor_bytes
    cursor_bytes_per_row = ring_spec(params, layers, 1, self.dtype, args).cursor_bytes - spec.cursor_bytes
    stock_drafts = args.speculative_num_draft_tokens
    args.speculative_num_draft_tokens = (per_row + cursor_bytes_per_row) / params.mamba_cache_per_req
    try:
        left = original(self, total_rest_memory - once / GIB)
    finally:
        args.speculative_num_draft_tokens = stock_drafts
    global reserved_bytes
    reserved_bytes = round((total_rest_memory - left) * GIB)
    return left


def init_mamba_pool(
    original,
    self: MambaPool,
    *,
    size: int,
    spec_state_size: int,
    cache_params: BaseLinearStateParams,
    mamba_layer_ids: list[int],
    device: str,
    speculative_num_draft_tokens: int | None = None,
    speculative_eagle_topk: int | None = None,
    **kwargs,
) -> None:
    """AROUND MambaPool.__init__: state as stock, ring instead of the snapshots, and leaner conv windows.

    The stock constructor is asked for a pool without speculation, so that the snapshots never exist, not even for a
    moment; the windows and the ring are then allocated in the same memory-saver region.

    Raises:
        RuntimeError: the pool is not one that the ring was decided for (a layout or dtype that only this point knows).
    """
    original(
        self,
        size=size,
        spec_state_size=spec_state_size,
        cache_params=cache_params,
        mamba_layer_ids=mamba_layer_ids,
        device=device,
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=speculative_eagle_topk,
        **kwargs,
    )
    if speculative_num_draft_tokens is None:
        return

    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.server_args import get_global_server_args

    args = get_global_server_args()
    layers, state = len(mamba_layer_ids), self.mamba_cache.temporal
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise RuntimeError(
            f"the ring needs a contiguous float32 state, but SGLang allocated {state.dtype} with strides "
            f"{state.stride()}: start without --enable-gdn-replayssm-spec and report this configuration"
        )
    spec = ring_spec(cache_params, layers, spec_state_size, args.get_model_config().dtype, args)
    saver = self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else contextlib.nullcontext()
    with saver, pool:
        windows = [
            torch.zeros(shape, dtype=cache_params.dtype.conv, device=device)
            for shape in window_shapes(cache_params, layers, spec_state_size, speculative_num_draft_tokens)
        ]
        ring = Ring.allocate(spec, device)
    # Outside: a released region loses its contents, and these are read between release and resume (by the report).
    cursors = Cursors.allocate(spec, device)
    self._intermediate_conv_window_phys = windows
    self.mamba_cache = self.SpeculativeState(
        conv=self.mamba_cache.conv,
        temporal=state,
        intermediate_ssm=None,
        intermediate_conv_window=windows,
    )
    ring_pool = RingPool(
        spec=spec,
        ring=ring,
        cursors=cursors,
        checkpoint_bytes_per_slot=_bytes(*self.mamba_cache.conv, state) // (size + 1),
        window_bytes_per_row=_bytes(*windows) // (spec_state_size + 1),
        stock_scratch_bytes_per_row=stock_scratch_bytes_per_row(cache_params, layers, speculative_num_draft_tokens),
    )
    ring_pool.attach(self)
    self.mem_usage = (_bytes(*self.mamba_cache.conv, state, *windows) + ring_bytes(ring_pool)) / GIB
    logger.info(
        "GDN ReplaySSM ring allocated (fold=%s): ring %.3f GiB (%d rows x %.2f MiB, %d records), "
        "conv windows %.3f GiB, state %.3f GiB (%d slots x %.2f MiB); "
        "stock's snapshots and windows would take %.3f GiB (%.2f MiB a row)",
        spec.fold,
        ring_bytes(ring_pool) / GIB,
        spec.rows + 1,
        spec.bytes_per_row / 2**20,
        spec.records,
        _bytes(*windows) / GIB,
        _bytes(*self.mamba_cache.conv, state) / GIB,
        size + 1,
        ring_pool.checkpoint_bytes_per_slot / 2**20,
        ring_pool.stock_scratch_bytes_per_row * (spec.rows + 1) / GIB,
        ring_pool.stock_scratch_bytes_per_row / 2**20,
    )
    _log_reservation(size, spec.rows, _bytes(*self.mamba_cache.conv, state, *windows) + ring_bytes(ring_pool))
    logger.info("GDN ReplaySSM verify kernel: %s", kernel_name(spec, spec.max_draft_tokens, ring.k.device))


def _log_reservation(slots: int, rows: int, allocated: int) -> None:
    """Say whether the solver's reservation was used up: the number of requests may be capped after it, by tokens."""
    if reserved_bytes is None:
        return
    spare = reserved_bytes - allocated
    logger.info(
        "GDN ReplaySSM memory: %.3f GiB reserved, %.3f GiB allocated for %d slots and %d request rows%s",
        reserved_bytes / GIB,
        allocated / GIB,
        slots,
        rows,
        f"; {spare / GIB:.3f} GiB are spare because the requests were capped later" if spare > GIB // 1024 else "",
    )


def ring_bytes(pool: RingPool) -> int:
    """Bytes of ring, cursors, plan and counters as allocated."""
    return _bytes(*pool.ring.tensors().values()) + cursor_bytes(pool)


def cursor_bytes(pool: RingPool) -> int:
    """Bytes of cursors, plan and counters as allocated: what no request row accounts for."""
    return _bytes(pool.cursors.position, pool.cursors.plan, pool.cursors.counters)


def saved_bytes(pool: RingPool) -> int:
    """Bytes that stock's snapshots and windows would take for these rows, beyond ring and windows."""
    stock, windows = pool.stock_scratch_bytes_per_row, pool.window_bytes_per_row
    return (pool.spec.rows + 1) * (stock - windows) - ring_bytes(pool)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
