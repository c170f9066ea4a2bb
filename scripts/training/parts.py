"""Linear maps and norms whose parameters stay fp32 while they compute in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from training.shape import NORM_EPS


class Linear(nn.Linear):
    """Without bias, in the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), over the last dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), NORM_EPS).to(x.dtype)


class GatedNorm(nn.Module):
    """x / rms(x) * weight * silu(gate)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), NORM_EPS)
        return (normed * F.silu(gate.float())).to(gate.dtype)
