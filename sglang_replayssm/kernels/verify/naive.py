"""Verify in plain PyTorch: rebuild S_n, then run the recurrence over the window; see `triton.py` for the contract."""

from __future__ import annotations

import torch

from ..fold.naive import folded_state, rounded
from ..recurrence import norm, recurrence
from ..ring import Cursors, Ring


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring: Ring,
    cursors: Cursors,
    draft_tokens: int,
    out: torch.Tensor | None = None,
    out_fp32: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The kernel's contract; `dtype` is that of the arithmetic (records keep the ring's dtypes)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    for n in range(q.shape[0] // draft_tokens):
        slot, row, base, count, fold = cursors.plan[n, :5].tolist()
        window = slice(n * draft_tokens, (n + 1) * draft_tokens)
        if slot < 0:
            out[window] = 0
            if out_fp32 is not None:
                out_fp32[window] = 0
            continue

        current = folded_state(state[slot], ring, row, base, count, dtype)
        tokens = [x[None, window] for x in (q, k, v, a, b)]
        step = recurrence(*tokens, A_log, dt_bias, current[None], dtype)
        out[window] = step.out[0].to(out.dtype)
        if out_fp32 is not None:
            out_fp32[window] = step.out[0].to(out_fp32.dtype)
        if fold:
            state[slot] = rounded(current, ring)

        _record(ring, row, base, count, fold, [x[0] for x in tokens], step, dtype)
    return out


def _record(ring: Ring, row: int, base: int, count: int, fold: int, tokens: list[torch.Tensor], step, dtype) -> None:
    """What the policy records of one window, behind the row's `count` records."""
    _, k, v, _, b = tokens
    at = (base + count + torch.arange(len(k), device=k.device)) % ring.spec.records
    policy, unit = ring.spec.policy, norm(k.to(dtype))
    new = {"k": k / unit if policy.factors == "bfloat16" else k}
    if policy.factors is not None:
        last = ring.g[row, :, (base + count - 1) % ring.spec.records].double().sum(-1)  # high + low
        total = step.log_decay[0].double().cumsum(0) + (0 if fold or count == 0 else last)
        high = total.to(ring.g.dtype)
        new["g"] = torch.stack([high, (total - high).to(ring.g.dtype)], -1)
        scale = 1 if policy.factors == "bfloat16" else unit.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
        new["d"] = step.deltas[0] / scale
    if policy.inputs:
        new["v"] = v
        new["gates"] = torch.stack([step.log_decay[0], torch.sigmoid(b.to(dtype))], -1)
    for name, value in new.items():
        buffer = getattr(ring, name)
        buffer[row, :, at] = value.to(buffer.dtype).transpose(0, 1)
