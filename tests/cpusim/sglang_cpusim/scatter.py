"""The state and window scatters of a commit: their hosts refuse tensors that are not on CUDA."""

from __future__ import annotations

import functools

import torch
from torch.overrides import TorchFunctionMode

from sglang_cpusim.rebind import rebind


def install() -> None:
    from sglang.srt.layers.attention.mamba import mamba_state_scatter_triton as scatter

    for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
        rebind(scatter, name, _claiming_cuda(getattr(scatter, name)))


class ClaimCuda(TorchFunctionMode):
    """Inside, every tensor's `is_cuda` is true."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:  # a new wrapper object each time, hence not `is`
            return True
        return func(*args, **(kwargs or {}))


def _claiming_cuda(host):
    @functools.wraps(host)
    def call(*args, **kwargs):
        with ClaimCuda():
            return host(*args, **kwargs)

    return call
