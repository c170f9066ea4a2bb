"""Soak: a bounded random workload against SGLang's real engine with the ring, and the same requests against stock.

    python scripts/soak.py                                         # 8 minutes on a GPU
    python scripts/soak.py --seconds 300 --radix extra_buffer      # with the prefix cache
    python scripts/soak.py --fold every-commit --cache-len 8 --seed 7

Arrivals, lengths, shared prefixes, turns of conversations, stops, copies, sampling and aborts are random, a function of
--seed. Then a stock engine answers every finished greedy request again: first differences must be near ties, and where
stock differs from itself at other batch sizes shows what those are (evaluation/near_ties.py). Of sampled and aborted
requests the life cycle is checked. Whenever nothing runs, no row, slot or KV token may be held.

Without a GPU the engine runs on the CPU, its kernels interpreted. Exit status 1 on a mismatch, leak or crash.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench.environment import environment, stamp_of
from bench.report import wide_console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from soak import settings, verdict, workload
from soak.side import Side, run_side

from sglang_replayssm.policies import POLICIES
from sglang_replayssm.tiny import ARCHITECTURES, ZERO_LOGIT_TOKEN

# Of the time beside the two starts. A replay waits for no arrivals, but also shows stock against itself.
SHARE = 0.35
GRACE = 90
LINES = 20


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seconds", type=float, default=480, help="of the whole run, both starts included (default: 480)")
    p.add_argument("--fold", choices=POLICIES, default="fp32")
    p.add_argument("--cache-len", type=int, default=16, help="window of the ring")
    p.add_argument("--concurrency", type=int, help="requests that run at once (default: 64 on a GPU, 3 on a CPU)")
    p.add_argument("--rate", type=float, help="mean arrivals a second (default: 40 on a GPU, 1 on a CPU)")
    p.add_argument("--radix", choices=settings.RADIX, default="off", help="prefix cache, by its mamba strategy")
    p.add_argument("--kv-tokens", type=int, help="KV memory (default: little, so that requests are retracted)")
    p.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_next", help="of the tiny model")
    p.add_argument("--model", type=Path, help="folder of another model with an MTP layer (default: the tiny one)")
    p.add_argument("--out", type=Path, default=Path("results"))
    return p


def main(argv: list[str] | None = None) -> int:
    options, console, begin = parser().parse_args(argv), wide_console(), time.monotonic()
    on_gpu = torch.cuda.is_available()
    options.concurrency = options.concurrency or (64 if on_gpu else 3)
    options.rate = options.rate or (40.0 if on_gpu else 1.0)
    name = "GPU" if on_gpu else "CPU"
    sizes: workload.Sizes = getattr(workload, name)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        model = options.model or settings.write_model(Path(scratch) / "model", options.architecture, on_gpu)
        arguments, env = settings.engine(options, model, sizes, on_gpu)
        job = {"sizes": name, "probe": None if options.model else ZERO_LOGIT_TOKEN, "share": SHARE}
        job |= {key: getattr(options, key) for key in ("seed", "seconds", "concurrency", "rate")}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:

            def run(title: str, job: dict[str, Any], timeout: float) -> Side:
                counts, task = {}, progress.add_task(f"{title}: starting")

                def show(event: dict[str, Any]) -> None:
                    counts[event["event"]] = counts.get(event["event"], 0) + 1
                    progress.update(task, description=f"{title}: " + ", ".join(f"{n} {k}" for k, n in counts.items()))

                side = run_side(job, Path(scratch) / title, env, timeout, show)
                progress.update(task, total=1, completed=1)
                return side

            ring = run("ring", {**job, "arguments": arguments | settings.ring(options)}, options.seconds + GRACE)
            took = time.monotonic() - begin
            # Whatever the ring's answers took on a machine that others use too, stock may take longer.
            patience = max(options.seconds + GRACE - took, 2 * took)
            job["left"] = options.seconds - took
            sent = verdict.asked(ring, options.seed, sizes, options.rate)
            answers = verdict.comparable(ring, sent)
            stock = run("stock", {**job, "arguments": arguments, "answers": answers}, patience) if answers else None
        found = verdict.judge(ring, stock, sent, settings.vocabulary(model))
    report = (ring.of("done") or [{}])[0].get("ring") or {}
    if not ring.crash and not report.get("active"):
        found.crashes.append(f"the ring was not active: {'; '.join(report.get('reasons', [])) or 'no report'}")
    result = {"environment": environment(), "options": vars(options), "seconds": time.monotonic() - begin}
    result |= {"ring": report, "pools": [event["pools"] for event in ring.of("pools")], **found.as_json()}
    options.out.mkdir(parents=True, exist_ok=True)
    stamp = stamp_of(result["environment"])
    path = options.out / f"soak-{stamp}.json"
    path.write_text(json.dumps(result, indent=1, default=str))
    console.print(table(options, found, report))
    for kind in ("mismatches", "leaks", "crashes"):
        for line in getattr(found, kind)[:LINES]:
            console.print(f"{kind}: {line}", markup=False, highlight=False)
    console.print(f"wrote {path.name}", highlight=False)
    return 0 if found.ok else 1


def table(options: argparse.Namespace, found: verdict.Verdict, report: dict[str, Any]) -> Table:
    """Counts, differences and the three zeros."""
    shown = Table(title=f"soak: fold {options.fold}, prefix cache {options.radix}, seed {options.seed}")
    shown.add_column("what")
    shown.add_column("count", justify="right")
    for name, count in found.counts.items():
        shown.add_row(name, str(count))
    shown.add_row("verified rows, folds", f"{report.get('verify_rows', '-')}, {report.get('folds', '-')}")
    for name, differences in (("ring", found.differences), ("stock", found.stock_differences)):
        largest = max((d.gap for d in differences), default=0.0)
        shown.add_row(f"first differences, {name} against stock", f"{len(differences)} (largest gap {largest:.3g})")
    shown.add_section()
    for kind in ("mismatches", "leaks", "crashes"):
        count = len(getattr(found, kind))
        shown.add_row(kind, f"[{'red' if count else 'green'}]{count}[/]")
    return shown


if __name__ == "__main__":
    sys.exit(main())
