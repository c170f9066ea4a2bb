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
    """Lazy fold of fp32 records, fp32-accurate: plan_window, one verify a layer, commit."""

    name = "replayssm"
    source = ("", "verify")
    tolerance = 1e-5
    folds_before_window = True

    def __init__(self, setup: Setup) -> None:
        self._verify = _attribute(*self.source)
        self._plan, self._commit = _attribute("", "plan_window"), _attribute("", "commit")
        super().__init__(setup)
        ring_type, cursors_type, spec_type = (_attribute("", n) for n in ("Ring", "Cursors", "RingSpec"))
        shape = setup.shape
        window = max(setup.window, shape.draft_tokens)
        spec = spec_type(
            setup.layers,
            setup.capacity,
            shape.num_k_heads,
            shape.num_v_heads,
            shape.head_dim,
            shape.head_dim,
            window,
            shape.draft_tokens,
            ACTIVATION,
        )
        self.ring = ring_type.allocate(spec, setup.device)
        self.layers = [self.ring.layer(i) for i in range(setup.layers)]
        self.cursors = cursors_type.allocate(spec, setup.device)
        self.out = torch.empty(shape.tokens, shape.num_v_heads, shape.head_dim, dtype=ACTIVATION, device=setup.device)
        self.rule = FoldRule(window - shape.draft_tokens)
        self.config = f"W={window}"

    @property
    def modules(self):
        return tuple(m for n, m in list(sys.modules.items()) if n.startswith(PACKAGE + ".") and m is not None)

    def plan(self) -> None:
        self._plan(self.cursors, self.setup.rows, self.setup.slots)

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        fp32 = self.setup.output() if self.setup.fp32_output else None
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
        )
        return out if fp32 is None else fp32

    def commit(self) -> None:
        self._commit(self.cursors, self.setup.rows, self.setup.accepted)

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


VARIANTS = (Hopper, PortableTriton, ReplaySSM)
