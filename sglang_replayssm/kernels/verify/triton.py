"""Verify as one Triton launch a layer.

A program takes one value head of one batch row and a few tiles of V. With X = [k_1..k_T, q_1..q_T] the raw keys and
queries of the window as columns, everything that the window needs of the state is its projection on X,

    U = S_n X = e^{G_n} S_c X + sum_j e^{G_n - G_j} d'_j (k_j . X),

and the recurrence over the window can be run on the columns of U instead of on S, once column t is scaled by
e^{Γ_t} / |x_t|: token t reads S k_t off column k_t and adds d'_t e^{Γ_s - Γ_t} (k_t . x_s) / |x_s| to the columns s
that see it. No decay is ever divided out and nothing is inverted.

q, k and the keys of the ring are multiplied as they are, which is exact in a tensor core with fp32 sums. What the
recurrence does to K x V numbers, whose roundings average out, is done here to a few scalars, whose roundings do not. So
scalars (scores, norms, decays, beta) are pairs high + low until they meet a row of V.
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
    add_apart,
    dot_exact,
    dot_pair,
    dot_raw,
    exp_pair,
    fold_tile,
    inverse_root_pair,
    load_decays,
    load_deltas,
    load_keys,
    round_to,
    sigmoid_pair,
    softplus,
    times,
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
def _load_tokens(q, k, token, is_key, q_stride, k_stride, K: tl.constexpr, CHUNK: tl.constexpr):
    """Raw keys (where is_key) or queries as a tuple of [len(token), CHUNK]; `token` is clamped, never masked: a masked
    token dimension of a dot operand has leaked stale shared memory upstream."""
    rows = tl.where(is_key[:, None], k + token[:, None] * k_stride, q + token[:, None] * q_stride)
    chunks = ()
    for i in tl.static_range(K // CHUNK):
        chunks += (tl.load(rows + (i * CHUNK + tl.arange(0, CHUNK))[None, :]),)
    return chunks


@triton.jit
def _scores(x, y):
    """x y^T of tuples of [M, CHUNK] and [N, CHUNK], whose chunks make up K, as a pair, high + low."""
    high = dot_raw(x[0], tl.trans(y[0]))
    low = tl.zeros_like(high)
    for i in tl.static_range(1, len(x)):
        high, error = two_sum(high, dot_raw(x[i], tl.trans(y[i])))
        low += error
    return high, low


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
    BF16: tl.constexpr = ring_d.dtype.element_ty == tl.bfloat16  # factors: rounded, of normalised keys
    CHUNK: tl.constexpr = K if IEEE or K < 32 else 32  # of K that a tensor core sums, see `add_apart`
    CHUNKS: tl.constexpr = K // CHUNK

    block = tl.program_id(0)
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
            vs = (block * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            zeros = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
            mask = (real & ~is_key)[None, :]
            tl.store(out + token[None, :] * out_stride + vs[:, None], round_to(zeros, out.dtype.element_ty), mask=mask)
            if out_fp32 is not None:
                tl.store(out_fp32 + token[None, :] * (HV * V) + vs[:, None], zeros, mask=mask)
        return

    # Window: X, and its scores k_t . x.
    x = _load_tokens(q, k, token, is_key, q_stride, k_stride, K, CHUNK)
    r = tl.arange(0, WINDOW)
    row_token = tl.minimum(r % BLOCK_T, T - 1)
    window = _load_tokens(q, k, row_token, r % COLUMNS < BLOCK_T, q_stride, k_stride, K, CHUNK)
    j = tl.arange(0, HISTORY)
    live = j < count
    at = wrap(base + j, R)
    score_high, score_low = _scores(window, x)
    keys = ()
    for i in tl.static_range(CHUNKS):
        columns = i * CHUNK + tl.arange(0, CHUNK)
        keys += (tl.load(ring_k + at[:, None] * K + columns[None, :], mask=live[:, None], other=0.0).to(x[0].dtype),)

    # Gates: log-decay and beta a column, and the log-decays summed up to a column's or a row's token.
    rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    bias = tl.load(dt_bias + hv).to(tl.float32)
    beta_high, beta_low = sigmoid_pair(tl.load(b + token * b_stride).to(tl.float32))
    column_high = tl.zeros([COLUMNS], tl.float32)
    column_low = column_high
    row_high = tl.zeros([WINDOW], tl.float32)
    row_low = row_high
    for t in tl.static_range(T):
        g = -rate * softplus(tl.load(a + t * a_stride).to(tl.float32) + bias)
        column_high, error = two_sum(column_high, tl.where(column_token >= t, g, 0.0))
        column_low += error
        row_high, error = two_sum(row_high, tl.where(r >= t, g, 0.0))
        row_low += error

    # Scale of a column, strength of its d', and what a token (row) adds to the columns that see it.
    diagonal = r[:, None] == c[None, :]
    squares, rest = two_sum(tl.sum(tl.where(diagonal, score_high, 0.0), axis=0), NORM_EPSILON)
    rest += tl.sum(tl.where(diagonal, score_low, 0.0), axis=0)
    for_query = tl.where(is_key, 1.0, K * 1.0)  # K^-1/2
    norm_high, norm_low = inverse_root_pair(squares * for_query, rest * for_query)
    keep_high, keep_low = exp_pair(column_high, column_low)
    scale_high, scale_low = times(keep_high, keep_low, norm_high, norm_low)
    scale = scale_high + scale_low
    strength_high, strength_low = times(beta_high, beta_low, norm_high, norm_low)
    strength = strength_high + strength_low
    later = (column_token[None, :] > r[:, None]) | ((column_token[None, :] == r[:, None]) & ~is_key[None, :])
    between, rest = two_sum(column_high[None, :], -row_high[:, None])
    rest += column_low[None, :] - row_low[:, None]
    keep_high, keep_low = exp_pair(tl.where(later, between, 0.0), tl.where(later, rest, 0.0))
    score_high, score_low = times(score_high, score_low, keep_high, keep_low)
    score_high, score_low = times(score_high, score_low, norm_high[None, :], norm_low[None, :])
    score = tl.where(later, score_high + score_low, 0.0)
    adds = ()
    for t in tl.static_range(T):
        adds += (tl.sum(tl.where(r[:, None] == t, score, 0.0), axis=0),)

    # History: its decays, and its scores with X, weighted.
    total_high, total_low, weight_high, weight_low = load_decays(ring_g, base, count, j, R)
    weight = weight_high + weight_low
    decay, rest = exp_pair(total_high, total_low)
    decay += rest
    past_high, past_low = _scores(keys, x)
    past_high, past_low = times(past_high, past_low, weight_high[:, None], weight_low[:, None])

    # New records: keys and log-decays, each by one program.
    first = base + count
    new_at = wrap(first + token, R)
    is_record = is_key & real
    if block == 0:
        if hv % (HV // H) == 0:
            for i in tl.static_range(CHUNKS):
                new_keys = ring_k + new_at[:, None] * K + (i * CHUNK + tl.arange(0, CHUNK))[None, :]
                new = round_to(x[i].to(tl.float32) * norm_high[:, None], tl.bfloat16) if BF16 else x[i]
                tl.store(new_keys, new, mask=is_record[:, None])
        new_high, new_low = two_sum(tl.where(fold != 0, 0.0, total_high), column_high)
        new_low += tl.where(fold != 0, 0.0, total_low) + column_low
        tl.store(ring_g + 2 * new_at, new_high, mask=is_record)
        tl.store(ring_g + 2 * new_at + 1, new_low, mask=is_record)
        if ring_gates is not None:
            for t in tl.static_range(T):
                a_t = tl.load(a + t * a_stride).to(tl.float32)
                b_t = tl.load(b + t * b_stride).to(tl.float32)
                g_t, beta_t = stock_gates(a_t, b_t, tl.load(A_log + hv).to(tl.float32), bias)
                new_gates = ring_gates + 2 * wrap(first + t, R)
                tl.store(new_gates, g_t)
                tl.store(new_gates + 1, beta_t)

    for i in tl.range(0, TILES, num_stages=STAGES):
        vs = (block * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
        s = ()
        for i_k in tl.static_range(CHUNKS):
            s += (tl.load(state + vs[:, None] * K + (i_k * CHUNK + tl.arange(0, CHUNK))[None, :]),)
        d = load_deltas(ring_d, at, live, vs, V)
        projected = dot_exact(s[0], tl.trans(x[0]))
        for i_k in tl.static_range(1, CHUNKS):
            projected = add_apart(projected, dot_exact(s[i_k], tl.trans(x[i_k])))
        u = (projected * decay + dot_pair(d, past_high, past_low, IEEE)) * scale[None, :]
        new_d = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
        for t in tl.static_range(T):
            is_t = (c == t)[None, :]
            s_k = tl.sum(tl.where(is_t, u, 0.0), axis=1)
            d_t = tl.load(v + t * v_stride + vs).to(tl.float32) - s_k
            d_t *= tl.sum(tl.where(c == t, strength, 0.0), axis=0)
            u += d_t[:, None] * adds[t][None, :]
            new_d = tl.where(is_t, d_t[:, None], new_d)
        is_out = (real & ~is_key)[None, :]
        tl.store(out + token[None, :] * out_stride + vs[:, None], round_to(u, out.dtype.element_ty), mask=is_out)
        if out_fp32 is not None:
            tl.store(out_fp32 + token[None, :] * (HV * V) + vs[:, None], u, mask=is_out)
        new_d = round_to(new_d / norm_high[None, :], tl.bfloat16) if BF16 else new_d
        tl.store(ring_d + new_at[None, :] * V + vs[:, None], new_d, mask=is_record[None, :])

    # A loop of its own, which loads its tiles again: folds are rare and must not cost the loop above registers.
    if fold != 0:
        all_keys = load_keys(ring_k, at, live, K).to(q.dtype.element_ty)
        for i in tl.range(0, TILES, num_stages=1):
            vs = (block * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
            fold_tile(state, ring_d, all_keys, decay, weight, at, live, vs, V, K)

    # The values too, which the loop above has had in other registers.
    if ring_v is not None:
        for i in tl.range(0, TILES, num_stages=1):
            vs = (block * TILES + i) * BLOCK_V + tl.arange(0, BLOCK_V)
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
