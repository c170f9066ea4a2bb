"""What a variant is: one way of doing the verify step, adapted to one interface, with its own ring and cursors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from .shape import Inputs, Shape
from .traffic import Cycle, FoldRule


class NotApplicable(Exception):
    """The variant does not run here; the message says why and ends up in the table."""


@dataclass
class Setup:
    """The buffers that all variants of one measurement share.

    Attributes:
        layers: GDN layers, each with its own state and ring.
        capacity: request rows and state slots of the pools (the same for every batch, so that strides stay the same).
        window: W, records after which our rings fold.
        fp32_output: ask for outputs before the cast (for the check against the oracle).
        slots, rows: int32 [B], state slot and request row of each batch row, scattered.
        accepted, last_step: int32 [B], accepted tokens of the current step, and that minus one.
    """

    shape: Shape
    layers: int
    capacity: int
    device: torch.device
    window: int = 16
    fp32_output: bool = False
    seed: int = 0
    pools: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        batch = self.shape.batch

        def scattered() -> torch.Tensor:
            order = torch.randperm(self.capacity, generator=generator)[:batch] + 1
            return order.to(torch.int32).to(self.device)

        self.slots, self.rows = scattered(), scattered()
        self.accepted = torch.ones(batch, dtype=torch.int32, device=self.device)
        self.last_step = torch.zeros(batch, dtype=torch.int32, device=self.device)
        starts = torch.arange(batch + 1, dtype=torch.int32) * self.shape.draft_tokens
        self.query_start_loc = starts.to(self.device)

    def state(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[layers, capacity + 1, HV, V, K], random; one pool a dtype, shared by all variants."""
        if ("state", dtype) not in self.pools:
            # One seed for every dtype: the bf16 pool is the rounded fp32 pool.
            generator = torch.Generator(self.device).manual_seed(self.seed)
            size = (self.layers, self.capacity + 1, *self.shape.state_shape)
            pool = torch.empty(size, dtype=dtype, device=self.device)
            for layer in pool:
                layer.copy_(torch.randn(layer.shape, device=self.device, generator=generator) * 0.3)
            self.pools["state", dtype] = pool
        return self.pools["state", dtype]

    def snapshots(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[layers, B, T, HV, V, K]: the state after every draft, for variants that keep copies."""
        if ("snapshots", dtype) not in self.pools:
            size = (self.layers, self.shape.batch, self.shape.draft_tokens, *self.shape.state_shape)
            self.pools["snapshots", dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self.pools["snapshots", dtype]

    def zeros(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def output(self) -> torch.Tensor:
        """[B*T, HV, V], poisoned: every element must be written."""
        size = (self.shape.tokens, self.shape.num_v_heads, self.shape.head_dim)
        dtype = torch.float32 if self.fp32_output else torch.bfloat16
        return torch.full(size, float("nan"), dtype=dtype, device=self.device)

    def set_accepted(self, accepted: torch.Tensor) -> None:
        self.accepted.copy_(accepted)
        torch.sub(self.accepted, 1, out=self.last_step)


class Variant:
    """One way of doing the step: plan() once, verify() per layer, commit() once for all layers.

    Attributes:
        name: key of the registry and of the table.
        config: how it is configured, in words.
        tolerance: largest relative L2 error of outputs and checkpoints that is still its intended arithmetic.
        output_before_cast: whether verify returns fp32 when the setup asks for it.
        packed_inputs: whether it takes q, k, v as slices of one buffer (else it gets contiguous copies).
        folds_before_window: the checkpoint written in a step holds what was committed before it (folded in verify),
            or else also the tokens accepted in it (folded in commit).
        modules: where its kernels live (for registers and shared memory).
    """

    name = "?"
    config = ""
    tolerance = 5e-3
    state_dtype = torch.float32
    output_before_cast = True
    packed_inputs = True
    folds_before_window = False
    rule = FoldRule(0)
    modules: tuple[ModuleType, ...] = ()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.shape = setup.shape
        self.state = setup.state(self.state_dtype)

    def plan(self) -> None:
        """Once a step, before the first layer."""

    def verify(self, layer: int, inputs: Inputs) -> torch.Tensor:
        """Outputs [B*T, HV, V] of one layer."""
        raise NotImplementedError

    def commit(self) -> None:
        """Once a step, after the last layer: the accepted tokens of `setup.accepted` become history."""
        raise NotImplementedError

    def step(self, inputs: Inputs) -> None:
        self.plan()
        for layer in range(self.setup.layers):
            self.verify(layer, inputs)
        self.commit()

    def traffic(self, cycle: Cycle) -> float:
        """Bytes per request, layer and step; see traffic.py."""
        raise NotImplementedError
