"""Fold of all layers as one Triton launch, and a tiny one that moves the cursors.

Which kernel folds follows from what the policy records: `_fold` adds rank-1 factors, `replay.py` replays raw inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import fold_tile, load_decays, load_keys, wrap
from ..ring import PLAN_ROW, PLAN_SLOT, Cursors, Ring
from ..sequential import STOCK_BLOCK_V, STOCK_WARPS
from .replay import replay_rows

# Batch rows that one program of `_empty_rows` handles.
BLOCK = 128

# Batch rows that a replay works on at once; the programs of a head take the others in turn. Most have nothing to do,
# and programs that only start and end would cost a large batch more than the folds.
REPLAY_ROWS = 8

# Place in `Cursors.counters`.
FOLDS = tl.constexpr(Cursors.COUNTERS.index("folds"))


@triton.jit(do_not_specialize=["least"])
def _fold(
    state,
    ring_d,
    ring_k,
    ring_g,
    position,
    rows,
    slots,
    strides,
    least,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (layers HV, B): one value head of one layer and batch row a program; most rows exit at once.

    `strides`: layer and slot of state; layer of d, k, g; rows and slots.
    """
    layer = (tl.program_id(0) // HV).to(tl.int64)
    hv = tl.program_id(0) % HV
    n = tl.program_id(1)
    state_layer, state_slot, d_layer, k_layer, g_layer, row_stride, slot_stride = strides
    row = tl.load(rows + n * row_stride).to(tl.int64)
    slot = tl.load(slots + n * slot_stride).to(tl.int64)
    base = tl.load(position + 2 * row)
    count = tl.load(position + 2 * row + 1)
    if (row > 0) & (slot >= 0) & (count >= least):
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


@triton.jit(do_not_specialize=["batch", "least"])
def _empty_rows(position, counters, rows, slots, strides, batch, least, R: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n * strides[0], mask=n < batch, other=0).to(tl.int32)
    slot = tl.load(slots + n * strides[1], mask=n < batch, other=-1)
    live = (row > 0) & (slot >= 0)
    base = tl.load(position + 2 * row, mask=live, other=0)
    count = tl.load(position + 2 * row + 1, mask=live, other=0)
    folded = live & (count >= least)
    tl.store(position + 2 * row, wrap(base + count, R), mask=folded)
    tl.store(position + 2 * row + 1, tl.zeros_like(count), mask=folded)
    if counters is not None:
        tl.atomic_add(counters + FOLDS, tl.sum(folded.to(tl.int64), axis=0))


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
    _check(state, ring)
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
    _fold_rows(state, ring, cursors, rows, slots, least=1)


def fold_due(state: torch.Tensor, ring: Ring, cursors: Cursors, batch: int) -> None:
    """Right after `commit`: fold the rows of the step whose rings might not take another window.

    That is when policies fold that replay inputs; for the others, whose verify folds, this does nothing. The slots are
    those of the step's plan, as in SGLang's own commit: by now an allocator may have given the row another.

    Args:
        state, ring: as for `fold`.
        batch: batch rows of the step, at most those of its plan.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    spec = ring.spec
    if not spec.policy.inputs:
        return
    _check(state, ring)
    if batch > cursors.plan.shape[0]:
        raise ValueError(f"fold_due got {batch} batch rows, but the plan has {cursors.plan.shape[0]} lines")
    rows, slots = cursors.plan[:batch, PLAN_ROW], cursors.plan[:batch, PLAN_SLOT]
    _fold_rows(state, ring, cursors, rows, slots, spec.full, cursors.counters)


def _fold_rows(state, ring, cursors, rows, slots, least: int, counters: torch.Tensor | None = None) -> None:
    """Fold and empty the rows with at least `least` records; `counters`: where to count them."""
    batch, spec = rows.numel(), ring.spec
    if batch == 0:
        return
    index_strides = (rows.stride(0), slots.stride(0))
    (_replay if spec.policy.inputs else _add_factors)(state, ring, cursors, rows, slots, index_strides, least)
    _empty_rows[(triton.cdiv(batch, BLOCK),)](
        cursors.position, counters, rows, slots, index_strides, batch, least, R=spec.records, BLOCK=BLOCK
    )


def _add_factors(state, ring, cursors, rows, slots, index_strides, least: int) -> None:
    spec = ring.spec
    layers, _, v_heads, v_dim, k_dim = state.shape
    _fold[(layers * v_heads, rows.numel())](
        state,
        ring.d,
        ring.k,
        ring.g,
        cursors.position,
        rows,
        slots,
        (state.stride(0), state.stride(1), ring.d.stride(0), ring.k.stride(0), ring.g.stride(0), *index_strides),
        least,
        H=spec.num_k_heads,
        HV=v_heads,
        K=k_dim,
        V=v_dim,
        R=spec.records,
        HISTORY=max(16, triton.next_power_of_2(spec.window)),
        BLOCK_V=min(v_dim, max(16, 4096 // k_dim)),
        num_warps=2,
    )


def _replay(state, ring, cursors, rows, slots, index_strides, least: int) -> None:
    spec, batch = ring.spec, rows.numel()
    layers, _, v_heads, v_dim, k_dim = state.shape
    block_v = min(v_dim, STOCK_BLOCK_V)
    strides = (tensor.stride(0) for tensor in (ring.k, ring.v, ring.gates))
    replay_rows[(v_dim // block_v, layers * v_heads, min(batch, REPLAY_ROWS))](
        state,
        ring.k,
        ring.v,
        ring.gates,
        cursors.position,
        rows,
        slots,
        (state.stride(0), state.stride(1), *strides, *index_strides),
        batch,
        least,
        H=spec.num_k_heads,
        HV=v_heads,
        K=k_dim,
        V=v_dim,
        R=spec.records,
        BLOCK_V=block_v,
        num_warps=STOCK_WARPS,
    )


def _check(state: torch.Tensor, ring: Ring) -> None:
    spec = ring.spec
    heads = (spec.num_v_heads, spec.head_v_dim, spec.head_k_dim)
    if state.dtype != torch.float32 or state.dim() != 5 or state.shape[0] != spec.layers or state.shape[2:] != heads:
        raise ValueError(
            f"fold takes an fp32 state [layers={spec.layers}, slots, HV, V, K = {heads}], found {state.dtype} "
            f"{tuple(state.shape)}"
        )
    if state.stride()[2:] != (spec.head_v_dim * spec.head_k_dim, spec.head_k_dim, 1):
        raise ValueError(f"fold takes a state with packed HV, V, K, found strides {state.stride()}: make it contiguous")
    if ring.k.dim() != 5:
        raise ValueError(
            "fold takes the ring of all layers, found one layer's: pass the ring itself, not ring.layer(i)"
        )
