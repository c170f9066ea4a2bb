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


def cuda_arch() -> int:
    """What kernels are compiled for: 90 for compute capability 9.0; 0 in the interpreter and on other makers' GPUs."""
    if INTERPRETED:
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


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
def times(x_high, x_low, y_high, y_low):
    """Product of two pairs (high + low) as a pair."""
    high = x_high * y_high
    return high, tl.fma(x_high, y_high, -high) + tl.fma(x_high, y_low, x_low * y_high)


@triton.jit
def exp_pair(high, low):
    """e^(high + low) as a pair, off by at most 2^-24.8 of it; 0 below e^-87. For arguments up to 87.

    e^x = 2^n e^r with |r| <= ln(2) / 2. ln(2) is a constant of 9 bits, whose product with n is exact, and a small rest;
    e^r is its Taylor series up to r^7.
    """
    dead = high < -87.0
    high = tl.where(dead, 0.0, high)
    n = tl.floor(high * 1.4426950408889634 + 0.5)
    exact = tl.fma(n, -0.693359375, high)
    rest = tl.fma(n, 2.1219444005469057e-4, low)
    r = exact + rest
    rest -= r - exact
    series = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    series = tl.fma(r, series, 1.0 / 120)
    series = tl.fma(r, series, 1.0 / 24)
    series = tl.fma(r, series, 1.0 / 6)
    series = tl.fma(r, series, 0.5)
    above_1 = tl.fma(r * r, series, r)
    result = 1.0 + above_1
    rest += above_1 - (result - 1.0)
    power = tl.where(dead, 0, (n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return result * power, rest * power


@triton.jit
def exp_fast(x):
    """e^x as a pair, to the error of the hardware's 2^x (2 units of the last place) but not of its argument."""
    argument = x * 1.4426950408889634
    rest = tl.fma(x, 1.925963033500e-8, tl.fma(x, 1.4426950408889634, -argument))
    result = tl.exp2(argument)
    return result, result * (rest * 0.6931471805599453)


@triton.jit
def log_decay(A_log, x):
    """-e^A_log log(1 + e^x), off by two or three roundings for any x."""
    rate_high, rate_low = exp_fast(A_log)
    y_high, y_low = exp_fast(x)
    u = 1.0 + y_high
    # u - 1 and the rounding of u are exact; log(u + rest) is log(u) + rest / u.
    log1p = tl.log(u) + ((y_high - (u - 1.0)) + y_low) / u
    y = tl.where(x > SOFTPLUS_LIMIT, x, log1p)
    return -tl.fma(rate_high, y, rate_low * y)


@triton.jit
def sigmoid_pair(x):
    """1 / (1 + e^-x) as a pair; e^-80 for anything below."""
    e_high, e_low = exp_pair(-tl.where(x < -80.0, -80.0, x), 0.0)
    divisor, rest = two_sum(1.0, e_high)
    rest += e_low
    y = 1.0 / divisor
    return y, y * (tl.fma(-divisor, y, 1.0) - rest * y)


@triton.jit
def inverse_root_pair(high, low):
    """(high + low)^-1/2 as a pair: the hardware's approximation and its correction by one Newton step."""
    y = tl.rsqrt(high)
    square = y * y
    short = tl.fma(-high, square, 1.0) - high * tl.fma(y, y, -square) - low * square
    return y, 0.5 * y * short


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
def split_nearest(x):
    """fp32 x as its nearest bf16 (halves away from 0) and the exact rest."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), x - bits.to(tl.float32, bitcast=True)


@triton.jit
def split_pair(high, low):
    """high + low as three bf16 parts, to 26 bits; of either sign, so that what products of parts leave out is tiny.

    If low is 0, without error: two nearest parts leave 6 bits.
    """
    first, rest = split_nearest(high)
    second, rest = split_nearest(rest)
    third, rest = split_bf16(rest + low)
    return first, second, third


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
def part(x, i: tl.constexpr, PARTS: tl.constexpr):
    """The i-th of `PARTS` parts of x's columns, the others set to zero, so that a product sums no more of them.

    A tensor core truncates when it adds to an accumulator, and in a long sum of terms of one sign, such as S k where S
    has seen k, these errors all point the same way.
    """
    if PARTS == 1:
        return x
    else:
        SIZE: tl.constexpr = x.shape[1] // PARTS
        column = tl.arange(0, x.shape[1])[None, :]
        return tl.where((column >= i * SIZE) & (column < (i + 1) * SIZE), x, tl.zeros_like(x))


@triton.jit
def dot_exact(x, y, PARTS: tl.constexpr = 1):
    """fp32 x times y of the activation dtype, accurate to fp32; a tensor core sums 1 / PARTS of the columns of x."""
    if y.dtype == tl.float32:
        return tl.dot(x, y, input_precision="ieee")
    else:
        if y.dtype == tl.bfloat16:
            high, middle, low = split_fp32(x)
            product = dot(low, y, dot(middle, y))
        else:
            high, low = split_tf32(x)
            y = y.to(tl.float32)
            product = dot(low, y)
        for i in tl.static_range(PARTS):
            product = add_apart(product, dot(part(high, i, PARTS), y))
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
