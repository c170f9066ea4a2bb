"""Triton functions that several kernels share: the step plan, ring addresses, gates, and products without error."""

import triton
import triton.language as tl

from . import ring
from .recurrence import NORM_EPS, SOFTPLUS_THRESHOLD

PLAN_COLUMNS = tl.constexpr(ring.PLAN_COLUMNS)
PLAN_SLOT = tl.constexpr(ring.PLAN_SLOT)
PLAN_ROW = tl.constexpr(ring.PLAN_ROW)
PLAN_BASE = tl.constexpr(ring.PLAN_BASE)
PLAN_COUNT = tl.constexpr(ring.PLAN_COUNT)
PLAN_FOLD = tl.constexpr(ring.PLAN_FOLD)
NORM_EPSILON = tl.constexpr(NORM_EPS)
SOFTPLUS_LIMIT = tl.constexpr(SOFTPLUS_THRESHOLD)

# Triton 3.6's interpreter multiplies the stored bits of bf16 operands as integers, and truncates fp32 to bf16: there
# operands are widened first (`dot`) and results rounded by hand (`round_to`).
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wrap(index, R: tl.constexpr):
    """Physical record of an index in 0..2R-1: R is no power of two, and a modulo costs more than a compare."""
    return tl.where(index >= R, index - R, index)


@triton.jit
def two_sum(x, y):
    """x + y as a rounded sum and its exact rounding error (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


@triton.jit
def softplus(x):
    """log(1 + e^x); the quotient undoes the rounding of 1 + e^x, which log alone would amplify for x << 0."""
    y = tl.exp(x)
    u = 1.0 + y
    # u - 1 is exact, and log(u) / (u - 1) is smooth: the rounding of u cancels (Kahan's log1p).
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / (u - 1.0)))
    return tl.where(x > SOFTPLUS_LIMIT, x, log1p)


@triton.jit
def inverse_root(x):
    """x^-1/2, the hardware's approximation after one Newton step: the norms enter every product."""
    y = tl.rsqrt(x)
    return y + 0.5 * y * tl.fma(-x * y, y, 1.0)


@triton.jit
def dot(x, y, acc=None):
    """`tl.dot` of 16-bit operands (or of fp32 ones that fit tf32 without loss)."""
    if INTERPRETED:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="tf32")


@triton.jit
def dot_raw(x, y):
    """Product of two tensors of the activation dtype: exact products, summed in fp32."""
    return tl.dot(x, y, input_precision="ieee") if x.dtype == tl.float32 else dot(x, y)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x rounded to the nearest of `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to even
        result = (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def split_bf16(x):
    """fp32 x as its leading bf16 part, by truncation, and the exact rest."""
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), x - high


@triton.jit
def split_fp32(x):
    """fp32 x as three bf16 parts, without error."""
    high, rest = split_bf16(x)
    middle, rest = split_bf16(rest)
    low, rest = split_bf16(rest)
    return high, middle, low


@triton.jit
def split_tf32(x):
    """fp32 x as its nearest tf32 and the exact rest, which itself fits tf32 but for its last bit."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    high = bits.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def add_apart(small, large):
    """small + large for two products whose sums must not share an accumulator: tensor cores truncate when they add.

    Written as an addition, Triton would make the one product the other's initial accumulator.
    """
    return tl.fma(large, 1.0, small)


@triton.jit
def dot_exact(x, y):
    """fp32 x times y of the activation dtype, accurate to fp32."""
    if y.dtype == tl.bfloat16:
        high, middle, low = split_fp32(x)
        product = add_apart(dot(low, y, dot(middle, y)), dot(high, y))
    elif y.dtype == tl.float16:
        high, low = split_tf32(x)
        y = y.to(tl.float32)
        product = add_apart(dot(low, y), dot(high, y))
    else:
        product = tl.dot(x, y, input_precision="ieee")
    return product


@triton.jit
def dot_fp32(x, y, IEEE: tl.constexpr):
    """fp32 x times fp32 y, accurate to fp32: by three tf32 products, or by plain fp32 arithmetic."""
    if IEEE:
        product = tl.dot(x, y, input_precision="ieee")
    else:
        x_high, x_low = split_tf32(x)
        y_high, y_low = split_tf32(y)
        product = add_apart(dot(x_high, y_low, dot(x_low, y_high)), dot(x_high, y_high))
    return product


@triton.jit
def load_decays(g, base, count, j, R: tl.constexpr):
    """Decays from the accumulated log-decays of one row and head.

    Args:
        g: pointer to the [R, 2] high and low parts.
        base, count: the row's history.
        j: [J], history indices 0..J-1; those from `count` on are dead.

    Returns:
        the total log-decay since the checkpoint, high and low; and [J] exp(G_n - G_j), 0 for dead records.
    """
    live = j < count
    at = 2 * wrap(base + j, R)
    high = tl.load(g + at, mask=live, other=0.0)
    low = tl.load(g + at + 1, mask=live, other=0.0)
    last = 2 * wrap(base + count - 1, R)
    total_high = tl.load(g + last, mask=count > 0, other=0.0)
    total_low = tl.load(g + last + 1, mask=count > 0, other=0.0)
    weight = tl.where(live, tl.exp((total_high - high) + (total_low - low)), 0.0)
    return total_high, total_low, weight


@triton.jit
def load_keys(ring_k, at, live, K: tl.constexpr):
    """Keys [J, K] of the records at [J], raw or normalised; zero where not live (dead records may hold NaN)."""
    return tl.load(ring_k + at[:, None] * K + tl.arange(0, K)[None, :], mask=live[:, None], other=0.0)


@triton.jit
def load_deltas(ring_d, at, live, vs, V: tl.constexpr):
    """fp32 d' [len(vs), J] of the records at [J]; zero where not live (dead records may hold NaN)."""
    return tl.load(ring_d + at[None, :] * V + vs[:, None], mask=live[None, :], other=0.0).to(tl.float32)


@triton.jit
def fold_tile(state, target, ring_d, keys, decay, weight, at, live, vs, V: tl.constexpr, K: tl.constexpr):
    """Rows `vs` of one head's state with its history: target <- decay S + sum_j weight_j d'_j k_j^T.

    Args:
        state, target: pointers to the head's [V, K] checkpoint and to where the result goes; the same for a fold.
        ring_d: pointer to the head's [R, V] deltas. If they are bf16, the result is rounded to bf16.
        keys: [J, K] keys of the history, zero where not live.
        decay: e^{G_n}; weight: [J], e^{G_n - G_j}; at, live: [J], physical records of the history.
    """
    tile = vs[:, None] * K + tl.arange(0, K)[None, :]
    update = dot_exact(load_deltas(ring_d, at, live, vs, V) * weight[None, :], keys)
    folded = tl.load(state + tile) * decay + update
    if ring_d.dtype.element_ty == tl.bfloat16:
        folded = round_to(folded, tl.bfloat16).to(tl.float32)
    tl.store(target + tile, folded)
