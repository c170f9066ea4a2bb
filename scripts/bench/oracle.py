"""The sequential recurrence in torch, in any precision: fp64 is the oracle, the error of fp32 is the bar."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from .shape import Inputs


def normalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrence(state: torch.Tensor, inputs: Inputs, rows: torch.Tensor, batch: int, dtype: torch.dtype):
    """Run the window of the requests `rows` from their `state` [rows, HV, V, K].

    Returns outputs [rows, T, HV, V] and the states after each token [rows, T, HV, V, K], both in `dtype`.
    """
    q, k, v, a, b = (x[rows] for x in inputs.rows(batch))
    state = state.to(dtype)
    group = v.shape[2] // q.shape[2]
    gate = a.to(dtype) + inputs.dt_bias.to(dtype)
    log_decay = -torch.exp(inputs.A_log.to(dtype)) * softplus(gate, threshold=20.0 if dtype == torch.float32 else 1e9)
    beta = torch.sigmoid(b.to(dtype))
    q = (normalised(q, dtype) * q.shape[-1] ** -0.5).repeat_interleave(group, 2)
    k = normalised(k, dtype).repeat_interleave(group, 2)
    v = v.to(dtype)
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = state * torch.exp(log_decay[:, t])[..., None, None]
        delta = beta[:, t][..., None] * (v[:, t] - (state * k[:, t][:, :, None, :]).sum(-1))
        state = state + delta[..., None] * k[:, t][:, :, None, :]
        outputs.append((state * q[:, t][:, :, None, :]).sum(-1))
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


class RelativeError:
    """Relative L2 error over everything added to it."""

    def __init__(self) -> None:
        self.error = self.reference = 0.0

    def add(self, got: torch.Tensor, reference: torch.Tensor) -> None:
        self.error += (got.double() - reference).square().sum().item()
        self.reference += reference.square().sum().item()

    @property
    def value(self) -> float | None:
        """None when nothing was added; NaN stays NaN."""
        return (self.error / self.reference) ** 0.5 if self.reference else None
