"""The recurrent verify that keeps a copy of the state after every draft: stock SGLang of the pin, verify + commit."""

from __future__ import annotations

from types import ModuleType

import torch

from .peers import load_sglang
from .shape import Inputs
from .traffic import Cycle, activation_bytes, state_bytes
from .variant import Setup, Variant

PIN, FOLDER = "0.5.15.post1", "sglang/srt/layers/attention"


def load_scatter() -> ModuleType:
    """The pin's commit: the accepted snapshot back to the state."""
    return load_sglang(PIN, f"{FOLDER}/mamba/mamba_state_scatter_triton.py")


def load_conv() -> ModuleType:
    """The pin's convolution of windows."""
    return load_sglang(PIN, f"{FOLDER}/mamba/causal_conv1d_triton.py")


class Stock(Variant):
    name = "stock"
    config = "as shipped"
    tolerance = 1e-4

    def __init__(self, setup: Setup) -> None:
        kernel = load_sglang(PIN, f"{FOLDER}/fla/fused_sigmoid_gating_recurrent.py")
        scatter = load_scatter()
        self.modules = (kernel, scatter)
        self._update = kernel.fused_sigmoid_gating_delta_rule_update
        self._scatter = scatter.fused_mamba_state_scatter_with_mask
        super().__init__(setup)
        self.snapshots = setup.snapshots()
        self.snapshot_rows = torch.arange(setup.shape.batch, dtype=torch.int32, device=setup.device)

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        out = self._update(
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            # The kernel's output has the dtype of q.
            q=(inputs.q.float() if self.setup.fp32_output else inputs.q)[None],
            k=inputs.k[None],
            v=inputs.v[None],
            a=inputs.a,
            b=inputs.b,
            initial_state_source=self.state[layer],
            initial_state_indices=self.setup.slots,
            cu_seqlens=self.setup.query_start_loc,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots[layer],
            intermediate_state_indices=self.snapshot_rows,
            cache_steps=self.shape.draft_tokens,
            retrieve_parent_token=None,
        )
        return out[0]

    def commit(self) -> None:
        self._scatter(self.state, self.snapshots, self.setup.slots, self.setup.last_step)

    def traffic(self, cycle: Cycle) -> float:
        """1 read + T writes in verify, 1 read + 1 write in commit."""
        return state_bytes(self.shape) * (self.shape.draft_tokens + 3) + activation_bytes(self.shape)


VARIANTS = (Stock,)
