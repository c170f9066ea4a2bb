"""Step all methods over the same tokens, as a replayed CUDA graph where there is a GPU, and sum their errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .methods import Method, make_methods
from .scenarios import Inputs, Regime, Scenario, largest_inverse_entry
from .sums import Sums, squares

OUT, STATE = (1, 3), (2, 3)  # dims of [B, T, HV, V] and [B, HV, V, K] that errors are summed over


@dataclass(frozen=True)
class Size:
    """How much is studied: tokens a row, tokens a window of statistics, draft tokens, K = V, naive kernels or not."""

    tokens: int
    window: int
    T: int
    head_dim: int
    naive: bool


@dataclass
class Measured:
    """What one run leaves behind.

    Attributes:
        sums: name -> fp64 [windows, B, HV]; see `Study._quantities`.
        tokens: positions that every row has passed; `sums` has only whole windows of them.
        inverse: fp64 [B, HV], largest |(I+A)^-1| entry of the `inverse_samples` windows looked at.
        accepted: mean accepted tokens a step.
    """

    size: Size
    rows: list[Scenario]
    regimes: list[Regime]
    methods: list[Method]
    sums: dict[str, torch.Tensor]
    tokens: int
    steps: int
    seconds: float
    accepted: float
    inverse: torch.Tensor
    inverse_samples: int


class Study:
    """One draft length: inputs, oracle, methods, and the step that advances all of them."""

    def __init__(
        self, size: Size, rows: list[Scenario], regimes: list[Regime], policies: list[str], device: torch.device
    ):
        self.size, self.device = size, device
        self.inputs = Inputs(rows, regimes, size.T, size.head_dim, device)
        self.oracle, self.methods = make_methods(self.inputs, policies, size.naive)
        self.position = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.sums = Sums(self._quantities(), size.tokens // size.window, len(rows), len(regimes), device)
        self._zero = torch.zeros(len(rows), len(regimes), dtype=torch.float64, device=device)

    def _quantities(self) -> list[str]:
        """Squared errors against the oracle, with what they are relative to; see `_outputs` and `_states`."""
        names = ["out norm"]
        for m in self.methods:
            names += [f"{m.name}: out", f"{m.name}: state", f"{m.name}: state norm", f"{m.name}: state yardstick"]
            names += [f"{m.name}: differing {what}" for what in m.identical]
        return names

    def step(self) -> None:
        """One verify and commit of everything. Nothing here waits for the device."""
        inputs, everyone = self.inputs, [self.oracle, *self.methods]
        inputs.draw()
        for method in everyone:
            method.verify(inputs)
        values = self._outputs()
        values |= self._states([m for m in self.methods if m.folds_in_verify])
        for method in everyone:
            method.commit(inputs)
        values |= self._states([m for m in self.methods if not m.folds_in_verify])
        self.sums.add(self.position // self.size.window, values)
        self.position.add_(inputs.accepted)

    def _outputs(self) -> dict[str, torch.Tensor]:
        """Of all drafts, accepted or not."""
        values = {"out norm": self.oracle.out.square().sum(OUT)}
        for m in self.methods:
            values[f"{m.name}: out"] = squares(m.out, self.oracle.out, OUT)
            if "out" in m.identical:
                values[f"{m.name}: differing out"] = (m.out != m.yardstick.out).sum(OUT)
        return values

    def _states(self, methods: list[Method]) -> dict[str, torch.Tensor]:
        """Of the rows just folded; the yardstick's error is taken at the same moments."""
        values, norm = {}, self.oracle.state.square().sum(STATE)
        errors: dict[str, torch.Tensor] = {}

        def error(method: Method) -> torch.Tensor:
            if method.name not in errors:
                errors[method.name] = squares(method.state, self.oracle.state, STATE)
            return errors[method.name]

        for m in methods:
            found = {"state": error(m), "state norm": norm, "state yardstick": error(m.yardstick or m)}
            if "state" in m.identical:
                found["differing state"] = (m.state != m.yardstick.state).sum(STATE).double()
            values |= {f"{m.name}: {k}": torch.where(m.folded[:, None], x, self._zero) for k, x in found.items()}
        return values

    def run(self, seconds: float, progress: Callable[[int], None] = lambda tokens: None) -> Measured:
        """Step until every row has passed all tokens, or the time is over; `progress` gets the slowest row's tokens."""
        begin = time.monotonic()
        step, steps = self.step, 0
        if self.device.type == "cuda":
            steps, step = self._capture()
        chunk = 128 if self.device.type == "cuda" else 1  # steps between looks at the device
        inverse, samples, done = self._zero.clone(), 0, 0
        while done < self.size.tokens and time.monotonic() - begin < seconds:
            for _ in range(chunk):
                step()
            steps += chunk
            if samples < 1000:
                inverse, samples = torch.maximum(inverse, largest_inverse_entry(self.inputs)), samples + 1
            done = int(self.position.min())
            progress(min(done, self.size.tokens))
        done = min(done, self.size.tokens)
        return Measured(
            size=self.size,
            rows=self.inputs.rows,
            regimes=self.inputs.regimes,
            methods=self.methods,
            sums=self.sums.by_name(done // self.size.window),
            tokens=done,
            steps=steps,
            seconds=time.monotonic() - begin,
            accepted=float(self.position.double().mean()) / max(steps, 1),
            inverse=inverse.cpu(),
            inverse_samples=samples,
        )

    def _capture(self) -> tuple[int, Callable[[], None]]:
        """Two steps as they are, which compile the kernels, then one captured: how many ran, and its replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return 2, graph.replay
