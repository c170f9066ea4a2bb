"""The decoder layers of Qwen3-Next. Parameters are fp32 and carry the checkpoint's names.

Caches make the same code prefill and decode: a layer that is given one starts from it and leaves its own behind.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from training.attention import Attention, KVCache
from training.gdn import GatedDeltaNet, GDNCache
from training.parts import Linear, RMSNorm
from training.shape import ModelShape


class MLP(nn.Module):
    """The weights of one expert; `MoE` computes all of them at once."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)


class MoE(nn.Module):
    """A few routed experts and a shared one. All are computed for every token, as one wide MLP: they are few."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.active = shape.active
        self.gate = Linear(shape.hidden, shape.experts)
        self.experts = nn.ModuleList(MLP(shape) for _ in range(shape.experts))
        self.shared_expert = MLP(shape)
        self.shared_expert_gate = Linear(shape.hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.gate(x).float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(self.active, -1).indices, 1.0)
        weights = probabilities * chosen
        weights = torch.cat(
            [weights / weights.sum(-1, keepdim=True), self.shared_expert_gate(x).float().sigmoid()], dim=-1
        )
        mlps = [*self.experts, self.shared_expert]
        gate, up, down = (
            torch.cat([getattr(mlp, name).weight for mlp in mlps], dim=axis).to(x.dtype)
            for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
        )
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
        inner = inner.unflatten(-1, (len(mlps), -1)) * weights[..., None].to(x.dtype)
        return F.linear(inner.flatten(-2), down)


class DecoderLayer(nn.Module):
    """Mixer and experts, each behind a norm and added to the residual."""

    def __init__(self, shape: ModelShape, attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        if attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = MoE(shape)

    @property
    def is_attention(self) -> bool:
        return hasattr(self, "self_attn")

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: GDNCache | KVCache | None = None):
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, positions, cache) if self.is_attention else self.linear_attn(normed, cache))
        return self.experts(x)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


def initialise(module: nn.Module, depth: int, generator: torch.Generator) -> None:
    """Projections by fan-in, those into the residual smaller with depth; GDN heads from forgetful to lasting."""

    def normal(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    with torch.no_grad():
        for name, child in module.named_modules():
            if isinstance(child, Linear):
                into_residual = name.endswith(("out_proj", "o_proj", "down_proj"))
                normal(child.weight, child.in_features**-0.5 / (math.sqrt(2 * depth) if into_residual else 1))
            elif isinstance(child, nn.Embedding):
                normal(child.weight, 1.0)
            elif isinstance(child, nn.Conv1d):
                normal(child.weight, child.kernel_size[0] ** -0.5)
            elif isinstance(child, GatedDeltaNet):
                # log-decay of a head where its input is 0: from -0.1 to -1e-5
                decays = torch.logspace(-1, -5, child.shape.v_heads)
                child.A_log.zero_()
                child.dt_bias.copy_(torch.expm1(decays).log())
