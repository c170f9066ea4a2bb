"""The study as a dictionary for JSON, as tables, and as a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from .study import Measured
from .verdict import QUANTITIES, Check, series


def as_dict(measured: Measured, found: list[Check]) -> dict:
    """Everything but the raw sums: sizes, scenarios, figures a method and regime, curves, verdicts."""
    regimes = [regime.name for regime in measured.regimes]
    methods = {}
    for method in measured.methods:
        of = methods[method.name] = {
            "judged": method.judged,
            "yardstick": method.yardstick.name if method.yardstick else None,
        }
        for what in QUANTITIES:
            s = series(measured, method, what)
            figures = {"overall": s.overall(), "ratio": s.ratio()}
            figures |= {"worst_window": s.worst_window(), "worst_window_and_scenario": s.worst_ratio()}
            if len(s.error) >= 4:
                figures |= {"growth": s.growth(), "yardstick_growth": s.yardstick_growth()}
            figures["ratio_by_scenario"] = s.ratio_by_row().T  # a list a regime, like
            figures["curve"], figures["yardstick_curve"] = s.curve().T, s.yardstick_curve().T
            of[what] = {key: dict(zip(regimes, x.tolist(), strict=True)) for key, x in figures.items()}
    return {
        "size": asdict(measured.size),
        "tokens": measured.tokens,
        "steps": measured.steps,
        "seconds": round(measured.seconds, 1),
        "accepted_per_step": measured.accepted,
        "regimes": [asdict(regime) for regime in measured.regimes],
        "scenarios": [row.as_dict() for row in measured.rows],
        "largest_inverse_entry": dict(zip(regimes, measured.inverse.amax(0).tolist(), strict=True)),
        "inverse_samples": measured.inverse_samples * len(measured.rows),
        "methods": methods,
        "checks": [asdict(check) | {"passed": check.passed} for check in found],
        "passed": all(check.passed for check in found),
    }


def errors_table(measured: Measured, quantity: str) -> Table:
    """A line a method, a column a regime: overall relative error, as a multiple of the yardstick's, and growth."""
    size = measured.size
    title = f"{quantity} error, T={size.T}, {measured.tokens:,} tokens, {len(measured.rows)} scenarios a regime"
    caption = (
        "overall, times that of the method's yardstick at the same moments, and (last quarter / second quarter); "
        "below, the largest such ratio in any one window of any one scenario"
    )
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("method")
    for regime in measured.regimes:
        table.add_column(regime.name, justify="right")
    for method in measured.methods:
        s = series(measured, method, quantity)
        ratio = [f" {r:.2f}x" if r < 10 else f" {r:.0e}x" for r in s.ratio().tolist()]
        growth = [f" ({g:.2f})" for g in s.growth().tolist()] if len(s.error) >= 4 else [""] * len(ratio)
        cells = zip(s.overall().tolist(), ratio, growth, strict=True)
        worst = [f"\n{x:.2f}x" if method.yardstick else "" for x in s.worst_ratio().tolist()]
        table.add_row(method.name, *(f"{e:.1e}{r}{g}{w}" for (e, r, g), w in zip(cells, worst, strict=True)))
    return table


def drift(measured: Measured, name: str) -> str:
    """Whether the state error of a method that is not judged keeps growing, in a sentence."""
    method = next(m for m in measured.methods if m.name == name)
    s = series(measured, method, "state")
    error, growth, reference = s.overall(), s.growth(), s.yardstick_growth()
    at = int(growth.argmax())
    return (
        f"{name}: state error {error.min():.1e} to {error.max():.1e}, in the last quarter at most {growth[at]:.2f} "
        f"times the second's (decay: {measured.regimes[at].name}; {method.yardstick.name} there {reference[at]:.2f})"
    )


def checks_table(measured: Measured, found: list[Check]) -> Table:
    table = Table(title=f"bars, T={measured.size.T}", title_justify="left")
    for column in ("method", "bar"):
        table.add_column(column)
    for column in ("found", "at most"):
        table.add_column(column, justify="right")
    for column in ("in regime", ""):
        table.add_column(column)
    for c in found:
        verdict = "[green]PASS[/]" if c.passed else "[bold red]FAIL[/]"
        table.add_row(c.method, c.what, f"{c.value:.3g}", f"{c.bar:.3g}", c.regime, verdict)
    return table


def plot(path: Path, measured: Measured, quantity: str) -> bool:
    """Error against position, a panel a regime; False when matplotlib is not there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    count = len(measured.regimes)
    columns = min(4, count)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3 * lines + 1), squeeze=False, sharex=True)
    for at, (panel, regime) in enumerate(zip(axes.flat, measured.regimes, strict=False)):
        for i, method in enumerate(measured.methods):
            curve = series(measured, method, quantity).curve()[:, at].tolist()
            position = [(n + 0.5) * measured.size.window for n in range(len(curve))]
            # Equal errors hide each other: the later a line is drawn, the more of those below it lets through.
            style = (0, (6, 2 * i)) if i else "-"
            panel.plot(position, curve, linestyle=style, linewidth=1.8 if method.judged else 1.1, label=method.name)
        panel.set_yscale("log")
        panel.set_title(regime.name, fontsize=10)
        panel.grid(True, which="both", alpha=0.3)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    for panel in axes[-1]:
        panel.set_xlabel("position (tokens)")
    for line in axes:
        line[0].set_ylabel(f"relative {quantity} error")
    size = measured.size
    figure.suptitle(f"Error against fp64, T={size.T}, K=V={size.head_dim}, windows of {size.window:,} tokens")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
