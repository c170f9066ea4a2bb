"""Triton's interpreter: bf16 arithmetic and autotuning.

The interpreter keeps bf16 as raw 16-bit integers and computes on those integers. Here every arithmetic operation widens
such operands to fp32, computes, and rounds the result to nearest even, which is what hardware does.
"""

from __future__ import annotations

import functools

import numpy as np
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_FLOATS = (tl.bfloat16, tl.float16, tl.float32, tl.float64)

# Operation -> which operand's type the result has.
_ARITHMETIC = {"binary_op": 0, "unary_op": 0, "create_fma": 2, "create_rsqrt": 0, "create_erf": 0, "create_dot": 2}

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    for name, result in _ARITHMETIC.items():
        setattr(InterpreterBuilder, name, _in_fp32(getattr(InterpreterBuilder, name), result))
    _fix_casts()
    _skip_autotuning()


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widen(handle: TensorHandle) -> TensorHandle:
    """bf16 -> fp32, exact."""
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(handle: TensorHandle) -> TensorHandle:
    """fp32 -> bf16, to nearest even."""
    values = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def _in_fp32(operation, result: int):
    @functools.wraps(operation)
    def compute(self, *operands):
        tensors = [operand for operand in operands if isinstance(operand, TensorHandle)]
        if not any(is_bf16(tensor) for tensor in tensors):
            return operation(self, *operands)
        wide = [widen(o) if isinstance(o, TensorHandle) and is_bf16(o) else o for o in operands]
        output = operation(self, *wide)
        is_comparison = output.data.dtype == bool
        return narrow(output) if is_bf16(tensors[result]) and not is_comparison else output

    return compute


def _fix_casts() -> None:
    cast, fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        if source == tl.bfloat16:
            return cast(self, widen(src), target)
        return narrow(cast(self, src, tl.float32))

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if src.dtype.scalar in _FLOATS and dst_type.scalar in _FLOATS:
            return self.cast_impl(src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _skip_autotuning() -> None:
    """There is no device to time candidates on: take the first."""
    run = Autotuner.run

    def run_first(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = run_first
