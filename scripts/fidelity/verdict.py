"""From sums to figures and verdicts: relative L2 errors by position, ratios to the yardstick, growth, the bars."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .methods import STOCK_KERNEL, Method
from .study import Measured

POSITION_BAR = 2.0  # times the yardstick's error, in any window, of one scenario and of all
NOISE = 1.1  # what two growths, or the output errors of equal states, may differ by
ORDER = 1.25  # what the errors of one recurrence may differ by between two orders of its sums
QUANTITIES = ("out", "state")


@dataclass(frozen=True)
class Series:
    """Squared errors of one method and quantity, fp64 [windows, B, HV] each; 0 in `norm`: nothing was compared.

    Rows weigh the same, whatever the size of their values.
    """

    error: torch.Tensor
    norm: torch.Tensor
    yardstick: torch.Tensor

    def curve(self) -> torch.Tensor:
        """[windows, HV], relative error of each window."""
        return _relative(self.error, self.norm)

    def yardstick_curve(self) -> torch.Tensor:
        return _relative(self.yardstick, self.norm)

    def overall(self) -> torch.Tensor:
        """[HV], relative error over all positions."""
        return _relative(self.error.sum(0), self.norm.sum(0))

    def ratio(self) -> torch.Tensor:
        """[HV], overall error in units of the yardstick's."""
        return self.overall() / _relative(self.yardstick.sum(0), self.norm.sum(0))

    def ratio_by_row(self) -> torch.Tensor:
        """[B, HV], overall error of each scenario in units of the yardstick's."""
        return torch.sqrt(self.error.sum(0) / self.yardstick.sum(0))

    def worst_window(self) -> torch.Tensor:
        """[HV], the largest ratio of the two curves."""
        compared = (self.norm > 0).any(1)
        return torch.where(compared, self.curve() / self.yardstick_curve(), 0.0).amax(0)

    def worst_ratio(self) -> torch.Tensor:
        """[HV], the largest ratio to the yardstick in any one window and row."""
        ratio = torch.sqrt(self.error / self.yardstick)
        return torch.where(self.norm > 0, ratio, 0.0).amax((0, 1))

    def growth(self) -> torch.Tensor:
        """[HV], error of the last quarter of the positions / second quarter."""
        return _growth(self.error, self.norm)

    def yardstick_growth(self) -> torch.Tensor:
        return _growth(self.yardstick, self.norm)


def _relative(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """[..., B, HV] -> [..., HV]: root of the mean over rows of error / norm, rows without a comparison left out.

    A NaN error stays one.
    """
    compared = norm > 0
    share = torch.where(compared, error / norm, 0.0)
    return torch.sqrt(share.sum(-2) / compared.sum(-2))


def _growth(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    quarter = len(error) // 4
    early, late = slice(quarter, 2 * quarter), slice(len(error) - quarter, None)
    return _relative(error[late].sum(0), norm[late].sum(0)) / _relative(error[early].sum(0), norm[early].sum(0))


def series(measured: Measured, method: Method, quantity: str) -> Series:
    """`quantity`: out or state."""
    sums, yardstick = measured.sums, method.yardstick or method
    error = sums[f"{method.name}: {quantity}"]
    if quantity == "out":
        return Series(error, sums["out norm"], sums[f"{yardstick.name}: out"])
    return Series(error, sums[f"{method.name}: state norm"], sums[f"{method.name}: state yardstick"])


@dataclass(frozen=True)
class Check:
    """One bar: the figure that comes closest to it (or passes it farthest), and in which regime."""

    method: str
    what: str
    value: float
    bar: float
    regime: str

    @property
    def passed(self) -> bool:
        return self.value <= self.bar  # False for NaN


def _worst(method: str, what: str, values: torch.Tensor, bars: torch.Tensor, regimes: list[str]) -> Check:
    """The regime with the largest value / bar; NaN is larger than anything."""
    at = int(torch.where(values.isnan(), torch.inf, values / bars.clamp(min=1e-300)).argmax())
    return Check(method, what, float(values[at]), float(bars[at]), regimes[at])


def checks(measured: Measured) -> list[Check]:
    """Every bar of every judged method."""
    names = [regime.name for regime in measured.regimes]
    bars = torch.tensor([regime.bar for regime in measured.regimes], dtype=torch.float64)
    found = [_worst("windows", "|(I+A)^-1|", measured.inverse.amax(0), torch.full_like(bars, 1 + 1e-9), names)]
    for method in measured.methods:
        if not method.judged:
            continue
        for what in QUANTITIES:
            s = series(measured, method, what)
            # What reproduces the yardstick's own state has its error, not a smaller one.
            equal = NOISE if method.yardstick.name == STOCK_KERNEL else ORDER
            overall = bars.clamp(min=equal) if method.identical else bars
            found.append(_worst(method.name, f"{what}: overall / {method.yardstick.name}", s.ratio(), overall, names))
            position = torch.full_like(bars, POSITION_BAR)
            found.append(_worst(method.name, f"{what}: any window", s.worst_window(), position, names))
            found.append(_worst(method.name, f"{what}: any window and scenario", s.worst_ratio(), position, names))
            if len(s.error) >= 4:
                growth_bar = NOISE * s.yardstick_growth().clamp(min=1)
                found.append(_worst(method.name, f"{what}: growth", s.growth(), growth_bar, names))
        found += [_identity(measured, method, what, names) for what in method.identical]
    return found


def _identity(measured: Measured, method: Method, what: str, names: list[str]) -> Check:
    """Equal bits where the yardstick is SGLang's kernel, else an equal error: sums may be in another order."""
    if method.yardstick.name == STOCK_KERNEL:
        differing = measured.sums[f"{method.name}: differing {what}"].sum((0, 1))
        return _worst(method.name, f"{what}: elements unlike SGLang's", differing, torch.zeros_like(differing), names)
    ratio = series(measured, method, what).ratio()
    apart = torch.maximum(ratio, 1 / ratio)
    return _worst(method.name, f"{what}: error equal", apart, torch.full_like(ratio, ORDER), names)
