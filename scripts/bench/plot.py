"""Time against batch, log-log, with the roofline of the byte model at the measured copy bandwidth."""

from __future__ import annotations

from pathlib import Path


def plot_times(
    path: Path, title: str, results: list[dict], roofline: dict[int, float], floor: dict[int, float]
) -> bool:
    """Write the figure to `path`; False when matplotlib is not there. `roofline` and `floor`: batch -> microseconds."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 6))
    timed = [r for r in results if "us" in r]
    for variant in dict.fromkeys(r["variant"] for r in timed):
        points = sorted((r["batch"], r["us"]["median"]) for r in timed if r["variant"] == variant)
        ours = variant.startswith("replayssm")
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=2.2 if ours else 1.2, label=variant)
    bounds = ((roofline, "bytes of our ring / copy bandwidth", "k--"), (floor, "state + activations", "k:"))
    for line, name, style in bounds:
        if line:
            axes.plot(*zip(*sorted(line.items()), strict=True), style, linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch (requests)")
    axes.set_ylabel("us per layer and step")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
