"""One benchmark run: check every variant of a shape, choose the tuned ones, then time all of them in shuffled order."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import asdict, dataclass

import torch

from .check import Checker, Errors
from .compiled import Resources, resources
from .registry import TUNED, candidates
from .shape import Shape, acceptance_table, make_inputs
from .stats import summary
from .timing import Timer
from .traffic import Cycle, simulate
from .variant import NotApplicable, Setup, Variant


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        layers: GDN layers captured in one graph; fewer only where the memory would not hold their buffers.
        steps, skip: steps of one pass, and how many of them at the start do not count.
        repetitions: passes of each variant.
        capacity: rows and slots of the pools.
        window: W of our rings.
        memory: bytes that the shared pools of one shape may take.
    """

    layers: int = 30
    steps: int = 72
    skip: int = 12
    repetitions: int = 5
    capacity: int = 256
    window: int = 16
    memory: int = 116 * 2**30


@dataclass
class Entry:
    """A variant that passed its check, ready to be timed."""

    name: str
    variant: Variant
    errors: Errors
    graph: torch.cuda.CUDAGraph
    times: list[float]


def _first_line(error: Exception) -> str:
    """What went wrong, in one line of the table."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


class Session:
    """Measures shapes one by one; `deadline` (time.monotonic) stops further repetitions, never the first three."""

    def __init__(self, options: Options, timer: Timer, bandwidth: float, log, deadline: float | None = None) -> None:
        self.options, self.timer, self.bandwidth = options, timer, bandwidth
        self.log, self.deadline, self.device = log, deadline, timer.device
        self.known_kernels: set[int] = set()
        self.kernels: list[tuple[str, str, Resources]] = []

    def measure(self, shape: Shape, names: list[str]) -> list[dict]:
        """One result a name; a variant that does not run here has a `reason` instead of times."""
        generator = torch.Generator(self.device).manual_seed(7)
        inputs = {packed: make_inputs(shape, generator, packed) for packed in (True, False)}
        table = acceptance_table(self.options.steps, shape, generator)
        checker = Checker(shape, self.options.capacity, self.options.window, self.device)
        setup = Setup(shape, self.layers_for(shape, names), self.options.capacity, self.device, self.options.window)
        entries, results = [], []
        for name in names:
            try:
                entries.append(self._prepare(name, checker, setup, inputs, table))
            except NotApplicable as reason:
                results.append(self._result(shape, name) | {"reason": str(reason)})
            except Exception as error:
                results.append(self._result(shape, name) | {"reason": _first_line(error)})
            gc.collect()
        checker.traces.clear()
        self._time(entries, table)
        accepted = table.tolist()
        results += [self._timed(shape, e, simulate(accepted, e.variant.rule, self.options.skip)) for e in entries]
        del entries, setup
        gc.collect()
        torch.cuda.empty_cache()
        return results

    def layers_for(self, shape: Shape, names: list[str]) -> int:
        """As many layers as asked for, or as the memory holds (snapshots are what takes most)."""
        state = 4 * shape.num_v_heads * shape.head_dim**2
        slots, chosen = self.options.capacity + 1, set(names)
        half_states = bool(chosen & {"flashinfer-ucache-flush", "flashinfer-mtp-bf16"})
        copies = bool(chosen & {"stock", "flashinfer-mtp-fp32"}) + 0.5 * ("flashinfer-mtp-bf16" in chosen)
        rings = 0.25 * len(names)  # of a state, about
        per_layer = state * (slots * (1 + 0.5 * half_states + rings) + shape.batch * shape.draft_tokens * copies)
        return max(4, min(self.options.layers, int(self.options.memory / per_layer)))

    def _prepare(self, name: str, checker: Checker, setup: Setup, inputs: dict, table: torch.Tensor) -> Entry:
        """Check and capture; of several candidates the one that is fastest in a short pass."""
        choices, reasons = [], []
        for factory in candidates(name):
            try:
                errors = checker.check(factory)
                if name in TUNED:
                    trial = self._entry(name, factory, errors, setup, inputs)
                    choices.append((self.timer.measure(trial.variant, trial.graph, table[:32]), factory, errors))
                    del trial
                else:
                    choices.append((0.0, factory, errors))
            except NotApplicable as reason:
                reasons.append(str(reason))
            except Exception as error:
                reasons.append(_first_line(error))
        if not choices:
            raise NotApplicable(reasons[0])
        _, factory, errors = min(choices, key=lambda choice: choice[0])
        entry = self._entry(name, factory, errors, setup, inputs)
        found = resources(entry.variant.modules, self.known_kernels)
        self.kernels += [(name, str(setup.shape), kernel) for kernel in found]
        return entry

    def _entry(self, name: str, factory: type[Variant], errors: Errors, setup: Setup, inputs: dict) -> Entry:
        variant = factory(setup)
        return Entry(name, variant, errors, self.timer.capture(variant, inputs[factory.packed_inputs]), [])

    def _time(self, entries: list[Entry], table: torch.Tensor) -> None:
        """Repeat: every variant once, in a new random order."""
        order = random.Random(0)
        for entry in entries:  # warm caches, clocks and cursors
            self.timer.measure(entry.variant, entry.graph, table[: self.options.skip + 8])
        for repetition in range(self.options.repetitions):
            if repetition >= 3 and self.deadline is not None and time.monotonic() > self.deadline:
                self.log(f"out of time: {repetition} repetitions")
                break
            for entry in order.sample(entries, len(entries)):
                entry.times.append(self.timer.measure(entry.variant, entry.graph, table))

    @staticmethod
    def _result(shape: Shape, name: str) -> dict:
        return {
            "variant": name,
            "batch": shape.batch,
            "draft_tokens": shape.draft_tokens,
            "num_k_heads": shape.num_k_heads,
            "num_v_heads": shape.num_v_heads,
        }

    def _timed(self, shape: Shape, entry: Entry, cycle: Cycle) -> dict:
        times = summary(entry.times)
        model = entry.variant.traffic(cycle)
        achieved = model * shape.batch / (times["median"] * 1e-6)
        return self._result(shape, entry.name) | {
            "config": entry.variant.config,
            "layers": entry.variant.setup.layers,
            "us": times,
            "us_raw": entry.times,
            "errors": asdict(entry.errors),
            "cycle": asdict(cycle),
            "model_bytes": model,
            "achieved_bytes_per_s": achieved,
            "share_of_copy": achieved / self.bandwidth,
            "roofline_us": 1e6 * model * shape.batch / self.bandwidth,
        }
