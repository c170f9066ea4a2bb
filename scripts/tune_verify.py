"""Time every sensible cut of the verify kernels per batch, heads and draft length: what choose_config goes by.

    python scripts/tune_verify.py --out tune.json [--batches 1,8,64] [--drafts 4,8] [--heads 16x32,4x8] [--filter 64w2]

Variants are compiled in parallel processes (without a device), then checked against the portable kernel, then timed as
the benchmark times them: one CUDA graph of plan, all layers' verify and commit, replayed over whole fold cycles with
random acceptance, with every layer's buffers out of the L2 cache. What does not compile, or differs, is reported and
not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.environment import environment
from bench.ours import ReplaySSM
from bench.shape import ACTIVATION, Shape, acceptance_table, make_inputs
from bench.timing import Timer
from bench.variant import Setup

from sglang_replayssm.kernels.verify import hopper
from sglang_replayssm.kernels.verify import triton as portable

TOLERANCE = 1e-4  # relative L2 difference from the portable kernel, of checkpoints and records


@dataclass(frozen=True)
class Candidate:
    """A kernel with its cut; `None` is what the kernel's own table says."""

    kernel: str
    config: tuple | None
    pdl: bool = False

    @property
    def name(self) -> str:
        if self.config is None:
            return f"{self.kernel} table"
        if self.kernel == "hopper":
            block_v, warps, registers, early = self.config
            return f"hopper {block_v}w{warps} r{registers} {'early' if early else 'late'}{' pdl' if self.pdl else ''}"
        block_v, tiles, stages, warps, registers = self.config
        return f"portable {block_v}x{tiles}w{warps} s{stages} r{registers}"

    @property
    def verify(self) -> Callable:
        if self.kernel == "hopper":
            config = None if self.config is None else hopper.Config(*self.config, overlap=self.pdl)
            return partial(hopper.verify_hopper, config=config)
        return self._portable

    def _portable(self, *args, overlap_previous: bool = False, **kwargs) -> torch.Tensor:
        chosen = portable.choose_config
        if self.config is not None:
            portable.choose_config = lambda *shape: portable.Config(*self.config)
        try:
            return portable.verify(*args, **kwargs)
        finally:
            portable.choose_config = chosen


def candidates(pdl: bool, with_portable: bool) -> list[Candidate]:
    """Cuts worth a measurement: one to four MMAs a warp, at registers that let 2 to 4 warps share a scheduler."""
    cuts = (
        (16, 1, 128),
        (32, 1, 128),
        (32, 2, 128),
        (32, 2, 144),
        (32, 2, 168),
        (64, 2, 128),
        (64, 2, 144),
        (64, 2, 168),
        (64, 2, 224),
        (64, 4, 128),
        (64, 4, 168),
        (128, 4, 144),
        (128, 4, 168),
    )
    found = [Candidate("hopper", (*cut, early)) for cut, early in product(cuts, (True, False))]
    if pdl:
        found += [replace(c, pdl=True) for c in found if c.config[:3] in ((32, 2, 128), (64, 4, 128))]
    if with_portable:
        # (rows a tile, warps, registers): half to two MMAs a warp, with and without room for spills to vanish.
        cuts = ((16, 1, 255), (32, 2, 168), (32, 2, 255), (32, 4, 128), (64, 4, 168), (64, 4, 255))
        for (block_v, warps, registers), tiles, stages in product(cuts, (1, 2, 4), (1, 2)):
            if block_v * tiles <= 128:
                found.append(Candidate("portable", (block_v, tiles, stages, warps, registers)))
        found.append(Candidate("portable", None))
    return found


def compile_all(found: list[Candidate], shapes: list[Shape], window: int, jobs: int) -> dict[tuple[str, Shape], str]:
    """Fill Triton's cache from `jobs` processes; returns why the others failed. One batch stands for all."""
    kinds = sorted({replace(shape, batch=2) for shape in shapes}, key=str)
    tasks = list(product(found, kinds))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        reasons = pool.map(_compile, *zip(*tasks, strict=True), [window] * len(tasks))
        return {(c.name, kind): reason for (c, kind), reason in zip(tasks, reasons, strict=True) if reason}


def _compile(candidate: Candidate, shape: Shape, window: int) -> str | None:
    import triton
    from compile_offline import OfflineDriver

    driver = OfflineDriver()
    triton.runtime.driver.set_active(driver)
    try:
        setup = Setup(shape, 2, shape.batch, torch.device("cpu"), window)
        inputs = make_inputs(shape, torch.Generator("cpu"))
        Tuned(setup, candidate).verify(1, inputs)  # of layer 0, nothing is launched early
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:150]
    return None


class Tuned(ReplaySSM):
    """The benchmark's variant with a candidate in place of the dispatcher's choice."""

    def __init__(self, setup: Setup, candidate: Candidate) -> None:
        super().__init__(setup)
        self._verify = candidate.verify


def check(candidate: Candidate, shape: Shape, window: int, steps: int = 16) -> str | None:
    """Why the candidate's outputs, records or checkpoints differ from the portable kernel's; None if they do not."""
    device = torch.device("cuda")
    shape = replace(shape, batch=5)
    generator = torch.Generator(device).manual_seed(3)
    inputs, table = make_inputs(shape, generator), acceptance_table(steps, shape, generator)
    setups = [Setup(shape, 2, 8, device, window) for _ in range(2)]
    ours, theirs = (Tuned(s, c) for s, c in zip(setups, (candidate, Candidate("portable", None)), strict=True))
    worst = 0.0
    for accepted in table:
        outs = []
        for variant in (ours, theirs):
            variant.setup.set_accepted(accepted)
            variant.plan()
            outs.append(torch.stack([variant.verify(layer, inputs).float() for layer in range(2)]))
            variant.commit()
        worst = max(worst, _difference(*outs) / 30)  # outputs are rounded to bf16
    for mine, reference in (
        (ours.state, theirs.state),
        *((getattr(ours.ring, n).float(), getattr(theirs.ring, n).float()) for n in "dkg"),
    ):
        worst = max(worst, _difference(mine, reference))
    return None if worst < TOLERANCE else f"differs from the portable kernel by {worst:.1e}"


def _difference(mine: torch.Tensor, reference: torch.Tensor) -> float:
    return float((mine - reference).norm() / reference.norm())


def measure(candidate: Candidate, setup: Setup, timer: Timer, table: torch.Tensor) -> float:
    """Microseconds per layer and step, commit included."""
    generator = torch.Generator(setup.device).manual_seed(7)
    inputs = make_inputs(setup.shape, generator)
    variant = Tuned(setup, candidate)
    return timer.measure(variant, timer.capture(variant, inputs), table)


def tune(args: argparse.Namespace) -> dict:
    started = time.monotonic()
    shapes = [Shape(batch, drafts, *heads) for heads, drafts, batch in product(args.heads, args.drafts, args.batches)]
    found = [c for c in candidates(args.pdl, args.portable) if all(part in c.name for part in args.filter)]
    failed = compile_all(found, shapes, args.window, args.jobs)
    for (name, kind), reason in failed.items():
        print(f"does not compile: {name} {kind}: {reason}", flush=True)
    print(f"compiled {len(found)} candidates in {time.monotonic() - started:.0f} s", flush=True)

    device = torch.device("cuda")
    timer = Timer(device, skip=12)
    wrong: dict[tuple[str, Shape], str | None] = dict(failed)
    results = []
    for shape in shapes:
        kind = replace(shape, batch=2)
        setup = Setup(shape, args.layers, shape.batch, device, args.window)
        table = acceptance_table(args.steps, shape, torch.Generator(device).manual_seed(11))
        times: dict[str, float] = {}
        for candidate in found:
            if time.monotonic() - started > args.seconds:
                print("out of time", flush=True)
                break
            try:
                if (candidate.name, kind) not in wrong:
                    wrong[candidate.name, kind] = check(candidate, shape, args.window)
                    if wrong[candidate.name, kind]:
                        print(f"{candidate.name} {kind}: {wrong[candidate.name, kind]}", flush=True)
                if wrong[candidate.name, kind] is None:
                    times[candidate.name] = measure(candidate, setup, timer, table)
            except Exception as error:
                wrong[candidate.name, kind] = str(error)
                print(f"{candidate.name} {kind}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        ranking = sorted(times.items(), key=lambda item: item[1])
        print(f"\n{shape} W={args.window}", flush=True)
        for name, value in ranking[: args.top]:
            print(f"  {value:8.2f} us  {name}", flush=True)
        results.append({"shape": str(shape), "us": dict(ranking)})
        del setup
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "environment": environment(),
        "window": args.window,
        "layers": args.layers,
        "steps": args.steps,
        "activation": str(ACTIVATION),
        "failed": {f"{name} {kind}": reason for (name, kind), reason in wrong.items() if reason},
        "results": results,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all times")
    parser.add_argument("--batches", type=integers, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--drafts", type=integers, default=[4], help="T, draft tokens")
    parser.add_argument(
        "--heads",
        type=lambda text: [tuple(map(int, p.split("x"))) for p in text.split(",")],
        default=[(16, 32)],
        help="key heads x value heads, e.g. 16x32,4x8",
    )
    parser.add_argument("--window", type=int, default=16, help="W")
    parser.add_argument("--filter", type=lambda text: text.split(","), default=[], help="parts that a name must have")
    parser.add_argument("--portable", action="store_true", help="tune the portable kernel as well")
    parser.add_argument("--pdl", action="store_true", help="also with programmatic dependent launch")
    parser.add_argument("--layers", type=int, default=16, help="layers a graph")
    parser.add_argument("--steps", type=int, default=72, help="steps timed, the first 12 not counted")
    parser.add_argument("--seconds", type=float, default=500, help="stop measuring after this long")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--top", type=int, default=8, help="lines printed a shape")
    args = parser.parse_args()
    result = tune(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
