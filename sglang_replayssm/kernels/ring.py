"""What the ring is: sizes, dtypes, layouts and the fold rule. Every other module takes them from here.

Vocabulary: the *checkpoint* is the state S_c that SGLang keeps per mamba slot; a *record* is what one token leaves in
the ring, its rank-1 factor (d, k, g), its raw inputs (k, v, gates), or both, as the fold policy says; the *ring* holds
the records of the tokens committed since the checkpoint; the *window* is the T draft tokens of one verify step;
*verify* computes the window's outputs; *commit* moves the cursors over the accepted tokens; *fold* adds the ring's
history into the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from ..policies import FP32, POLICIES, FoldPolicy

# Columns of `Cursors.position`, int32 [rows + 1, 2].
CACHE_BASE, WRITE_POS = 0, 1

# Columns of `Cursors.plan`, int32 [plan_lines, PLAN_COLUMNS]: what every layer of a step needs to know of a batch row.
PLAN_SLOT, PLAN_ROW, PLAN_BASE, PLAN_COUNT, PLAN_FOLD = range(5)
PLAN_COLUMNS = 8  # one 32-byte sector a batch row
# Lines of the plan beyond rows + 1: SGLang pads a batch up to a multiple of its attention group.
PLAN_SPARE_LINES = 64


@dataclass(frozen=True)
class RingSpec:
    """Sizes of one worker's ring.

    Attributes:
        layers: GDN layers on this worker.
        rows: request rows, numbered 1..rows; row 0 belongs to padding and graph capture, so buffers have rows + 1.
        num_k_heads, num_v_heads: H and HV after tensor parallelism; H divides HV.
        head_k_dim, head_v_dim: K and V.
        window: W, the number of committed records after which a row folds. T_max, whatever was asked for, if the
            policy records no rank-1 factors: verify cannot use a history then.
        max_draft_tokens: T_max, the largest number of draft tokens that a step of this server may verify.
        activation_dtype: dtype of q, k and v.
        fold: name of the fold policy, a key of `POLICIES`.

    Raises:
        ValueError: an unknown policy, W < T_max, or H that does not divide HV.
    """

    layers: int
    rows: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    window: int
    max_draft_tokens: int
    activation_dtype: torch.dtype
    fold: str = FP32.name

    def __post_init__(self) -> None:
        if self.fold not in POLICIES:
            raise ValueError(f"fold policy {self.fold!r} is none of {', '.join(POLICIES)}")
        if self.policy.factors is None:
            object.__setattr__(self, "window", self.max_draft_tokens)
        if self.window < self.max_draft_tokens:
            raise ValueError(
                f"ring window W={self.window} is smaller than the largest draft length "
                f"T_max={self.max_draft_tokens}: a row could never take a window; raise W to at least T_max"
            )
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"num_v_heads={self.num_v_heads} is not a multiple of num_k_heads={self.num_k_heads}")

    @property
    def policy(self) -> FoldPolicy:
        return POLICIES[self.fold]

    @property
    def records(self) -> int:
        """R, physical records a row. Where verify itself folds, the window that it writes must not overwrite the
        history that another program of the launch still reads; a replay comes after the commit, when there is none."""
        return self.window if self.policy.inputs else self.window + self.max_draft_tokens

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of the buffers that the policy needs; the layouts are those of `Ring`."""
        lead, r, policy = (self.layers, self.rows + 1), self.records, self.policy
        heads, v_heads = (*lead, self.num_k_heads, r), (*lead, self.num_v_heads, r)
        rounded = policy.factors == "bfloat16"
        buffers = {"k": ((*heads, self.head_k_dim), torch.bfloat16 if rounded else self.activation_dtype)}
        if policy.factors is not None:
            buffers["d"] = ((*v_heads, self.head_v_dim), getattr(torch, policy.factors))
            buffers["g"] = ((*v_heads, 2), torch.float32)
        if policy.inputs:
            buffers["v"] = ((*v_heads, self.head_v_dim), self.activation_dtype)
            buffers["gates"] = ((*v_heads, 2), torch.float32)
        return buffers

    @property
    def bytes_per_row(self) -> int:
        """Bytes of ring that one request row takes over all layers (row 0 costs the same once more)."""
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors().values())
        return total // (self.rows + 1)

    @property
    def plan_lines(self) -> int:
        """Batch rows that a step may have, padding included."""
        return self.rows + 1 + PLAN_SPARE_LINES

    @property
    def cursor_bytes(self) -> int:
        """Bytes of cursors, step plan and counters of the whole worker."""
        return (self.rows + 1) * 2 * 4 + self.plan_lines * PLAN_COLUMNS * 4 + 8 * len(Cursors.COUNTERS)

    @property
    def full(self) -> int:
        """Committed records from which on a row folds: its ring might not take another window, of the *largest* draft
        length."""
        return self.window - self.max_draft_tokens + 1


@dataclass(frozen=True)
class Ring:
    """Ring buffers of all layers, or (see `layer`) of one: the same tensors without the leading axis.

    Which ones exist is up to the policy (`RingSpec.tensors`); the others are None.

    Attributes:
        k: activation dtype [layers, rows + 1, H, R, K]. Raw keys: not normalised, hence exact. (bf16 factors: bf16,
            normalised.)
        d: fp32 [layers, rows + 1, HV, R, V]. beta (v - S k) of the token, divided by sqrt(|k|^2 + 1e-6), so that
            d x (raw k) is the rank-1 update of the token. (bf16 factors: bf16, not divided.)
        g: fp32 [layers, rows + 1, HV, R, 2]. Log-decay accumulated since the last fold, the token's own included, as
            an unevaluated sum high + low.
        v: activation dtype [layers, rows + 1, HV, R, V]. Raw values.
        gates: fp32 [layers, rows + 1, HV, R, 2]. The token's own log-decay and beta, as SGLang's kernel computes them.
    """

    spec: RingSpec
    k: torch.Tensor
    d: torch.Tensor | None = None
    g: torch.Tensor | None = None
    v: torch.Tensor | None = None
    gates: torch.Tensor | None = None

    @classmethod
    def allocate(cls, spec: RingSpec, device: torch.device | str) -> Ring:
        """Zero-filled buffers on `device`."""
        return cls(spec, **{n: torch.zeros(shape, dtype=t, device=device) for n, (shape, t) in spec.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers that exist, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}

    def layer(self, index: int) -> Ring:
        """Views of one layer: k [rows + 1, H, R, K], d and v [rows + 1, HV, R, V], g and gates [rows + 1, HV, R, 2]."""
        return Ring(self.spec, **{name: tensor[index] for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class Cursors:
    """Where each request row stands in its ring; shared by all layers and moved once a step, on the device.

    Attributes:
        position: int32 [rows + 1, 2], columns CACHE_BASE (physical record of the oldest committed token, 0..R-1) and
            WRITE_POS (committed tokens since the checkpoint, 0..W).
        plan: int32 [plan_lines, PLAN_COLUMNS], one line a *batch* row, written by `plan_window` at the start of a step:
            mamba slot (-1: padding), request row, and the base, count and fold decision that every layer uses.
        counters: int64 [len(COUNTERS)], running totals; see COUNTERS.
    """

    COUNTERS = ("verify_rows", "folds", "accepted_tokens")

    spec: RingSpec
    position: torch.Tensor
    plan: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, spec: RingSpec, device: torch.device | str) -> Cursors:
        """All rows empty."""
        return cls(
            spec,
            torch.zeros((spec.rows + 1, 2), dtype=torch.int32, device=device),
            torch.zeros((spec.plan_lines, PLAN_COLUMNS), dtype=torch.int32, device=device),
            torch.zeros(len(cls.COUNTERS), dtype=torch.int64, device=device),
        )


def check_indices(name: str, what: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Check the per-row index tensors of a call of the function `name`.

    Raises:
        ValueError: one is not contiguous int32 or int64 of the first one's length.
    """
    for tensor in (first, *others):
        if (
            tensor.shape != (first.numel(),)
            or not tensor.is_contiguous()
            or tensor.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{name} takes contiguous int32 or int64 {what} of one length, found {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} next to {first.numel()} rows"
            )
