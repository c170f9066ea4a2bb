"""Load the peers' kernels from their own files in .peers/ (see fetch_peers.py), without installing the peers.

What their files import from the rest of their package is little: those few names are stood in for while a file loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .variant import NotApplicable

PEERS = Path(__file__).resolve().parents[2] / ".peers"


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def _sglang_stand_ins() -> dict[str, dict[str, object]]:
    """Module -> the names that the peers' files take from it, for a CUDA device of this capability."""
    cuda = torch.cuda.is_available()
    sm = 10 * torch.cuda.get_device_capability()[0] if cuda else 0
    return {
        "sglang.srt.utils": {
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False,
            "is_cuda": lambda: cuda,
            "is_sm90_supported": lambda *_: sm == 90,
            "get_device_sm": lambda: sm,
        },
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _hopper},
        "sglang.jit_kernel.utils": {"is_arch_support_pdl": _hopper},
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": True},
    }


@contextmanager
def _stood_in(modules: dict[str, dict[str, object]]):
    """Put `modules` and their parents into sys.modules, and take them out again."""
    names = {".".join(name.split(".")[:n]) for name in modules for n in range(1, name.count(".") + 2)}
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(modules.get(name, {}))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load_sglang(version: str, path: str) -> ModuleType:
    """The module at `path` of SGLang `version`."""
    file = PEERS / "sglang" / version / path
    name = "peer_sglang_" + "".join(c if c.isalnum() else "_" for c in f"{version}_{file.stem}")
    if name in sys.modules:
        return sys.modules[name]
    if not file.exists():
        raise NotApplicable("not fetched: run scripts/fetch_peers.py")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _stood_in(_sglang_stand_ins()):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _cutlass_on_path() -> None:
    """Unpack the archives of the CUTLASS DSL once a machine, and make it importable."""
    archives = sorted((PEERS / "cutlass").glob("*.tar.xz"))
    if not archives or importlib.util.find_spec("cutlass"):
        return
    size = sum(archive.stat().st_size for archive in archives)
    place = Path(tempfile.gettempdir()) / f"replayssm-cutlass-{size}"
    if not place.exists():
        partial = place.with_name(f"{place.name}-{os.getpid()}")
        for archive in archives:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
        partial.rename(place)
    sys.path += [str(place), str(place / "nvidia_cutlass_dsl" / "dsl_packages")]
    importlib.invalidate_caches()


def load_flashinfer(module: str) -> ModuleType:
    """`module` (dotted, below the package) of FlashInfer; its kernels need the CUTLASS DSL of .peers/cutlass/."""
    root = PEERS / "flashinfer" / "flashinfer"
    if not root.exists():
        raise NotApplicable("not fetched: run scripts/fetch_peers.py --with-flashinfer")
    _cutlass_on_path()
    if "peer_flashinfer" not in sys.modules:
        package = ModuleType("peer_flashinfer")
        package.__path__ = [str(root)]
        sys.modules["peer_flashinfer"] = package
        jit = ModuleType("peer_flashinfer.jit")
        jit.__path__ = []
        core = ModuleType("peer_flashinfer.jit.core")
        core.logger = SimpleNamespace(warning_once=lambda *_: None)
        sys.modules.update({"peer_flashinfer.jit": jit, "peer_flashinfer.jit.core": core})
    try:
        return importlib.import_module(f"peer_flashinfer.{module}")
    except ImportError as error:
        raise NotApplicable(f"does not import here: {error}") from error
