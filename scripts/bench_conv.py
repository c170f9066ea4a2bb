#!/usr/bin/env python3
"""Time the convolution in front of the verify step with its commit, ours and SGLang's, side by side on one GPU.

    python scripts/fetch_peers.py                   # once, where SGLang is not installed
    PYTHONPATH=. python scripts/bench_conv.py       # T=4, 8192 channels (32/16 heads of 128), batches 1..256

One step is every layer's convolution of its windows and one commit of all conv states, as one CUDA graph, replayed with
random acceptance and cold caches. Both must give the same outputs and the same conv states, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.arguments import numbers
from bench.environment import environment, stamp_of
from bench.report import wide_console
from bench.shape import ACTIVATION, Shape, acceptance_table
from bench.stats import summary
from bench.stock import PIN, load_conv, load_scatter
from bench.timing import Timer, copy_bandwidth
from bench.variant import Setup
from rich.table import Table

from sglang_replayssm import kernels

WIDTH = 4  # of the filter, in every model with GDN layers


class Convolution:
    """The buffers of one side; `step` is what a server does once a step.

    Attributes:
        state: [layers, slots, dim, WIDTH - 1]. weight: [layers, dim, WIDTH].
    """

    name = "?"

    def __init__(self, setup: Setup, dim: int) -> None:
        self.setup, self.dim = setup, dim
        generator = torch.Generator(setup.device).manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=setup.device, generator=generator).to(ACTIVATION)

        self.state = normal(setup.layers, setup.capacity + 1, dim, WIDTH - 1)
        self.weight = normal(setup.layers, dim, WIDTH)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B T, dim] of inputs [B T, dim]."""
        raise NotImplementedError

    def commit(self) -> None:
        """All layers' conv states become those after `setup.last_step`."""
        raise NotImplementedError

    def step(self, x: torch.Tensor) -> None:
        for index in range(self.setup.layers):
            self.layer(index, x)
        self.commit()

    def bytes_per_window(self) -> int:
        """Bytes that must move for one request and layer."""
        raise NotImplementedError


class Stock(Convolution):
    """SGLang's kernels on the pin's deduplicated windows: T + WIDTH - 2 inputs a channel, side by side."""

    name = f"SGLang {PIN}"

    def __init__(self, setup: Setup, dim: int) -> None:
        super().__init__(setup, dim)
        self._update, self._scatter = load_conv().causal_conv1d_update, load_scatter()
        drafts, columns = setup.shape.draft_tokens, setup.shape.draft_tokens + WIDTH - 2
        size = (setup.layers, setup.shape.batch, dim, columns)
        memory = torch.zeros(size, dtype=ACTIVATION, device=setup.device)
        self.windows = memory.unfold(-1, columns - drafts + 1, 1).transpose(2, 3)
        self.rows = torch.arange(setup.shape.batch, dtype=torch.int32, device=setup.device)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        out = self._update(
            x.view(self.setup.shape.batch, -1, self.dim).transpose(1, 2),
            self.state[index],
            self.weight[index],
            None,
            "silu",
            conv_state_indices=self.setup.slots,
            intermediate_conv_window=self.windows[index],
            intermediate_state_indices=self.rows,
        )
        return out.transpose(1, 2).reshape(x.shape)

    def commit(self) -> None:
        self._scatter.fused_conv_window_scatter_with_mask(
            self.state, self.windows, self.setup.slots, self.setup.last_step
        )

    def bytes_per_window(self) -> int:
        """Inputs, outputs, state read and written, windows written; then a window read and the state written."""
        drafts = self.setup.shape.draft_tokens
        return 2 * self.dim * (2 * drafts + 2 * (WIDTH - 1) + (drafts + WIDTH - 2) + 2 * (WIDTH - 1))


class Ours(Convolution):
    """Raw inputs kept, the state only read; it changes in the commit."""

    name = "replayssm"

    def __init__(self, setup: Setup, dim: int) -> None:
        super().__init__(setup, dim)
        drafts = setup.shape.draft_tokens
        spec = kernels.RingSpec(setup.layers, setup.capacity, 1, 1, 16, 16, max(16, drafts), drafts, ACTIVATION)
        self.cursors = kernels.Cursors.allocate(spec, setup.device)
        kernels.plan_window(self.cursors, setup.rows, setup.slots)  # a verify needs the plan anyway
        size = (setup.layers, setup.shape.batch, drafts, dim)
        self.windows = torch.zeros(size, dtype=ACTIVATION, device=setup.device)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        arguments = (self.state[index], self.weight[index], None, "silu", self.windows[index], self.cursors)
        return kernels.convolve(x, *arguments, self.setup.shape.draft_tokens)

    def commit(self) -> None:
        kernels.commit_conv(self.state, self.windows, self.cursors, self.setup.last_step)

    def bytes_per_window(self) -> int:
        """Inputs, outputs, state read, inputs kept; then state and the kept inputs read, as many, and state written."""
        drafts = self.setup.shape.draft_tokens
        return 2 * self.dim * (3 * drafts + (WIDTH - 1) + 2 * (WIDTH - 1))


SIDES = (Stock, Ours)


def make_setup(batch: int, drafts: int, layers: int, device: torch.device) -> Setup:
    return Setup(Shape(batch, drafts, 16, 32), layers, batch, device)


def check(sides: list[Convolution], table: torch.Tensor, generator: torch.Generator) -> None:
    """Step both through `table`; SystemExit when a bit differs."""
    setup = sides[0].setup
    for accepted in table:
        x = torch.randn(setup.shape.tokens, sides[0].dim, device=setup.device, generator=generator).to(ACTIVATION)
        results = []
        for side in sides:
            side.setup.set_accepted(accepted)
            results.append(torch.stack([side.layer(index, x) for index in range(setup.layers)]))
            side.commit()
        slots = setup.slots.long()
        states = [side.state[:, slots] for side in sides]
        if not (torch.equal(*results) and torch.equal(*states)):
            raise SystemExit(f"bench_conv: {SIDES[1].name} differs from {SIDES[0].name} at {setup.shape}")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batches", type=numbers, default=[1, 8, 16, 32, 64, 128, 256])
    p.add_argument("--T", type=int, default=4, help="draft tokens")
    p.add_argument("--dim", type=int, default=8192, help="channels: 2 H K + HV V")
    p.add_argument("--layers", type=int, default=30, help="layers in one graph")
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON")
    args = p.parse_args(argv)
    console = wide_console()
    if not torch.cuda.is_available():
        console.print("bench_conv needs an NVIDIA GPU")
        return 2
    device = torch.device("cuda")
    bandwidth, timer, order = copy_bandwidth(device), Timer(device, skip=12), random.Random(0)
    table = Table(title=f"convolution and its commit, us per layer and step, T={args.T}", title_justify="left")
    for column in ("batch", *(side.name for side in SIDES), "ratio", "ours: bytes / copy time, us"):
        table.add_column(column, justify="right")
    results = []
    for batch in args.batches:
        generator = torch.Generator(device).manual_seed(7)
        sides = [side(make_setup(batch, args.T, args.layers, device), args.dim) for side in SIDES]
        accepted = acceptance_table(72, sides[0].setup.shape, generator)
        check(sides, accepted[:10], generator)
        x = torch.randn(batch * args.T, args.dim, device=device, generator=generator).to(ACTIVATION)
        graphs = {side.name: timer.capture(side, x) for side in sides}
        times = {side.name: [] for side in sides}
        for _ in range(args.repetitions):
            for side in order.sample(sides, len(sides)):
                times[side.name].append(timer.measure(side, graphs[side.name], accepted))
        medians = [summary(times[side.name])["median"] for side in sides]
        floor = 1e6 * batch * sides[1].bytes_per_window() / bandwidth
        table.add_row(str(batch), *(f"{m:.2f}" for m in medians), f"{medians[0] / medians[1]:.2f}", f"{floor:.2f}")
        for side in sides:
            model = batch * side.bytes_per_window()
            results.append({"side": side.name, "batch": batch, "us": summary(times[side.name]), "model_bytes": model})
    console.print(table)
    report = {"environment": environment(), "copy_bytes_per_s": bandwidth, "options": vars(args) | {"out": None}}
    stamp = stamp_of(report["environment"])
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"conv-{stamp}.json"
    path.write_text(json.dumps(report | {"results": results}, indent=1, default=str))
    console.print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
