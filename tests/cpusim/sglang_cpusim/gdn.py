"""SGLang's GDN kernels (flash-linear-attention): what they need to run interpreted, and in fp32."""

from __future__ import annotations

import functools

import triton.language as tl

from sglang_cpusim.rebind import rebind


def install() -> None:
    from sglang.srt.layers.attention.fla import chunk, layernorm_gated, op

    # `exp = tl.exp` keeps the function that the interpreter replaces on the `tl` module; look it up at each call.
    rebind(op, "exp", lambda x: tl.exp(x))
    rebind(op, "exp2", lambda x: tl.math.exp2(x))
    rebind(op, "log", lambda x: tl.log(x))
    rebind(op, "log2", lambda x: tl.log2(x))
    rebind(op, "gather", lambda *args, **kwargs: tl.gather(*args, **kwargs))
    rebind(layernorm_gated, "_get_sm_count", lambda device: 1)
    rebind(chunk, "chunk_gated_delta_rule", _admit_fp32(chunk.chunk_gated_delta_rule, chunk))


def _admit_fp32(original, chunk):
    """The prefill's entry refuses fp32 for the sake of speed; the autograd function behind it does not mind."""

    @functools.wraps(original)
    def chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        initial_state_indices=None,
        cu_seqlens=None,
        head_first=False,
        use_qk_l2norm_in_kernel=False,
    ):
        if scale is None:
            scale = k.shape[-1] ** -0.5
        o, h = chunk.ChunkGatedDeltaRuleFunction.apply(
            q, k, v, g, beta, scale, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel
        )
        return o, None, h

    return chunk_gated_delta_rule
