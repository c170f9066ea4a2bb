"""Every variant against the fp64 oracle, at the batch that is timed: outputs, and checkpoints when they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .oracle import RelativeError, recurrence
from .shape import Inputs, Shape, acceptance_table, make_inputs
from .variant import NotApplicable, Setup, Variant

# Batch rows that the oracle follows, spread over the batch; all rows run.
ORACLE_ROWS = 16


@dataclass(frozen=True)
class Step:
    """One step of the oracle: what goes in and what must come out (fp64, followed rows only)."""

    inputs: Inputs
    accepted: torch.Tensor
    outputs: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """The oracle's run, and the error that the sequential fp32 recurrence makes on it."""

    rows: torch.Tensor
    steps: list[Step]
    reference_output: float
    reference_state: float


def steps_for(shape: Shape, window: int) -> int:
    """Enough steps for about three folds of every row."""
    return max(12, math.ceil(3 * window / ((shape.draft_tokens + 1) / 2)))


def trace(shape: Shape, state: torch.Tensor, slots: torch.Tensor, steps: int, packed: bool, seed: int = 1) -> Trace:
    """Follow a few rows from `state` [slots, HV, V, K] through `steps` random windows and acceptances."""
    generator = torch.Generator(state.device).manual_seed(seed)
    count = min(shape.batch, ORACLE_ROWS)
    rows = torch.linspace(0, shape.batch - 1, count, device=state.device).round().long()
    exact = state[slots[rows].long()].double()
    single = exact.float()
    table = acceptance_table(steps, shape, generator)
    output_error, state_error = RelativeError(), RelativeError()
    trace_steps = []
    for accepted in table:
        inputs = make_inputs(shape, generator, packed)
        outputs, states = recurrence(exact, inputs, rows, shape.batch, torch.float64)
        reference, reference_states = recurrence(single, inputs, rows, shape.batch, torch.float32)
        output_error.add(reference, outputs)
        last = accepted[rows].long() - 1
        each = torch.arange(count, device=state.device)
        after, single = states[each, last], reference_states[each, last]
        state_error.add(single, after)
        trace_steps.append(Step(inputs, accepted, outputs, exact, after))
        exact = after
    return Trace(rows, trace_steps, output_error.value, state_error.value)


@dataclass(frozen=True)
class Errors:
    """Relative L2 errors; `before_cast` says whether the outputs were compared before the cast to bf16 (1.7e-3)."""

    output: float
    state: float | None
    folds: int
    before_cast: bool
    reference_output: float
    reference_state: float


class Checker:
    """Runs variants of one shape against one oracle run per kind of state and input layout."""

    def __init__(self, shape: Shape, capacity: int, window: int, device: torch.device) -> None:
        self.shape, self.capacity, self.window, self.device = shape, capacity, window, device
        self.traces: dict[tuple, Trace] = {}

    def setup(self, fp32_output: bool) -> Setup:
        return Setup(self.shape, 1, self.capacity, self.device, self.window, fp32_output)

    def check(self, factory: type[Variant]) -> Errors:
        """The errors of one variant; NotApplicable when they are not those of its intended arithmetic."""
        setup = self.setup(factory.output_before_cast)
        variant = factory(setup)
        key = (factory.state_dtype, factory.packed_inputs)
        if key not in self.traces:
            steps = steps_for(self.shape, max(self.window, 16))
            self.traces[key] = trace(self.shape, variant.state[0], setup.slots, steps, factory.packed_inputs)
        errors = run(variant, self.traces[key])
        for what, value in (("outputs", errors.output), ("checkpoints", errors.state)):
            if value is not None and not value <= factory.tolerance:
                raise NotApplicable(f"fails the oracle: relative error {value:.1e} of its {what}")
        return errors


def run(variant: Variant, oracle: Trace) -> Errors:
    """Step `variant` through the oracle's run. A checkpoint counts in the steps that change it."""
    setup, shape = variant.setup, variant.shape
    slots = setup.slots[oracle.rows].long()
    output_error, state_error, folds = RelativeError(), RelativeError(), 0
    for step in oracle.steps:
        old = variant.state[0][slots]
        setup.set_accepted(step.accepted)
        variant.plan()
        out = variant.verify(0, step.inputs)
        output_error.add(out.unflatten(0, (shape.batch, -1))[oracle.rows], step.outputs)
        variant.commit()
        new = variant.state[0][slots]
        changed = (new != old).flatten(1).any(1)
        folds += int(changed.sum())
        if changed.any():
            expected = step.before if variant.folds_before_window else step.after
            state_error.add(new[changed], expected[changed])
    before_cast = variant.output_before_cast and setup.fp32_output
    return Errors(
        output_error.value,
        state_error.value,
        folds,
        before_cast,
        oracle.reference_output,
        oracle.reference_state,
    )
