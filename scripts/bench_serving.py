#!/usr/bin/env python3
"""The real server end to end, without and with the flag: output tokens/s, TPOT and memory, from dummy weights.

    python scripts/bench_serving.py                                    # off and on, 1..128 concurrent, 256 in / 384 out
    python scripts/bench_serving.py --sides on --concurrency 8,64      # one side, fewer points
    python scripts/bench_serving.py --fixed-memory --sides off         # largest N of 256 + 512 tokens, and its speed
    python scripts/bench_serving.py --profile 64                       # kernels of a step at 64 concurrent
    python scripts/bench_serving.py --dry-run                          # print the commands

The model is the shape of Qwen3.5-35B-A3B with random weights; SGLANG_SIMULATE_ACC_LEN makes acceptance 3 of 4 tokens a
step, so throughput means something and the text does not. Each concurrency is measured after a warm-up wave of the same
size. `--seconds` bounds the whole run: points that would not fit any more are left out and named.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.arguments import numbers
from bench.environment import environment, stamp_of
from bench.report import wide_console
from bench.serving import client, memory, profile, report
from bench.serving.model import SHAPES, gdn_layers, write_model
from bench.serving.server import Launch, Server, StartFailed

SIDES = ("off", "on")
# The server allocates a few tokens ahead of each request.
TOKENS_AHEAD = 16


def sides(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(SIDES):
        raise argparse.ArgumentTypeError(f"sides are {' and '.join(SIDES)}")
    return chosen


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sides", type=sides, default=list(SIDES))
    p.add_argument("--concurrency", type=numbers, default=[1, 8, 16, 32, 64, 128])
    p.add_argument("--input-tokens", type=int, default=256)
    p.add_argument("--output-tokens", type=int, help="default 384, or 512 with --fixed-memory")
    p.add_argument("--waves", type=int, default=3, help="measured waves a point; their median is reported")
    p.add_argument("--max-running-requests", type=int, default=136, help="with headroom over the largest concurrency")
    p.add_argument("--mem-fraction-static", type=float, default=0.88)
    p.add_argument("--accepted", type=float, default=3, help="simulated acceptance length")
    p.add_argument("--shape", choices=SHAPES, default="full")
    p.add_argument("--server-args", type=shlex.split, default=[], help="further arguments of the server, one string")
    p.add_argument("--on-args", type=shlex.split, default=[], help="further arguments of the server with the flag")
    p.add_argument("--start-timeout", type=float, default=300)
    p.add_argument("--seconds", type=float, default=560, help="bound of the whole run")
    p.add_argument("--fixed-memory", action="store_true", help="largest N without retraction, and throughput there")
    p.add_argument("--requests", type=int, help="with --fixed-memory: this N instead of the computed one")
    p.add_argument(
        "--from", dest="source", type=Path, help="with --fixed-memory: pools of an earlier JSON, not a start"
    )
    p.add_argument(
        "--profile", type=int, metavar="N", help="instead: where the GPU's time goes at N concurrent requests"
    )
    p.add_argument("--out", type=Path, default=Path("results"))
    p.add_argument("--dry-run", action="store_true")
    return p


class Run:
    """One invocation: its time limit, its log and its model folder."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.console, self.begin = args, wide_console(), time.monotonic()
        self.model = write_model(scratch / "model", args.shape)

    def log(self, message: str) -> None:
        elapsed = time.monotonic() - self.begin
        self.console.print(f"[{elapsed:6.1f} s] {message}", markup=False, highlight=False)

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.begin)

    def launch(self, side: str, requests: int, *extra: str) -> Launch:
        a = self.args
        own = a.on_args if side == "on" else []
        every = (*a.server_args, *own, *extra)
        return Launch(self.model, side == "on", requests, a.mem_fraction_static, accepted=a.accepted, extra=every)

    def server(self, launch: Launch, name: str) -> Server:
        timeout = min(self.args.start_timeout, max(self.left(), 1))
        return Server(launch, self.args.out / f"server-{name}.log", timeout)

    # -- throughput ---------------------------------------------------------------------------------------------

    def throughput(self, side: str) -> dict:
        """All points of one side."""
        result = {"side": side, "points": [], "skipped": [], "pools": None, "startup_seconds": 0.0}
        with self.server(self.launch(side, self.args.max_running_requests), side) as server:
            result["startup_seconds"] = server.startup_seconds
            result["pools"] = asdict(memory.parse(server.log_text()))
            self.log(f"{side}: ready after {server.startup_seconds:.0f} s")
            for concurrency in self.args.concurrency:
                point = self.point(server.url, concurrency)
                result["points" if point else "skipped"].append(point or concurrency)
            info = client.server_info(server.url)
            result["internal_state"] = _small(info["internal_states"][0])
            result["max_total_num_tokens"] = info.get("max_total_num_tokens")
        return result

    def point(self, url: str, concurrency: int) -> dict | None:
        """A warm-up wave and the measured ones; None when the time is up."""
        a = self.args
        sizes = (concurrency, a.input_tokens, a.output_tokens or 384)
        if self.left() < 5:
            self.log(f"concurrency {concurrency}: left out, time is up")
            return None
        warm = client.wave(url, *sizes, seed=1)
        waves = []
        for index in range(a.waves):
            if waves and self.left() < 1.2 * warm.seconds:
                break
            waves.append(client.wave(url, *sizes, seed=2 + index))
        point = {
            "concurrency": concurrency,
            "tokens_per_second": median(w.tokens_per_second for w in waves),
            "median_tpot_ms": median(w.median_tpot_ms for w in waves),
            "median_ttft_ms": median(w.median_ttft_ms for w in waves),
            "retractions": sum(w.retractions for w in waves),
            "waves": [asdict(w) for w in waves],
        }
        rate, tpot = point["tokens_per_second"], point["median_tpot_ms"]
        self.log(f"concurrency {concurrency}: {rate:.0f} tokens/s, TPOT {tpot:.2f} ms, {len(waves)} waves")
        return point

    # -- profile ------------------------------------------------------------------------------------------------

    def profile(self, side: str) -> dict:
        """Kernels of a few steps in the middle of a wave."""
        a, steps = self.args, 12
        sizes = (a.profile, a.input_tokens, a.output_tokens or 384)
        launch = self.launch(side, a.max_running_requests)
        with (
            tempfile.TemporaryDirectory() as scratch,
            self.server(launch, side) as server,
            ThreadPoolExecutor(1) as pool,
        ):
            folder = Path(scratch)
            self.log(f"{side}: ready after {server.startup_seconds:.0f} s")
            warm = client.wave(server.url, *sizes, seed=1)
            wave = pool.submit(client.wave, server.url, *sizes, seed=2)
            time.sleep(warm.seconds / 2)  # past the prefills
            profile.record(server.url, folder, steps)
            wave.result()
            found = profile.summarise(profile.wait_for_trace(folder, 120), gdn_layers(a.shape))
        for table in profile.tables(f"flag {side}", found):
            self.console.print(table)
        return {"side": side, "concurrency": a.profile, **asdict(found)}

    # -- fixed memory -------------------------------------------------------------------------------------------

    def fixed_memory(self, side: str) -> dict:
        """Compute the largest N from the pools of one start, then start for N and run N requests at once."""
        a = self.args
        sizes = (a.input_tokens, a.output_tokens or 512)
        n = a.requests or memory.largest_batch(self.pools(side), sum(sizes) + TOKENS_AHEAD)
        result = {"side": side, "n": n, "pools": None, "wave": None, "error": None}
        self.log(f"{side}: N = {n}")
        try:
            graphs = ("--cuda-graph-max-bs-decode", str(n))
            with self.server(self.launch(side, n, *graphs), f"{side}-n{n}") as server:
                result["pools"] = asdict(memory.parse(server.log_text()))
                self.log(f"{side}: ready after {server.startup_seconds:.0f} s")
                client.wave(server.url, n, a.input_tokens, 32, seed=1)
                result["wave"] = asdict(client.wave(server.url, n, *sizes, seed=2))
                result["internal_state"] = _small(client.server_info(server.url)["internal_states"][0])
        except (StartFailed, RuntimeError, OSError) as error:
            result["error"] = str(error)
            self.log(f"{side}: {error}")
        return result

    def pools(self, side: str) -> memory.Pools:
        """From an earlier JSON of this script, or from one start."""
        if self.args.source:
            runs = json.loads(self.args.source.read_text())["runs"]
            return memory.Pools(**next(r["pools"] for r in runs if r["side"] == side))
        with self.server(self.launch(side, self.args.max_running_requests), f"{side}-probe") as server:
            return memory.parse(server.log_text())


def _small(state: dict) -> dict:
    """What is worth keeping of the server's internal state."""
    keys = ("memory_usage", "avg_spec_accept_length", "effective_max_running_requests_per_dp", "max_mamba_cache_size")
    return {key: state.get(key) for key in keys}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(args, Path(scratch))
        if args.dry_run:
            for side in args.sides:
                launch = run.launch(side, args.requests or args.max_running_requests)
                words = [f"{k}={v}" for k, v in launch.environment().items()] + launch.command(30000)
                run.console.print(shlex.join(words), soft_wrap=True, highlight=False)
            return 0
        args.out.mkdir(parents=True, exist_ok=True)
        results = {"environment": environment(), "options": vars(args), "runs": []}
        kind = "profile" if args.profile else "fixed-memory" if args.fixed_memory else "serving"
        stamp = stamp_of(results["environment"])
        path = args.out / f"{kind}-{stamp}.json"
        failed = False
        for side in args.sides:
            try:
                measure = {"profile": run.profile, "fixed-memory": run.fixed_memory, "serving": run.throughput}[kind]
                results["runs"].append(measure(side))
            except (StartFailed, RuntimeError, OSError, ValueError) as error:
                failed = True
                run.log(f"{side}: failed: {error}")
            path.write_text(json.dumps(results, indent=1, default=str))
        if kind == "fixed-memory":
            run.console.print(report.fixed_memory_table(results["runs"]))
        elif kind == "serving":  # a profile has printed its tables
            run.console.print(report.throughput_table(results["runs"], args.concurrency))
            run.console.print(report.memory_table(results["runs"]))
            title = f"{args.input_tokens} in / {args.output_tokens or 384} out, {results['environment']['gpu']}"
            report.plot(path.with_suffix(".png"), results["runs"], title)
        run.log(f"wrote {path.name}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
