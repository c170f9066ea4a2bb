"""Convolution and rollback in plain PyTorch; see `triton.py` for the contracts."""

from __future__ import annotations

import torch

from ..ring import PLAN_ROW, PLAN_SLOT, Cursors


def convolve(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    windows: torch.Tensor,
    cursors: Cursors,
    draft_tokens: int,
) -> torch.Tensor:
    """out[t] = silu(bias + sum_j weight[:, j] input[t - (W - 1) + j]), inputs before the window from the state."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for n, window in enumerate(x.unflatten(0, (-1, draft_tokens))):
        slot, row = cursors.plan[n, PLAN_SLOT], cursors.plan[n, PLAN_ROW]
        if slot >= 0 and row > 0:
            windows[n, :draft_tokens] = window
            inputs = torch.cat([state[slot].T.to(x.dtype), window])
            acc = torch.zeros(window.shape, device=x.device) if bias is None else bias.float().expand(window.shape)
            for j in range(width):
                acc = acc + (inputs[j : j + draft_tokens] * weight[:, j]).float()
            result = torch.nn.functional.silu(acc) if activation else acc
            out[n * draft_tokens : (n + 1) * draft_tokens] = result
    return out


def commit_conv(
    state: torch.Tensor,
    windows: torch.Tensor,
    cursors: Cursors,
    steps: torch.Tensor,
    track_steps: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
) -> None:
    """The state after input s is the last W - 1 of (state, inputs 0..s)."""
    width = state.shape[-1]

    def after(n: int, step: int) -> torch.Tensor:
        old = state[:, cursors.plan[n, PLAN_SLOT]]
        inputs = torch.cat([old, windows[:, n, : step + 1].transpose(1, 2).to(state.dtype)], -1)
        return inputs[:, :, inputs.shape[-1] - width :]

    for n in range(steps.numel()):
        slot, row = cursors.plan[n, PLAN_SLOT], cursors.plan[n, PLAN_ROW]
        if slot < 0 or row <= 0:
            continue
        if track_steps is not None and track_steps[n] >= 0 and track_slots[n] >= 0:
            state[:, track_slots[n]] = after(n, int(track_steps[n]))
        if steps[n] >= 0:
            state[:, slot] = after(n, int(steps[n])).clone()
