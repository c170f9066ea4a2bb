"""FlashInfer's CuTe DSL kernels: the fused verify + flush ring (bf16 state), the recurrent MTP verify (fp32, bf16)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .peers import load_flashinfer
from .shape import ACTIVATION, Inputs
from .stock import load_scatter
from .traffic import Cycle, FoldRule, activation_bytes, record_bytes, state_bytes
from .variant import NotApplicable, Setup, Variant


def _contiguous(inputs: Inputs, batch: int) -> list[torch.Tensor]:
    """q, k, v, a, b as [B, T, ...]; contiguous is what these kernels want."""
    return [x.contiguous() for x in inputs.rows(batch)]


@triton.jit
def _advance(length, base, accepted, rows, flush_min, mask, BLOCK: tl.constexpr):
    """Rows that were flushed slide their base past the folded window; then the accepted tokens count."""
    row = tl.arange(0, BLOCK)
    inside = row < rows
    old = tl.load(length + row, mask=inside, other=0)
    start = tl.load(base + row, mask=inside, other=0)
    flushed = old >= flush_min
    new = tl.load(accepted + row, mask=inside, other=0)
    tl.store(base + row, tl.where(flushed, (start + old) & mask, start), mask=inside)
    tl.store(length + row, tl.where(flushed, new, old + new), mask=inside)


class UCacheFlush(Variant):
    """One launch a layer; the cursor commit belongs to the caller: here one small launch, as in our own commit."""

    name = "flashinfer-ucache-flush"
    config = "bf16 state, lazy flush"
    tolerance = 5e-2
    state_dtype = torch.bfloat16
    output_before_cast = False
    packed_inputs = False
    folds_before_window = True

    def __init__(self, setup: Setup) -> None:
        if setup.shape.draft_tokens not in (4, 8):
            raise NotApplicable("T is 4 or 8 only")
        if setup.device.type != "cuda":
            raise NotApplicable("needs CUDA")
        self._module = load_flashinfer("gdn_kernels.gdn_decode_bf16_wy_ucache_flush")
        super().__init__(setup)
        shape, slots, layers, ring = setup.shape, setup.capacity + 1, setup.layers, self._module.RING_SLOTS
        h, hv, dim = shape.num_k_heads, shape.num_v_heads, shape.head_dim
        self.k = setup.zeros(layers, slots, h, ring, dim, dtype=ACTIVATION)
        self.u = setup.zeros(layers, slots, hv, ring, dim, dtype=ACTIVATION)
        self.g = setup.zeros(layers, slots, hv, ring)
        self.length, self.base = (setup.zeros(shape.batch, dtype=torch.int32) for _ in range(2))
        self.out = torch.empty(shape.batch, shape.draft_tokens, hv, dim, dtype=ACTIVATION, device=setup.device)
        self.flush_min = self._module.W_RING - shape.draft_tokens + 1
        self.rule = FoldRule(self.flush_min - 1)

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        q, k, v, a, b = _contiguous(inputs, self.shape.batch)
        out = self._module.gated_delta_rule_mtp_ucache_flush(
            A_log=inputs.A_log,
            a=a,
            dt_bias=inputs.dt_bias,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=self.state[layer],
            initial_state_indices=self.setup.slots,
            output=self.out,
            k_cache=self.k[layer],
            u_cache=self.u[layer],
            g_cache=self.g[layer],
            hist_len=self.length,
            cache_base=self.base,
            restart_hist_on_flush=False,
        )
        return out.flatten(0, 1)

    def commit(self) -> None:
        rows = self.shape.batch
        mask, block = self._module.RING_MASK, triton.next_power_of_2(rows)
        _advance[(1,)](self.length, self.base, self.setup.accepted, rows, self.flush_min, mask, BLOCK=block)

    def traffic(self, cycle: Cycle) -> float:
        record = record_bytes(self.shape, per_v=2, per_k=2, per_head=4)
        state = state_bytes(self.shape, 2) * (1 + 2 * cycle.fold_rate)
        return state + record * (cycle.history + self.shape.draft_tokens) + activation_bytes(self.shape)


class RecurrentMTP(Variant):
    """Recurrent verify with a copy of the state after every draft, fp32; committed by the scatter of the pin."""

    name = "flashinfer-mtp-fp32"
    config = "as shipped, stock's commit"
    tolerance = 1e-3
    output_before_cast = False
    packed_inputs = False

    def __init__(self, setup: Setup) -> None:
        if setup.device.type != "cuda":
            raise NotApplicable("needs CUDA")
        self._function = self._load()
        super().__init__(setup)
        self.snapshots = setup.snapshots(self.state_dtype)
        size = (setup.shape.batch, setup.shape.draft_tokens, setup.shape.num_v_heads, setup.shape.head_dim)
        self.out = torch.empty(size, dtype=ACTIVATION, device=setup.device)
        self._scatter = load_scatter().fused_mamba_state_scatter_with_mask

    def _load(self):
        return load_flashinfer("gdn_decode").gated_delta_rule_mtp

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        q, k, v, a, b = _contiguous(inputs, self.shape.batch)
        out, _ = self._function(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            initial_state=self.state[layer],
            initial_state_indices=self.setup.slots,
            output=self.out,
            intermediate_states_buffer=self.snapshots[layer],
            disable_state_update=True,
        )
        return out.flatten(0, 1)

    def commit(self) -> None:
        self._scatter(self.state, self.snapshots, self.setup.slots, self.setup.last_step)

    def traffic(self, cycle: Cycle) -> float:
        copies = state_bytes(self.shape, self.state_dtype.itemsize) * (self.shape.draft_tokens + 3)
        return copies + activation_bytes(self.shape)


class RecurrentMTPBf16(RecurrentMTP):
    """The same with a bf16 state."""

    name = "flashinfer-mtp-bf16"
    config = "bf16 state, stock's commit"
    state_dtype = torch.bfloat16
    tolerance = 5e-2

    def _load(self):
        return load_flashinfer("gdn_kernels.gdn_decode_bf16_state").gated_delta_rule_mtp

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        q, k, v, a, b = _contiguous(inputs, self.shape.batch)
        out = self._function(
            A_log=inputs.A_log,
            a=a,
            dt_bias=inputs.dt_bias,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=self.state[layer],
            initial_state_indices=self.setup.slots,
            output=self.out,
            intermediate_states_buffer=self.snapshots[layer],
            disable_state_update=True,
        )
        return out.flatten(0, 1)


VARIANTS = (UCacheFlush, RecurrentMTP, RecurrentMTPBf16)
