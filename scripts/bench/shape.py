"""What one measurement is of: the shape of a verify step, its inputs and how many drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ACTIVATION = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One verify step of one GDN layer: batch requests, T drafts each, H key heads, HV value heads, K = V."""

    batch: int
    draft_tokens: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.draft_tokens

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[HV, V, K] of one request and layer."""
        return self.num_v_heads, self.head_dim, self.head_dim

    def __str__(self) -> str:
        return f"B={self.batch} T={self.draft_tokens} heads={self.num_v_heads}/{self.num_k_heads}"


@dataclass(frozen=True)
class Inputs:
    """q, k [B*T, H, K], v [B*T, HV, V], a, b [B*T, HV] in the activation dtype; A_log, dt_bias [HV] fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def rows(self, batch: int) -> list[torch.Tensor]:
        """q, k, v, a, b with the batch axis of its own: [B, T, ...]."""
        return [x.unflatten(0, (batch, -1)) for x in (self.q, self.k, self.v, self.a, self.b)]


def make_inputs(shape: Shape, generator: torch.Generator, packed: bool = True, dtype=ACTIVATION) -> Inputs:
    """Random inputs of mixed decay. `packed`: q, k, v are column slices of one buffer, as after the convolution."""
    device, tokens = generator.device, shape.tokens
    h, hv, dim = shape.num_k_heads, shape.num_v_heads, shape.head_dim

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator) * scale

    columns = (h * dim, h * dim, hv * dim)
    qkv = normal(tokens, sum(columns), scale=1.3).to(dtype)
    q, k, v = qkv.split(columns, dim=1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return Inputs(
        q.unflatten(1, (h, dim)),
        k.unflatten(1, (h, dim)),
        v.unflatten(1, (hv, dim)),
        normal(tokens, hv).to(dtype),
        normal(tokens, hv, scale=2.0).to(dtype),
        *decay_parameters(hv, device),
    )


def decay_parameters(num_v_heads: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log and dt_bias that spread the heads from slow to fast decay; fixed, as they are weights."""
    ramp = torch.linspace(0, 1, num_v_heads, device=device)
    return torch.log(0.05 + 1.95 * ramp), -9.0 + 10.0 * ramp.flip(0)


def acceptance_table(steps: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """int32 [steps, B]: accepted tokens of every step, uniform over 1..T."""
    size, device = (steps, shape.batch), generator.device
    return torch.randint(1, shape.draft_tokens + 1, size, device=device, generator=generator, dtype=torch.int32)
