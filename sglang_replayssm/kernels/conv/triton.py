"""Convolution of a layer's windows, and the commit of all layers' conv states, one launch each.

Outputs are bit-identical to `causal_conv1d_update` of the pinned SGLang (layers/attention/mamba): products in the type
of their factors, sums in fp32 from the oldest input to the newest, then x / (1 + e^-x).
"""

# ruff: noqa: RUF005 (kernels cannot unpack tuples)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..primitives import PLAN_COLUMNS, PLAN_ROW, PLAN_SLOT, cuda_arch, round_to
from ..ring import Cursors, check_indices

# Channels of a program, and its warps: two channels a thread.
BLOCK, WARPS = 256, 4

ACTIVATIONS = (None, "silu", "swish")


@triton.jit
def _product(x, w):
    """fp32 x w, rounded as the types of the factors have it."""
    product = x.to(tl.float32) * w.to(tl.float32)
    return round_to(product, x.dtype).to(tl.float32) if x.dtype == w.dtype else product


@triton.jit
def _cast(x, dtype: tl.constexpr):
    return x if x.dtype == dtype else round_to(x.to(tl.float32), dtype)


@triton.jit
def _convolve(
    x,
    state,
    weight,
    bias,
    windows,
    plan,
    out,
    strides,
    dim,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (dim / BLOCK, B): channels of one window. `strides`: token of x, slot of state, row of windows."""
    if EARLY:  # verify fetches checkpoints meanwhile; it waits for the end of this kernel before it reads `out`
        tl.extra.cuda.gdc_launch_dependents()
    x_stride, slot_stride, window_stride = strides
    n = tl.program_id(1).to(tl.int64)
    slot = tl.load(plan + n * PLAN_COLUMNS + PLAN_SLOT).to(tl.int64)
    row = tl.load(plan + n * PLAN_COLUMNS + PLAN_ROW)
    if (slot < 0) | (row <= 0):
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < dim
    x += n * T * x_stride + c
    state += slot * slot_stride + c * (WIDTH - 1)
    weight += c * WIDTH
    windows += n * window_stride + c
    out += n * T * dim + c

    # The inputs of the next output, oldest first; the last is still to come.
    taps = ()
    weights = ()
    for j in tl.static_range(WIDTH):
        weights = weights + (tl.load(weight + j, mask=inside, other=0.0),)
        if j < WIDTH - 1:
            taps = taps + (tl.load(state + j, mask=inside, other=0.0),)
    start = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        start += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for t in tl.static_range(T):
        taps = taps + (tl.load(x + t * x_stride, mask=inside, other=0.0),)
    for t in tl.static_range(T):
        acc = start
        for j in tl.static_range(WIDTH):
            acc += _product(taps[t + j], weights[j])
        if SILU:
            acc = acc / (1 + tl.exp(-acc))
        tl.store(out + t * dim, round_to(acc, out.dtype.element_ty), mask=inside)
        tl.store(windows + t * dim, _cast(taps[t + WIDTH - 1], windows.dtype.element_ty), mask=inside)


@triton.jit
def _after(state, windows, step, dim, inside, WIDTH: tl.constexpr):
    """The WIDTH - 1 inputs up to the window's input `step`, oldest first: of the old state or of the window."""
    inputs = ()
    for j in tl.static_range(WIDTH - 1):
        index = step + 1 + j
        old = tl.load(state + index, mask=inside & (index < WIDTH - 1), other=0.0)
        new = tl.load(windows + (index - (WIDTH - 1)) * dim, mask=inside & (index >= WIDTH - 1), other=0.0)
        inputs = inputs + (tl.where(index < WIDTH - 1, old, new),)
    return inputs


@triton.jit
def _commit_conv(
    state,
    windows,
    plan,
    steps,
    track_steps,
    track_slots,
    strides,
    dim,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (dim / BLOCK, B, layers). `strides`: layer and slot of state, layer and row of windows.

    A thread has its channels to itself, and reads all that it needs before it writes.
    """
    layer_stride, slot_stride, window_layer, window_stride = strides
    n = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(plan + n * PLAN_COLUMNS + PLAN_SLOT).to(tl.int64)
    row = tl.load(plan + n * PLAN_COLUMNS + PLAN_ROW)
    if (slot < 0) | (row <= 0):
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < dim
    state += layer * layer_stride + c * (WIDTH - 1)
    windows += layer * window_layer + n * window_stride + c
    step = tl.load(steps + n).to(tl.int32)
    if track_steps is not None:
        track_step = tl.load(track_steps + n).to(tl.int32)
        track_slot = tl.load(track_slots + n).to(tl.int64)
        if (track_step >= 0) & (track_slot >= 0):
            tracked = _after(state + slot * slot_stride, windows, track_step, dim, inside, WIDTH)
            for j in tl.static_range(WIDTH - 1):
                tl.store(state + track_slot * slot_stride + j, tracked[j], mask=inside)
    if step >= 0:
        inputs = _after(state + slot * slot_stride, windows, step, dim, inside, WIDTH)
        for j in tl.static_range(WIDTH - 1):
            tl.store(state + slot * slot_stride + j, inputs[j], mask=inside)


def convolve(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    windows: torch.Tensor,
    cursors: Cursors,
    draft_tokens: int,
) -> torch.Tensor:
    """Convolve B windows of T draft tokens of one layer and keep their inputs; the state is only read.

    Batch rows that the plan does not serve (row 0 or slot -1) are skipped: their outputs stay undefined. Those that it
    serves come first in a batch, as SGLang pads, and `windows` has a row for each of them.

    Args:
        x: [B T, dim], the model's q, k, v before the convolution; any token stride.
        state: [slots, dim, W - 1], one layer's conv states; any slot stride.
        weight, bias: [dim, W] and [dim] or None.
        activation: "silu" or "swish" (the same), None for none.
        windows: [rows, at least T, dim], one layer's buffer for the inputs, by batch row; in the dtype of the state.
        cursors: the step's plan gives slots.

    Returns:
        [B T, dim] in the dtype of x, contiguous.

    Raises:
        ValueError: shapes, strides or an activation that the kernel does not take.
    """
    (tokens, dim), width = x.shape, weight.shape[-1]
    batch = tokens // draft_tokens
    _check_conv(state, windows, weight, dim)
    if activation not in ACTIVATIONS:
        raise ValueError(f"convolve knows the activations {ACTIVATIONS}, found {activation!r}")
    if tokens % draft_tokens or x.stride(1) != 1:
        raise ValueError(
            f"convolve takes x [B x {draft_tokens}, dim] with adjacent channels, found {tuple(x.shape)} with strides "
            f"{x.stride()}"
        )
    if draft_tokens > windows.shape[1] or batch > cursors.plan.shape[0]:
        raise ValueError(
            f"convolve got {batch} windows of {draft_tokens} tokens, but has room for {cursors.plan.shape[0]} windows "
            f"of {windows.shape[1]}"
        )
    out = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    if batch:
        _convolve[(triton.cdiv(dim, BLOCK), batch)](
            x,
            state,
            weight,
            bias,
            windows,
            cursors.plan,
            out,
            (x.stride(0), state.stride(0), windows.stride(0)),
            dim,
            T=draft_tokens,
            WIDTH=width,
            SILU=activation is not None,
            EARLY=cuda_arch() >= 90,  # from where on there is programmatic dependent launch
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def commit_conv(
    state: torch.Tensor,
    windows: torch.Tensor,
    cursors: Cursors,
    steps: torch.Tensor,
    track_steps: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
) -> None:
    """End a step for the conv states of all layers: each becomes the one after its window's accepted tokens.

    Slots are those of the step's plan, as in SGLang's own commit; batch rows that the plan does not serve are skipped.

    Args:
        state: [layers, slots, dim, W - 1].
        windows: [layers, rows, T, dim], as `convolve` has filled it.
        steps: int32 or int64 [B], the last accepted step of each window; -1 leaves the state alone.
        track_steps, track_slots: int32 or int64 [B]: the state after that step also goes into that slot, of nobody in
            this step; -1 for none.

    Raises:
        ValueError: shapes, strides or dtypes that the kernel does not take.
    """
    tracked = () if track_steps is None else (track_steps, track_slots)
    check_indices("commit_conv", "steps and slots", steps, *tracked)
    layers, _, dim, history = state.shape
    batch = steps.numel()
    _check_conv(state[0], windows[0], None, dim)
    if windows.shape[0] != layers or batch > cursors.plan.shape[0]:
        raise ValueError(
            f"commit_conv got {batch} batch rows and inputs of {windows.shape[0]} layers, but the plan has "
            f"{cursors.plan.shape[0]} lines and the state {layers} layers"
        )
    if batch:
        _commit_conv[(triton.cdiv(dim, BLOCK), batch, layers)](
            state,
            windows,
            cursors.plan,
            steps,
            *(tracked or (None, None)),
            (state.stride(0), state.stride(1), windows.stride(0), windows.stride(1)),
            dim,
            WIDTH=history + 1,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _check_conv(state: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor | None, dim: int) -> None:
    history = state.shape[-1]
    if state.shape[1] != dim or state.stride()[1:] != (history, 1):
        raise ValueError(
            f"the convolution takes a state [slots, {dim}, W - 1], its last two dimensions packed, found "
            f"{tuple(state.shape)} with strides {state.stride()}"
        )
    if weight is not None and (weight.shape != (dim, history + 1) or not weight.is_contiguous()):
        raise ValueError(
            f"the convolution takes contiguous weights [{dim}, {history + 1}], found {tuple(weight.shape)} with "
            f"strides {weight.stride()}"
        )
    if windows.shape[2] != dim or windows.stride()[1:] != (dim, 1) or windows.dtype != state.dtype:
        raise ValueError(
            f"the convolution keeps inputs in [rows, T, {dim}] of {state.dtype}, found {windows.dtype} "
            f"{tuple(windows.shape)} with strides {windows.stride()}"
        )
