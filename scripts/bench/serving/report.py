"""Tables and figure of the end-to-end benchmark."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table


def throughput_table(runs: list[dict], concurrency: list[int]) -> Table:
    """Output tokens/s and TPOT, off and on, and the gain."""
    table = Table(title="output tokens/s (median of waves) and median TPOT", title_justify="left")
    for column in ("concurrency", "off tok/s", "on tok/s", "gain %", "off TPOT ms", "on TPOT ms"):
        table.add_column(column, justify="right")
    by = {(r["side"], p["concurrency"]): p for r in runs for p in r["points"]}

    def text(point: dict | None, key: str, digits: int) -> str:
        return f"{point[key]:.{digits}f}" if point else "-"

    for n in concurrency:
        off, on = by.get(("off", n)), by.get(("on", n))
        gain = f"{100 * (on['tokens_per_second'] / off['tokens_per_second'] - 1):+.1f}" if off and on else "-"
        rates = (text(p, "tokens_per_second", 0) for p in (off, on))
        latencies = (text(p, "median_tpot_ms", 2) for p in (off, on))
        table.add_row(str(n), *rates, gain, *latencies)
    return table


def memory_table(runs: list[dict]) -> Table:
    """GiB of state, scratch (copies or ring) and KV cache."""
    table = Table(title="memory, GiB", title_justify="left")
    for column in ("side", "requests", "state", "spec scratch", "KV cache", "KV tokens", "start s"):
        table.add_column(column, justify="right")
    for r in runs:
        pools = r.get("pools")
        if pools:
            sizes = (f"{pools[key]:.2f}" for key in ("state", "scratch", "kv"))
            start = f"{r['startup_seconds']:.0f}"
            table.add_row(r["side"], str(pools["requests"]), *sizes, str(pools["kv_tokens"]), start)
    return table


def fixed_memory_table(runs: list[dict]) -> Table:
    """Largest N without retraction and the throughput there."""
    table = Table(title="fixed memory", title_justify="left")
    for column in ("side", "N", "ran", "retractions", "tok/s", "TPOT ms", "KV tokens", "state", "scratch", "note"):
        table.add_column(column, justify="right")
    for r in runs:
        wave, pools = r.get("wave"), r.get("pools")
        table.add_row(
            r["side"],
            str(r["n"]),
            "yes" if wave else "no",
            str(wave["retractions"]) if wave else "-",
            f"{wave['tokens_per_second']:.0f}" if wave else "-",
            f"{wave['median_tpot_ms']:.2f}" if wave else "-",
            str(pools["kv_tokens"]) if pools else "-",
            f"{pools['state']:.2f}" if pools else "-",
            f"{pools['scratch']:.2f}" if pools else "-",
            (r.get("error") or "")[:60],
        )
    return table


def plot(path: Path, runs: list[dict], title: str) -> bool:
    """Output tokens/s against concurrency; False when matplotlib is not there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for r in runs:
        points = [(p["concurrency"], p["tokens_per_second"]) for p in r["points"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"flag {r['side']}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("output tokens/s")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
