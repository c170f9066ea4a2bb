"""Fold of all layers as one Triton launch, and a tiny one that moves the cursors.

Which kernel folds follows from what the policy records: `_add_factors` adds rank-1 factors, `replay.py` replays raw
inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import fold_tile, load_decays, load_keys, wrap
from ..ring import PLAN_ROW, PLAN_SLOT, Cursors, Ring, check_indices
from ..sequential import STOCK_WARPS, tile_columns
from .reach import reach
from .replay import replay_rows

# Batch rows that one program of `_empty_rows` handles.
BLOCK = 128

# Batch rows that a launch works on at once; the programs of a head take the others in turn. Most have nothing to do,
# and programs that only start and end would cost a large batch more than the folds.
ROWS_AT_ONCE = 8

# Columns of a replaying program's state tile.
REPLAY_BLOCK_V = 8

# Place in `Cursors.counters`.
FOLDS = tl.constexpr(Cursors.COUNTERS.index("folds"))


@triton.jit(do_not_specialize=["batch", "least"])
def _add_factors(
    state,
    ring_d,
    ring_k,
    ring_g,
    position,
    rows,
    slots,
    steps,
    targets,
    strides,
    index_strides,
    batch,
    least,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (layers HV, any): one head of one layer, for every num_programs(1)-th batch row in turn.

    What a row asks for: `reach`. `strides`: layer and slot of state; layer of d, k, g.
    """
    layer = (tl.program_id(0) // HV).to(tl.int64)
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    state_layer, state_slot, d_layer, k_layer, g_layer = strides
    state += layer * state_layer + hv * (V * K)
    ring_d += layer * d_layer + hv * (R * V)
    ring_k += layer * k_layer + h * (R * K)
    ring_g += layer * g_layer + hv * (R * 2)
    j = tl.arange(0, HISTORY)

    for n in range(tl.program_id(1), batch, tl.num_programs(1)):
        row, slot, target, base, count, wanted = reach(position, rows, slots, steps, targets, index_strides, n, least)
        if wanted:
            live = j < count
            at = wrap(base + j, R)
            log_decays = ring_g + row * (HV * R * 2)
            total_high, total_low, weight = load_decays(log_decays, base, count, j, R)
            decay = tl.exp(total_high) * (1.0 + total_low)
            keys = load_keys(ring_k + row * (H * R * K), at, live, K)
            deltas = ring_d + row * (HV * R * V)
            checkpoint, result = state + slot * state_slot, state + target * state_slot
            for i in tl.range(0, V // BLOCK_V):
                vs = i * BLOCK_V + tl.arange(0, BLOCK_V)
                fold_tile(checkpoint, result, deltas, keys, decay, weight, at, live, vs, V, K)


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
    check_indices("fold", "rows and slots", rows, slots)
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


def materialize(state: torch.Tensor, ring: Ring, cursors: Cursors, steps: torch.Tensor, targets: torch.Tensor) -> None:
    """Between `verify` and `commit`: write the states after chosen steps of the windows into slots of their own.

    That is S_{n+s+1} for a row with n records: checkpoint, records, and the window up to step s. Bit-identical to the
    state that SGLang's kernel has there, if the policy replays inputs. Checkpoints, rings and cursors stay as they are.
    Rows and slots are those of the step's plan.

    Args:
        state, ring: as for `fold`.
        steps: int32 or int64 [B], step s of each batch row's window, 0..T-1; -1 for none.
        targets: int32 or int64 [B], the slot to write, of nobody in this step; -1 for none.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    _check(state, ring)
    check_indices("materialize", "steps and targets", steps, targets)
    batch = steps.numel()
    if batch > cursors.plan.shape[0]:
        raise ValueError(f"materialize got {batch} batch rows, but the plan has {cursors.plan.shape[0]} lines")
    rows, slots = cursors.plan[:batch, PLAN_ROW], cursors.plan[:batch, PLAN_SLOT]
    if batch:
        _launch(state, ring, cursors, rows, slots, least=1, steps=steps, targets=targets)


def _fold_rows(state, ring, cursors, rows, slots, least: int, counters: torch.Tensor | None = None) -> None:
    """Fold and empty the rows with at least `least` records; `counters`: where to count them."""
    batch = rows.numel()
    if batch == 0:
        return
    _launch(state, ring, cursors, rows, slots, least)
    index_strides = (rows.stride(0), slots.stride(0))
    _empty_rows[(triton.cdiv(batch, BLOCK),)](
        cursors.position, counters, rows, slots, index_strides, batch, least, R=ring.spec.records, BLOCK=BLOCK
    )


def _launch(state, ring, cursors, rows, slots, least: int, steps=None, targets=None) -> None:
    """The policy's kernel on all layers; arguments are those of `reach`."""
    spec, batch = ring.spec, rows.numel()
    layers, _, v_heads, v_dim, k_dim = state.shape
    replays = spec.policy.inputs
    buffers = (ring.k, ring.v, ring.gates) if replays else (ring.d, ring.k, ring.g)
    arguments = (
        state,
        *buffers,
        cursors.position,
        rows,
        slots,
        steps,
        targets,
        (state.stride(0), state.stride(1), *(buffer.stride(0) for buffer in buffers)),
        tuple(index.stride(0) for index in (rows, slots, steps, targets) if index is not None),
        batch,
        least,
    )
    sizes = {"H": spec.num_k_heads, "HV": v_heads, "K": k_dim, "V": v_dim, "R": spec.records}
    at_once = min(batch, ROWS_AT_ONCE)
    if replays:
        block_v = tile_columns(REPLAY_BLOCK_V, k_dim, v_dim)
        grid = (v_dim // block_v, layers * v_heads, at_once)
        replay_rows[grid](*arguments, **sizes, BLOCK_V=block_v, num_warps=STOCK_WARPS)
    else:
        history = max(16, triton.next_power_of_2(spec.window))
        block_v = min(v_dim, max(16, 4096 // k_dim))
        _add_factors[(layers * v_heads, at_once)](*arguments, **sizes, HISTORY=history, BLOCK_V=block_v, num_warps=2)


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
