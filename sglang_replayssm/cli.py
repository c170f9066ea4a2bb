"""`sglang-replayssm`: what a user runs beside the server."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from sglang_replayssm.plugin import flags, seams
from sglang_replayssm.plugin.seams import Status


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="sglang-replayssm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="report whether this environment can run the ring; exit status 1 on a problem")
    parser.parse_args(argv)
    return check()


def check() -> int:
    """Print versions, GPU, flags, entry point and every seam; 1 if anything keeps the ring from working."""
    problems = []
    print("versions")
    for package in ("sglang-replayssm", "sglang", "torch", "triton"):
        version = _version(package)
        print(f"  {package:17} {version or 'not installed'}")
        if version is None:
            problems.append(f"{package} is not installed")
    print(f"  {'GPU':17} {_gpu()}")

    print("\nplugin")
    entry_points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    ours = [point for point in entry_points if point.value == "sglang_replayssm.plugin:register"]
    print(f"  {'entry point':17} {ours[0].name if ours else 'not found'}")
    if not ours:
        problems.append("SGLang cannot find the plugin: install this package with pip instead of putting it on a path")

    print("\nflags")
    for flag in flags.FLAGS:
        print(f"  {flag.option}  (default {flag.default})\n      {flag.help}")

    print(f"\nseams (SGLang {seams.PINNED_SGLANG})")
    for seam in seams.SEAMS:
        found = seams.status(seam)
        print(f"  {found.value:8} {seam.target}\n           {seam.purpose}")
        if found is not Status.OK:
            problems.append(f"seam {seam.target} {found.value}")

    print()
    if problems:
        print("\n".join(f"problem: {problem}" for problem in problems))
        print(f"fix: pip install sglang=={seams.PINNED_SGLANG} sglang-replayssm")
        return 1
    print("ok: the ring can be used here" + ("" if _gpu() != "none" else " (on a machine with an NVIDIA GPU)"))
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "none"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


if __name__ == "__main__":
    sys.exit(main())
