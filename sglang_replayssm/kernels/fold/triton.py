"""Fold of all layers as one Triton launch, and a tiny one that moves the cursors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import fold_tile, load_decays, load_keys, wrap
from ..ring import Cursors, Ring

# Batch rows that one program of `_empty_rows` handles.
BLOCK = 128


@triton.jit
def _fold(
    state,
    ring_d,
    ring_k,
    ring_g,
    position,
    rows,
    slots,
    strides,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (layers HV, B): one value head of one layer and batch row a program; most rows exit at once."""
    layer = (tl.program_id(0) // HV).to(tl.int64)
    hv = tl.program_id(0) % HV
    n = tl.program_id(1)
    row = tl.load(rows + n).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    base = tl.load(position + 2 * row)
    count = tl.load(position + 2 * row + 1)
    if (row > 0) & (slot >= 0) & (count > 0):
        state_layer, state_slot, d_layer, k_layer, g_layer = strides
        h = hv // (HV // H)
        state += layer * state_layer + slot * state_slot + hv * (V * K)
        ring_d += layer * d_layer + (row * HV + hv) * (R * V)
        ring_k += layer * k_layer + (row * H + h) * (R * K)
        ring_g += layer * g_layer + (row * HV + hv) * (R * 2)

        j = tl.arange(0, HISTORY)
        live = j < count
        at = wrap(base + j, R)
        total_high, total_low, weight = load_decays(ring_g, base, count, j, R)
        decay = tl.exp(total_high) * (1.0 + total_low)
        keys = load_keys(ring_k, at, live, K)
        for i in tl.range(0, V // BLOCK_V):
            vs = i * BLOCK_V + tl.arange(0, BLOCK_V)
            fold_tile(state, ring_d, keys, decay, weight, at, live, vs, V, K)


@triton.jit(do_not_specialize=["batch"])
def _empty_rows(position, rows, slots, batch, R: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n, mask=n < batch, other=0).to(tl.int32)
    slot = tl.load(slots + n, mask=n < batch, other=-1)
    folded = (row > 0) & (slot >= 0)
    base = tl.load(position + 2 * row, mask=folded, other=0)
    count = tl.load(position + 2 * row + 1, mask=folded, other=0)
    tl.store(position + 2 * row, wrap(base + count, R), mask=folded)
    tl.store(position + 2 * row + 1, tl.zeros_like(count), mask=folded)


def fold(state: torch.Tensor, ring: Ring, cursors: Cursors, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """S_c <- S_n in all layers of the rows that have records; their rings are empty afterwards.

    For whatever reads or moves a live state outside of verify. Rows without records cost next to nothing.

    Args:
        state: fp32 [layers, slots, HV, V, K], checkpoints; any layer and slot stride.
        ring: the ring of all layers.
        rows: int32 or int64 [B], request rows, no row twice; row 0 is skipped.
        slots: int32 or int64 [B], the mamba slot of each row; -1 is skipped.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    _check(state, ring, rows, slots)
    batch, spec = rows.numel(), cursors.spec
    if batch == 0:
        return
    layers, _, v_heads, v_dim, k_dim = state.shape
    _fold[(layers * v_heads, batch)](
        state,
        ring.d,
        ring.k,
        ring.g,
        cursors.position,
        rows,
        slots,
        (state.stride(0), state.stride(1), ring.d.stride(0), ring.k.stride(0), ring.g.stride(0)),
        H=spec.num_k_heads,
        HV=v_heads,
        K=k_dim,
        V=v_dim,
        R=spec.records,
        HISTORY=max(16, triton.next_power_of_2(spec.window)),
        BLOCK_V=min(v_dim, max(16, 4096 // k_dim)),
        num_warps=2,
    )
    _empty_rows[(triton.cdiv(batch, BLOCK),)](cursors.position, rows, slots, batch, R=spec.records, BLOCK=BLOCK)


def _check(state: torch.Tensor, ring: Ring, rows: torch.Tensor, slots: torch.Tensor) -> None:
    spec = ring.spec
    heads = (spec.num_v_heads, spec.head_v_dim, spec.head_k_dim)
    if state.dtype != torch.float32 or state.dim() != 5 or state.shape[0] != spec.layers or state.shape[2:] != heads:
        raise ValueError(
            f"fold takes an fp32 state [layers={spec.layers}, slots, HV, V, K = {heads}], found {state.dtype} "
            f"{tuple(state.shape)}"
        )
    if state.stride()[2:] != (spec.head_v_dim * spec.head_k_dim, spec.head_k_dim, 1):
        raise ValueError(f"fold takes a state with packed HV, V, K, found strides {state.stride()}: make it contiguous")
    if ring.d.dim() != 5:
        raise ValueError(
            "fold takes the ring of all layers, found one layer's: pass the ring itself, not ring.layer(i)"
        )
    for tensor in (rows, slots):
        if (
            tensor.shape != (rows.numel(),)
            or not tensor.is_contiguous()
            or tensor.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"fold takes contiguous int32 or int64 rows and slots of one length, found {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} next to {rows.numel()} rows"
            )
