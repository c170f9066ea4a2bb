"""Runs one side (`engine.py`) and follows what it writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
TICK = 0.2
LOG_TAIL = 4000
# Leaks by which SGLang ends its scheduler, in its words.
LEAK_WORDS = ("memory leak detected", "Mem Leak Detected")


@dataclass
class Side:
    """What one process did: its events by kind, and how it ended.

    Attributes:
        events: kind -> facts, in order.
        crash: why it did not end by itself, with the end of its log; None if it did.
    """

    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    crash: str | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.events.get(kind, [])

    def add(self, event: dict[str, Any]) -> None:
        self.events.setdefault(event.pop("event"), []).append(event)

    @property
    def leak_in_log(self) -> bool:
        return any(words in (self.crash or "") for words in LEAK_WORDS)


def run_side(
    job: dict[str, Any],
    directory: Path,
    env: dict[str, str],
    timeout: float,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Side:
    """Run a job to its end.

    Args:
        directory: for job.json, events and log; made if missing.
        env: changes to this process's environment.
        timeout: seconds until it is killed, which counts as a crash.
        on_event: called with each event as it comes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.json").write_text(json.dumps(job))
    (directory / "events").touch()
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    side, deadline = Side(), time.monotonic() + timeout
    with open(directory / "log", "wb") as log, open(directory / "events") as events:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "soak.engine", str(directory)],
            env={**os.environ, **env, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the engine's own children share the group, so that none outlives the run
        )
        try:
            ended = None
            while ended is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended = child.wait(TICK)
                for event in _lines(events):
                    on_event(event)
                    side.add(event)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if not side.of("done"):
        reason = f"ran longer than {timeout:.0f} s" if ended is None else f"exited with status {ended}"
        text = (directory / "log").read_text(errors="replace")
        words = [line for line in text.splitlines() if any(w in line for w in LEAK_WORDS)]
        side.crash = "\n".join([f"the engine {reason}", *words[:1], "--- end of its log ---", text[-LOG_TAIL:]])
    return side


def _lines(events) -> Iterator[dict[str, Any]]:
    """Whole lines that have come since the last call."""
    while True:
        position, line = events.tell(), events.readline()
        if not line.endswith("\n"):
            events.seek(position)
            return
        yield json.loads(line)
