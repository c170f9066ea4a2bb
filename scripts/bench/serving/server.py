"""Start the real server, wait for it, and stop it with everything it started."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

FLAG = "--enable-gdn-replayssm-spec"


@dataclass(frozen=True)
class Launch:
    """What distinguishes one start of the server from another."""

    model: Path
    on: bool
    max_running_requests: int
    mem_fraction_static: float = 0.88
    draft_tokens: int = 4
    accepted: float = 3
    extra: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        arguments = {
            "--model-path": self.model,
            "--load-format": "dummy",
            "--attention-backend": "triton",
            "--sampling-backend": "pytorch",
            "--moe-runner-backend": "triton",
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": self.draft_tokens - 1,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": self.draft_tokens,
            "--max-running-requests": self.max_running_requests,
            "--mem-fraction-static": self.mem_fraction_static,
            "--context-length": 8192,
            "--host": "127.0.0.1",
            "--port": port,
        }
        switches = ["--skip-tokenizer-init", "--disable-piecewise-cuda-graph", "--disable-radix-cache"]
        pairs = [str(part) for pair in arguments.items() for part in pair]
        own = [FLAG] if self.on else []
        return [sys.executable, "-m", "sglang.launch_server", *pairs, *switches, *own, *self.extra]

    def environment(self) -> dict[str, str]:
        """Acceptance is simulated: dummy weights accept nothing by themselves."""
        return {"SGLANG_SIMULATE_ACC_LEN": f"{self.accepted:g}", "PYTHONUNBUFFERED": "1"}


class StartFailed(RuntimeError):
    """The server did not come up; the message holds the end of its log."""


def free_port(last: int = 50_000) -> int:
    """A free port; SGLang takes another one up to 10,000 above it, so that most ephemeral ports will not do."""
    for port in random.sample(range(20_000, last), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise StartFailed(f"no free port found between 20000 and {last}")


class Server:
    """Context manager around one server process; `url` is ready inside the block."""

    def __init__(self, launch: Launch, log: Path, timeout: float) -> None:
        self.launch, self.log_path, self.timeout = launch, log, timeout
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_seconds = 0.0

    def __enter__(self) -> Server:
        begin = time.monotonic()
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            self.launch.command(self.port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | self.launch.environment(),
            start_new_session=True,  # its own group: one signal reaches scheduler and detokenizer too
        )
        try:
            self._wait(begin + self.timeout)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - begin
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartFailed(f"server exited with {self.process.returncode}:\n{self.log_tail()}")
            if self._healthy():
                return
            time.sleep(1)
        raise StartFailed(f"server not ready after {self.timeout:.0f} s:\n{self.log_tail()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health_generate", timeout=20) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM to the group that this object started, SIGKILL if it stays; then wait until it is gone."""
        members = _family(self.process.pid)
        for kind, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, kind)
            except ProcessLookupError:
                break
            if self._gone(members, patience):
                break
        self._log.close()

    def _gone(self, members: list[psutil.Process], patience: float) -> bool:
        """Whether all of `members` end within `patience` seconds."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            self.process.poll()
            if not any(map(_alive, members)):
                return True
            time.sleep(0.2)
        return False


def _family(pid: int) -> list[psutil.Process]:
    """The process and all that it started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _alive(process: psutil.Process) -> bool:
    """Running; one that ended but was not collected by its parent holds no memory and does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
