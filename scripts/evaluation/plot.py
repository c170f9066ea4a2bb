"""Two runs in one figure."""

from __future__ import annotations

from pathlib import Path

from evaluation.records import Record
from evaluation.stats import Estimate


def draw(path: Path, runs: dict[str, list[Record]], accuracies: dict[str, Estimate]) -> None:
    """Accuracy with its interval, and acceptance against output length answer by answer, loops marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(1, 2), layout="constrained")
    for index, (name, records) in enumerate(runs.items()):
        color = f"C{index}"
        value = accuracies[name]
        below_above = [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]
        left.errorbar(index, value.value, yerr=below_above, fmt="o", capsize=6, color=color)
        for looped, marker in ((False, "."), (True, "x")):
            told = [r for r in records if r.verify_steps and r.loops == looped]
            if told:
                label = f"{name}, loops" if looped else name
                steps = [r.completion_tokens / r.verify_steps for r in told]
                right.scatter(
                    [r.completion_tokens for r in told], steps, marker=marker, color=color, label=label, alpha=0.6
                )
    left.set_xticks(range(len(runs)), list(runs))
    left.set_xlim(-0.5, len(runs) - 0.5)
    left.set_ylabel("accuracy, 95 % interval")
    right.set_xlabel("output tokens")
    right.set_ylabel("acceptance length")
    if right.collections:
        right.set_xscale("log")
        for plain in (right.xaxis.set_major_formatter, right.xaxis.set_minor_formatter):
            plain(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        right.legend()
    else:
        right.text(0.5, 0.5, "the servers told no acceptance", ha="center", transform=right.transAxes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
