"""The full-attention layer and its cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from training.parts import Linear, RMSNorm
from training.shape import ROPE_THETA, ModelShape


class KVCache:
    """Keys (rotated) and values of all tokens so far, in room made once."""

    def __init__(self, batch: int, capacity: int, shape: ModelShape, x: torch.Tensor) -> None:
        size = (2, batch, shape.kv_heads, capacity, shape.attention_head)
        self.room, self.length = x.new_empty(size), 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [B, kv_heads, T, D]; returns what is stored now."""
        end = self.length + k.shape[2]
        self.room[0, :, :, self.length : end], self.room[1, :, :, self.length : end] = k, v
        self.length = end
        return self.room[0, :, :, :end], self.room[1, :, :, :end]


class Attention(nn.Module):
    """Full attention: normed queries and keys, partial RoPE, an output gate; `q_proj` rows by head: (q, gate)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, 2 * shape.heads * shape.attention_head)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.attention_head)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.attention_head)
        self.o_proj = Linear(shape.heads * shape.attention_head, shape.hidden)
        self.q_norm = RMSNorm(shape.attention_head)
        self.k_norm = RMSNorm(shape.attention_head)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [B, heads, T, D] and gates [B, T, heads D] of tokens at `positions` [B or 1, T]."""
        batch, tokens, _ = x.shape
        q, gate = self.q_proj(x).view(batch, tokens, self.shape.heads, -1).chunk(2, dim=-1)
        q = rotate(self.q_norm(q).transpose(1, 2), positions, self.shape.rotary_dim)
        return q, gate.reshape(batch, tokens, -1)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, [B, kv_heads, T, D]."""
        batch, tokens, _ = x.shape
        k = self.k_norm(self.k_proj(x).view(batch, tokens, self.shape.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        return rotate(k, positions, self.shape.rotary_dim), v

    def output(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[B, heads, T, D] -> [B, T, hidden]."""
        return self.o_proj(mixed.transpose(1, 2).reshape(gate.shape) * gate.sigmoid())

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]; tokens behind a non-empty cache come one at a time."""
        q, gate = self.queries(x, positions)
        k, v = self.keys_values(x, positions)
        causal = cache is None or cache.length == 0
        if not causal and x.shape[1] != 1:
            raise ValueError("tokens behind a cache come one at a time")
        if cache is not None:
            k, v = cache.append(k, v)
        # Repeated here: not every fast kernel groups heads, and the slow one would need room for all scores.
        k, v = (y.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1) for y in (k, v))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=causal), gate)


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """RoPE on the first `rotary_dim` of D, halves paired; x [B, heads, T, D], positions [B or 1, T]."""
    half = rotary_dim // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() * ROPE_THETA**-steps
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:rotary_dim].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)
