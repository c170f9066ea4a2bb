"""A small server's worth of requests, stepped through the kernels next to the recurrence they must equal.

`Lifecycle` owns a ring of any fold policy full of NaN, requests on random rows and slots with random cursors, padding
rows in every batch, and the same requests' states in an fp64 oracle and an fp32 sequential reference. A test calls
`step`, `fold` and `restart` in any order and reads `errors()`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from sglang_replayssm import kernels
from sglang_replayssm.kernels.cursors import naive as naive_cursors
from sglang_replayssm.kernels.fold import naive as naive_fold
from sglang_replayssm.kernels.recurrence import recurrence
from sglang_replayssm.kernels.ring import CACHE_BASE, WRITE_POS, Cursors, Ring, RingSpec
from sglang_replayssm.kernels.verify.naive import verify as naive_verify

TRITON = SimpleNamespace(**{name: getattr(kernels, name) for name in kernels.__all__})
NAIVE = SimpleNamespace(
    plan_window=naive_cursors.plan_window,
    commit=naive_cursors.commit,
    reset=naive_cursors.reset,
    verify=naive_verify,
    fold=naive_fold.fold,
    fold_due=naive_fold.fold_due,
    materialize=naive_fold.materialize,
)
# The same in fp64: what is left is a wrong formula.
NAIVE_FP64 = SimpleNamespace(
    **{
        **vars(NAIVE),
        "verify": lambda *args, **kwargs: naive_verify(*args, **kwargs, dtype=torch.float64),
        "fold": lambda *args: naive_fold.fold(*args, dtype=torch.float64),
        "fold_due": lambda *args: naive_fold.fold_due(*args, dtype=torch.float64),
        "materialize": lambda *args: naive_fold.materialize(*args, dtype=torch.float64),
    }
)

# Accuracy bars: largest error as a multiple of the fp32 sequential recurrence's own, per decay regime.
BARS = {"slow": 1.0, "mixed": 1.0, "fast": 1.5}


@dataclass(frozen=True)
class Case:
    """What is served. `requests` live rows plus `padding` dead ones make the batch."""

    num_k_heads: int = 1
    num_v_heads: int = 2
    head_k_dim: int = 32
    head_v_dim: int = 32
    window: int = 16
    max_draft_tokens: int = 4
    dtype: torch.dtype = torch.bfloat16
    regime: str = "mixed"
    requests: int = 2
    padding: int = 1
    seed: int = 0
    fold: str = "fp32"

    @property
    def spec(self) -> RingSpec:
        heads = (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        rows = 2 * self.requests + self.padding + 2  # as many and a few that nobody uses
        window = max(self.window, self.max_draft_tokens)
        return RingSpec(1, rows, *heads, window, self.max_draft_tokens, self.dtype, self.fold)


@dataclass
class RelativeError:
    """Relative L2 error against the oracle, over everything that was added."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, value: torch.Tensor, oracle: torch.Tensor) -> None:
        self.difference += (value.double() - oracle).square().sum().item()
        self.reference += oracle.square().sum().item()

    @property
    def value(self) -> float:
        return math.sqrt(self.difference / self.reference) if self.reference else 0.0


@dataclass
class Errors:
    """Errors of the kernels (`out` before the cast, `state` at folds) and of the fp32 sequential reference."""

    out: float
    out_reference: float
    state: float
    state_reference: float
    folds: int

    def check(self, regime: str, slack: float = 1.0) -> None:
        """Assert the accuracy bars, or `slack` times them."""
        assert self.out <= slack * BARS[regime] * self.out_reference, self
        assert self.state <= slack * BARS[regime] * self.state_reference, self


class Lifecycle:
    """See the module. Batch row i < requests is request i; the rows behind are padding."""

    def __init__(
        self, case: Case, device: str = "cpu", ops: SimpleNamespace = TRITON, storage: torch.dtype | None = None
    ):
        """`storage`: dtype of state and fp32 ring buffers (fp64 to test a formula without rounding)."""
        self.case, self.spec, self.ops, self.device = case, case.spec, ops, device
        self.random = torch.Generator(device).manual_seed(case.seed)
        spec, batch = self.spec, case.requests + case.padding
        storage = storage or torch.float32
        ring = Ring.allocate(spec, device)
        stored = {name: x.to(storage) for name, x in ring.tensors().items() if x.dtype == torch.float32}
        self.ring = replace(ring, **stored)
        self.cursors = Cursors.allocate(spec, device)
        bases = torch.randint(spec.records, (spec.rows,), device=device, generator=self.random)
        self.cursors.position[1:, CACHE_BASE] = bases.int()
        self._poison_ring(slice(None))

        heads = (spec.num_v_heads, spec.head_v_dim, spec.head_k_dim)
        self.state = self.normal(1, spec.rows + 1, *heads).mul(0.3).to(storage)
        shuffled = torch.randperm(spec.rows, device=device, generator=self.random) + 1
        self.rows = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rows[: case.requests] = shuffled[: case.requests]
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.slots[: case.requests] = shuffled.flip(0)[: case.requests].int()
        self.live = slice(0, case.requests)
        self.oracle = self.state[0, self.slots[self.live].long()].double()
        self.reference = self.oracle.float()

        self.A_log, self.dt_bias = self._gate_parameters()
        self.folds = 0
        self.forget_errors()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.random)

    def draw(self, low: int, high: int) -> torch.Tensor:
        """One integer a batch row, low..high inclusive."""
        return torch.randint(low, high + 1, self.rows.shape, device=self.device, generator=self.random)

    def _poison_ring(self, rows) -> None:
        for tensor in self.ring.tensors().values():
            tensor[:, rows] = float("nan")

    def _gate_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-decay a token: about -1e-4 (slow), -1e-4 to -2 by head (mixed), -10 (fast)."""
        heads = self.spec.num_v_heads
        uniform = torch.rand(heads, device=self.device, generator=self.random) + 0.01
        if self.case.regime == "slow":
            return uniform.log(), torch.full_like(uniform, -9.0)
        if self.case.regime == "mixed":
            return (2 * uniform).log(), torch.linspace(-9, 1, heads, device=self.device)
        return torch.full_like(uniform, 2.0), torch.ones_like(uniform)

    def inputs(self, T: int) -> list[torch.Tensor]:
        """q, k, v, a, b of a step: views of packed buffers, as the model hands them over. Keys are correlated."""
        spec, tokens = self.spec, self.rows.numel() * T
        q_size, v_size = spec.num_k_heads * spec.head_k_dim, spec.num_v_heads * spec.head_v_dim
        qkv = self.normal(tokens, 2 * q_size + v_size)
        qkv[:, q_size : 2 * q_size] = 2 * qkv[:, q_size : 2 * q_size] + 0.5 * self.normal(1, q_size)
        q, k, v = qkv.to(spec.activation_dtype).split([q_size, q_size, v_size], dim=1)
        ba = self.normal(tokens, 2 * spec.num_v_heads).to(spec.activation_dtype)
        b, a = ba.split(spec.num_v_heads, dim=1)
        keys, values = (spec.num_k_heads, spec.head_k_dim), (spec.num_v_heads, spec.head_v_dim)
        return [q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values), a, b]

    def step(
        self,
        T: int | None = None,
        accepted: Sequence[int] | None = None,
        *,
        inputs=None,
        commit: bool = True,
        track: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One verify of T drafts (default: the largest) and its commit (default: random); returns its fp32 outputs.

        Without `commit` the step's drafts never happened, as when the batch's results are thrown away. `track`: steps
        of the batch rows' windows after which the state is written into `spare_slots`; -1 for none.
        """
        T = T or self.spec.max_draft_tokens
        live, requests = self.live, self.case.requests
        inputs = self.inputs(T) if inputs is None else inputs
        gates = (self.A_log, self.dt_bias)
        out_fp32 = torch.full_like(inputs[2], 7.0, dtype=self.state.dtype, memory_format=torch.contiguous_format)

        self.ops.plan_window(self.cursors, self.rows, self.slots)
        out = self.ops.verify(*inputs, *gates, self.state[0], self.ring.layer(0), self.cursors, T, out_fp32=out_fp32)
        if self.device == "cuda":
            torch.testing.assert_close(out, out_fp32.to(out.dtype), rtol=0, atol=0)
        assert (out.view(-1, T, *out.shape[1:])[requests:] == 0).all(), "padding rows must be zero"

        folded = self.cursors.plan[: self.rows.numel()][live, 4] == 1
        self._compare_states(folded)
        tokens = [x.reshape(-1, T, *x.shape[1:])[live] for x in inputs]
        oracle = recurrence(*tokens, *gates, self.oracle, torch.float64)
        reference = recurrence(*tokens, *gates, self.reference, torch.float32)
        self._errors["out"].add(out_fp32.view(-1, T, *out.shape[1:])[live], oracle.out)
        self._errors["out_reference"].add(reference.out, oracle.out)
        if track is not None:
            self._track(track, oracle.states, reference.states)
        if commit:
            accepted = self.draw(1, T) if accepted is None else torch.tensor(accepted, device=self.device)
            self.ops.commit(self.cursors, self.rows, accepted)
            self._accept(oracle.states, reference.states, accepted[live])
            self._fold_due()
        return out_fp32

    @property
    def spare_slots(self) -> list[int]:
        """A slot for every batch row, which no request has."""
        taken = {0, *self.slots.tolist()}
        return [slot for slot in range(self.state.shape[1]) if slot not in taken][: self.rows.numel()]

    def _track(self, steps: Sequence[int], oracle: torch.Tensor, reference: torch.Tensor) -> None:
        """Materialize, add the states to the errors, and nothing else has changed."""
        steps = torch.tensor(steps, device=self.device)
        targets = torch.tensor(self.spare_slots, device=self.device)
        state, position = self.state.clone(), self.cursors.position.clone()
        self.ops.materialize(self.state, self.ring, self.cursors, steps, targets)
        wanted = steps[self.live] >= 0
        written, request = targets[self.live][wanted], torch.arange(self.case.requests, device=self.device)[wanted]
        at = (request, steps[self.live][wanted])
        self._errors["state"].add(self.state[0, written], oracle[at])
        self._errors["state_reference"].add(reference[at], oracle[at])
        others = [slot for slot in range(state.shape[1]) if slot not in written.tolist()]
        assert torch.equal(self.state[:, others], state[:, others])
        assert torch.equal(self.cursors.position, position)

    def _fold_due(self) -> None:
        before = self.cursors.position[self.rows[self.live], WRITE_POS].clone()
        self.ops.fold_due(self.state, self.ring, self.cursors, self.rows.numel())
        self._compare_states((before > 0) & (self.cursors.position[self.rows[self.live], WRITE_POS] == 0))

    def _accept(self, oracle: torch.Tensor, reference: torch.Tensor, accepted: torch.Tensor) -> None:
        some = accepted > 0
        request, last = torch.arange(len(accepted), device=self.device)[some], accepted[some].long() - 1
        self.oracle[some] = oracle[request, last]
        self.reference[some] = reference[request, last]

    def _compare_states(self, which: torch.Tensor) -> None:
        """Add the checkpoints of the requests in the mask, just folded, to the errors."""
        self.folds += int(which.sum())
        self._errors["state"].add(self.state[0, self.slots[self.live].long()][which], self.oracle[which])
        self._errors["state_reference"].add(self.reference[which], self.oracle[which])

    def fold(self) -> None:
        """Fold every request; their checkpoints are the oracle's states from then on."""
        self.ops.fold(self.state, self.ring, self.cursors, self.rows, self.slots)
        self._compare_states(torch.ones(self.case.requests, dtype=torch.bool, device=self.device))
        assert (self.cursors.position[self.rows, 1] == 0).all()

    def restart(self, request: int) -> None:
        """Give the request's row and slot to a new one; what is left in its ring is NaN."""
        self._poison_ring(self.rows[request])
        self.ops.reset(self.cursors, self.rows[request : request + 1])
        fresh = 0.3 * self.normal(*self.state.shape[2:])
        self.state[0, self.slots[request].long()] = fresh
        self.oracle[request] = fresh.double()
        self.reference[request] = fresh

    def forget_errors(self) -> None:
        """Measure from here on."""
        self._errors = {name: RelativeError() for name in ("out", "out_reference", "state", "state_reference")}

    def errors(self) -> Errors:
        return Errors(**{name: error.value for name, error in self._errors.items()}, folds=self.folds)


def run(case: Case, steps: int, device: str = "cpu") -> Errors:
    """`steps` steps of random acceptance."""
    life = Lifecycle(case, device)
    for _ in range(steps):
        life.step()
    return life.errors()
