"""Fold in plain PyTorch; see `triton.py` for the contract."""

from __future__ import annotations

import torch

from ..ring import CACHE_BASE, WRITE_POS, Cursors, Ring


def folded_state(
    state: torch.Tensor, ring: Ring, row: int, base: int, count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """S_n = e^{G_n} S_c + sum_j e^{G_n - G_j} d'_j k_j^T of one layer and row, in `dtype`.

    Args:
        state: [HV, V, K], the checkpoint S_c.
        ring: the layer's ring, whose `row` holds `count` records from physical record `base` on.
    """
    if count == 0:
        return state.to(dtype)
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
            state[i, slot] = folded_state(state[i, slot], ring.layer(i), row, base, count, dtype)
        cursors.position[row, CACHE_BASE] = (base + count) % cursors.spec.records
        cursors.position[row, WRITE_POS] = 0
