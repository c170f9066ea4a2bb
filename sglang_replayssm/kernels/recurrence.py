"""The gated delta rule, token by token in plain PyTorch: what every other kernel must equal.

In float64 it is the oracle of the tests; in float32 it is the reference of the accuracy bars.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


class Recurrence(NamedTuple):
    """Result of `recurrence`.

    Attributes:
        out: [B, T, HV, V], outputs.
        states: [B, T, HV, V, K], the state after every token.
        deltas: [B, T, HV, V], d_t = beta_t (v_t - S k_t), the column that token t adds to the state.
        log_decay: [B, T, HV], g_t, each token's own.
    """

    out: torch.Tensor
    states: torch.Tensor
    deltas: torch.Tensor
    log_decay: torch.Tensor


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) by log1p, and x itself above the threshold, like SGLang's kernels."""
    return torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD))))


def norm(x: torch.Tensor) -> torch.Tensor:
    """sqrt(|x|^2 + eps) over the last dimension, which is kept."""
    return torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> Recurrence:
    """Run T tokens of B sequences through the gated delta rule (formulas: Gated DeltaNet, arXiv 2412.06464, eq. 10).

    Args:
        q, k: [B, T, H, K], raw: they are l2-normalised here and q is scaled by K^-1/2.
        v: [B, T, HV, V]; value head j uses key head j // (HV // H).
        a, b: [B, T, HV], the inputs of decay and beta.
        A_log, dt_bias: [HV].
        state: [B, HV, V, K], the state before the first token; not modified.
        dtype: dtype of all arithmetic and of the results.
    """
    q, k, v, a, b, A_log, dt_bias, state = (x.to(dtype) for x in (q, k, v, a, b, A_log, dt_bias, state))
    group = v.shape[2] // q.shape[2]
    q = (q / norm(q) * q.shape[-1] ** -0.5).repeat_interleave(group, dim=2)
    k = (k / norm(k)).repeat_interleave(group, dim=2)
    g = -torch.exp(A_log) * softplus(a + dt_bias)
    beta = torch.sigmoid(b)

    out, states, deltas = [], [], []
    for t in range(v.shape[1]):
        state = state * torch.exp(g[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None, :]).sum(-1))
        state = state + delta[..., None] * k[:, t, :, None, :]
        out.append((state * q[:, t, :, None, :]).sum(-1))
        states.append(state)
        deltas.append(delta)
    return Recurrence(torch.stack(out, 1), torch.stack(states, 1), torch.stack(deltas, 1), g)
