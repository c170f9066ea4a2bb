#!/usr/bin/env python3
"""Measure what every fold policy keeps of a long run: errors against fp64, next to the recurrence's own.

    PYTHONPATH=. python scripts/study_fidelity.py             # 131,072 tokens, T=4 and 8; needs a GPU
    PYTHONPATH=. python scripts/study_fidelity.py --naive     # 512 tokens on a CPU, by the plain PyTorch kernels

Batch rows are scenarios (keys, beta, values, acceptance), value heads are decay regimes; all methods see the same
tokens. Written are a JSON file and plots of the error against the position; the exit status is 1 if a bar is missed.
Without a GPU and without --naive, the kernels run in Triton's interpreter: only for a few tokens, rows and regimes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when it is imported

from bench.arguments import numbers
from bench.environment import environment, stamp_of
from fidelity.report import as_dict, checks_table, drift, errors_table, plot
from fidelity.scenarios import REGIMES, scenarios
from fidelity.study import Size, Study
from fidelity.verdict import QUANTITIES, checks
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_replayssm.policies import POLICIES


def parser(gpu: bool) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=131_072 if gpu else 512, help="a row (GPU: 131072, else 512)")
    p.add_argument("--window", type=int, help="tokens a window of statistics (default: 1024, or an eighth of --tokens)")
    p.add_argument("--T", type=numbers, default=[4, 8], help="draft tokens, e.g. 4,8")
    p.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES), help="comma separated")
    p.add_argument("--rows", type=int, default=24 if gpu else 6, help="scenarios, at most 24 (GPU: 24, else 6)")
    p.add_argument("--regimes", type=int, default=len(REGIMES), help="the first so many decay regimes")
    p.add_argument("--head-dim", type=int, default=128 if gpu else 64, help="K = V (GPU: 128, else 64)")
    p.add_argument("--naive", action="store_true", help="plain PyTorch kernels in place of the server's")
    p.add_argument("--seconds", type=float, default=420, help="stop by then, in whole windows, and report these")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON and plots")
    return p


def main(argv: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    p = parser(gpu)
    args = p.parse_args(argv)
    if unknown := set(args.policies) - set(POLICIES):
        p.error(f"no such policy: {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    if args.naive and gpu:
        p.error("--naive steps on the host: run it where no GPU is visible (CUDA_VISIBLE_DEVICES=)")
    window = args.window or max(1, min(1024, args.tokens // 8))
    args.tokens -= args.tokens % window
    console = Console() if sys.stdout.isatty() else Console(width=230)
    end = time.monotonic() + args.seconds

    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(), "options": vars(args) | {"out": None}, "results": []}
    stamp = stamp_of(report["environment"])
    path = args.out / f"fidelity-{stamp}.json"
    passed = True
    for i, T in enumerate(args.T):
        torch.manual_seed(args.seed)
        size = Size(args.tokens, window, T, args.head_dim, args.naive)
        device = torch.device("cuda" if gpu else "cpu")
        study = Study(size, scenarios(args.rows), list(REGIMES[: args.regimes]), args.policies, device)
        share = (end - time.monotonic()) / (len(args.T) - i)  # of the time left, for this draft length
        columns = TextColumn(f"T={T}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"), TimeRemainingColumn()
        with Progress(*columns, console=console) as bar, torch.no_grad():
            task = bar.add_task("", total=size.tokens)
            measured = study.run(share, lambda tokens, bar=bar, task=task: bar.update(task, completed=tokens))
        if measured.tokens < window:
            console.print(f"T={T}: {measured.tokens} tokens in {share:.0f} s, not one window of {window}")
            passed = False
            continue
        found = checks(measured)
        passed &= all(check.passed for check in found)
        report["results"].append(as_dict(measured, found))
        path.write_text(json.dumps(report, indent=1, default=str))
        for quantity in QUANTITIES:
            plot(args.out / f"fidelity-{stamp}-T{T}-{quantity}.png", measured, quantity)
            console.print(errors_table(measured, quantity))
        console.print(checks_table(measured, found))
        if "bf16" in args.policies and measured.tokens >= 4 * window:
            console.print(drift(measured, "bf16"), highlight=False)
        console.print(
            f"{measured.steps:,} steps in {measured.seconds:.0f} s, {measured.accepted:.2f} tokens accepted a step"
            + ("" if measured.tokens == size.tokens else f"; stopped at {measured.tokens:,} of {size.tokens:,} tokens")
        )
        del study, measured
    console.print(f"{'PASS' if passed else 'FAIL'}; wrote {path.name}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
