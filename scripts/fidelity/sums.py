"""Sums of squared errors by position, accumulated on the device."""

from __future__ import annotations

import torch


class Sums:
    """Named sums over windows of positions, one launch a step.

    Attributes:
        names: what is summed.
        table: fp64 [bins + 1, B, len(names), HV]; the last bin takes what lies behind the end and is never read.
    """

    def __init__(self, names: list[str], bins: int, batch: int, heads: int, device: torch.device):
        self.names = names
        self.table = torch.zeros(bins + 1, batch, len(names), heads, dtype=torch.float64, device=device)
        self._row = torch.arange(batch, device=device)

    def add(self, bins: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Add one [B, HV] value a name at int64 [B] bins; bins past the end count as the last."""
        stacked = torch.stack([values[name].double() for name in self.names], 1)
        at = bins.clamp(max=len(self.table) - 1) * len(self._row) + self._row  # no two alike: a deterministic sum
        self.table.view(-1, stacked[0].numel()).index_add_(0, at, stacked.flatten(1))

    def by_name(self, bins: int) -> dict[str, torch.Tensor]:
        """Name -> fp64 [bins, B, HV] of the first `bins` windows, on the host."""
        table = self.table[:bins].cpu()
        return {name: table[:, :, i] for i, name in enumerate(self.names)}


def squares(x: torch.Tensor, oracle: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum of squared differences in fp64 over `dims`."""
    return (x.double() - oracle).square().sum(dims)
