"""Faults put into a scheduler on purpose, to see what a server with the ring makes of them (CPUSIM_FAULT=...).

hook: SGLang fails to apply one of the plugin's hooks. compile: the verify kernel does not compile. memory: there is no
memory for the ring. poison: NaN in every dead record after each commit, and once in all records of a live row.
"""

from __future__ import annotations

import functools
import importlib
import os

HOOK_TARGET = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"
KERNELS = "sglang_replayssm.kernels"
# The commit after which a live row is poisoned: late enough that it has records, and others run beside it.
POISONED_COMMIT = 3


def install() -> None:
    late = {"compile": _fail_to_compile, "memory": _no_memory, "poison": _poison}
    fault = os.environ.get("CPUSIM_FAULT")
    if fault == "hook":
        _fail_to_apply()
    elif fault:
        _before_the_scheduler(late[fault])


def _fail_to_apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_target = HookRegistry._apply_target

    def refuse_one(target, hooks):
        if target == HOOK_TARGET:
            raise RuntimeError("CPUSIM_FAULT=hook")
        return apply_target(target, hooks)

    HookRegistry._apply_target = staticmethod(refuse_one)


def _before_the_scheduler(fault) -> None:
    """Not at load: the plugin imports its kernels only once the flag has arrived, and this must not do it earlier."""
    from sglang.srt.managers.scheduler import Scheduler

    init = Scheduler.__init__

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        fault()
        init(self, *args, **kwargs)

    Scheduler.__init__ = __init__


def _fail_to_compile() -> None:
    from triton.compiler.errors import CompilationError

    class Broken:
        def __getitem__(self, grid):
            raise CompilationError("", None, "CPUSIM_FAULT=compile")

    importlib.import_module(f"{KERNELS}.verify.triton")._verify = Broken()


def _no_memory() -> None:
    import torch

    def allocate(spec, device):
        raise torch.OutOfMemoryError("CPUSIM_FAULT=memory")

    importlib.import_module(f"{KERNELS}.ring").Ring.allocate = allocate


def _poison() -> None:
    """By way of the commit's hook: `commit` knows the rows, `fold_due` behind it the ring."""
    import torch

    verify = importlib.import_module("sglang_replayssm.plugin.verify")
    commit, fold_due = verify.commit, verify.fold_due
    commits, rows = 0, None

    def committed(cursors, batch_rows, accepted) -> None:
        nonlocal commits, rows
        commit(cursors, batch_rows, accepted)
        commits, rows = commits + 1, batch_rows

    def poisoned(state, ring, cursors, batch) -> None:
        fold_due(state, ring, cursors, batch)
        records = torch.arange(ring.spec.records)
        base, count = cursors.position.unsqueeze(-1).unbind(1)
        hit = (records - base) % ring.spec.records >= count  # [rows + 1, R]
        if commits == POISONED_COMMIT:
            print(f"CPUSIM_FAULT=poison: {int(count[rows[0]])} live records of row {int(rows[0])}", flush=True)
            hit[rows[0]] = True
        for tensor in ring.tensors().values():  # [layers, rows + 1, heads, R, ...]
            tensor.transpose(2, 3)[:, hit] = float("nan")

    verify.commit, verify.fold_due = committed, poisoned
