"""Fold in plain PyTorch; see `triton.py` for the contract."""

from __future__ import annotations

import torch

from ..recurrence import norm
from ..ring import CACHE_BASE, PLAN_ROW, PLAN_SLOT, WRITE_POS, Cursors, Ring


def folded_state(
    state: torch.Tensor, ring: Ring, row: int, base: int, count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """S_n of one layer and row, in `dtype`, by what the ring's policy records.

    Args:
        state: [HV, V, K], the checkpoint S_c.
        ring: the layer's ring, whose `row` holds `count` records from physical record `base` on.
    """
    if count == 0:
        return state.to(dtype)
    add = replayed if ring.spec.policy.inputs else with_factors
    return add(state, ring, row, base, count, dtype)


def replayed(state: torch.Tensor, ring: Ring, row: int, base: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The recurrence over the raw inputs of the records, one after the other; arguments of `folded_state`."""
    state = state.to(dtype)
    for j in range(count):
        at = (base + j) % ring.spec.records
        k = ring.k[row, :, at].to(dtype)
        k = (k / norm(k)).repeat_interleave(state.shape[0] // k.shape[0], dim=0)
        g, beta = ring.gates[row, :, at].to(dtype).unbind(-1)
        state = state * torch.exp(g)[:, None, None]
        d = beta[:, None] * (ring.v[row, :, at].to(dtype) - torch.einsum("hvk,hk->hv", state, k))
        state = state + d[:, :, None] * k[:, None, :]
    return state


def with_factors(state: torch.Tensor, ring: Ring, row: int, base: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """e^{G_n} S_c + sum_j e^{G_n - G_j} d'_j k_j^T; arguments of `folded_state`."""
    at = (base + torch.arange(count, device=state.device)) % ring.spec.records
    high, low = ring.g[row][:, at].to(dtype).unbind(-1)  # [HV, count]
    d = ring.d[row][:, at].to(dtype)  # [HV, count, V]
    k = ring.k[row][:, at].to(dtype).repeat_interleave(d.shape[0] // ring.k.shape[1], dim=0)  # [HV, count, K]
    weight = torch.exp((high[:, -1:] - high) + (low[:, -1:] - low))
    decay = torch.exp(high[:, -1]) * (1 + low[:, -1])
    return state.to(dtype) * decay[:, None, None] + torch.einsum("hjv,hjk->hvk", d * weight[..., None], k)


def fold(
    state: torch.Tensor,
    ring: Ring,
    cursors: Cursors,
    rows: torch.Tensor,
    slots: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """S_c <- S_n in all layers of the rows that have records, whose rings are empty afterwards."""
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        base, count = cursors.position[row].tolist()
        if row == 0 or slot < 0 or count == 0:
            continue
        for i in range(state.shape[0]):
            state[i, slot] = rounded(folded_state(state[i, slot], ring.layer(i), row, base, count, dtype), ring)
        cursors.position[row, CACHE_BASE] = (base + count) % cursors.spec.records
        cursors.position[row, WRITE_POS] = 0


def fold_due(state: torch.Tensor, ring: Ring, cursors: Cursors, batch: int, dtype: torch.dtype = torch.float32) -> None:
    """After `commit`: fold the step's rows that might not take another window, if the policy replays inputs."""
    if not ring.spec.policy.inputs:
        return
    rows, slots = cursors.plan[:batch, PLAN_ROW], cursors.plan[:batch, PLAN_SLOT]
    live = (rows > 0) & (slots >= 0)
    due = live & (cursors.position[rows.long(), WRITE_POS] >= ring.spec.full)
    fold(state, ring, cursors, rows[due], slots[due], dtype)
    cursors.counters[1] += int(due.sum())


def materialize(
    state: torch.Tensor,
    ring: Ring,
    cursors: Cursors,
    steps: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Between `verify` and `commit`: the states after chosen steps of the windows, written into slots of their own."""
    for n, (step, target) in enumerate(zip(steps.tolist(), targets.tolist(), strict=True)):
        slot, row = cursors.plan[n, [PLAN_SLOT, PLAN_ROW]].tolist()
        if row == 0 or slot < 0 or step < 0 or target < 0:
            continue
        base, count = cursors.position[row].tolist()
        for i in range(state.shape[0]):
            ahead = folded_state(state[i, slot], ring.layer(i), row, base, count + step + 1, dtype)
            state[i, target] = rounded(ahead, ring)


def rounded(state: torch.Tensor, ring: Ring) -> torch.Tensor:
    """A folded state as the policy keeps it: rounded to bf16 if the factors are, else as it is."""
    return state.bfloat16().to(state.dtype) if ring.spec.policy.factors == "bfloat16" else state
