"""SGLang's own verify and commit, a state copy a draft, next to a life cycle: what bit-identity is measured against."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lifecycle import Lifecycle

from sglang_replayssm.plugin.seams import PINNED_SGLANG


def load_pinned(path: str) -> ModuleType:
    """SGLang's module at `path` below `srt`: installed, or fetched by scripts/fetch_peers.py where SGLang is not."""
    try:
        return importlib.import_module("sglang.srt." + path.removesuffix(".py").replace("/", "."))
    except ImportError:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
        from bench.peers import load_sglang
        from bench.variant import NotApplicable

        try:
            return load_sglang(PINNED_SGLANG, f"sglang/srt/{path}")
        except NotApplicable as reason:
            pytest.skip(f"compares with SGLang's kernel: {reason}", allow_module_level=True)


stock_kernel = load_pinned("layers/attention/fla/fused_sigmoid_gating_recurrent.py")


class Stock:
    """The same requests on SGLang's kernel: `step` follows every step of the life cycle, `restart` every restart."""

    def __init__(self, life: Lifecycle):
        self.life, self.state = life, life.state[0].clone()
        self.snapshots = None  # fp32 [B, T, HV, V, K], the states after every token of the last step

    def step(self, inputs: Sequence[torch.Tensor], T: int, accepted: torch.Tensor, fp32: bool = False) -> torch.Tensor:
        """Verify one window a row and keep the state after its accepted tokens.

        Args:
            inputs: those of the life cycle's step.
            accepted: [B], tokens to keep; 0 keeps the old state.
            fp32: outputs in fp32 (by widening q, which changes nothing else).

        Returns:
            [requests, T, HV, V], outputs of the live rows.
        """
        life, (q, k, v, a, b) = self.life, inputs
        batch = life.rows.numel()
        snapshots = torch.empty(batch, T, *self.state.shape[1:], device=life.device)
        index = torch.arange(batch + 1, dtype=torch.int32, device=life.device)
        out = stock_kernel.fused_sigmoid_gating_delta_rule_update(
            A_log=life.A_log,
            a=a,
            dt_bias=life.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=(q.float() if fp32 else q)[None],
            k=k[None],
            v=v[None],
            b=b,
            initial_state_source=self.state,
            initial_state_indices=life.slots,
            cu_seqlens=index * T,
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=snapshots,
            intermediate_state_indices=index[:-1],
            cache_steps=T,
        )
        self.snapshots = snapshots
        for n, count in enumerate(accepted[life.live].tolist()):
            if count:
                self.state[life.slots[n].long()] = snapshots[n, count - 1]
        return out[0].view(batch, T, *out.shape[2:])[life.live]

    def restart(self, request: int) -> None:
        slot = self.life.slots[request].long()
        self.state[slot] = self.life.state[0, slot]

    def live_states(self) -> torch.Tensor:
        return self.state[self.life.slots[self.life.live].long()]
