"""What a result must say about where it comes from."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys

import torch


def environment() -> dict:
    """Machine, versions, date and command; no host names or paths."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
    }


def stamp_of(environment: dict) -> str:
    """The date as it goes into the names of a result's files."""
    return environment["date"].replace(":", "").replace("+0000", "Z")


def _version(module: str) -> str | None:
    try:
        return __import__(module).__version__
    except ImportError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _driver() -> str | None:
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else None


def _commit() -> str | None:
    return _output("git", "describe", "--always", "--dirty")
