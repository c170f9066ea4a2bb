"""The Gated-DeltaNet layer: projections, convolution, the rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from training.delta_rule import delta_rule, unit
from training.parts import GatedNorm, Linear
from training.shape import ModelShape


@dataclass
class GDNCache:
    """conv: [B, width - 1, channels], the last inputs of the convolution; state: [B, HV, V, K], fp32."""

    conv: torch.Tensor
    state: torch.Tensor


class GatedDeltaNet(nn.Module):
    """`in_proj_qkvz` and `in_proj_ba` hold their rows by key head: (q, k, its v's, its z's) and (its b's, its a's)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj_qkvz = Linear(shape.hidden, 2 * shape.key_dim + 2 * shape.value_dim)
        self.in_proj_ba = Linear(shape.hidden, 2 * shape.v_heads)
        channels = 2 * shape.key_dim + shape.value_dim
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.v_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.v_heads))
        self.norm = GatedNorm(shape.gdn_head)
        self.out_proj = Linear(shape.value_dim, shape.hidden)

    def empty_cache(self, batch: int, x: torch.Tensor) -> GDNCache:
        s = self.shape
        conv = x.new_zeros(batch, s.conv_width - 1, self.conv1d.in_channels)
        return GDNCache(conv, x.new_zeros(batch, s.v_heads, s.gdn_head, s.gdn_head, dtype=torch.float32))

    def forward(self, x: torch.Tensor, cache: GDNCache | None = None) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        s, (batch, tokens, _) = self.shape, x.shape
        size, group = s.gdn_head, s.v_heads // s.k_heads
        by_head = self.in_proj_qkvz(x).view(batch, tokens, s.k_heads, -1)
        q, k, v, z = by_head.split([size, size, group * size, group * size], dim=-1)
        b, a = (
            y.reshape(batch, tokens, -1) for y in self.in_proj_ba(x).view(batch, tokens, s.k_heads, -1).chunk(2, -1)
        )
        mixed = torch.cat([y.reshape(batch, tokens, -1) for y in (q, k, v)], dim=-1)
        mixed = self._convolve(mixed, cache)
        q, k, v = mixed.split([s.key_dim, s.key_dim, s.value_dim], dim=-1)
        q, k, v = (y.reshape(batch, tokens, -1, size) for y in (q, k, v))
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        beta = b.float().sigmoid()
        if cache is None:
            out, _ = delta_rule(q, k, v, g, beta)
        elif tokens == 1:
            out, cache.state = _one_token(q, k, v, g, beta, cache.state)
        else:
            out, cache.state = delta_rule(q, k, v, g, beta, cache.state)
        out = self.norm(out.to(x.dtype), z.reshape(batch, tokens, -1, size))
        return self.out_proj(out.reshape(batch, tokens, -1))

    def _convolve(self, x: torch.Tensor, cache: GDNCache | None) -> torch.Tensor:
        """Depthwise causal convolution and SiLU; the last tap is the token itself."""
        width, tokens = self.shape.conv_width, x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0)) if cache is None else torch.cat([cache.conv, x], dim=1)
        if cache is not None:
            cache.conv = padded[:, tokens:]
        taps = self.conv1d.weight[:, 0].to(x.dtype).float()
        mixed = sum(padded[:, i : i + tokens] * taps[:, i] for i in range(width))
        return F.silu(mixed).to(x.dtype)


def _one_token(q, k, v, g, beta, state):
    """The recurrence itself, for one token a sequence."""
    group = v.shape[2] // q.shape[2]
    q, k, v = (x[:, 0].float() for x in (q, k, v))
    q = (unit(q) * q.shape[-1] ** -0.5).repeat_interleave(group, dim=1)
    k = unit(k).repeat_interleave(group, dim=1)
    state = state * g[:, 0].exp()[..., None, None]
    delta = beta[:, 0, :, None] * (v - (state @ k[..., None])[..., 0])
    state = state + delta[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0][:, None], state
