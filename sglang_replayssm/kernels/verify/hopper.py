"""Verify on Hopper (sm_90), in Gluon: one launch a layer, bf16 activations, K = V = 128, up to 8 draft tokens, W <= 32.

The contract and the arithmetic are those of `triton.py`: with X = [k_1 .. k_P, q_1 .. q_P], the raw keys and queries of
the window as columns (T tokens padded to P = 4 or 8), everything that the window needs of the state is

    U = S_n X = e^{G_n} (S_c X) + sum_j d'_j e^{G_n - G_j} (k_j . X),

and the gated delta rule then runs on the columns of U. What differs is how the work meets the machine:

* A program takes BV rows of one value head. The copy engine (TMA) starts to fetch its rows of S as soon as the plan is
  there; all that does not need S (history, gates, norms, keys and decays of the new records) runs in its shadow.
* S goes from shared memory to the tensor cores without a single move: a lane's 16-byte loads *are* the operand fragment
  and the accumulator fragment of the fold, once the columns of a chunk of K are renamed (see `_fragment_order`). K is
  summed over, so any order will do as long as both operands use it.
* S is split without error into three bf16 parts, and the products with raw bf16 keys and queries are exact. The tensor
  cores truncate when they add, so they add few products, and sums of these are rounded (see `_products`).
* What multiplies whole rows of V is a pair of floats until it is rounded, once: nothing averages its errors out. Warps
  share the scores with the history and hand them over as operands; the window's own scores become coefficients one a
  lane (see `_coefficients`). Two barriers pass all of it on.
* A fold updates S where it lies in shared memory, and the copy engine writes it back.

All layouts assume the fragments of mma.sync m16n8k16 and m16n8k8 (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane
(g, c) = (lane / 4, lane % 4) of a warp holds rows g and g + 8 and columns 2c and 2c + 1 of an accumulator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import (
    NORM_EPSILON,
    PLAN_BASE,
    PLAN_COLUMNS,
    PLAN_COUNT,
    PLAN_FOLD,
    PLAN_ROW,
    PLAN_SLOT,
    exp_pair,
    inverse_root_pair,
    log_decay,
    sigmoid_pair,
    split_fp32,
    split_pair,
    times,
    two_sum,
    wrap,
)
from ..ring import Cursors, Ring, RingSpec
from ..sequential import stock_gates
from .triton import _checked_batch

MAX_DRAFT_TOKENS = 8
MAX_WINDOW = 32

DIM = gl.constexpr(128)  # K = V
CHUNK = gl.constexpr(32)  # columns of S at a time in registers: at more the compiler spills others
CHUNKS = gl.constexpr(DIM.value // CHUNK.value)


# ---------------------------------------------------------------------------------------------------- configuration


class Config(NamedTuple):
    """How the work is cut; none of it changes a result.

    Attributes:
        block_v: rows of V a program: 16, 32 or 64 a warp.
        warps: warps a program.
        max_registers: registers a thread. Left alone, ptxas takes up to 255 and too few programs fit.
        fold_early: a folding row updates S before it projects it (the write-back overlaps the rest; best for latency),
            or after its outputs (fewer live registers).
        overlap: start before the previous kernel has ended, if the caller allows it. Pays where the device has room for
            the programs of both.
    """

    block_v: int
    warps: int
    max_registers: int
    fold_early: bool
    overlap: bool = False


# (P, padded W): (largest B HV, cut) in ascending order; the last is for everything beyond. None spills a register.
# From scripts/tune_verify.py on an H200; registers then raised where spills began.
CONFIGS = {
    (4, 16): (
        (256, Config(32, 2, 128, True, overlap=True)),
        (1024, Config(32, 2, 128, True)),
        (None, Config(64, 2, 168, True)),
    ),
    (8, 16): (
        (128, Config(32, 2, 168, True, overlap=True)),
        (512, Config(32, 2, 168, True)),
        (None, Config(64, 2, 224, True)),
    ),
    (4, 32): ((96, Config(32, 2, 168, True, overlap=True)), (None, Config(64, 2, 168, True))),
    (8, 32): (
        (96, Config(32, 2, 200, True, overlap=True)),
        (512, Config(32, 2, 200, True)),
        (None, Config(64, 2, 240, True)),
    ),
}


def choose_config(value_heads: int, draft_tokens: int, window: int) -> Config:
    """The cut for one launch over `value_heads` = B HV heads."""
    table = CONFIGS[_padded_tokens(draft_tokens), _padded_window(window)]
    return next(config for most, config in table if most is None or value_heads <= most)


def supports(spec: RingSpec, draft_tokens: int, device_capability: tuple[int, int]) -> bool:
    """Whether `verify_hopper` can serve this ring and draft length on a device of this compute capability."""
    return (
        tuple(device_capability) == (9, 0)
        and spec.policy.factors == "float32"
        and spec.activation_dtype == torch.bfloat16
        and spec.head_k_dim == spec.head_v_dim == DIM.value
        and spec.window <= MAX_WINDOW
        and 1 <= draft_tokens <= min(MAX_DRAFT_TOKENS, spec.max_draft_tokens)
    )


def _padded_tokens(draft_tokens: int) -> int:
    """P: X has 2 P columns, and an MMA has 8 or 16 of them."""
    return 4 if draft_tokens <= 4 else 8


def _padded_window(window: int) -> int:
    """W, padded to what the history's MMAs hold."""
    return 16 if window <= 16 else 32


# ----------------------------------------------------------------------------------------------------------- layouts


@gluon.constexpr_function
def _doublings(first, below, axis=0, rank=2):
    """Basis vectors first, 2 first, 4 first .. < below along one axis."""
    bases = []
    while first < below:
        bases.append([first if i == axis else 0 for i in range(rank)])
        first *= 2
    return bases


@gluon.constexpr_function
def _nothing(count, rank=2):
    """Basis vectors of lanes or warps that hold copies."""
    return [[0] * rank for _ in range(count)]


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _state_layout(warps):
    """[16 warps, 32] of S as an MMA operand: lane (g, c) has columns 8c .. 8c+7 of rows g and g + 8.

    A quarter of a warp reads two neighbouring rows at every other 16-byte column; the swizzle moves odd rows to the
    other columns, so that no two lanes meet in a bank.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=_doublings(16, 16 * warps),
        block_bases=[],
        shape=[16 * warps, 32],
    )


@gluon.constexpr_function
def _keys_layout(rows, warps, shares):
    """[rows, K] of keys or queries: lane (g, c) has columns 8c .. 8c+7 of every 32, of rows g + 8i.

    i is dealt out to `shares` warps (1: all rows are in each warp).
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], *_doublings(8 * shares, rows)],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[*_doublings(8, 8 * shares), *_nothing(_log2(warps // shares))],
        block_bases=[],
        shape=[rows, 128],
    )


@gluon.constexpr_function
def _rows_layout(rows, columns, warps):
    """[rows, columns] with a row of V a lane and its columns in registers; a warp has the rows that its MMAs have.

    Of 16 rows a warp, two lanes hold each; of 64 a warp, each lane holds two.
    """
    tiles = rows // (16 * warps)
    fifth_lane = [[16 * warps, 0]] if tiles > 1 else _nothing(1)
    return gl.DistributedLinearLayout(
        reg_bases=[*_doublings(1, columns, axis=1), *_doublings(32 * warps, rows)],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], *fifth_lane],
        warp_bases=_doublings(16, 16 * warps),
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.constexpr_function
def _scores_layout(rows, columns, warps, shares):
    """[rows, columns] of an accumulator: rows is 16, or 8 of which the other half is dropped.

    Tiles of 8 columns are dealt out to `shares` warps, as in `_keys_layout`.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *_doublings(8, rows), *_doublings(8 * shares, columns, axis=1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[*_doublings(8, 8 * shares, axis=1), *_nothing(_log2(warps // shares))],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.constexpr_function
def _pairs_layout(rows, columns, warps, shares):
    """[rows, columns], a column a lane, with as many lanes a column as there are; `shares` warps share the rows."""
    lanes = 32 // columns
    return gl.DistributedLinearLayout(
        reg_bases=_doublings(lanes * shares, rows),
        lane_bases=[*_doublings(1, columns, axis=1), *_doublings(1, lanes)],
        warp_bases=[*_doublings(lanes, lanes * shares), *_nothing(_log2(warps // shares))],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.constexpr_function
def _uniform_layout(columns, warps):
    """[1, columns], all of it in every lane."""
    return gl.DistributedLinearLayout(
        reg_bases=_doublings(1, columns, axis=1),
        lane_bases=_nothing(5),
        warp_bases=_nothing(_log2(warps)),
        block_bases=[],
        shape=[1, columns],
    )


@gluon.constexpr_function
def _tile_memory():
    """Shared memory of a tile of S as the copy engine writes it: 128-byte lines of 32 columns, swizzled."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.jit
def _fragment_order(x):
    """[M, N] with its columns renamed so that lane c's 8 neighbours are what an MMA wants from lane c.

    Of every 32 memory columns, numbered c (2 bits), h, e, p (1 bit each), column (c, h, e, p) becomes (h, e, c, p):
    lane c then has columns 2c, 2c + 1, 2c + 8 and 2c + 9 of the two MMAs h of depth 16, and columns 2c and 2c + 1 of
    the four accumulators (h, e). No data moves.
    """
    return x.reshape([x.shape[0], x.shape[1] // 32, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape(x.shape)


@gluon.jit
def _memory_order(x):
    """The inverse of `_fragment_order`."""
    return x.reshape([x.shape[0], x.shape[1] // 32, 2, 2, 4, 2]).permute([0, 1, 4, 2, 3, 5]).reshape(x.shape)


# -------------------------------------------------------------------------------------------------------- arithmetic


@gluon.jit
def _products(x, y, MMA: gl.constexpr):
    """x y of bf16 operand fragments as a tuple of fp32 products over 32 of K each (or all 16), whose sum it is.

    A tensor core truncates when it adds to an accumulator. In a sum of many terms of one sign, such as |k|^2 or S k
    where S has seen k, these errors all point the same way: 128 terms in one accumulator are off by up to 5 times what
    fp32 additions are. The first 16 exact products mostly fit fp32 without any error.
    """
    BLOCK: gl.constexpr = 32 if x.shape[1] >= 32 else 16
    CHUNKS: gl.constexpr = x.shape[1] // BLOCK
    x = _chunks(x, CHUNKS)
    y = _chunks(y.permute([1, 0]), CHUNKS)
    zero = gl.zeros([x[0].shape[0], y[0].shape[0]], gl.float32, MMA)
    products = ()
    for i in gl.static_range(CHUNKS):
        x_i = gl.convert_layout(x[i], gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        y_i = gl.convert_layout(y[i].permute([1, 0]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
        products += (mma_v2(x_i, y_i, zero),)
    return products


@gluon.jit
def _scores(x, y, SCORES: gl.constexpr, MMA: gl.constexpr):
    """x y of bf16 operand fragments as a pair, high + low, in layout SCORES; its rows are the first of x."""
    ROWS: gl.constexpr = SCORES.shape[0]
    products = _products(x, y, MMA)
    sums = ()
    for i in gl.static_range(len(products)):
        product = products[i]
        if ROWS == 8:
            product, _unused = gl.split(product.reshape([2, 8, y.shape[1]]).permute([1, 2, 0]))
        sums += (gl.convert_layout(product, SCORES, assert_trivial=True),)
    high = sums[0]
    low = gl.zeros_like(high)
    for i in gl.static_range(1, len(sums)):
        high, error = two_sum(high, sums[i])
        low += error
    return high, low


@gluon.jit
def _project(leading, small, s, x, MMA: gl.constexpr):
    """leading + small + s x, summed as in `_products`; s is fp32 [rows, 32] in fragment order, x bf16 [32, columns]."""
    s = gl.convert_layout(s, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    x = gl.convert_layout(x.permute([1, 0]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    high, middle, low = split_fp32(s)
    small = mma_v2(middle, x, mma_v2(low, x, small))
    return leading + mma_v2(high, x, gl.zeros_like(leading)), small


@gluon.jit
def _product_fp32(x, y, MMA: gl.constexpr):
    """x y of fp32 operand fragments, given as their bf16 parts; what is left out is below 2^-25 of the largest term."""
    x_first, x_second, x_third = x
    y_first, y_second, y_third = y
    zero = gl.zeros([x_first.shape[0], y_first.shape[1]], gl.float32, MMA)
    total = mma_v2(x_second, y_second, mma_v2(x_first, y_third, mma_v2(x_third, y_first, zero)))
    total = mma_v2(x_first, y_second, mma_v2(x_second, y_first, total))
    products = _products(x_first, y_first, MMA)
    for i in gl.static_range(len(products)):
        total += products[i]
    return total


# ----------------------------------------------------------------------------------------------- tuples of registers


@gluon.jit
def _columns(x, M: gl.constexpr, N: gl.constexpr):
    """[M, N] with a row's columns in one lane as a tuple of N [M]."""
    if N == 1:
        return (x.reshape([M]),)
    else:
        first, second = gl.split(x.reshape([M, 2, N // 2]).permute([0, 2, 1]))
        return _columns(first, M, N // 2) + _columns(second, M, N // 2)


@gluon.jit
def _chunks(x, N: gl.constexpr):
    """[rows, columns] as a tuple of N [rows, columns / N]."""
    if N == 1:
        return (x,)
    else:
        first, second = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))
        return _chunks(first, N // 2) + _chunks(second, N // 2)


@gluon.jit
def _scalars(x, N: gl.constexpr):
    """[1, N], the same in all lanes, as a tuple of N scalars."""
    return [value.sum(0) for value in _columns(x, 1, N)]


@gluon.jit
def _stack(tiles, ROWS: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr):
    """A tuple of [ROWS, N] one below the other."""
    if TILES == 1:
        return tiles[0]
    else:
        HALF: gl.constexpr = TILES // 2
        upper = _stack(tiles[:HALF], ROWS, N, HALF)
        lower = _stack(tiles[HALF:], ROWS, N, HALF)
        return gl.join(upper, lower).permute([2, 0, 1]).reshape([TILES * ROWS, N])


# ------------------------------------------------------------------------------------------------------------ stages


@gluon.jit
def _fetch_state(state, first_row, wanted, tiles, arrived, ROWS: gl.constexpr, TILES: gl.constexpr):
    """Start the copies of the rows of S from `first_row` on to the tiles, each behind a barrier of its own."""
    for i in gl.static_range(TILES):
        mbarrier.expect(arrived[i], ROWS * DIM * 4, pred=wanted)
    for i in gl.static_range(TILES):
        tma.async_copy_global_to_shared(state, [first_row + i * ROWS, 0], arrived[i], tiles[i], pred=wanted)


@gluon.jit
def _schedule_boundary(barrier):
    """A wait that is over at once, since `barrier` is never used, but that the compiler schedules nothing across.

    Left alone it waits for one load before it issues the next, and starts the copy engine last of all.
    """
    mbarrier.wait(barrier, 1)


@gluon.jit
def _load_window(
    q,
    k,
    v,
    a,
    b,
    rows,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    T: gl.constexpr,
    P: gl.constexpr,
    X: gl.constexpr,
    COLUMN: gl.constexpr,
):
    """Window of one head: raw [k_1 .. k_P, q_1 .. q_P] in layout X, a tuple of T [v], and a and b by column.

    Tokens beyond T repeat the last one (a masked dimension of an MMA operand is asking for trouble); nobody reads them.
    """
    column = gl.arange(0, 2 * P, layout=gl.SliceLayout(1, X))
    token = gl.minimum(column % P, T - 1)
    pointer = gl.where((column < P)[:, None], k + (token * k_stride)[:, None], q + (token * q_stride)[:, None])
    x = gl.load(pointer + gl.arange(0, DIM, layout=gl.SliceLayout(0, X))[None, :])
    token = gl.minimum(gl.arange(0, 2 * P, layout=COLUMN) % P, T - 1)
    a_t = gl.load(a + token * a_stride)
    b_t = gl.load(b + token * b_stride)
    values = ()
    for t in gl.static_range(T):
        values += (gl.load(v + t * v_stride + rows),)
    return x, values, a_t, b_t


@gluon.jit
def _load_history_keys(ring_k, base, count, R: gl.constexpr, KEYS: gl.constexpr):
    """[HISTORY, K] raw keys of the committed records in fragment order, zero where there is none."""
    j = gl.arange(0, KEYS.shape[0], layout=gl.SliceLayout(1, KEYS))
    record = ring_k + wrap(base + j, R)[:, None] * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, KEYS))[None, :]
    return _fragment_order(gl.load(record, mask=(j < count)[:, None], other=0.0))


@gluon.jit
def _load_history_deltas(
    ring_d,
    base,
    count,
    R: gl.constexpr,
    HISTORY: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    LEFT: gl.constexpr,
):
    """A tuple of TILES [ROWS, HISTORY] d' of the committed records, zero where there is none."""
    j = gl.arange(0, HISTORY, layout=gl.SliceLayout(0, LEFT))
    record = ring_d + wrap(base + j, R)[None, :] * DIM + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LEFT))[:, None]
    deltas = ()
    for i in gl.static_range(TILES):
        deltas += (gl.load(record + i * ROWS, mask=(j < count)[None, :], other=0.0),)
    return deltas


@gluon.jit
def _project_tiles(tiles, arrived, x, TILES: gl.constexpr, MMA: gl.constexpr, num_warps: gl.constexpr):
    """A tuple of the tiles' S X, each computed as its tile arrives."""
    ROWS: gl.constexpr = tiles[0].shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    chunks = _chunks(x.permute([1, 0]), CHUNKS)
    projected = ()
    for i in gl.static_range(TILES):
        mbarrier.wait(arrived[i], 0)
        leading = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        small = leading
        for chunk in gl.static_range(CHUNKS):
            s = tiles[i].slice(chunk * CHUNK, CHUNK, dim=1).load(_state_layout(num_warps))
            leading, small = _project(leading, small, _fragment_order(s), chunks[chunk], MMA)
        projected += (leading + small,)
    return projected


@gluon.jit
def _fold_tiles(
    tiles,
    arrived,
    x,
    d,
    weights,
    keys,
    decay,
    state,
    first_row,
    boundary,
    TILES: gl.constexpr,
    MMA: gl.constexpr,
    num_warps: gl.constexpr,
):
    """S <- decay S + sum_j weight_j d'_j k_j^T, in shared memory and from there by the copy engine.

    Args:
        tiles, arrived, x: as in `_project_tiles`.
        d: tuple of TILES [rows, HISTORY]; weights: shared [HISTORY]; keys: shared [HISTORY, K] in fragment order.

    Returns:
        S X, of S before the fold.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = tiles[0].shape[0]
    LAYOUT: gl.constexpr = _state_layout(num_warps)
    weight = weights.load(gl.SliceLayout(0, LEFT))[None, :]
    COLUMNS: gl.constexpr = x.shape[1]
    chunks = _chunks(x.permute([1, 0]), CHUNKS)
    projected = ()
    for i in gl.static_range(TILES):
        high, middle, low = split_fp32(d[i] * weight)
        leading = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        small = leading
        for chunk in gl.static_range(CHUNKS):
            k = keys.slice(chunk * CHUNK, CHUNK, dim=1).load(RIGHT)
            zero = gl.zeros([ROWS, CHUNK], gl.float32, MMA)
            update = mma_v2(high, k, mma_v2(middle, k, mma_v2(low, k, zero)))
            if chunk == 0:
                mbarrier.wait(arrived[i], 0)
            part = tiles[i].slice(chunk * CHUNK, CHUNK, dim=1)
            s = _fragment_order(part.load(LAYOUT))
            leading, small = _project(leading, small, s, chunks[chunk], MMA)
            folded = gl.convert_layout(s, MMA, assert_trivial=True) * decay + update
            part.store(gl.convert_layout(_memory_order(folded), LAYOUT, assert_trivial=True))
            _schedule_boundary(boundary)
        fence_async_shared()
        tma.async_copy_shared_to_global(state, [first_row + i * ROWS, 0], tiles[i])
        projected += (leading + small,)
    return projected


@gluon.jit
def _store_pair(shared, high, low):
    shared[0].store(high)
    shared[1].store(low)


@gluon.jit
def _load_pair(shared, row: gl.constexpr, num_warps: gl.constexpr):
    """One row of a pair of shared [rows, N], as two tuples of N scalars."""
    N: gl.constexpr = shared[0].shape[1]
    LAYOUT: gl.constexpr = _uniform_layout(N, num_warps)
    return _scalars(shared[0].slice(row, 1).load(LAYOUT), N), _scalars(shared[1].slice(row, 1).load(LAYOUT), N)


@gluon.jit
def _coefficients(own, g, b_t, scores, scales, strengths, PAIRS: gl.constexpr, SCORES: gl.constexpr):
    """What multiplies rows of V in `_solve`, as pairs, to shared memory; formed one a lane.

    Args:
        own: pair of shared [COLUMNS, COLUMNS], x_i . x_j of the raw columns.
        g: tuple of P scalars, the tokens' log-decays.
        b_t: [COLUMNS], what beta is the sigmoid of.
        scores, scales, strengths: shared; see `_solve`.
        PAIRS, SCORES: layouts with a column a lane, of [COLUMNS, COLUMNS] and of [P, COLUMNS].
    """
    COLUMNS: gl.constexpr = own[0].shape[1]
    P: gl.constexpr = COLUMNS // 2
    r = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, PAIRS))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PAIRS))
    diagonal = r[:, None] == c[None, :]
    squares, rest = two_sum(gl.where(diagonal, own[0].load(PAIRS), 0.0).sum(0), NORM_EPSILON)
    rest += gl.where(diagonal, own[1].load(PAIRS), 0.0).sum(0)
    for_query = gl.where(c < P, 1.0, DIM * 1.0)  # K^-1/2
    norm_high, norm_low = inverse_root_pair(squares * for_query, rest * for_query)

    # Γ_t, and Γ_t - Γ_s as a sum of its own: a difference would lose digits.
    s = gl.arange(0, P, layout=gl.SliceLayout(1, SCORES))[:, None]
    t = (gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES)) % P)[None, :]
    total = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, PAIRS)) + g[0]
    between = gl.zeros([P, COLUMNS], gl.float32, SCORES)
    for i in gl.static_range(1, P):
        total += gl.where(c % P >= i, g[i], 0.0)
        between += gl.where((s < i) & (t >= i), g[i], 0.0)

    keep_high, keep_low = exp_pair(total, 0.0)
    keep_high, keep_low = times(keep_high, keep_low, norm_high, norm_low)
    _store_pair(scales, keep_high[None, :], keep_low[None, :])
    beta_high, beta_low = sigmoid_pair(b_t.to(gl.float32))
    beta_high, beta_low = times(beta_high, beta_low, norm_high, norm_low)
    _store_pair(strengths, beta_high[None, :], beta_low[None, :])
    keep_high, keep_low = exp_pair(between, 0.0)
    own_high, own_low = own[0].slice(0, P).load(SCORES), own[1].slice(0, P).load(SCORES)
    own_high, own_low = times(own_high, own_low, keep_high, keep_low)
    norm_high = gl.convert_layout(norm_high, gl.SliceLayout(0, SCORES), assert_trivial=True)[None, :]
    norm_low = gl.convert_layout(norm_low, gl.SliceLayout(0, SCORES), assert_trivial=True)[None, :]
    own_high, own_low = times(own_high, own_low, norm_high, norm_low)
    _store_pair(scores, own_high.trans(), own_low.trans())


@gluon.jit
def _solve(u, v, scores, scales, strengths, COLUMNS: gl.constexpr, T: gl.constexpr, num_warps: gl.constexpr):
    """The gated delta rule on the columns of U, token by token.

    What multiplies is a pair. Its small half goes first, into a sum that is still small, so that it costs no rounding.

    Args:
        u: tuple of COLUMNS vectors over V, the projections of S_n on raw keys (first half) and queries.
        v: tuple of T vectors over V.
        scores: pair of shared [COLUMNS, P], what d'_s adds to each column: e^{Γ_t - Γ_s} (k_s . x_t) / |x_t|.
        scales: pair of shared [1, COLUMNS], e^{Γ_t} / |x_t|; K^-1/2 is part of a query's 1 / |x_t|.
        strengths: pair of shared [1, COLUMNS], of which the first half is beta_t / |k_t|.

    Returns:
        tuples of T vectors: outputs o_t, and d'_t = d_t / |k_t|.
    """
    P: gl.constexpr = COLUMNS // 2
    scale, scale_low = _load_pair(scales, 0, num_warps)
    strength, strength_low = _load_pair(strengths, 0, num_warps)
    outputs, deltas = (), ()
    for t in gl.static_range(T):
        score, score_low = _load_pair(scores, t, num_warps)
        missing = v[t].to(gl.float32) - u[t] * scale[t]
        low = u[t] * scale_low[t]
        for s in gl.static_range(t):
            missing -= deltas[s] * score[s]
            low += deltas[s] * score_low[s]
        missing -= low
        deltas += (missing * strength[t] + missing * strength_low[t],)

        score, score_low = _load_pair(scores, P + t, num_warps)
        output = u[P + t] * scale_low[P + t]
        for s in gl.static_range(t + 1):
            output += deltas[s] * score_low[s]
        output += u[P + t] * scale[P + t]
        for s in gl.static_range(t + 1):
            output += deltas[s] * score[s]
        outputs += (output,)
    return outputs, deltas


# ------------------------------------------------------------------------------------------------------------ kernel


@gluon.jit
def _verify_hopper(
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
    T: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    R: gl.constexpr,
    HISTORY: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_V: gl.constexpr,
    FOLD_EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (V / BLOCK_V, HV, B). `state` describes the checkpoints as rows of V; HISTORY is W padded to a tile.

    ring_v and ring_gates are None if the policy records no raw inputs. If it does, a replay folds, not this kernel.
    """
    FOLDS: gl.constexpr = ring_v is None
    P: gl.constexpr = COLUMNS // 2
    ROWS: gl.constexpr = 16 * num_warps  # of a tile: one MMA a warp
    TILES: gl.constexpr = BLOCK_V // ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    BY_ROW: gl.constexpr = _rows_layout(BLOCK_V, COLUMNS, num_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, BY_ROW)
    X: gl.constexpr = _keys_layout(COLUMNS, num_warps, 1)
    # Of the history's records, each warp has its share.
    SHARES: gl.constexpr = min(num_warps, HISTORY // 8)
    SHARED: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8])
    KEYS: gl.constexpr = _keys_layout(HISTORY, num_warps, SHARES)
    PAST: gl.constexpr = _scores_layout(COLUMNS, HISTORY, num_warps, SHARES)
    PAIRS: gl.constexpr = _pairs_layout(COLUMNS, COLUMNS, num_warps, 1)
    SCORES: gl.constexpr = _pairs_layout(P, COLUMNS, num_warps, min(num_warps, P * COLUMNS // 32))
    COLUMN: gl.constexpr = gl.SliceLayout(0, PAIRS)
    KEYS_MEMORY: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    PAST_MEMORY: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // HISTORY, HISTORY // 8, order=[1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_stride, k_stride, v_stride, a_stride, b_stride, out_stride, slot_rows = strides

    part = gl.program_id(0)
    hv = gl.program_id(1)
    n = gl.program_id(2)
    h = hv // (HV // H)
    first_v = part * BLOCK_V
    line = plan + n * PLAN_COLUMNS
    slot = gl.load(line + PLAN_SLOT)
    row = gl.load(line + PLAN_ROW).to(gl.int64)
    base = gl.load(line + PLAN_BASE)
    count = gl.load(line + PLAN_COUNT)
    fold = gl.load(line + PLAN_FOLD) != 0

    # To the first token of this batch row, this head, and the head's ring.
    window = (n * T).to(gl.int64)
    q += window * q_stride + h * DIM
    k += window * k_stride + h * DIM
    v += window * v_stride + hv * DIM + first_v
    a += window * a_stride + hv
    b += window * b_stride + hv
    out += window * out_stride + hv * DIM + first_v
    if out_fp32 is not None:
        out_fp32 += window * (HV * DIM) + hv * DIM + first_v
    ring_d += (row * HV + hv) * (R * DIM) + first_v
    ring_k += (row * H + h) * (R * DIM)
    ring_g += (row * HV + hv) * (R * 2)
    if ring_v is not None:
        ring_v += (row * HV + hv) * (R * DIM) + first_v
        ring_gates += (row * HV + hv) * (R * 2)
    rows = gl.arange(0, BLOCK_V, layout=ROW)
    if not PDL:
        raw, values, a_t, b_t = _load_window(
            q, k, v, a, b, rows, q_stride, k_stride, v_stride, a_stride, b_stride, T, P, X, COLUMN
        )
    A_log_hv = gl.load(A_log + hv)
    dt_bias_hv = gl.load(dt_bias + hv)
    tiles, arrived = (), ()
    for i in gl.static_range(TILES):
        tiles += (gl.allocate_shared_memory(gl.float32, [ROWS, DIM], _tile_memory()),)
        arrived += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(arrived[i], count=1)
    boundary = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(boundary, count=1)

    first_row = slot * slot_rows + hv * DIM + first_v
    _fetch_state(state, first_row, slot >= 0, tiles, arrived, ROWS, TILES)
    _schedule_boundary(boundary)
    keys = _load_history_keys(ring_k, base, count, R, KEYS)
    d = _load_history_deltas(ring_d, base, count, R, HISTORY, ROWS, TILES, LEFT)
    j = gl.arange(0, HISTORY, layout=gl.SliceLayout(0, PAST))
    decays = ring_g + 2 * wrap(base + j, R)
    decay_high = gl.load(decays, mask=j < count, other=0.0)
    decay_low = gl.load(decays + 1, mask=j < count, other=0.0)
    newest = ring_g + 2 * wrap(base + count - 1, R)
    total_high = gl.load(newest, mask=count > 0, other=0.0)
    total_low = gl.load(newest + 1, mask=count > 0, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
        raw, values, a_t, b_t = _load_window(
            q, k, v, a, b, rows, q_stride, k_stride, v_stride, a_stride, b_stride, T, P, X, COLUMN
        )
    _schedule_boundary(boundary)

    if slot < 0:  # padding: nothing but zeros in its outputs
        for t in gl.static_range(T):
            zero = gl.zeros([BLOCK_V], gl.float32, ROW)
            gl.store(out + t * out_stride + rows, zero.to(gl.bfloat16))
            if out_fp32 is not None:
                gl.store(out_fp32 + t * (HV * DIM) + rows, zero)
        return

    # Scores of the window with itself and with the history: raw products, 16 rows an MMA.
    x = _fragment_order(raw)
    x_left = x
    if COLUMNS == 8:
        x_left = gl.join(x, gl.zeros_like(x)).permute([2, 0, 1]).reshape([16, DIM])
    x_left = gl.convert_layout(x_left, LEFT, assert_trivial=True)
    x = gl.convert_layout(x.permute([1, 0]), RIGHT, assert_trivial=True)
    own_high, own_low = _scores(x_left, x, _scores_layout(COLUMNS, COLUMNS, num_warps, 1), MMA)
    MATRIX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    own = (
        gl.allocate_shared_memory(gl.float32, [COLUMNS, COLUMNS], MATRIX, own_high),
        gl.allocate_shared_memory(gl.float32, [COLUMNS, COLUMNS], MATRIX, own_low),
    )
    g = log_decay(A_log_hv.to(gl.float32), a_t.to(gl.float32) + dt_bias_hv.to(gl.float32))
    gates = gl.allocate_shared_memory(gl.float32, [COLUMNS], FLAT, g)

    # History's share of U: d' times the weighted scores.
    live = j < count
    between, rest = two_sum(total_high, -decay_high)
    weight_high, weight_low = exp_pair(between, rest + (total_low - decay_low))
    weight_high = gl.where(live, weight_high, 0.0)
    weight_low = gl.where(live, weight_low, 0.0)
    weights = gl.allocate_shared_memory(gl.float32, [HISTORY], FLAT, weight_high + weight_low)
    shared_left = gl.convert_layout(x_left, gl.DotOperandLayout(0, SHARED, 2), assert_trivial=True)
    shared_keys = gl.convert_layout(keys.permute([1, 0]), gl.DotOperandLayout(1, SHARED, 2), assert_trivial=True)
    past_high, past_low = _scores(shared_left, shared_keys, PAST, SHARED)
    past_high, past_low = times(past_high, past_low, weight_high[None, :], weight_low[None, :])
    parts = [
        gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, HISTORY], PAST_MEMORY, x_part)
        for x_part in split_pair(past_high, past_low)
    ]
    past = [x_part.permute([1, 0]).load(RIGHT) for x_part in parts]
    history = ()
    for i in gl.static_range(TILES):
        history += (_product_fp32(split_pair(d[i], 0.0), past, MMA),)

    # All that multiplies rows of V in the window.
    each_g = _scalars(gates.load(gl.SliceLayout(0, _uniform_layout(COLUMNS, num_warps)))[None, :], COLUMNS)
    scores, scales, strengths = (), (), ()
    for _half in gl.static_range(2):
        scores += (gl.allocate_shared_memory(gl.float32, [COLUMNS, P], MATRIX),)
        scales += (gl.allocate_shared_memory(gl.float32, [1, COLUMNS], MATRIX),)
        strengths += (gl.allocate_shared_memory(gl.float32, [1, COLUMNS], MATRIX),)
    _coefficients(own, each_g, b_t, scores, scales, strengths, PAIRS, SCORES)
    decay_high, decay_low = exp_pair(total_high, total_low)
    decay = decay_high + decay_low

    # New records: what is not of V, each by one program.
    first = base + count
    if part == 0:
        if hv % (HV // H) == 0:
            column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, X))
            new_key = ring_k + wrap(first + column, R)[:, None] * DIM
            new_key += gl.arange(0, DIM, layout=gl.SliceLayout(0, X))[None, :]
            gl.store(new_key, raw, mask=(column < T)[:, None])
        column = gl.arange(0, COLUMNS, layout=COLUMN)
        high = gl.zeros([COLUMNS], gl.float32, COLUMN) + gl.where(fold, 0.0, total_high)
        low = gl.zeros([COLUMNS], gl.float32, COLUMN) + gl.where(fold, 0.0, total_low)
        for t in gl.static_range(T):
            high, error = two_sum(high, gl.where(column >= t, each_g[t], 0.0))
            low += error
        new_g = ring_g + 2 * wrap(first + column, R)
        gl.store(new_g, high, mask=column < T)
        gl.store(new_g + 1, low, mask=column < T)
        if ring_gates is not None:
            new_gates = ring_gates + 2 * wrap(first + column, R)
            log_decays, betas = stock_gates(
                a_t.to(gl.float32), b_t.to(gl.float32), A_log_hv.to(gl.float32), dt_bias_hv.to(gl.float32)
            )
            gl.store(new_gates, log_decays, mask=column < T)
            gl.store(new_gates + 1, betas, mask=column < T)

    # S arrives.
    if FOLDS and FOLD_EARLY:
        if fold:
            fold_keys = gl.allocate_shared_memory(gl.bfloat16, [HISTORY, DIM], KEYS_MEMORY, keys)
            projected = _fold_tiles(
                tiles, arrived, x, d, weights, fold_keys, decay, state, first_row, boundary, TILES, MMA, num_warps
            )
        else:
            projected = _project_tiles(tiles, arrived, x, TILES, MMA, num_warps)
    else:
        projected = _project_tiles(tiles, arrived, x, TILES, MMA, num_warps)

    # The window's own recurrence, a row of V a lane.
    u = ()
    for i in gl.static_range(TILES):
        u += (projected[i] * decay + history[i],)
    u = gl.convert_layout(_stack(u, ROWS, COLUMNS, TILES), BY_ROW)
    u = [gl.convert_layout(column_of_u, ROW, assert_trivial=True) for column_of_u in _columns(u, BLOCK_V, COLUMNS)]
    outputs, deltas = _solve(u, values, scores, scales, strengths, COLUMNS, T, num_warps)
    for t in gl.static_range(T):
        gl.store(out + t * out_stride + rows, outputs[t].to(gl.bfloat16))
        if out_fp32 is not None:
            gl.store(out_fp32 + t * (HV * DIM) + rows, outputs[t])
        gl.store(ring_d + wrap(first + t, R) * DIM + rows, deltas[t])
        if ring_v is not None:
            gl.store(ring_v + wrap(first + t, R) * DIM + rows, values[t])

    if FOLDS and not FOLD_EARLY:  # noqa: SIM102 - decided at compile time, unlike what follows
        if fold:
            # Read the history again rather than keep it all along: few rows fold, and the caches have it.
            keys = _load_history_keys(ring_k, base, count, R, KEYS)
            d = _load_history_deltas(ring_d, base, count, R, HISTORY, ROWS, TILES, LEFT)
            fold_keys = gl.allocate_shared_memory(gl.bfloat16, [HISTORY, DIM], KEYS_MEMORY, keys)
            _fold_tiles(
                tiles, arrived, x, d, weights, fold_keys, decay, state, first_row, boundary, TILES, MMA, num_warps
            )
    if FOLDS:  # noqa: SIM102
        if fold:
            tma.store_wait(0)
    # Nothing else may take the place of a tile before the copies out of it are done; nor, ever, that of a barrier: data
    # stored where one had been was corrupted when programs followed each other on a multiprocessor.
    boundary._keep_alive()
    for i in gl.static_range(TILES):
        tiles[i]._keep_alive()
        arrived[i]._keep_alive()


# ----------------------------------------------------------------------------------------------------------- wrapper


class _Address:
    """What a tensor map needs of a tensor. Cached in its place, so that the cache keeps no memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._data_ptr = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._data_ptr


_DESCRIPTORS: dict[tuple, TensorDescriptor] = {}


def _state_tiles(state: torch.Tensor, rows: int) -> TensorDescriptor:
    """`state` [slots, HV, V, K] as [rows of V, K], to be copied in tiles of [rows, K]."""
    slots, value_heads, head_v_dim, head_k_dim = state.shape
    key = (state.data_ptr(), slots, value_heads, state.stride(0), rows)
    descriptor = _DESCRIPTORS.get(key)
    if descriptor is None:
        total = (slots - 1) * (state.stride(0) // head_k_dim) + value_heads * head_v_dim
        descriptor = TensorDescriptor(
            _Address(state), [total, head_k_dim], [head_k_dim, 1], [rows, head_k_dim], _tile_memory()
        )
        _DESCRIPTORS[key] = descriptor
    return descriptor


def verify_hopper(
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
    *,
    config: Config | None = None,
    overlap_previous: bool = False,
) -> torch.Tensor:
    """`verify` of `triton.py` for what `supports` accepts; safe to capture in a CUDA graph.

    Args:
        q, k: bf16 [B T, H, 128], raw; any token stride, heads packed.
        v: bf16 [B T, HV, 128], likewise.
        a, b: [B T, HV], any float dtype and token stride.
        A_log, dt_bias: [HV], any float dtype.
        state: fp32 [slots, HV, 128, 128], the layer's checkpoints, 16-byte aligned; a slot stride of whole rows.
            A captured graph keeps its address and shape.
        ring: the layer's ring, `Ring.layer(i)`.
        draft_tokens: T, 1 .. min(T_max, 8).
        out: bf16 [B T, HV, 128], any token stride; allocated if None. Padding rows are set to zero.
        out_fp32: fp32 [B T, HV, 128], contiguous: the outputs before they are rounded. For tests.
        config: the cut, in place of the table's. For tuning.
        overlap_previous: the launch may start before the previous kernel of the stream has ended (programmatic
            dependent launch), and does if the cut says so: checkpoint, ring and plan are then read at once, q, k, v, a
            and b after its end. Legal only if that kernel writes none of the first three and neither does any other
            that may still run.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch = _checked_batch(q, k, v, a, b, A_log, dt_bias, state, ring, cursors, draft_tokens, out, out_fp32)
    if not supports(ring.spec, draft_tokens, (9, 0)) or state.stride(0) % DIM.value or state.data_ptr() % 16:
        raise ValueError(
            f"verify_hopper takes bf16, K = V = 128, W <= {MAX_WINDOW}, T <= {MAX_DRAFT_TOKENS} and an aligned state "
            f"of whole rows, found {ring.spec}, T={draft_tokens}, state strides {state.stride()}: use triton.verify"
        )
    if batch == 0:
        return out
    heads, value_heads = q.shape[1], v.shape[1]
    config = config or choose_config(batch * value_heads, draft_tokens, ring.spec.window)
    slot_rows = state.stride(0) // DIM.value
    pdl = overlap_previous and config.overlap
    _verify_hopper[(DIM.value // config.block_v, value_heads, batch)](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        _state_tiles(state, 16 * config.warps),
        ring.d,
        ring.k,
        ring.g,
        ring.v,
        ring.gates,
        cursors.plan,
        out,
        out_fp32,
        (*(tensor.stride(0) for tensor in (q, k, v, a, b, out)), slot_rows),
        T=draft_tokens,
        H=heads,
        HV=value_heads,
        R=ring.spec.records,
        HISTORY=_padded_window(ring.spec.window),
        COLUMNS=2 * _padded_tokens(draft_tokens),
        BLOCK_V=config.block_v,
        FOLD_EARLY=config.fold_early,
        PDL=pdl,
        num_warps=config.warps,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
    return out
