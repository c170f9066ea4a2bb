"""What the study compares: the recurrence in three precisions, every fold policy, and SGLang's own kernel.

All have one interface. `verify` computes the window's outputs from the state before it; `commit` moves on by the
accepted tokens. `folded` says for which rows `state` is the state of the moment: after `verify` that before the window,
if `folds_in_verify`, else, after `commit`, that after the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch

from sglang_replayssm import kernels
from sglang_replayssm.kernels.cursors import naive as naive_cursors
from sglang_replayssm.kernels.fold import naive as naive_fold
from sglang_replayssm.kernels.recurrence import SOFTPLUS_THRESHOLD, norm, softplus
from sglang_replayssm.kernels.ring import PLAN_FOLD, WRITE_POS, Cursors, Ring, RingSpec
from sglang_replayssm.kernels.verify import naive as naive_verify

from .scenarios import Inputs

WINDOW = 16  # W
STOCK_KERNEL = "SGLang's kernel"

TRITON = kernels
NAIVE = SimpleNamespace(
    plan_window=naive_cursors.plan_window,
    commit=naive_cursors.commit,
    verify=naive_verify.verify,
    fold_due=naive_fold.fold_due,
)


def stock_softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) as SGLang's kernel has it: 1 + e^x is rounded first, which costs digits for x << 0."""
    return torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log(1 + torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD))))


class Method:
    """See the module.

    Attributes:
        state: [B, HV, V, K].
        out: [B, T, HV, V] of the last `verify`, not rounded to the activation dtype.
        folded: bool [B].
        yardstick: the method whose error its own is measured in, None for yardsticks themselves.
        judged: whether the bars apply.
        identical: state, or state and outputs, that must equal the yardstick's.
    """

    folds_in_verify = False
    yardstick: Method | None = None
    judged = False
    identical: tuple[str, ...] = ()

    def __init__(self, name: str, state: torch.Tensor):
        self.name, self.state = name, state
        self.folded = torch.ones(len(state), dtype=torch.bool, device=state.device)
        self.out: torch.Tensor

    def verify(self, inputs: Inputs) -> None:
        raise NotImplementedError

    def commit(self, inputs: Inputs) -> None:
        raise NotImplementedError


class Sequential(Method):
    """The recurrence token by token; in fp64 the oracle, in fp32 the reference of the bars.

    Args:
        state: [B, HV, V, K], the first state; its dtype is that of all arithmetic.
        gate: softplus of the decay.
        rounded: dtype that the state passes through after every token; outputs are read before.
    """

    def __init__(
        self,
        name: str,
        state: torch.Tensor,
        gate: Callable[[torch.Tensor], torch.Tensor] = softplus,
        rounded: torch.dtype | None = None,
    ):
        super().__init__(name, state.clone())
        self.gate, self.rounded = gate, rounded

    def verify(self, inputs: Inputs) -> None:
        dtype = self.state.dtype
        q, k, v, a, b = inputs.tokens(dtype)
        q = inputs.by_value_head(q / norm(q) * q.shape[-1] ** -0.5)
        k = inputs.by_value_head(k / norm(k))
        g = -torch.exp(inputs.A_log.to(dtype)) * self.gate(a + inputs.dt_bias.to(dtype))
        keep, beta = torch.exp(g), torch.sigmoid(b)
        state = self._next = self.state
        out = []
        for t in range(inputs.T):
            state = state * keep[:, t, :, None, None]
            delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None, :]).sum(-1))
            state = state + delta[..., None] * k[:, t, :, None, :]
            out.append((state * q[:, t, :, None, :]).sum(-1))
            if self.rounded is not None:
                state = state.to(self.rounded).to(dtype)
            last = (inputs.accepted == t + 1)[:, None, None, None]
            self._next = torch.where(last, state, self._next)
        self.out = torch.stack(out, 1)

    def commit(self, inputs: Inputs) -> None:
        self.state.copy_(self._next)


class Policy(Method):
    """A fold policy, through the functions that the server calls; batch row n has request row and slot n + 1."""

    def __init__(self, fold: str, ops: SimpleNamespace | ModuleType, state: torch.Tensor, inputs: Inputs):
        batch, heads, v_dim, k_dim = state.shape
        self.pool = torch.zeros(1, batch + 1, heads, v_dim, k_dim, device=state.device)
        self.pool[0, 1:] = state
        super().__init__(fold, self.pool[0, 1:])
        window = max(WINDOW, inputs.T)
        spec = RingSpec(1, batch, inputs.k_heads, heads, k_dim, v_dim, window, inputs.T, inputs.q.dtype, fold)
        self.ops, self.judged = ops, fold != "bf16"
        self.folds_in_verify = not spec.policy.inputs
        if spec.policy.inputs:
            self.identical = ("state",) if spec.policy.factors else ("state", "out")
        self.ring, self.cursors = Ring.allocate(spec, state.device), Cursors.allocate(spec, state.device)
        self.request_rows = torch.arange(1, batch + 1, device=state.device)
        self.slots = self.request_rows.int()
        self._out_fp32 = torch.zeros(batch * inputs.T, heads, v_dim, device=state.device)
        self.out = self._out_fp32.view(batch, inputs.T, heads, v_dim)

    def verify(self, inputs: Inputs) -> None:
        self.ops.plan_window(self.cursors, self.request_rows, self.slots)
        self.ops.verify(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.a,
            inputs.b,
            inputs.A_log,
            inputs.dt_bias,
            self.pool[0],
            self.ring.layer(0),
            self.cursors,
            inputs.T,
            out_fp32=self._out_fp32,
        )
        if self.folds_in_verify:
            self.folded.copy_(self.cursors.plan[: inputs.batch, PLAN_FOLD] == 1)

    def commit(self, inputs: Inputs) -> None:
        self.ops.commit(self.cursors, self.request_rows, inputs.accepted)
        self.ops.fold_due(self.pool, self.ring, self.cursors, inputs.batch)
        if not self.folds_in_verify:  # a commit adds at least one token: none left means folded
            self.folded.copy_(self.cursors.position[1:, WRITE_POS] == 0)


class StockKernel(Method):
    """SGLang's kernel with a state copy a draft, of which commit keeps the last accepted one."""

    def __init__(self, module: ModuleType, state: torch.Tensor, T: int):
        super().__init__(STOCK_KERNEL, state.clone())
        batch = len(state)
        self.kernel = module.fused_sigmoid_gating_delta_rule_update
        self.snapshots = torch.zeros(batch, T, *state.shape[1:], device=state.device)
        self.index = torch.arange(batch + 1, dtype=torch.int32, device=state.device)

    def verify(self, inputs: Inputs) -> None:
        out = self.kernel(
            A_log=inputs.A_log,
            a=inputs.a,
            dt_bias=inputs.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=SOFTPLUS_THRESHOLD,
            q=inputs.q.float()[None],  # widened: outputs take q's dtype, nothing else changes
            k=inputs.k[None],
            v=inputs.v[None],
            b=inputs.b,
            initial_state_source=self.state,
            initial_state_indices=self.index[:-1],
            cu_seqlens=self.index * inputs.T,
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots,
            intermediate_state_indices=self.index[:-1],
            cache_steps=inputs.T,
        )
        self.out = out[0].view(inputs.batch, inputs.T, *out.shape[2:])

    def commit(self, inputs: Inputs) -> None:
        self.state.copy_(self.snapshots[self.index[:-1].long(), inputs.accepted - 1])


def load_stock_kernel() -> ModuleType | None:
    """SGLang's module, installed or fetched by fetch_peers.py; None when there is neither."""
    try:
        import sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent as module

        return module
    except ImportError:
        from bench.peers import load_sglang
        from bench.variant import NotApplicable

        try:
            return load_sglang("0.5.15.post1", "sglang/srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py")
        except NotApplicable:
            return None


def make_methods(inputs: Inputs, policies: list[str], naive: bool) -> tuple[Sequential, list[Method]]:
    """The oracle and everything that is measured against it; yardsticks come before the methods that use them."""
    heads, dim = len(inputs.regimes), inputs.head_dim
    first = 0.3 * torch.randn(inputs.batch, heads, dim, dim, device=inputs.device)
    oracle = Sequential("fp64", first.double())
    fp32 = Sequential("stock fp32", first)
    bf16 = Sequential("stock, bf16 state", first, rounded=torch.bfloat16)
    bf16.yardstick = fp32
    methods: list[Method] = [fp32, bf16]
    # Whatever replays raw inputs reproduces SGLang's gates, and so its error; plain PyTorch has log1p everywhere.
    stock: Method = fp32
    if not naive:
        module = load_stock_kernel()
        gates = Sequential("stock fp32, log(1 + e^x)", first, gate=stock_softplus)
        gates.yardstick = fp32
        stock = gates if module is None else StockKernel(module, first, inputs.T)
        stock.yardstick = fp32
        methods += [gates] if stock is gates else [gates, stock]
    for name in policies:
        policy = Policy(name, NAIVE if naive else TRITON, first, inputs)
        policy.yardstick = stock if policy.identical else fp32
        methods.append(policy)
    return oracle, methods
