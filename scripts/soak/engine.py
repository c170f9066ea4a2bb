"""One side of a soak in a process of its own: `python -m soak.engine DIRECTORY`, with a job.json there.

SGLang's plugins patch modules for good, so each side needs a fresh process. What happens is written to `events`, a JSON
object a line, at once: of a process that dies, everything up to then is known.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from evaluation.near_ties import bf16_ulp, first_difference

from soak import workload
from soak.pools import SECTION, run_scheduler

# Requests that wait in SGLang's queue beside those that run.
WAITING = 4
# Seconds that a scheduler may take to free what the last request held.
PATIENCE = 10

Write = Callable[..., None]


async def generate(engine, prompt, sampling: dict, abort_after: int | None = None) -> list[dict[str, Any]]:
    """What SGLang answers, one a copy: tokens, type of the finish reason, cached tokens, retractions."""
    if abort_after is None:
        answers = await engine.async_generate(input_ids=list(prompt), sampling_params=sampling)
        answers = answers if isinstance(answers, list) else [answers]
    else:
        answers = [await _until_aborted(engine, prompt, sampling, abort_after)]
    return [
        {
            "tokens": list(answer["output_ids"]),
            "finish": answer["meta_info"]["finish_reason"]["type"],
            "cached": answer["meta_info"].get("cached_tokens", 0),
            "retractions": answer["meta_info"].get("num_retractions", 0),
        }
        for answer in answers
    ]


async def _until_aborted(engine, prompt, sampling: dict, abort_after: int) -> dict[str, Any]:
    rid = uuid.uuid4().hex
    stream = await engine.async_generate(input_ids=list(prompt), sampling_params=sampling, rid=rid, stream=True)
    if abort_after == 0:  # once it is on its way
        asyncio.get_running_loop().call_later(0.005, engine.tokenizer_manager.abort_request, rid)
    aborted, answer = abort_after == 0, None
    async for answer in stream:
        if not aborted and len(answer["output_ids"]) >= abort_after:
            engine.tokenizer_manager.abort_request(rid)
            aborted = True
    return answer


async def idle_pools(engine, write: Write) -> None:
    """What the scheduler still holds with no request left, once it has had time to let go."""
    for _ in range(4 * PATIENCE):
        (state, *_) = await engine.tokenizer_manager.get_internal_state()
        pools = state[SECTION]
        if not (pools["rows"] or pools["slots"] or pools["tokens"]):
            break
        await asyncio.sleep(0.25)
    write("pools", pools=pools)


async def soak(engine, job: dict[str, Any], write: Write, seconds: float) -> None:
    """The random workload for `seconds`, until its last answer."""
    sizes = getattr(workload, job["sizes"])
    places = asyncio.Semaphore(job["concurrency"] + WAITING)
    said: dict[int, asyncio.Future] = {}
    running: set[asyncio.Task] = set()

    async def serve(request: workload.Request) -> None:
        prompt: list[int] = []
        try:
            prompt = [*(await said[request.parent] if request.parent is not None else ()), *request.prompt]
            begin = time.monotonic()
            answers = await generate(engine, prompt, request.sampling(), request.abort_after)
            took = time.monotonic() - begin
            for copy, answer in enumerate(answers):
                write("answer", index=request.index, copy=copy, prompt=prompt, seconds=took, **answer)
            prompt = prompt + answers[0]["tokens"]
        except Exception as error:
            write("failure", index=request.index, error=f"{type(error).__name__}: {error}")
        finally:
            said[request.index].set_result(prompt)
            places.release()

    await idle_pools(engine, write)
    begin = time.monotonic()
    for request in workload.requests(job["seed"], sizes, job["rate"]):
        await asyncio.sleep(request.gap)
        if request.drain and running:
            await asyncio.gather(*running)
            await idle_pools(engine, write)
        await places.acquire()
        if time.monotonic() - begin > seconds:
            break
        said[request.index] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(request))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    await idle_pools(engine, write)


async def replay(engine, job: dict[str, Any], write: Write, seconds: float) -> None:
    """Every answer again, all at once; then once more, in another order and batch sizes, while time is left."""
    answers = job["answers"]
    first: list[list[int]] = [[] for _ in answers]

    async def once(number: int) -> None:
        answer = answers[number]
        (stock,) = await generate(engine, answer["prompt"], answer["sampling"])
        first[number] = stock["tokens"]
        difference = await _difference(engine, job, answer["prompt"], stock["tokens"], answer["tokens"])
        if difference is None and stock["finish"] != answer["finish"]:
            difference = {"position": len(stock["tokens"]), "gap": math.inf, "ulp": 0.0}
        write("replayed", number=number, difference=difference)

    async def again(number: int) -> None:
        if time.monotonic() < deadline:
            answer = answers[number]
            (stock,) = await generate(engine, answer["prompt"], answer["sampling"])
            difference = await _difference(engine, job, answer["prompt"], first[number], stock["tokens"])
            write("replayed again", number=number, difference=difference)

    await _bounded(job["concurrency"] + WAITING, [lambda n=n: once(n) for n in range(len(answers))])
    deadline = min(time.monotonic() + seconds / 2, job["until"])
    backwards = range(len(answers) - 1, -1, -1)
    await _bounded(max(1, job["concurrency"] // 4), [lambda n=n: again(n) for n in backwards])


async def _bounded(limit: int, calls: list[Callable[[], Awaitable[None]]]) -> None:
    places = asyncio.Semaphore(limit)

    async def call(one: Callable[[], Awaitable[None]]) -> None:
        async with places:
            await one()

    await asyncio.gather(*map(call, calls))


async def _difference(engine, job: dict[str, Any], prompt: list[int], stock: list[int], other: list[int]):
    """Where two answers differ first, and how far apart the two tokens are there, by stock behind what both said."""
    position = first_difference(stock, other)
    if position is None:
        return None
    if position == min(len(stock), len(other)):  # one ends and the other goes on: no tie of tokens
        return {"position": position, "gap": math.inf, "ulp": 0.0}
    probe = [] if job["probe"] is None else [job["probe"]]
    answer = await engine.async_generate(
        input_ids=prompt + stock[:position],
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=1,
        token_ids_logprob=[stock[position], other[position], *probe],
    )
    meta = answer["meta_info"]
    asked = {token: logprob for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
    ulp = bf16_ulp(meta["output_top_logprobs"][0][0][0] - asked[probe[0]]) if probe else 0.0
    return {"position": position, "gap": abs(asked[stock[position]] - asked[other[position]]), "ulp": ulp}


def main(directory: Path) -> None:
    from sglang.srt.entrypoints import engine as sglang_engine

    class Engine(sglang_engine.Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    job = json.loads((directory / "job.json").read_text())
    events = open(directory / "events", "a", buffering=1)  # noqa: SIM115

    def write(event: str, **facts) -> None:
        print(json.dumps({"event": event, **facts}), file=events)

    begin = time.monotonic()
    job["until"] = begin + job.get("left", math.inf)
    engine = Engine(**job["arguments"])
    try:
        started = time.monotonic() - begin
        # Of the time that two starts leave.
        seconds = job["share"] * max(10.0, job["seconds"] - 2 * started)
        write("started", seconds=started, workload=seconds)
        engine.loop.run_until_complete((replay if "answers" in job else soak)(engine, job, write, seconds))
        (state, *_) = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
        write("done", ring=state.get("gdn_replayssm"), accepted=state.get("avg_spec_accept_length"))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
