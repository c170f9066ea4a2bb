"""Runs the real SGLang engine, speculation included, on a CPU: Triton kernels go through Triton's interpreter.

A platform plugin makes SGLang take its portable code paths and a general plugin (the same name, so one entry of
`SGLANG_PLUGINS` admits both) relaxes the few places that insist on CUDA. Nothing happens unless CPUSIM=1.

What this cannot show: CUDA graphs, streams and races, compiled-Triton behaviour, speed, sampling other than greedy.
"""

from __future__ import annotations

import multiprocessing
import os

from sglang_cpusim.settings import engine_arguments, environment

__all__ = ["activate", "engine_arguments", "environment", "install", "register"]


def enabled() -> bool:
    return os.environ.get("CPUSIM") == "1"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`."""
    return "sglang_cpusim.platform.CpuSimPlatform" if enabled() else None


def register() -> None:
    """Entry point of `sglang.srt.plugins`."""
    if not enabled():
        return
    from sglang_cpusim import arguments, devices

    devices.install()
    arguments.install()
    # The main process runs no model: only the scheduler's child needs the rest, which imports much of SGLang.
    if multiprocessing.parent_process() is not None:
        install()


def install() -> None:
    """Make this process run SGLang's kernels on CPU tensors. For in-process tests of pools and backends."""
    from sglang_cpusim import devices, faults, gdn, grammar, grammar_sync, interpreter, sabotage, scatter, speculation

    devices.install()
    interpreter.install()
    gdn.install()
    scatter.install()
    speculation.install()
    sabotage.install()
    grammar.install()
    grammar_sync.install()
    faults.install()
