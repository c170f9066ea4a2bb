"""Compile the kernels for an H200 on a machine without a GPU; print registers, stack and shared memory a variant.

    python scripts/compile_offline.py [substring of a variant's name ...]

Each variant calls the public function on small CPU tensors with a driver that compiles as on the device but launches
nothing, so what is measured is exactly what a server would run, the choice of configuration included. A stack above 0
means spilled registers. To list another kernel, add a generator of (name, call) to `VARIANTS`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget

from sglang_replayssm import kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
Variant = tuple[str, Callable[[], object]]


class OfflineDriver:
    """Stands in for Triton's CUDA driver: knows the target, keeps the last binary that was to be loaded."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int]] = []
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, get_device_properties=lambda device: {"max_shared_mem": 227 * 1024}
        )
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def _load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple:
        self.loaded.append((name, cubin, shared))
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads


def resources(cubin: bytes) -> dict[str, int]:
    """Of the binary's kernel: registers and bytes of stack a thread, loads and stores of spills, instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
        sass = subprocess.check_output([CUOBJDUMP, "-sass", file.name], text=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass, re.M)
    moves = opcodes.count("LDL") + opcodes.count("STL")
    return {"regs": registers, "stack": stack, "spill_moves": moves, "sass": len(opcodes)}


class Case:
    """Tensors of one shape: enough of them to call any kernel."""

    def __init__(
        self, dtype: torch.dtype, T: int, D: int, batch: int, window: int, H: int = 16, HV: int = 32, fold: str = "fp32"
    ) -> None:
        self.T = T
        self.spec = kernels.RingSpec(1, batch, H, HV, D, D, window, max(T, 1), dtype, fold)
        self.ring = kernels.Ring.allocate(self.spec, "cpu")
        self.cursors = kernels.Cursors.allocate(self.spec, "cpu")
        self.qkv = torch.empty(batch * T, (2 * H + HV) * D, dtype=dtype)
        q, k, v = self.qkv.split([H * D, H * D, HV * D], dim=1)
        self.q, self.k, self.v = q.unflatten(1, (H, D)), k.unflatten(1, (H, D)), v.unflatten(1, (HV, D))
        self.a, self.b = torch.empty(batch * T, HV, dtype=dtype), torch.empty(batch * T, HV, dtype=dtype)
        self.A_log, self.dt_bias = torch.empty(HV), torch.empty(HV)
        self.state = torch.empty(1, 1, HV, D, D)
        self.rows = torch.ones(batch, dtype=torch.int64)
        self.slots = torch.ones(batch, dtype=torch.int32)

    def verify(self) -> None:
        inputs = (self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias)
        kernels.verify(*inputs, self.state[0], self.ring.layer(0), self.cursors, self.T)

    def fold(self) -> None:
        kernels.fold(self.state, self.ring, self.cursors, self.rows, self.slots)

    def fold_due(self) -> None:
        kernels.fold_due(self.state, self.ring, self.cursors, len(self.rows))

    def materialize(self) -> None:
        kernels.materialize(self.state, self.ring, self.cursors, self.rows, self.slots)


def verify_variants() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in (64, 128, 256):
            for T in (1, 4, 8, 16):
                name = f"verify {str(dtype)[6:]:8} K=V={D:<3} T={T:<2} W=16"
                yield name, lambda d=dtype, T=T, D=D: Case(d, T, D, batch=16, window=16).verify()
    yield "verify bfloat16 K=V=128 T=4  W=16 B=1", Case(torch.bfloat16, 4, 128, batch=1, window=16).verify
    yield "verify bfloat16 K=V=128 T=4  W=32", Case(torch.bfloat16, 4, 128, batch=16, window=32).verify
    yield "verify bfloat16 K=V=128 T=8  W=64", Case(torch.bfloat16, 8, 128, batch=16, window=64).verify


def fold_variants() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in (64, 128, 256):
            yield f"fold   {str(dtype)[6:]:8} K=V={D:<3} W=16", Case(dtype, 4, D, batch=4, window=16).fold


def policy_variants() -> Iterator[Variant]:
    for fold in ("exact", "every-commit", "bf16"):
        for T in (4, 8):
            case = Case(torch.bfloat16, T, 128, batch=16, window=16, fold=fold)
            yield f"verify {fold:12} K=V=128 T={T}  W=16", case.verify
    yield "replay K=V=128", Case(torch.bfloat16, 4, 128, batch=16, window=16, fold="exact").fold_due
    yield "fold   bf16 K=V=128", Case(torch.bfloat16, 4, 128, batch=16, window=16, fold="bf16").fold


def materialize_variants() -> Iterator[Variant]:
    for fold in ("fp32", "exact", "every-commit", "bf16"):
        yield f"materialize {fold:12} K=V=128", Case(torch.bfloat16, 4, 128, batch=16, window=16, fold=fold).materialize


def conv_variants() -> Iterator[Variant]:
    for T in (1, 4, 8, 16):
        dim, layers = 8192, 2
        cursors = Case(torch.bfloat16, T, 128, batch=4, window=16).cursors
        state = torch.empty(layers, 5, dim, 3, dtype=torch.bfloat16)
        windows = torch.empty(layers, 5, T, dim, dtype=torch.bfloat16)
        x, weight = torch.empty(4 * T, dim, dtype=torch.bfloat16), torch.empty(dim, 4, dtype=torch.bfloat16)
        arguments = (x, state[0], weight, None, "silu", windows[0], cursors, T)
        yield f"conv   bfloat16 T={T}", partial(kernels.convolve, *arguments)
    steps = torch.zeros(4, dtype=torch.int64)
    yield "commit bfloat16 conv", partial(kernels.commit_conv, state, windows, cursors, steps, steps, steps)


VARIANTS = (verify_variants, fold_variants, policy_variants, materialize_variants, conv_variants)


def main(wanted: list[str]) -> None:
    driver = OfflineDriver()
    triton.runtime.driver.set_active(driver)
    print(f"{'variant':44} {'kernel':12} {'regs':>5} {'stack':>6} {'ldl+stl':>8} {'smem':>7} {'sass':>6}")
    for variants in VARIANTS:
        for name, call in variants():
            if wanted and not any(part in name for part in wanted):
                continue
            driver.loaded.clear()
            call()
            for kernel, cubin, shared in driver.loaded:
                r = resources(cubin)
                usage = f"{r['regs']:5} {r['stack']:6} {r['spill_moves']:8} {shared:7} {r['sass']:6}"
                print(f"{name:44} {kernel:12} {usage}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
