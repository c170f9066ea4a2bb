"""Fold by replay of the raw inputs, all layers in one launch: the checkpoint that SGLang's own kernel would hold."""

import triton
import triton.language as tl

from ..primitives import wrap
from ..sequential import advance, unit


@triton.jit(do_not_specialize=["batch", "least"])
def replay_rows(
    state,
    ring_k,
    ring_v,
    ring_gates,
    position,
    rows,
    slots,
    strides,
    batch,
    least,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (V / BLOCK_V, layers HV, any): one tile of one head, for every num_programs(2)-th batch row in turn.

    Rows with fewer than `least` records are left alone. `strides`: layer and slot of state; layer of k, v, gates; rows
    and slots.
    """
    vs = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    ks = tl.arange(0, K)
    layer = (tl.program_id(1) // HV).to(tl.int64)
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    state_layer, state_slot, k_layer, v_layer, gates_layer, row_stride, slot_stride = strides
    state += layer * state_layer + hv * (V * K)
    ring_k += layer * k_layer + h * (R * K)
    ring_v += layer * v_layer + hv * (R * V)
    ring_gates += layer * gates_layer + hv * (R * 2)

    for n in range(tl.program_id(2), batch, tl.num_programs(2)):
        row = tl.load(rows + n * row_stride).to(tl.int64)
        slot = tl.load(slots + n * slot_stride).to(tl.int64)
        base = tl.load(position + 2 * row)
        count = tl.load(position + 2 * row + 1)
        if (row > 0) & (slot >= 0) & (count >= least):
            tile = state + slot * state_slot + vs[None, :] * K + ks[:, None]
            s = tl.zeros([K, BLOCK_V], tl.float32)
            s += tl.load(tile)  # turns -0 into 0, as SGLang's kernel does
            for j in range(0, count):
                at = wrap(base + j, R)
                k = tl.load(ring_k + row * (H * R * K) + at * K + ks).to(tl.float32)
                v = tl.load(ring_v + row * (HV * R * V) + at * V + vs).to(tl.float32)
                gates = ring_gates + row * (HV * R * 2) + at * 2
                s = advance(s, unit(k), v, tl.load(gates), tl.load(gates + 1))
            tl.store(tile, s)
