#!/usr/bin/env python3
"""Time the GDN verify step, ours and the peers', side by side in one run on one GPU.

    python scripts/fetch_peers.py                     # once, where a package registry is reachable
    PYTHONPATH=. python scripts/bench_verify.py       # T=4, 32/16 heads, batches 1..256, every variant

Every variant is first checked against an fp64 oracle. Then each is captured as a CUDA graph of one whole step (plan,
30 layers' verify, commit) and replayed over 72 steps of random acceptance, of which 12 are skipped; the L2 is filled
with other data between steps. Reported is the median over repetitions of the mean time per layer and step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.arguments import numbers
from bench.environment import environment, stamp_of
from bench.plot import plot_times
from bench.precompile import precompile
from bench.registry import NAMES, TUNED
from bench.report import matrix_table, resources_table, times_table, wide_console
from bench.session import Options, Session
from bench.shape import Shape
from bench.timing import Timer, copy_bandwidth
from bench.traffic import floor_bytes

BATCHES = [1, 8, 16, 32, 64, 128, 256]
YARDSTICKS = ("replayssm-hopper", "replayssm-triton", "replayssm")


def head_layouts(text: str) -> list[tuple[int, int]]:
    """`32/16,8/4`: value heads / key heads."""
    layouts = [tuple(int(n) for n in part.split("/")) for part in text.split(",")]
    if any(len(layout) != 2 or layout[0] % layout[1] for layout in layouts):
        raise argparse.ArgumentTypeError("give value/key heads such as 32/16, the second dividing the first")
    return layouts


def variant_names(text: str) -> list[str]:
    """Names or prefixes, comma separated."""
    parts = text.split(",")
    unknown = [part for part in parts if not part or not any(name.startswith(part) for name in NAMES)]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such variant: {', '.join(unknown)!r}; there are {', '.join(NAMES)}")
    return [name for name in NAMES if name.startswith(tuple(parts))]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", type=variant_names, default=list(NAMES), help="names or prefixes, comma separated")
    p.add_argument("--batches", type=numbers, default=BATCHES)
    p.add_argument("--T", type=numbers, default=[4], help="draft tokens, e.g. 2,4,8")
    p.add_argument("--heads", type=head_layouts, default=[(32, 16)], help="value/key heads, e.g. 32/16,8/4")
    p.add_argument("--window", type=int, default=16, help="W of our rings")
    p.add_argument("--layers", type=int, default=30, help="layers in one graph")
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--seconds", type=float, default=420, help="after this no repetition beyond the third is begun")
    p.add_argument("--jobs", type=int, default=12, help="processes that compile in parallel; 0 compiles as it goes")
    p.add_argument("--quick", action="store_true", help="batches 1, 16, 64, 256 and three repetitions")
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON and plots")
    p.add_argument("--list", action="store_true", help="print the variants and exit")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = wide_console()
    if args.list:
        console.print("\n".join(NAMES))
        return 0
    if not torch.cuda.is_available():
        console.print("bench_verify needs an NVIDIA GPU")
        return 2
    if args.quick:
        args.batches, args.repetitions = [b for b in args.batches if b in (1, 16, 64, 256)] or args.batches, 3
    begin = time.monotonic()

    def log(message: str) -> None:
        console.print(f"[{time.monotonic() - begin:6.1f} s] {message}", markup=False, highlight=False)

    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    log(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (bytes read + written)")
    torch.cuda.empty_cache()
    capacity = max(args.batches)
    shapes = [Shape(b, t, h, hv) for hv, h in args.heads for t in args.T for b in args.batches]
    if args.jobs:
        precompile(args.variants, shapes, capacity, args.window, args.jobs, log)
    options = Options(args.layers, repetitions=args.repetitions, capacity=capacity, window=args.window)
    session = Session(options, Timer(device, options.skip), bandwidth, log, begin + args.seconds)

    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(), "copy_bytes_per_s": bandwidth, "options": vars(args) | {"out": None}}
    report["results"] = []
    stamp = stamp_of(report["environment"])
    json_path = args.out / f"verify-{stamp}.json"
    tables = []
    for shape in shapes:
        results = session.measure(shape, args.variants)
        report["results"] += results
        report["kernels"] = [{"variant": v, "shape": s} | k.as_dict() for v, s, k in session.kernels]
        json_path.write_text(json.dumps(report, indent=1, default=str))
        timed = {r["variant"] for r in results if "us" in r}
        yardstick = next((name for name in YARDSTICKS if name in timed), None)
        layers = {r["layers"] for r in results if "us" in r}
        tables.append(times_table(f"{shape}, {layers or '-'} layers", results, yardstick))
        log(f"{shape} done")
        console.print(tables[-1])
    console.print(resources_table([kernel for kernel in session.kernels if kernel[0] not in TUNED]))
    for hv, h in args.heads:
        for t in args.T:
            shape_of = ("num_v_heads", "num_k_heads", "draft_tokens")
            chosen = [r for r in report["results"] if tuple(r[key] for key in shape_of) == (hv, h, t)]
            title = f"GDN verify step, T={t}, {hv} value / {h} key heads, {report['environment']['gpu']}"
            ours = next((n for n in YARDSTICKS if any(r["variant"] == n and "us" in r for r in chosen)), None)
            roofline = {r["batch"]: r["roofline_us"] for r in chosen if r["variant"] == ours and "us" in r}
            floor = {b: 1e6 * b * floor_bytes(Shape(b, t, h, hv)) / bandwidth for b in args.batches}
            plot_times(args.out / f"verify-{stamp}-T{t}-{hv}x{h}.png", title, chosen, roofline, floor)
            console.print(matrix_table(title, chosen, args.batches))
    log(f"wrote {json_path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
