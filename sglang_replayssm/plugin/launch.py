"""The kernels as the hooks launch them: one that cannot run stops the server with one error that says what to do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from sglang_replayssm import kernels
from sglang_replayssm.kernels import Cursors
from sglang_replayssm.plugin import flags

__all__ = ["commit", "commit_conv", "convolve", "fold", "fold_due", "materialize", "plan_window", "reset", "verify"]

# What the device itself reports, maybe of somebody else's kernel; torch's own words are the better ones.
OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)


def explained(kernel: Callable) -> Callable:
    """`kernel`, with any failure to compile or launch it named; the original error is the cause."""
    signature = inspect.signature(kernel)

    @functools.wraps(kernel)
    def launch(*args, **kwargs):
        try:
            return kernel(*args, **kwargs)
        except OF_THE_DEVICE:
            raise
        except Exception as error:
            which = _describe(kernel.__name__, signature.bind(*args, **kwargs).arguments)
            raise RuntimeError(
                f"{flags.ENABLE.option}: {which} does not compile or launch here ({type(error).__name__}, "
                "shown above). The server stops, since it cannot answer without it. Start without the flag, and please "
                "report this with `sglang-replayssm check --report`."
            ) from error

    return launch


def _describe(name: str, arguments: dict) -> str:
    cursors: Cursors = arguments["cursors"]
    spec, details = cursors.spec, []
    if name == "verify":
        drafts = arguments["draft_tokens"]
        details = [kernels.kernel_name(spec, drafts, cursors.position.device), f"T={drafts}"]
    return f"the kernel `{name}` ({', '.join([*details, f'fold={spec.fold}', f'W={spec.window}'])})"


commit = explained(kernels.commit)
commit_conv = explained(kernels.commit_conv)
convolve = explained(kernels.convolve)
fold = explained(kernels.fold)
fold_due = explained(kernels.fold_due)
materialize = explained(kernels.materialize)
plan_window = explained(kernels.plan_window)
reset = explained(kernels.reset)
verify = explained(kernels.verify)
