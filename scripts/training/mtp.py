"""The MTP head, and the chain of drafts it is trained for.

As SGLang drafts (NEXTN, one chain): the head at position i reads the embedding of token i + 1 and the trunk's hidden
state of token i, both normed, and predicts token i + 2. Its further drafts read the drafted token and the head's own
output, at the next position; their keys and values stand behind those that the head made from the trunk's states. Once
tokens are accepted, their entries are made anew from the trunk's.
"""

from __future__ import annotations

import torch
from torch import nn

from training.layers import DecoderLayer
from training.parts import Linear, RMSNorm
from training.shape import ModelShape


class MTPHead(nn.Module):
    """One full-attention layer between `fc` and a norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden)
        self.fc = Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([DecoderLayer(shape, attention=True)])
        self.norm = RMSNorm(shape.hidden)

    def combine(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))

    def chain(self, embedded: torch.Tensor, hidden: torch.Tensor, window: range, drafts: int) -> list[torch.Tensor]:
        """The head's outputs for chains of drafts that begin at each position of a window, along the true tokens.

        A draft behind a wrong one is rejected with it, so every draft may assume that those before it were right.

        Args:
            embedded, hidden: [B, T, hidden], embedding and trunk state of every token.
            window: positions i; the last one at most T - 1 - drafts.
            drafts: length of the chains.

        Returns:
            For each draft j from 1, [B, len(window), hidden]: what predicts token i + j + 1.
        """
        layer, device = self.layers[0], hidden.device
        attention = layer.self_attn
        bases = torch.arange(window.start, window.stop, device=device)
        seen = window.stop
        before = self.combine(embedded[:, 1 : seen + 1], hidden[:, :seen])
        keys, values = attention.keys_values(layer.input_layernorm(before), torch.arange(seen, device=device)[None])
        causal = torch.arange(seen, device=device) <= bases[:, None]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs, state = [], hidden[:, window.start : window.stop]
        for j in range(1, drafts + 1):
            x = self.combine(embedded[:, window.start + j : window.stop + j], state)
            normed, positions = layer.input_layernorm(x), (bases + j - 1)[None]
            if j > 1:
                own.append(attention.keys_values(normed, positions))
            q, gate = attention.queries(normed, positions)
            x = x + attention.output(_attend(q, keys, values, causal, own), gate)
            state = self.norm(layer.experts(x))
            outputs.append(state)
        return outputs


def _attend(q, keys, values, causal, own):
    """Attention of queries [B, heads, L, D] over shared keys [B, kv_heads, S, D] and, each query, its own few."""
    group = q.shape[1] // keys.shape[1]
    keys, values, *rest = (
        x.repeat_interleave(group, dim=1) for x in (keys, values, *(tensor for pair in own for tensor in pair))
    )
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~causal, float("-inf"))
    extra = [(q * k).float().sum(-1, keepdim=True) for k in rest[::2]]
    weights = (torch.cat([scores, *extra], dim=-1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    mixed = weights[..., : keys.shape[2]] @ values
    for number, v in enumerate(rest[1::2]):
        mixed = mixed + weights[..., keys.shape[2] + number, None] * v
    return mixed
