"""This project's kernels as variants: portable Triton, Hopper, what the dispatcher chooses, and each fold policy."""

from __future__ import annotations

import importlib
import sys

import torch

from .shape import ACTIVATION, Inputs
from .traffic import Cycle, FoldRule, activation_bytes, record_bytes, state_bytes
from .variant import NotApplicable, Setup, Variant

PACKAGE = "sglang_replayssm.kernels"


def _attribute(module: str, name: str):
    """A function of the package; NotApplicable when this build does not have it."""
    try:
        return getattr(importlib.import_module(f"{PACKAGE}{module}"), name)
    except (ImportError, AttributeError) as error:
        raise NotApplicable(f"not in this build: {error}") from error


class ReplaySSM(Variant):
    """Lazy fold of fp32 records, fp32-accurate: plan_window, one verify a layer, commit, folds that are due.

    As the server calls it: a verify may start before the kernel before it, here another layer's verify, has ended.
    """

    name = "replayssm"
    fold = "fp32"
    source = ("", "verify")
    tolerance = 1e-5
    folds_before_window = True

    def __init__(self, setup: Setup) -> None:
        self._verify = _attribute(*self.source)
        self._plan, self._commit = _attribute("", "plan_window"), _attribute("", "commit")
        self._fold_due = _attribute("", "fold_due")
        super().__init__(setup)
        ring_type, cursors_type, spec_type = (_attribute("", n) for n in ("Ring", "Cursors", "RingSpec"))
        shape = setup.shape
        spec = spec_type(
            setup.layers,
            setup.capacity,
            shape.num_k_heads,
            shape.num_v_heads,
            shape.head_dim,
            shape.head_dim,
            max(setup.window, shape.draft_tokens),
            shape.draft_tokens,
            ACTIVATION,
            self.fold,
        )
        self.ring = ring_type.allocate(spec, setup.device)
        self.layers = [self.ring.layer(i) for i in range(setup.layers)]
        self.cursors = cursors_type.allocate(spec, setup.device)
        self.out = torch.empty(shape.tokens, shape.num_v_heads, shape.head_dim, dtype=ACTIVATION, device=setup.device)
        self.rule = FoldRule(spec.window - shape.draft_tokens, in_commit=not self.folds_before_window)
        self.config = f"W={spec.window}"

    @property
    def modules(self):
        return tuple(m for n, m in list(sys.modules.items()) if n.startswith(PACKAGE + ".") and m is not None)

    def plan(self) -> None:
        self._plan(self.cursors, self.setup.rows, self.setup.slots)

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        fp32 = self.setup.output() if self.setup.fp32_output else None
        # Layer 0 follows the kernel that writes the plan, which a launch ahead of its time would read too early.
        overlap = {"overlap_previous": layer > 0} if self.source == ReplaySSM.source else {}
        out = self._verify(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.a,
            inputs.b,
            inputs.A_log,
            inputs.dt_bias,
            self.state[layer],
            self.layers[layer],
            self.cursors,
            self.shape.draft_tokens,
            out=self.out,
            out_fp32=fp32,
            **overlap,
        )
        return out if fp32 is None else fp32

    def commit(self) -> None:
        self._commit(self.cursors, self.setup.rows, self.setup.accepted)
        self._fold_due(self.state, self.ring, self.cursors, self.shape.batch)

    def traffic(self, cycle: Cycle) -> float:
        """S read, S written by rows that fold, history read, window's records written."""
        record = record_bytes(self.shape, per_v=4, per_k=2, per_head=8)
        state = state_bytes(self.shape) * (1 + cycle.fold_rate)
        return state + record * (cycle.history + self.shape.draft_tokens) + activation_bytes(self.shape)


class PortableTriton(ReplaySSM):
    name = "replayssm-triton"
    source = (".verify.triton", "verify")


class Hopper(ReplaySSM):
    name = "replayssm-hopper"
    source = (".verify.hopper", "verify_hopper")


class Exact(ReplaySSM):
    """The same window solve; folds replay the raw inputs."""

    name = "replayssm-exact"
    fold = "exact"
    tolerance = 1e-4  # SGLang's softplus
    folds_before_window = False

    def traffic(self, cycle: Cycle) -> float:
        """S read, and read and written by rows that fold; factors read; factors and inputs written, inputs folded."""
        factors = record_bytes(self.shape, per_v=4, per_k=2, per_head=8)
        values = record_bytes(self.shape, per_v=2, per_k=0, per_head=8)
        keys = record_bytes(self.shape, per_v=0, per_k=2, per_head=0)
        ring = factors * (cycle.history + self.shape.draft_tokens) + values * self.shape.draft_tokens
        ring += (values + keys) * cycle.fold_rate * cycle.folded
        return state_bytes(self.shape) * (1 + 2 * cycle.fold_rate) + ring + activation_bytes(self.shape)


class EveryCommit(ReplaySSM):
    """The recurrence without copies; every commit replays the accepted inputs."""

    name = "replayssm-every-commit"
    fold = "every-commit"
    tolerance = 1e-4
    folds_before_window = False

    def traffic(self, cycle: Cycle) -> float:
        """S read by verify, read and written by the replay; inputs written, their accepted part read."""
        raw = record_bytes(self.shape, per_v=2, per_k=2, per_head=8)
        ring = raw * (self.shape.draft_tokens + cycle.accepted)
        return 3 * state_bytes(self.shape) + ring + activation_bytes(self.shape)


class Bf16(ReplaySSM):
    """Records and folded checkpoints in bf16, as in the source document."""

    name = "replayssm-bf16"
    fold = "bf16"
    tolerance = 3e-2

    def traffic(self, cycle: Cycle) -> float:
        """As with fp32 records, of two bytes an element."""
        record = record_bytes(self.shape, per_v=2, per_k=2, per_head=8)
        state = state_bytes(self.shape) * (1 + cycle.fold_rate)
        return state + record * (cycle.history + self.shape.draft_tokens) + activation_bytes(self.shape)


VARIANTS = (Hopper, PortableTriton, ReplaySSM, Exact, EveryCommit, Bf16)
