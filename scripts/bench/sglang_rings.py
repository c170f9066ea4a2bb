"""SGLang's own rings: 0.5.16 (exact fold in verify), 0.5.23 compact (fold in commit) and 0.5.23 fold-every-commit.

The two lazy ones can be tuned from outside: tile and warps of the verify kernel, and the length L of the ring. Their
early-flush margin is two windows: a row folds once write_pos + 2 T > L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .peers import load_sglang
from .shape import ACTIVATION, Inputs
from .traffic import Cycle, FoldRule, activation_bytes, record_bytes, state_bytes
from .variant import NotApplicable, Setup, Variant


class Tuning(NamedTuple):
    """Arguments of gdn_replayssm_spec_decode that a caller may choose, and the ring length L."""

    block_v: int = 64
    num_warps: int = 1
    num_stages: int = 2
    nk: int = 2
    ring: int = 16

    def __str__(self) -> str:
        return f"BV={self.block_v} warps={self.num_warps} stages={self.num_stages} nk={self.nk} L={self.ring}"


SHIPPED = Tuning()
# Spills go with more warps or a shorter K tile; small grids want small tiles; L=32 folds less often.
CANDIDATES = (
    SHIPPED,
    Tuning(16, 1),
    Tuning(32, 1),
    Tuning(64, 2),
    Tuning(64, 4),
    Tuning(64, 2, nk=4),
    Tuning(128, 4),
    Tuning(32, 1, ring=32),
    Tuning(64, 4, ring=32),
)


class Ring0516(Variant):
    """d, k, g for outputs and raw v, k, g, beta for the exact fold, both at the request's state slot."""

    name = "sglang-0.5.16-ring"
    tolerance = 1e-2
    folds_before_window = True
    version, path = "0.5.16", "sglang/kernels/ops/attention/fla/gdn_replayssm_spec_decode.py"
    tuning = SHIPPED

    def __init__(self, setup: Setup) -> None:
        self._module = load_sglang(self.version, self.path)
        self.modules = (self._module,)
        super().__init__(setup)
        shape, length, slots = setup.shape, self.ring_length(setup), setup.capacity + 1
        if length != self.tuning.ring and self.tuning != SHIPPED:
            raise NotApplicable(f"L={self.tuning.ring} is below two windows")
        self.length = length
        h, hv, dim, layers = shape.num_k_heads, shape.num_v_heads, shape.head_dim, setup.layers
        self.d, self.raw_v = (setup.zeros(layers, slots, hv, length, dim, dtype=ACTIVATION) for _ in range(2))
        self.k, self.raw_k = (setup.zeros(layers, slots, h, length, dim, dtype=ACTIVATION) for _ in range(2))
        self.g, self.beta = (setup.zeros(layers, slots, hv, length) for _ in range(2))
        self.write_pos, self.cache_base = (setup.zeros(slots, dtype=torch.int32) for _ in range(2))
        self.is_flush = setup.zeros(slots, dtype=torch.int8)
        self.out = setup.output()
        # Early flush of rows whose ring cannot take two windows from the start.
        self.is_flush.fill_(2 * shape.draft_tokens > length)
        self.rule = FoldRule(length - 2 * shape.draft_tokens)
        self.config = str(self.tuning._replace(ring=length))

    def ring_length(self, setup: Setup) -> int:
        """L: a power of two of at least two windows."""
        return max(self.tuning.ring, 1 << (2 * setup.shape.draft_tokens - 1).bit_length())

    def _decode(self, layer: int, inputs: Inputs, beta: torch.Tensor | None, **extra) -> torch.Tensor:
        t = self.tuning
        return self._module.gdn_replayssm_spec_decode(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            a=inputs.a,
            b=inputs.b,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            checkpoint_state=self.state[layer],
            d_cache=self.d[layer],
            k_cache=self.k[layer],
            g_cache=self.g[layer],
            rawv_cache=self.raw_v[layer],
            rawk_cache=self.raw_k[layer],
            beta_cache=beta,
            out=self.out,
            query_start_loc=self.setup.query_start_loc,
            ssm_state_indices=self.setup.slots,
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            max_cache_len=self.length,
            max_spec_len=self.shape.draft_tokens,
            scale=self.shape.head_dim**-0.5,
            use_qk_l2norm_in_kernel=True,
            null_block_id=-1,
            block_v=t.block_v,
            num_warps=t.num_warps,
            num_stages=t.num_stages,
            nk=t.nk,
            **extra,
        )

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        t = self.tuning
        flush = {"block_v_flush": t.block_v, "num_warps_flush": t.num_warps, "num_stages_flush": t.num_stages}
        return self._decode(layer, inputs, self.beta[layer], nk_flush=t.nk, **flush)

    def commit(self) -> None:
        self._module.commit_gdn_replayssm_spec(
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            num_accepted=self.setup.accepted,
            state_batch_indices=self.setup.slots,
            max_cache_len=self.length,
            max_spec_len=self.shape.draft_tokens,
            null_block_id=-1,
        )

    def traffic(self, cycle: Cycle) -> float:
        """Rows that fold read and write S once more and replay raw records; the others read their d, k, g history."""
        shape, state = self.shape, state_bytes(self.shape)
        written = record_bytes(shape, per_v=4, per_k=4, per_head=8)
        raw = record_bytes(shape, per_v=2, per_k=2, per_head=8)
        replayed = record_bytes(shape, per_v=2, per_k=2, per_head=4)
        folded = cycle.fold_rate * cycle.folded
        ring = written * shape.draft_tokens + raw * folded + replayed * (cycle.history - folded)
        return state * (1 + 2 * cycle.fold_rate) + ring + activation_bytes(shape)


class Compact0523(Ring0516):
    """d and normalised k as high and low bf16 parts at the request's row; capacity rows fold in the commit."""

    name = "sglang-0.5.23-compact"
    folds_before_window = False
    version, path = "0.5.23", "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.beta = None
        self.is_flush.zero_()
        self.rule = FoldRule(self.length - 2 * setup.shape.draft_tokens, in_commit=True)

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        return self._decode(layer, inputs, None, replay_indices=self.setup.rows, launch_mode="verify")

    def commit(self) -> None:
        self._module.commit_gdn_replayssm_spec(
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            num_accepted=self.setup.accepted,
            replay_indices=self.setup.rows,
            max_cache_len=self.length,
            max_spec_len=self.shape.draft_tokens,
            fold_every_commit=False,
            null_block_id=-1,
        )
        self._module.commit_gdn_replayssm_circular(
            checkpoint_state=self.state,
            d_cache=self.d,
            k_cache=self.k,
            g_cache=self.g,
            d_residual_cache=self.raw_v,
            k_residual_cache=self.raw_k,
            state_batch_indices=self.setup.slots,
            replay_indices=self.setup.rows,
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            accept_lens=self.setup.accepted,
            null_block_id=-1,
        )

    def traffic(self, cycle: Cycle) -> float:
        """Verify reads S and the high parts; a fold reads S and all L records in both parts and writes S."""
        shape, state = self.shape, state_bytes(self.shape)
        both = record_bytes(shape, per_v=4, per_k=4, per_head=4)
        high = record_bytes(shape, per_v=2, per_k=2, per_head=4)
        ring = both * (shape.draft_tokens + cycle.fold_rate * self.length) + high * cycle.history
        return state * (1 + 2 * cycle.fold_rate) + ring + activation_bytes(shape)


class FoldEveryCommit0523(Variant):
    """Recurrent verify that stores the raw window, and one all-layer replay of the accepted prefix into the state."""

    name = "sglang-0.5.23-every-commit"
    config = "as shipped"
    tolerance = 1e-4

    def __init__(self, setup: Setup) -> None:
        folder = "sglang/kernels/ops/attention/linear"
        kernel = load_sglang("0.5.23", f"{folder}/fused_sigmoid_gating_recurrent.py")
        fold = load_sglang("0.5.23", f"{folder}/gdn_replayssm_spec_fold.py")
        self.modules = (kernel, fold)
        self._update = kernel.fused_sigmoid_gating_delta_rule_update
        self._fold = fold.commit_gdn_replayssm_fold_all_layers
        super().__init__(setup)
        shape, slots, layers = setup.shape, setup.capacity + 1, setup.layers
        t, h, hv, dim = shape.draft_tokens, shape.num_k_heads, shape.num_v_heads, shape.head_dim
        self.raw_v = setup.zeros(layers, slots, hv, t, dim, dtype=ACTIVATION)
        self.raw_k = setup.zeros(layers, slots, h, t, dim, dtype=ACTIVATION)
        self.g, self.beta = (setup.zeros(layers, slots, hv, t) for _ in range(2))

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        out = self._update(
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
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
            cache_ring=True,
            replayssm_rawv=self.raw_v[layer],
            replayssm_rawk=self.raw_k[layer],
            replayssm_g=self.g[layer],
            replayssm_beta=self.beta[layer],
        )
        return out[0]

    def commit(self) -> None:
        self._fold(
            checkpoint_state=self.state,
            rawv_cache=self.raw_v,
            rawk_cache=self.raw_k,
            g_cache=self.g,
            beta_cache=self.beta,
            ssm_state_indices=self.setup.slots,
            accept_lens=self.setup.accepted,
            max_cache_len=self.shape.draft_tokens,
            num_k_heads=self.shape.num_k_heads,
            null_block_id=-1,
        )

    def traffic(self, cycle: Cycle) -> float:
        """S read by verify, read and written by the fold; the raw window written, its accepted part read."""
        raw = record_bytes(self.shape, per_v=2, per_k=2, per_head=8)
        ring = raw * (self.shape.draft_tokens + cycle.accepted)
        return 3 * state_bytes(self.shape) + ring + activation_bytes(self.shape)


def tuned(base: type[Ring0516], tuning: Tuning) -> type[Ring0516]:
    """`base` with other arguments."""
    return type(base.__name__, (base,), {"tuning": tuning, "name": f"{base.name} {tuning}"})


VARIANTS = (Ring0516, Compact0523, FoldEveryCommit0523)
# Name of the variant that is the best of several -> the candidates.
TUNED = {f"{base.name}-tuned": tuple(tuned(base, t) for t in CANDIDATES) for base in (Ring0516, Compact0523)}
