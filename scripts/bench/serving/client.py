"""Waves of concurrent requests: every request of a wave starts at once; the wave ends with its last token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from statistics import median

import aiohttp

# Longer than any output: the server then sends the first token and the end, and no chunk between them.
STREAM_INTERVAL = 100_000


@dataclass(frozen=True)
class Request:
    """One finished request."""

    tokens: int
    seconds_to_first: float
    seconds: float
    retractions: int

    @property
    def seconds_per_token(self) -> float:
        """TPOT: time per output token after the first."""
        return (self.seconds - self.seconds_to_first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Wave:
    """What one wave measured."""

    concurrency: int
    seconds: float
    output_tokens: int
    tokens_per_second: float
    median_tpot_ms: float
    median_ttft_ms: float
    retractions: int


def summarise(concurrency: int, seconds: float, requests: list[Request]) -> Wave:
    tokens = sum(r.tokens for r in requests)
    return Wave(
        concurrency,
        seconds,
        tokens,
        tokens / seconds,
        1e3 * median(r.seconds_per_token for r in requests),
        1e3 * median(r.seconds_to_first for r in requests),
        sum(r.retractions for r in requests),
    )


def payload(rng: random.Random, input_tokens: int, output_tokens: int) -> dict:
    """Random input, greedy, exactly `output_tokens` out."""
    return {
        "input_ids": [rng.randrange(1000, 100_000) for _ in range(input_tokens)],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
            "stream_interval": STREAM_INTERVAL,
        },
        "stream": True,
    }


async def _request(session: aiohttp.ClientSession, url: str, body: dict) -> Request:
    begin, first, last = time.perf_counter(), None, None
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            text = line.decode().strip()
            if not text.startswith("data:") or text == "data: [DONE]":
                continue
            first = first or time.perf_counter()
            last = json.loads(text.removeprefix("data:"))
            if "error" in last:
                raise RuntimeError(f"the server answered with an error: {last['error']}")
    if last is None:
        raise RuntimeError("the server sent no token")
    info = last["meta_info"]
    end = time.perf_counter()
    return Request(info["completion_tokens"], first - begin, end - begin, info.get("num_retractions", 0))


async def _wave(url: str, bodies: list[dict]) -> Wave:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:
        begin = time.perf_counter()
        requests = await asyncio.gather(*(_request(session, url, body) for body in bodies))
        return summarise(len(bodies), time.perf_counter() - begin, requests)


def wave(url: str, concurrency: int, input_tokens: int, output_tokens: int, seed: int) -> Wave:
    """Run one wave to its end."""
    rng = random.Random(seed)
    return asyncio.run(_wave(url, [payload(rng, input_tokens, output_tokens) for _ in range(concurrency)]))


async def _get(url: str) -> dict:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as response:
        response.raise_for_status()
        return await response.json()


def server_info(url: str) -> dict:
    """The server's own account of its arguments and pools."""
    return asyncio.run(_get(url))
