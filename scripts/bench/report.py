"""Results as rich tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .compiled import Resources

BASELINE = "stock"


def error_text(value: float | None, before_cast: bool = True) -> str:
    """`*` marks an error that contains the cast of the output to bf16."""
    if value is None:
        return "-"
    return f"{value:.1e}" + ("" if before_cast else "*")


def times_table(title: str, results: list[dict], yardstick: str | None) -> Table:
    """One shape: a line a variant, fastest first, with ratios to `yardstick` (ours) and to stock."""
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    table.add_column("configuration")
    ratios = (f"/ {yardstick or '-'}", "x stock")
    for column in ("us", "p25-p75", *ratios, "model MB", "GB/s", "copy %", "out err", "state err"):
        table.add_column(column, justify="right")
    timed = sorted((r for r in results if "us" in r), key=lambda r: r["us"]["median"])
    of = {r["variant"]: r["us"]["median"] for r in timed}

    def ratio(numerator: float | None, denominator: float | None) -> str:
        return f"{numerator / denominator:.2f}" if numerator and denominator else "-"

    for r in timed:
        us, errors = r["us"], r["errors"]
        table.add_row(
            r["variant"],
            r["config"],
            f"{us['median']:.2f}",
            f"{us['p25']:.2f}-{us['p75']:.2f}",
            ratio(us["median"], of.get(yardstick)),
            ratio(of.get(BASELINE), us["median"]),
            f"{r['model_bytes'] / 1e6:.2f}",
            f"{r['achieved_bytes_per_s'] / 1e9:.0f}",
            f"{100 * r['share_of_copy']:.0f}",
            error_text(errors["output"], errors["before_cast"]),
            error_text(errors["state"]),
        )
    for r in results:
        if "us" not in r:
            table.add_row(r["variant"], f"n/a: {r['reason']}"[:100])
    if timed:
        errors = timed[0]["errors"]
        output, state = (error_text(errors[f"reference_{what}"]) for what in ("output", "state"))
        table.caption = f"errors against fp64; the sequential fp32 recurrence in torch has {output} and {state}"
    return table


def resources_table(kernels: list[tuple[str, str, Resources]]) -> Table:
    """(first used by, shape, kernel)."""
    table = Table(title="compiled kernels", title_justify="left")
    for column in ("first used by", "shape", "kernel"):
        table.add_column(column)
    for column in ("registers", "spills", "shared", "warps"):
        table.add_column(column, justify="right")
    for variant, shape, r in kernels:
        table.add_row(variant, shape, r.kernel, *(str(x) for x in (r.registers, r.spills, r.shared, r.warps)))
    return table


def matrix_table(title: str, results: list[dict], batches: list[int]) -> Table:
    """All batches at a glance: microseconds, a line a variant."""
    table = Table(title=title, title_justify="left")
    table.add_column("us per layer and step")
    for batch in batches:
        table.add_column(f"B={batch}", justify="right")
    times = {(r["variant"], r["batch"]): r["us"]["median"] for r in results if "us" in r}
    for variant in dict.fromkeys(r["variant"] for r in results):
        cells = [times.get((variant, batch)) for batch in batches]
        table.add_row(variant, *("-" if c is None else f"{c:.1f}" if c >= 10 else f"{c:.2f}" for c in cells))
    return table


def wide_console() -> Console:
    """A console that does not wrap when its output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=190)
