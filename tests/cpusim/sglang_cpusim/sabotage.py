"""A commit broken on purpose, so that a test can show that the equality tests would notice (CPUSIM_BREAK_COMMIT=1)."""

from __future__ import annotations

import functools
import importlib
import os

from sglang_cpusim.rebind import rebind

VERIFY = "sglang_replayssm.plugin.verify"


def install() -> None:
    if os.environ.get("CPUSIM_BREAK_COMMIT") != "1":
        return
    from sglang.srt.managers import scheduler

    # Not at load: the plugin imports its kernels only once the flag has arrived, and this must not do it earlier.
    rebind(scheduler, "dispatch_event_loop", _break_commit_before(scheduler.dispatch_event_loop))


def _break_commit_before(dispatch_event_loop):
    @functools.wraps(dispatch_event_loop)
    def dispatch(scheduler):
        verify = importlib.import_module(VERIFY)
        if not callable(getattr(verify, "commit", None)):
            raise RuntimeError(f"CPUSIM_BREAK_COMMIT: {VERIFY} has no global `commit` to break")
        verify.commit = lambda *args, **kwargs: None
        return dispatch_event_loop(scheduler)

    return dispatch
