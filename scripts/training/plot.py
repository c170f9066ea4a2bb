"""The log as one figure."""

from __future__ import annotations

import json
from pathlib import Path

from training.trainer import LOG

SMOOTHING = 20


def draw(directory: Path) -> Path:
    """Losses against training time, and where the rows grow longer; the path of the PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in (directory / LOG).read_text().splitlines()]
    minutes = [record["seconds"] / 60 for record in records]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    curves = {"registers": [r["long"] for r in records], "stories": [r["story"] for r in records]}
    for j in range(len(records[0]["long_drafts"])):
        curves[f"registers, draft {j + 1}"] = [r["long_drafts"][j] for r in records]
    for name, values in curves.items():
        axes.plot(minutes, _smooth(values), label=name, linewidth=1)
    lengths = [record["longest"] for record in records]
    for n in range(1, len(records)):
        if lengths[n] != lengths[n - 1]:
            axes.axvline(minutes[n], color="0.8", zorder=0)
            axes.text(minutes[n], axes.get_ylim()[1], f" {lengths[n]}", va="top", fontsize=8, color="0.4")
    axes.set(xlabel="minutes", ylabel="cross-entropy, nats a token", yscale="log", title="Loss of the demo model")
    axes.legend(fontsize=8)
    path = directory / "loss.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _smooth(values: list[float]) -> list[float]:
    """Running mean."""
    windows = (values[max(0, n - SMOOTHING + 1) : n + 1] for n in range(len(values)))
    return [sum(window) / len(window) for window in windows]
