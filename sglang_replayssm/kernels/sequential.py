"""One token of the recurrence in exactly the arithmetic of SGLang's own kernel, for states that are bit-identical.

The kernel is `fused_sigmoid_gating_delta_rule_update` of the pinned SGLang (layers/attention/fla). Floating point is
not associative, so equal bits take equal operations in equal order, and equal reduction trees: a program is one warp
on a state tile of [K, STOCK_BLOCK_V] that reduces over K. A token is: l2-normalise by a division by
sqrt(|x|^2 + 1e-6), decay, S k, d, rank-1 update, and only then the output. Do not replace any of it by something
faster; `primitives.softplus` is more accurate than the log(1 + e^x) here, and therefore wrong.

Columns of a tile do not meet in any sum, so a narrower tile keeps the bits as long as the compiler spreads K over the
lanes in the same way; more programs then fit on a multiprocessor, whose loads hide behind each other. Shown on Hopper
GPUs only (tests/kernels/test_bit_identity.py); SGLang found that on Blackwell narrow tiles do change bits.
"""

import triton
import triton.language as tl

from .primitives import NORM_EPSILON, SOFTPLUS_LIMIT, cuda_arch

STOCK_BLOCK_V = 32
STOCK_WARPS = 1

# A lane holds 4 consecutive elements along K, in tiles of at least so many elements.
FEWEST_TILE_ELEMENTS = 4 * 32


def tile_columns(narrow: int, K: int, V: int) -> int:
    """BLOCK_V: `narrow` where that has been shown to keep the bits, else that of SGLang's kernel."""
    return min(V, narrow if cuda_arch() == 90 and K * narrow >= FEWEST_TILE_ELEMENTS else STOCK_BLOCK_V)


@triton.jit
def stock_gates(a, b, A_log, dt_bias):
    """Log-decay and beta of one token from fp32 scalars."""
    x = a + dt_bias
    softplus = tl.where(x <= SOFTPLUS_LIMIT, tl.log(1.0 + tl.exp(x)), x)
    return -tl.exp(A_log) * softplus, 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def unit(x):
    """fp32 [K], l2-normalised."""
    return x / tl.sqrt(tl.sum(x * x) + NORM_EPSILON)


@triton.jit
def advance(s, k, v, g, beta):
    """The state [K, BLOCK_V] after a token of normalised key [K], value [BLOCK_V], log-decay and beta; all fp32."""
    s *= tl.exp(g)
    v -= tl.sum(s * k[:, None], 0)
    v *= beta
    s += k[:, None] * v[None, :]
    return s
