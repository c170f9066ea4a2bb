"""Hard-coded CUDA in host code: `device="cuda"`, pinned memory, streams."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """Sends every torch call that names a CUDA device to the CPU, and forgets pinning."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func in (torch.Tensor.pin_memory, torch.Tensor.cuda):
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(arg) for arg in args)
        return func(*args, **kwargs)


def _on_cpu(device):
    is_cuda = (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else device


_mode: CudaToCpu | None = None


def install() -> None:
    """Enter the mode for the rest of this thread's life; a scheduler does its work in its main thread."""
    global _mode
    if _mode is not None:
        return
    _mode = CudaToCpu()
    _mode.__enter__()
    torch.Tensor.record_stream = lambda self, stream: None  # refuses a CPU stream before any mode sees the call
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    if not hasattr(torch.cpu, "device"):  # `torch.get_device_module(d).device(i)` is a context on every accelerator
        torch.cpu.device = lambda index=None: contextlib.nullcontext()
