"""Registers, spills and shared memory of the Triton kernels that ran, read from the compiled objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import ModuleType

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Resources:
    """One compiled kernel."""

    kernel: str
    registers: int
    spills: int
    shared: int
    warps: int
    constants: str

    def as_dict(self) -> dict:
        return asdict(self)


def _objects(modules: Iterable[ModuleType]):
    """(function, compiled object) of every kernel in `modules` that was launched in this process."""
    seen = set()
    for module in modules:
        for function in list(vars(module).values()):
            if not isinstance(function, JITFunction) or id(function) in seen:
                continue
            seen.add(id(function))
            for caches in getattr(function, "device_caches", {}).values():
                for compiled in caches[0].values():
                    yield function, compiled


def resources(modules: Iterable[ModuleType], known: set[int]) -> list[Resources]:
    """Kernels not in `known` (which is extended)."""
    found = []
    for function, compiled in _objects(modules):
        if id(compiled) in known or getattr(compiled, "n_regs", None) is None:
            continue
        known.add(id(compiled))
        shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
        constants = _constants(function, compiled)
        found.append(Resources(function.__name__, compiled.n_regs, compiled.n_spills, shared, warps, constants))
    return found


def _constants(function: JITFunction, compiled) -> str:
    """The constexpr integers that this object was compiled for, strides left out."""
    constants = getattr(getattr(compiled, "src", None), "constants", None) or {}
    named = {function.arg_names[k[0]] if isinstance(k, tuple) else str(k): value for k, value in constants.items()}
    return " ".join(f"{n}={v}" for n, v in named.items() if isinstance(v, int) and not n.startswith("stride"))
