"""Where a verify step's time goes on the GPU: kernels of a few steps of the running server, from PyTorch's profiler."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
from rich.table import Table

# One launch a GDN layer and step: ours on Hopper, elsewhere, and SGLang's own.
VERIFY = re.compile(r"_verify_hopper|_verify\b|fused_sigmoid_gating_delta_rule_update")
BEFORE, AFTER = 6, 3  # kernels around verify that count as its surroundings


@dataclass(frozen=True)
class Kernel:
    """Kernels of one name.

    Attributes:
        per_step: launches a step.
        microseconds: median time of one.
        share: of the GPU's busy time.
    """

    name: str
    per_step: float
    microseconds: float
    share: float


@dataclass(frozen=True)
class Neighbour:
    """A kernel at a place before (negative) or after a layer's verify; times and idle gap before it are medians, us."""

    place: int
    name: str
    microseconds: float
    gap: float


@dataclass(frozen=True)
class Profile:
    """What `summarise` makes of a trace."""

    steps: int
    busy_ms_per_step: float
    kernels: list[Kernel]
    layer: list[Neighbour]


async def _start(url: str, folder: Path, steps: int) -> None:
    body = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/start_profile", json=body) as response:
        response.raise_for_status()


def record(url: str, folder: Path, steps: int) -> None:
    """Ask the server to profile its next `steps` forward passes into `folder`; returns when it has begun."""
    asyncio.run(_start(url, folder.resolve(), steps))


def wait_for_trace(folder: Path, timeout: float) -> Path:
    """The trace, once it is complete; TimeoutError if it does not come."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            try:
                with gzip.open(path) as file:
                    json.load(file)
                return path
            except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
                pass  # still being written
        time.sleep(0.5)
    raise TimeoutError(f"the server wrote no trace into {folder} within {timeout:.0f} s")


def summarise(trace: Path, layers: int) -> Profile:
    """Kernels by name, and the medians of what runs around each layer's verify.

    Args:
        layers: GDN layers of the model, so that verify launches tell how many steps there are.

    Raises:
        ValueError: a trace without verify kernels.
    """
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    verifies = [i for i, event in enumerate(kernels) if VERIFY.search(event["name"])]
    if not verifies:
        raise ValueError(f"{trace.name} has no verify kernel among its {len(kernels)}")
    steps = len(verifies) / layers

    times = defaultdict(list)
    for event in kernels:
        times[_short(event["name"])].append(event["dur"])
    busy = sum(map(sum, times.values()))
    found = [Kernel(name, len(t) / steps, median(t), sum(t) / busy) for name, t in times.items()]

    layer = []
    for place in range(-BEFORE, AFTER + 1):
        at = [i + place for i in verifies if BEFORE <= i < len(kernels) - AFTER]
        names = [_short(kernels[i]["name"]) for i in at]
        gaps = [kernels[i]["ts"] - (kernels[i - 1]["ts"] + kernels[i - 1]["dur"]) for i in at]
        name = max(set(names), key=names.count)
        layer.append(Neighbour(place, name, median(kernels[i]["dur"] for i in at), median(gaps)))
    return Profile(round(steps), busy / steps / 1e3, sorted(found, key=lambda k: -k.share), layer)


def _short(name: str) -> str:
    """Without template arguments and parameters."""
    return re.sub(r"<.*", "", re.sub(r"\(.*", "", name.removeprefix("void ")))[:60]


def tables(side: str, profile: Profile, most: int = 14) -> list[Table]:
    """The kernels that take most, and a layer's verify with its neighbours."""
    first = Table(title=f"{side}: {profile.busy_ms_per_step:.2f} ms of kernels a step", title_justify="left")
    for column in ("kernel", "a step", "us", "share %"):
        first.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel in profile.kernels[:most]:
        first.add_row(kernel.name, f"{kernel.per_step:.0f}", f"{kernel.microseconds:.1f}", f"{100 * kernel.share:.1f}")
    second = Table(title=f"{side}: around a layer's verify", title_justify="left")
    for column in ("place", "kernel", "us", "gap us"):
        second.add_column(column, justify="left" if column == "kernel" else "right")
    for near in profile.layer:
        second.add_row(str(near.place), near.name, f"{near.microseconds:.1f}", f"{near.gap:.1f}")
    return [first, second]
