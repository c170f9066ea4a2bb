"""Two result files of eval_gsm8k.py or eval_aime.py side by side, for example the ring on against off.

    python scripts/compare_evals.py results/gsm8k-off.jsonl results/gsm8k-on.jsonl

Compares the questions and repeats that both files hold: one table, and one figure beside the second file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

from evaluation.loops import LONG_LOOP, LOOP
from evaluation.plot import draw
from evaluation.records import Record, ResultFile, acceptance_length, outcomes
from evaluation.stats import CONFIDENCE, Estimate, Paired, accuracy, paired
from rich.console import Console
from rich.table import Table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--plot", type=Path, help="default: compare-A-B.png beside B")
    options = parser.parse_args(argv)
    files = [ResultFile(options.a), ResultFile(options.b)]
    tasks = [file.run.get("settings", {}).get("task") for file in files]
    if None in tasks or tasks[0] != tasks[1]:
        print(f"error: these are results of {tasks[0]} and {tasks[1]}", file=sys.stderr)
        return 1
    a, b = common(files[0].records, files[1].records)
    if not a:
        print("error: the files have no question in common", file=sys.stderr)
        return 1
    names = (options.a.stem, options.b.stem) if options.a.stem != options.b.stem else (str(options.a), str(options.b))
    console = Console()
    for name in sorted(files[0].run["settings"]):
        values = [file.run["settings"].get(name) for file in files]
        if values[0] != values[1]:
            console.print(f"note: the runs differ in {name}: {values[0]!r} and {values[1]!r}", markup=False)
    accuracies = {name: accuracy(outcomes(records)) for name, records in zip(names, (a, b), strict=True)}
    console.print(table(tasks[0], names, (a, b), accuracies))
    console.print(verdict(paired(outcomes(a), outcomes(b))), markup=False)
    if sum(r.loops for r in a) != sum(r.loops for r in b):
        console.print("Loops raise the acceptance length: compare it where nothing loops.")
    plot = options.plot or options.b.with_name(f"compare-{options.a.stem}-{options.b.stem}.png")
    draw(plot, dict(zip(names, (a, b), strict=True)), accuracies)
    print(plot)
    return 0


def common(a: list[Record], b: list[Record]) -> tuple[list[Record], list[Record]]:
    """The records whose question and repeat both sides have, in one order."""
    left, right = ({record.key: record for record in side} for side in (a, b))
    keys = sorted(left.keys() & right.keys())
    return [left[key] for key in keys], [right[key] for key in keys]


def table(task: str, names: tuple[str, str], sides: tuple, accuracies: dict[str, Estimate]) -> Table:
    """One column a file."""
    result = Table(title=f"{task}, {len(sides[0])} answers each")
    result.add_column("")
    for name in names:
        result.add_column(name, justify="right")

    def row(label: str, value) -> None:
        result.add_row(label, *(value(side) for side in sides))

    result.add_row("accuracy", *(f"{accuracies[name].value:.4f}" for name in names))
    result.add_row(
        f"{CONFIDENCE:.0%} interval", *(f"{accuracies[name].low:.4f} to {accuracies[name].high:.4f}" for name in names)
    )
    row("no answer found", lambda side: str(sum(r.answer is None for r in side)))
    row("truncated", lambda side: str(sum(r.truncated for r in side)))
    row(f"loops (>= {LOOP} times)", lambda side: str(sum(r.loops for r in side)))
    row(f"loops (>= {LONG_LOOP} times)", lambda side: str(sum(r.loops_long for r in side)))
    row("output tokens, mean", lambda side: f"{mean(r.completion_tokens for r in side):.1f}")
    row("acceptance length", lambda side: _length(side))
    row("... of answers without loops", lambda side: _length([r for r in side if not r.loops]))
    return result


def _length(records: list[Record]) -> str:
    value = acceptance_length(records)
    return "-" if value is None else f"{value:.3f}"


def verdict(result: Paired) -> str:
    """The paired test in one line."""
    d = result.difference
    return (
        f"B - A: {d.value:+.4f} ({CONFIDENCE:.0%} interval {d.low:+.4f} to {d.high:+.4f}); right only in A "
        f"{result.only_a}, only in B {result.only_b}; {result.test}: p = {result.p_value:.3g}"
    )


if __name__ == "__main__":
    sys.exit(main())
