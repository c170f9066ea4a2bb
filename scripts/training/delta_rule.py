"""The gated delta rule for training: parallel inside chunks, a short loop over chunks, differentiable.

The same function as `sglang_replayssm.kernels.recurrence`. With G the decay accumulated inside a chunk and S the state
at its start (here [K, V]), the deltas D of a chunk solve

    (I + A) D = beta (v - e^G k S),    A_ij = beta_i e^(G_i - G_j) k_i.k_j  for j < i

so D = U - W S, where U and W need no state and are computed for all chunks at once. Only `_Scan` is sequential.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.triangular import unit_lower_inverse

CHUNK = 64
NORM_EPS = 1e-6


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of T tokens and the state behind them.

    All arithmetic is fp32, or fp64 if `g` is fp64.

    Args:
        q, k: [B, T, H, K], raw: they are l2-normalised here and q is scaled by K^-1/2.
        v: [B, T, HV, V]; value head j uses key head j // (HV // H).
        g, beta: [B, T, HV], log-decay (at most 0) and beta.
        state: [B, HV, V, K] before the first token; zero if not given.
        chunk: tokens solved at once.

    Returns:
        [B, T, HV, V] outputs and [B, HV, V, K] state, in the dtype of the arithmetic.
    """
    batch, tokens, heads, value_size = v.shape
    key_size = k.shape[-1]
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = unit(q) * key_size**-0.5, unit(k)
    pad = -tokens % chunk
    count = (tokens + pad) // chunk

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads, ...] -> [B HV, N, C, ...]; padding tokens write nothing, and nobody reads them."""
        x = x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] != heads else x
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) if pad else x
        return x.transpose(1, 2).reshape(batch * heads, count, chunk, *x.shape[3:])

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta)[..., None]
    decay = chunks(g).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    since = decay.exp()[..., None]
    total = decay[..., -1]

    keys_t = k.transpose(-1, -2)
    couplings = beta * between * (k @ keys_t)
    sides = torch.cat([beta * v, beta * since * k], dim=-1)
    free, reads = (unit_lower_inverse(couplings) @ sides).split([value_size, key_size], dim=-1)
    writes = k * (total[..., None] - decay).exp()[..., None]

    if state is None:
        start = v.new_zeros(batch * heads, key_size, value_size)
    else:
        start = state.to(dtype).transpose(-1, -2).reshape(batch * heads, key_size, value_size)
    states, deltas = _Scan.apply(start, free, reads, writes, total.exp())
    out = (q * since) @ states[:, :-1] + (between * (q @ keys_t)) @ deltas
    out = out.reshape(batch, heads, count * chunk, value_size)[:, :, :tokens].transpose(1, 2)
    final = states[:, -1].reshape(batch, heads, key_size, value_size).transpose(-1, -2)
    return out, final


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|^2 + eps), over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


class _Scan(torch.autograd.Function):
    """States at the chunks' starts, and the deltas: D_n = U_n - W_n S_n, S_n+1 = e_n S_n + P_n^T D_n.

    start [X, K, V], free U [X, N, C, V], reads W and writes P [X, N, C, K], keep e [X, N]
    -> states [X, N + 1, K, V], deltas D [X, N, C, V].
    """

    @staticmethod
    def forward(ctx, start, free, reads, writes, keep):
        states = start.new_empty(start.shape[0], free.shape[1] + 1, *start.shape[1:])
        deltas = torch.empty_like(free)
        states[:, 0] = start
        state, *followers = states.unbind(1)
        written = writes.transpose(-1, -2).unbind(1)
        kept = keep[..., None, None].unbind(1)
        for n, (u, w, delta, following) in enumerate(
            zip(free.unbind(1), reads.unbind(1), deltas.unbind(1), followers, strict=True)
        ):
            torch.baddbmm(u, w, state, alpha=-1, out=delta)
            torch.mul(state, kept[n], out=following)
            state = following.baddbmm_(written[n], delta)
        ctx.save_for_backward(states, deltas, reads, writes, keep)
        return states, deltas

    @staticmethod
    def backward(ctx, d_states, d_deltas):
        states, deltas, reads, writes, keep = ctx.saved_tensors
        into = torch.empty_like(d_states)  # gradient of each state, everything behind it included
        d_free = torch.empty_like(deltas)
        into[:, -1] = d_states[:, -1]
        *earlier, after = into.unbind(1)
        own, own_deltas, d_frees = d_states.unbind(1), d_deltas.unbind(1), d_free.unbind(1)
        read, written = reads.transpose(-1, -2).unbind(1), writes.unbind(1)
        kept = keep[..., None, None].unbind(1)
        for n in reversed(range(len(earlier))):
            torch.baddbmm(own_deltas[n], written[n], after, out=d_frees[n])
            torch.addcmul(own[n], after, kept[n], out=earlier[n])
            after = earlier[n].baddbmm_(read[n], d_frees[n], alpha=-1)
        before = states[:, :-1]
        d_reads = -(d_free @ before.transpose(-1, -2))
        d_writes = deltas @ into[:, 1:].transpose(-1, -2)
        d_keep = (into[:, 1:] * before).sum((-1, -2))
        return into[:, 0], d_free, d_reads, d_writes, d_keep
