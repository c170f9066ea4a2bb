"""Verify as one Triton launch a layer.

A program takes one value head of one batch row and a few tiles of V. With X = [k_1..k_T, q_1..q_T] the raw keys and
queries of the window as columns, everything that the window needs of the state is its projection on X,

    U = S_n X = e^{G_n} S_c X + sum_j e^{G_n - G_j} d'_j (k_j . X),

and the recurrence over the window can be run on the columns of U instead of on S: token t multiplies the columns of
tokens >= t by e^{g_t}, reads S k_t off column k_t, and adds d_t (k_t . X) to the columns that see it. No decay is ever
divided out and nothing is inverted.

q, k and the keys of the ring are multiplied as they are, which is exact in a tensor core with fp32 sums; norms, scale
and decays are applied to the sums in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..primitives import (
    INTERPRETED,
    NORM_EPSILON,
    PLAN_BASE,
    PLAN_COLUMNS,
    PLAN_COUNT,
    PLAN_FOLD,
    PLAN_ROW,
    PLAN_SLOT,
    dot_exact,
    dot_fp32,
    dot_raw,
    fold_tile,
    load_decays,
    load_deltas,
    load_keys,
    round_to,
    softplus,
    two_sum,
    wrap,
)
from ..ring import Cursors, Ring, RingSpec
from ..sequential import stock_gates

MAX_DRAFT_TOKENS = 16


class Config(NamedTuple):
    """How the work is cut; none of it changes a result.

    Attributes:
        block_v: rows of V a tile.
        tiles: tiles a program, which share one prologue.
        stages: depth of the software pipeline over the tiles.
        warps: warps a program.
        max_registers: registers a thread; left alone, ptxas takes up to 255 and too few programs fit.
    """

    block_v: int
    tiles: int
    stages: int
    warps: int
    max_registers: int | None


def choose_config(batch: int, spec: RingSpec, draft_tokens: int) -> Config:
    """The cut for one launch: timed on an H200 for K = V = 128, T = 4, W = 16; elsewhere the one that spills least
    (scripts/compile_offline.py)."""
    K, V = spec.head_k_dim, spec.head_v_dim
    if INTERPRETED:  # a program costs the interpreter ~50 ms, whatever its size
        return Config(V, tiles=1, stages=1, warps=1, max_registers=None)
    if spec.activation_dtype == torch.float32:  # no tensor cores: registers hold whole rows of the dots
        return Config(min(V, 16), tiles=1, stages=1, warps=4, max_registers=None)
    if draft_tokens > 8:
        block_v, warps = (min(V, 64), 4) if K <= 64 else (16, 2 if K == 128 else 4)
    else:
        block_v, warps = min(V, max(16, 4096 // K)), 2 if K * draft_tokens <= 1024 else 4
    tiles = V // block_v
    # Small grids: one tile a program, to use the whole device. Large ones: two share a prologue.
    if tiles > 1:
        tiles = 2 if batch * spec.num_v_heads * tiles >= 1024 else 1
    # Where spills are few, more programs a multiprocessor are worth them, once there are that many programs.
    small = draft_tokens <= 4 and spec.window <= 16 and K <= 128 and spec.activation_dtype == torch.bfloat16
    crowded = batch * spec.num_v_heads > 256
    return Config(block_v, tiles, stages=2, warps=warps, max_registers=168 if small and crowded else None)


@triton.jit
def _load_tokens(q, k, token, is_key, q_stride, k_stride, K: tl.constexpr):
    """[len(token), K] raw keys (where is_key) or queries; `token` is clamped, never masked: a masked token dimension
    of a dot operand has leaked stale shared memory upstream."""
    rows = tl.where(is_key[:, None], k + token[:, None] * k_stride, q + token[:, None] * q_stride)
    return tl.load(rows + tl.arange(0, K)[None, :])


@triton.jit
def _verify(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    ring_d,
    ring_k,
    ring_g,
    ring_v,
    ring_gates,
    plan,
    out,
    out_fp32,
    strides,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (V / (TILES BLOCK_V), HV, B). HISTORY and BLOCK_T are W and T, padded to a tile.

    ring_v and ring_gates are None if the policy does not record raw inputs.
    """
    q_stride, k_stride, v_stride, a_stride, b_stride, out_stride, slot_stride = strides
    COLUMNS: tl.constexpr = 2 * BLOCK_T
    WINDOW: tl.constexpr = COLUMNS if COLUMNS > 16 else 16  # rows of the window's score tile: an MMA has 16
    IEEE: tl.constexpr = q.dtype.element_ty == tl.float32
    PARTS: tl.constexpr = K // 128 if K > 128 else 1  # see `part`; more parts cost 40 % and more
    BF16: tl.constexpr = ring_d.dtype.element_ty == tl.bfloat16  # factors: rounded, of normalised keys

    part = tl.program_id(0)
    hv = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    h = hv // (HV // H)
    line = plan + n * PLAN_COLUMNS
    slot = tl.load(line + PLAN_SLOT).to(tl.int64)
    row = tl.load(line + PLAN_ROW).to(tl.int64)
    base = tl.load(line + PLAN_BASE)
    count = tl.load(line + PLAN_COUNT)
    fold = tl.load(line + PLAN_FOLD)

    # To the first token of this batch row, this head, and the head's checkpoint and ring.
    q += n * T * q_stride + h * K
    k += n * T * k_stride + h * K
    v += n * T * v_stride + hv * V
    a += n * T * a_stride + hv
    b += n * T * b_stride + hv
    out += n * T * out_stride + hv * V
    if out_fp32 is not None:
        out_fp32 += n * T * (HV * V) + hv * V
    state += slot * slot_stride + hv * (V * K)
    ring_d += (row * HV + hv) * (R * V)
    ring_k += (row * H + h) * (R * K)
    ring_g += (row * HV + hv) * (R * 2)
    if ring_gates is not None:
        ring_v += (row * HV + hv) * (R * V)
        ring_gates += (row * HV + hv) * (R * 2)

    # Columns of X: the keys of the window in the first half, its queries in the second.
    c = tl.arange(0, COLUMNS)
    is_key = c < BLOCK_T
    column_token = c % BLOCK_T
    real = column_token < T
    token = tl.minimum(column_token, T - 1)

    if slot < 0:  # padding: nothing but zeros in its outputs
        for i in tl.static_range(TILES):
            vs = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            zeros = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
            mask = (real & ~is_key)[None, :]
            tl.store(out + token[None, :] * out_stride + vs[:, None], round_to(zeros, out.dtype.element_ty), mask=mask)
            if out_fp32 is not None:
                tl.store(out_fp32 + token[None, :] * (HV * V) + vs[:, None], zeros, mask=mask)
        return

    # Window: X, and its scores k_t . x.
    x = _load_tokens(q, k, token, is_key, q_stride, k_stride, K)
    x_t = tl.trans(x)
    r = tl.arange(0, WINDOW)
    window = _load_tokens(q, k, tl.minimum(r % BLOCK_T, T - 1), r % COLUMNS < BLOCK_T, q_stride, k_stride, K)
    scores = dot_raw(window, x_t)
    squares = tl.where(r[:, None] == c[None, :], scores, 0.0)  # the diagonal: |x|^2
    column_scale = tl.rsqrt(tl.sum(squares, axis=0) + NORM_EPSILON)
    row_scale = tl.rsqrt(tl.sum(squares, axis=1) + NORM_EPSILON)
    q_scale: tl.constexpr = K**-0.5
    x_scale = column_scale * tl.where(is_key, 1.0, q_scale)
    scores = scores * row_scale[:, None] * x_scale[None, :]

    # History: its decays, and its scores with X, weighted.
    j = tl.arange(0, HISTORY)
    live = j < count
    at = wrap(base + j, R)
    total_high, total_low, weight = load_decays(ring_g, base, count, j, R)
    decay = tl.exp(total_high) * (1.0 + total_low)
    keys = load_keys(ring_k, at, live, K).to(x.dtype)
    history_scores = dot_raw(keys, x_t) * weight[:, None]

    # Gates, one scalar a token; and for each token the columns that see it: later keys, its own and later queries.
    rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    bias = tl.load(dt_bias + hv).to(tl.float32)
    g, keep, beta, sees = (), (), (), ()
    for t in tl.static_range(T):
        g_t = -rate * softplus(tl.load(a + t * a_stride).to(tl.float32) + bias)
        beta_t = 1.0 / (1.0 + tl.exp(-tl.load(b + t * b_stride).to(tl.float32)))
        score = tl.sum(tl.where(r[:, None] == t, scores, 0.0), axis=0)
        g += (g_t,)
        keep += (tl.exp(g_t),)
        beta += (beta_t,)
        sees += (tl.where((column_token > t) | ((column_token == t) & (c >= BLOCK_T)), score, 0.0),)

    # New records: keys and log-decays, each by one program.
    first = base + count
    new_at = wrap(first + token, R)
    if part == 0:
        if hv % (HV // H) == 0:
            new_keys = ring_k + new_at[:, None] * K + tl.arange(0, K)[None, :]
            new = round_to(x.to(tl.float32) * column_scale[:, None], tl.bfloat16) if BF16 else x
            tl.store(new_keys, new, mask=(is_key & real)[:, None])
        high = tl.where(fold != 0, 0.0, total_high)
        low = tl.where(fold != 0, 0.0, total_low)
        for t in tl.static_range(T):
            high, error = two_sum(high, g[t])
            low += error
            new_g = ring_g + 2 * wrap(first + t, R)
            tl.store(new_g, high)
            tl.store(new_g + 1, low)
        if ring_gates is not None:
            for t in tl.static_range(T):
                a_t = tl.load(a + t * a_stride).to(tl.float32)
                b_t = tl.load(b + t * b_stride).to(tl.float32)
                g_t, beta_t = stock_gates(a_t, b_t, tl.load(A_log + hv).to(tl.float32), bias)
                new_gates = ring_gates + 2 * wrap(first + t, R)
                tl.store(new_gates, g_t)
                tl.store(new_gates + 1, beta_t)

    for i in tl.range(0, TILES, num_stages=STAGES):
        vs = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
        s = tl.load(state + vs[:, None] * K + tl.arange(0, K)[None, :])
        d = load_deltas(ring_d, at, live, vs, V)
        u = (dot_exact(s, x_t, PARTS) * decay + dot_fp32(d, history_scores, IEEE)) * x_scale[None, :]
        new_d = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
        for t in tl.static_range(T):
            u *= tl.where(column_token >= t, keep[t], 1.0)[None, :]
            s_k = tl.sum(tl.where((c == t)[None, :], u, 0.0), axis=1)
            d_t = beta[t] * (tl.load(v + t * v_stride + vs).to(tl.float32) - s_k)
            u += d_t[:, None] * sees[t][None, :]
            new_d = tl.where((c == t)[None, :], d_t[:, None], new_d)
        is_out = (real & ~is_key)[None, :]
        tl.store(out + token[None, :] * out_stride + vs[:, None], round_to(u, out.dtype.element_ty), mask=is_out)
        if out_fp32 is not None:
            tl.store(out_fp32 + token[None, :] * (HV * V) + vs[:, None], u, mask=is_out)
        new_d = round_to(new_d, tl.bfloat16) if BF16 else new_d * column_scale[None, :]
        tl.store(ring_d + new_at[None, :] * V + vs[:, None], new_d, mask=(is_key & real)[None, :])

    # A loop of its own, which loads its tiles again: folds are rare and must not cost the loop above registers.
    if fold != 0:
        for i in tl.range(0, TILES, num_stages=1):
            vs = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            fold_tile(state, state, ring_d, keys, decay, weight, at, live, vs, V, K)

    # The values too, which the loop above has had in other registers.
    if ring_v is not None:
        for i in tl.range(0, TILES, num_stages=1):
            vs = (part * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            values = tl.load(v + token[None, :] * v_stride + vs[:, None])
            tl.store(ring_v + new_at[None, :] * V + vs[:, None], values, mask=(is_key & real)[None, :])


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
    """Outputs of B windows of T draft tokens, whose records go to the ring; folds the rows that the plan says fold.

    `plan_window` must have written the step's plan. The cursors are not moved: `commit` does that. The policy must
    record rank-1 factors.

    Args:
        q, k: [B T, H, K], raw (not normalised); any token stride, heads packed.
        v: [B T, HV, V], likewise, of the same dtype: bf16, fp16 or fp32. K and V are powers of two from 16 to 256.
        a, b: [B T, HV], any float dtype and token stride.
        A_log, dt_bias: [HV], any float dtype.
        state: fp32 [slots, HV, V, K], the layer's checkpoints; any slot stride.
        ring: the layer's ring, `Ring.layer(i)`.
        draft_tokens: T, 1..T_max and at most 16. It may change from step to step.
        out: activation dtype [B T, HV, V], any token stride; allocated if None. Padding rows are set to zero.
        out_fp32: fp32 [B T, HV, V], contiguous: the outputs before they are rounded. For tests.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch = _checked_batch(q, k, v, a, b, A_log, dt_bias, state, ring, cursors, draft_tokens, out, out_fp32)
    if batch == 0:
        return out
    heads, head_k_dim = q.shape[1:]
    v_heads, head_v_dim = v.shape[1:]
    config = choose_config(batch, ring.spec, draft_tokens)
    grid = (head_v_dim // (config.block_v * config.tiles), v_heads, batch)
    _verify[grid](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state,
        ring.d,
        ring.k,
        ring.g,
        ring.v,
        ring.gates,
        cursors.plan,
        out,
        out_fp32,
        tuple(tensor.stride(0) for tensor in (q, k, v, a, b, out, state)),
        T=draft_tokens,
        H=heads,
        HV=v_heads,
        K=head_k_dim,
        V=head_v_dim,
        R=ring.spec.records,
        HISTORY=max(16, triton.next_power_of_2(ring.spec.window)),
        BLOCK_T=max(4, triton.next_power_of_2(draft_tokens)),
        BLOCK_V=config.block_v,
        TILES=config.tiles,
        STAGES=config.stages,
        num_warps=config.warps,
        maxnreg=config.max_registers,
    )
    return out


def _checked_batch(q, k, v, a, b, A_log, dt_bias, state, ring, cursors, draft_tokens, out, out_fp32) -> int:
    """B, after checking what the kernel relies on; runs once a layer and step, so one pass over plain attributes."""
    spec = ring.spec
    heads, v_heads, k_dim, v_dim = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
    tokens = q.shape[0]
    if any(size & (size - 1) or not 16 <= size <= 256 for size in (k_dim, v_dim)):
        raise ValueError(f"verify takes K and V that are powers of two from 16 to 256, found K={k_dim}, V={v_dim}")
    if not 1 <= draft_tokens <= min(spec.max_draft_tokens, MAX_DRAFT_TOKENS) or tokens % draft_tokens:
        raise ValueError(
            f"verify got draft_tokens={draft_tokens} for {tokens} tokens: it must divide them and be at most "
            f"min(T_max={spec.max_draft_tokens}, {MAX_DRAFT_TOKENS})"
        )
    if tokens // draft_tokens > cursors.plan.shape[0]:
        raise ValueError(
            f"verify got {tokens // draft_tokens} batch rows, but the plan has {cursors.plan.shape[0]} lines"
        )
    if ring.k.dim() != 4:
        raise ValueError("verify takes one layer's ring, found that of all layers: pass ring.layer(i)")
    for name, tensor, shape, inner, dtype in (
        ("q", q, (tokens, heads, k_dim), (k_dim, 1), spec.activation_dtype),
        ("k", k, (tokens, heads, k_dim), (k_dim, 1), spec.activation_dtype),
        ("v", v, (tokens, v_heads, v_dim), (v_dim, 1), spec.activation_dtype),
        ("a", a, (tokens, v_heads), (1,), None),
        ("b", b, (tokens, v_heads), (1,), None),
        ("A_log", A_log, (v_heads,), (), None),
        ("dt_bias", dt_bias, (v_heads,), (), None),
        ("state", state, (state.shape[0], v_heads, v_dim, k_dim), (v_dim * k_dim, k_dim, 1), torch.float32),
        ("out", out, (tokens, v_heads, v_dim), (v_dim, 1), spec.activation_dtype),
        ("out_fp32", out_fp32, (tokens, v_heads, v_dim), (v_dim, 1), torch.float32),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"verify takes {name} of shape {shape}, found {tuple(tensor.shape)}")
        if tensor.stride()[1:] != inner:
            raise ValueError(
                f"verify takes {name} with strides {inner} after the first dimension, found {tensor.stride()}: "
                "only the first dimension may be strided"
            )
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"verify takes {name} as {dtype}, found {tensor.dtype}")
    if out_fp32 is not None and not out_fp32.is_contiguous():
        raise ValueError(f"verify takes a contiguous out_fp32, found strides {out_fp32.stride()}")
    return tokens // draft_tokens
