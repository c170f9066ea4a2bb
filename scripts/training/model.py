"""The trunk and its MTP head; `state_dict` has exactly the checkpoint's names."""

from __future__ import annotations

import torch
from torch import nn

from training.attention import KVCache
from training.layers import DecoderLayer, initialise
from training.mtp import MTPHead
from training.parts import Linear, RMSNorm
from training.shape import ModelShape


class Trunk(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape, shape.is_attention(i)) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)


class DemoModel(nn.Module):
    """Qwen3-Next with one MTP layer. Parameters are fp32; arithmetic is in `dtype`.

    Args:
        shape: sizes.
        dtype: of activations and of the weights where they are used; bf16 for training, fp32 for comparisons.
        seed: of the initial weights.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden, shape.vocab)
        self.mtp = MTPHead(shape)
        initialise(self, shape.layers, torch.Generator().manual_seed(seed))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(ids).to(self.dtype)

    def hidden(self, ids: torch.Tensor, caches: list | None = None, start: int = 0) -> torch.Tensor:
        """Hidden states [B, T, hidden] behind the final norm, of tokens [B, T] from position `start` on."""
        x = self.embed(ids)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        for number, layer in enumerate(self.model.layers):
            x = layer(x, positions, caches[number] if caches else None)
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32."""
        return self.lm_head(hidden).float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        return self.logits(self.hidden(ids))

    def empty_caches(self, batch: int, capacity: int) -> list:
        """One per layer, for sequences of up to `capacity` tokens."""
        like = self.model.embed_tokens.weight.detach().to(self.dtype)
        return [
            KVCache(batch, capacity, self.shape, like)
            if layer.is_attention
            else layer.linear_attn.empty_cache(batch, like)
            for layer in self.model.layers
        ]
