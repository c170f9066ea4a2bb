"""Fold by replay of the raw inputs, all layers in one launch: the state that SGLang's own kernel would hold."""

import triton
import triton.language as tl

from ..primitives import wrap
from ..sequential import advance, unit
from .reach import reach


@triton.jit(do_not_specialize=["batch", "least"])
def replay_rows(
    state,
    ring_k,
    ring_v,
    ring_gates,
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
    BLOCK_V: tl.constexpr,
):
    """Grid (V / BLOCK_V, layers HV, any): one tile of one head, for every num_programs(2)-th batch row in turn.

    What a row asks for: `reach`. `strides`: layer and slot of state; layer of k, v, gates.
    """
    vs = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    ks = tl.arange(0, K)
    layer = (tl.program_id(1) // HV).to(tl.int64)
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    state_layer, state_slot, k_layer, v_layer, gates_layer = strides
    state += layer * state_layer + hv * (V * K)
    ring_k += layer * k_layer + h * (R * K)
    ring_v += layer * v_layer + hv * (R * V)
    ring_gates += layer * gates_layer + hv * (R * 2)

    for n in range(tl.program_id(2), batch, tl.num_programs(2)):
        row, slot, target, base, count, wanted = reach(position, rows, slots, steps, targets, index_strides, n, least)
        if wanted:
            tile = vs[None, :] * K + ks[:, None]
            s = tl.zeros([K, BLOCK_V], tl.float32)
            s += tl.load(state + slot * state_slot + tile)  # turns -0 into 0, as SGLang's kernel does
            for j in range(0, count):
                at = wrap(base + j, R)
                k = tl.load(ring_k + row * (H * R * K) + at * K + ks).to(tl.float32)
                v = tl.load(ring_v + row * (HV * R * V) + at * V + vs).to(tl.float32)
                gates = ring_gates + row * (HV * R * 2) + at * 2
                s = advance(s, unit(k), v, tl.load(gates), tl.load(gates + 1))
            tl.store(state + target * state_slot + tile, s)
