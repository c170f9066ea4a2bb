#!/usr/bin/env python3
"""Fetch the peers' kernels into the git-ignored folder .peers/, from their wheels in the package registry.

    python scripts/fetch_peers.py                     # SGLang 0.5.15.post1, 0.5.16, 0.5.23: under 1 MB
    python scripts/fetch_peers.py --with-flashinfer   # and FlashInfer's GDN kernels with the CUTLASS DSL they need

Only the few files that the benchmark loads are kept. Nothing of them becomes part of this repository.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).resolve().parent.parent / ".peers"


class Peer(NamedTuple):
    """A requirement, the folder it goes to, and the files of its wheel to keep (patterns; "!" leaves out)."""

    requirement: str
    folder: str
    keep: tuple[str, ...]


SGLANG = (
    Peer(
        "sglang==0.5.15.post1",
        "sglang/0.5.15.post1",
        (
            "sglang/srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py",
            "sglang/srt/layers/attention/mamba/causal_conv1d_triton.py",
            "sglang/srt/layers/attention/mamba/mamba_state_scatter_triton.py",
        ),
    ),
    Peer(
        "sglang==0.5.16",
        "sglang/0.5.16",
        ("sglang/kernels/ops/attention/fla/gdn_replayssm_spec_decode.py",),
    ),
    Peer(
        "sglang==0.5.23",
        "sglang/0.5.23",
        (
            "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py",
            "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_fold.py",
            "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
        ),
    ),
)
CUTLASS = "4.6.2"  # the CUTLASS DSL that FlashInfer 0.6.18 asks for
FLASHINFER = (
    Peer(
        "flashinfer-python==0.6.18",
        "flashinfer",
        ("flashinfer/gdn_decode.py", "flashinfer/gdn_kernels/[!_]*.py", "!flashinfer/gdn_kernels/*/*"),
    ),
    Peer("apache-tvm-ffi>=0.1.6,<0.2", "cutlass", ("tvm_ffi/*", "!*/include/*", "!*/3rdparty/*")),
    Peer(f"nvidia-cutlass-dsl-libs-core=={CUTLASS}", "cutlass", ("nvidia_cutlass_dsl/*",)),
    Peer(f"nvidia-cutlass-dsl-libs-base=={CUTLASS}", "cutlass", ("nvidia_cutlass_dsl/*", "!*/iket/*")),
    Peer(f"nvidia-cutlass-dsl-libs-cu13=={CUTLASS}", "cutlass", ("nvidia_cutlass_dsl/*", "!*/stubs/*")),
)


def pip() -> list[str]:
    """The registry's ordinary client: this Python's pip, else one on the PATH."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip"):
        return [found]
    sys.exit("fetch_peers: no pip found; install it into this environment (python -m ensurepip)")


def wanted(name: str, keep: tuple[str, ...]) -> bool:
    """Whether a file of a wheel is kept; later patterns win."""
    result = False
    for pattern in keep:
        if fnmatch(name, pattern.lstrip("!")):
            result = not pattern.startswith("!")
    return result


def fetch(peer: Peer, python: str, target: Path) -> int:
    """Download one wheel, unpack what is wanted of it; bytes kept."""
    with tempfile.TemporaryDirectory() as scratch:
        # A plain download of SGLang serves any Python: its kernels are Python files.
        native = (
            []
            if peer.requirement.startswith("sglang")
            else [
                *("--python-version", python, "--platform", "manylinux_2_28_x86_64"),
                *("--platform", "manylinux2014_x86_64", "--only-binary", ":all:"),
            ]
        )
        command = [*pip(), "download", "--quiet", "--no-deps", "--dest", scratch, *native, peer.requirement]
        subprocess.run(command, check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        size = 0
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not member.is_dir() and wanted(member.filename, peer.keep):
                    archive.extract(member, target / peer.folder)
                    size += member.file_size
    if not size:
        sys.exit(f"fetch_peers: nothing of {wheel.name} matches {peer.keep}")
    print(f"{wheel.name}: kept {size / 1e6:.2f} MB in {target.name}/{peer.folder}", flush=True)
    return size


def pack(folder: Path) -> None:
    """Replace every directory of `folder` by an xz archive: native libraries pack to a quarter."""
    for library in folder.rglob("*.so"):
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], capture_output=True)
    environment = os.environ | {"XZ_OPT": "-9e -T0"}
    for directory in [entry for entry in folder.iterdir() if entry.is_dir()]:
        archive = folder / f"{directory.name}.tar.xz"
        subprocess.run(["tar", "-cJf", str(archive), "-C", str(folder), directory.name], check=True, env=environment)
        shutil.rmtree(directory)
        print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with-flashinfer", action="store_true", help="also FlashInfer and the CUTLASS DSL (large)")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine, for native wheels")
    parser.add_argument("--target", type=Path, default=TARGET)
    args = parser.parse_args(argv)
    peers = SGLANG + (FLASHINFER if args.with_flashinfer else ())
    total = sum(fetch(peer, args.python, args.target) for peer in peers)
    if args.with_flashinfer:
        pack(args.target / "cutlass")
    print(f"{total / 1e6:.1f} MB in all, unpacked")


if __name__ == "__main__":
    main()
