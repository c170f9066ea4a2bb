"""Verify by the recurrence: SGLang's own arithmetic without its copies of the state, for policies without history.

Outputs are bit-identical to SGLang's kernel; instead of T states the launch writes the window's raw inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import PLAN_BASE, PLAN_COLUMNS, PLAN_ROW, PLAN_SLOT, round_to, wrap
from ..ring import Cursors, Ring
from ..sequential import STOCK_WARPS, advance, stock_gates, tile_columns, unit
from .triton import _checked_batch

# Columns of a program's state tile up to so many heads a launch (one request), and beyond.
FEW_HEADS, FEW_HEADS_BLOCK_V, BLOCK_V = 64, 4, 16


# T stays a runtime value, as in SGLang's kernel: an unrolled loop might be contracted differently.
@triton.jit(do_not_specialize=["T"])
def _verify_recurrent(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    ring_k,
    ring_v,
    ring_gates,
    plan,
    out,
    out_fp32,
    strides,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (V / BLOCK_V, HV, B)."""
    q_stride, k_stride, v_stride, a_stride, b_stride, out_stride, slot_stride = strides
    part = tl.program_id(0)
    hv = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    h = hv // (HV // H)
    line = plan + n * PLAN_COLUMNS
    slot = tl.load(line + PLAN_SLOT).to(tl.int64)
    row = tl.load(line + PLAN_ROW).to(tl.int64)
    base = tl.load(line + PLAN_BASE)
    ks = tl.arange(0, K)
    vs = part * BLOCK_V + tl.arange(0, BLOCK_V)

    q += n * T * q_stride + h * K + ks
    k += n * T * k_stride + h * K + ks
    v += n * T * v_stride + hv * V + vs
    a += n * T * a_stride + hv
    b += n * T * b_stride + hv
    out += n * T * out_stride + hv * V + vs
    if out_fp32 is not None:
        out_fp32 += n * T * (HV * V) + hv * V + vs
    ring_k += (row * H + h) * (R * K) + ks
    ring_v += (row * HV + hv) * (R * V) + vs
    ring_gates += (row * HV + hv) * (R * 2)

    if slot < 0:  # padding: nothing but zeros in its outputs
        for _ in range(0, T):
            zeros = tl.zeros([BLOCK_V], tl.float32)
            tl.store(out, round_to(zeros, out.dtype.element_ty))
            out += out_stride
            if out_fp32 is not None:
                tl.store(out_fp32, zeros)
                out_fp32 += HV * V
        return

    scale: tl.constexpr = K**-0.5
    A_log_hv = tl.load(A_log + hv).to(tl.float32)
    dt_bias_hv = tl.load(dt_bias + hv).to(tl.float32)
    s = tl.zeros([K, BLOCK_V], tl.float32)
    s += tl.load(state + slot * slot_stride + hv * (V * K) + vs[None, :] * K + ks[:, None])
    for t in range(0, T):
        raw_k = tl.load(k)
        raw_v = tl.load(v)
        g, beta = stock_gates(tl.load(a).to(tl.float32), tl.load(b).to(tl.float32), A_log_hv, dt_bias_hv)
        query = unit(tl.load(q).to(tl.float32)) * scale
        s = advance(s, unit(raw_k.to(tl.float32)), raw_v.to(tl.float32), g, beta)
        o = tl.sum(s * query[:, None], 0)
        tl.store(out, round_to(o, out.dtype.element_ty))
        if out_fp32 is not None:
            tl.store(out_fp32, o)
            out_fp32 += HV * V

        at = wrap(base + t, R)
        tl.store(ring_v + at * V, raw_v)
        if part == 0:
            tl.store(ring_gates + at * 2, g)
            tl.store(ring_gates + at * 2 + 1, beta)
            if hv % (HV // H) == 0:
                tl.store(ring_k + at * K, raw_k)
        q += q_stride
        k += k_stride
        v += v_stride
        a += a_stride
        b += b_stride
        out += out_stride


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring: Ring,
    cursors: Cursors,
    draft_tokens: int,
    out: torch.Tensor | None = None,
    out_fp32: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of B windows of T draft tokens by the recurrence; arguments and errors are those of `triton.py`.

    The rings of the plan's rows must be empty: what they hold is not looked at.
    """
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch = _checked_batch(q, k, v, a, b, A_log, dt_bias, state, ring, cursors, draft_tokens, out, out_fp32)
    if batch == 0:
        return out
    (heads, head_k_dim), (v_heads, head_v_dim) = q.shape[1:], v.shape[1:]
    narrow = FEW_HEADS_BLOCK_V if batch * v_heads <= FEW_HEADS else BLOCK_V
    block_v = tile_columns(narrow, head_k_dim, head_v_dim)
    _verify_recurrent[(head_v_dim // block_v, v_heads, batch)](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state,
        ring.k,
        ring.v,
        ring.gates,
        cursors.plan,
        out,
        out_fp32,
        tuple(tensor.stride(0) for tensor in (q, k, v, a, b, out, state)),
        draft_tokens,
        H=heads,
        HV=v_heads,
        K=head_k_dim,
        V=head_v_dim,
        R=ring.spec.records,
        BLOCK_V=block_v,
        num_warps=STOCK_WARPS,
    )
    return out
