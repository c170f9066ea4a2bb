"""Starts the real `sglang.Engine` in a fresh process, generates greedily, and brings back what it said.

    result = run_engine(model_path, [Batch(prompts=[[1, 2, 3]], max_new_tokens=8)], enable_gdn_replayssm_spec=True)
    result.batches[0][0].tokens

A fresh process, because SGLang's plugins patch modules for good and are loaded once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NEXTN = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
LOG_TAIL = 8000


@dataclass(frozen=True)
class Batch:
    """Prompts sent together; `max_new_tokens` is one number for all or one per prompt.

    `top_logprobs` asks for that many candidates at each position, and for the log-probability of `probe`.

    With `conversations`, one name a prompt, a prompt is appended to all that its conversation has said so far, answers
    included. `sampling` adds to or replaces the sampling parameters of each prompt, which are greedy and ignore the end
    of a sequence. `session` names the streaming session whose next turn the only prompt is. `abort_after` aborts the
    prompt of an index once it has as many tokens: its answer is not compared (`tokens` is empty) and its conversation
    does not remember the turn.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int | Sequence[int] = 16
    top_logprobs: int = 0
    probe: int = 0
    conversations: Sequence[str] = ()
    sampling: Sequence[Mapping[str, Any]] = ()
    session: str = ""
    abort_after: Mapping[int, int] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        if isinstance(self.max_new_tokens, int):
            return [self.max_new_tokens] * len(self.prompts)
        return list(self.max_new_tokens)


@dataclass(frozen=True)
class Output:
    """One prompt's answer. `verify_steps` is 0 without speculation; the histogram counts steps by accepted drafts;
    `cached_tokens` are those of the prompt that the prefix cache held.

    If the batch asked for them, `candidates` holds (log-probability, token) of the best tokens at each position, and
    `probe` the log-probability of the batch's probe token.
    """

    tokens: list[int]
    finish_reason: str | None
    verify_steps: int = 0
    histogram: list[int] = field(default_factory=list)
    candidates: list[list[tuple[float, int]]] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step, its bonus token included; the first token comes from the prefill."""
        return (len(self.tokens) - 1) / self.verify_steps if self.verify_steps else 1.0


@dataclass(frozen=True)
class EngineResult:
    """Outputs by batch, the plugin's own report (None without the plugin), and the engine's log.

    With `enable_metrics`, `metrics` is what the server would answer at /metrics.
    """

    batches: list[list[Output]]
    replayssm: dict[str, Any] | None
    log: str
    metrics: str = ""

    def tokens(self) -> list[list[list[int]]]:
        return [[output.tokens for output in batch] for batch in self.batches]

    def histogram(self) -> list[int]:
        """All requests' histograms added up."""
        rows = [output.histogram for batch in self.batches for output in batch]
        width = max(map(len, rows), default=0)
        return [sum(row[i] for row in rows if i < len(row)) for i in range(width)]


class EngineFailure(RuntimeError):
    """The engine did not start, crashed or took too long; the message ends with its log."""


def run_engine(
    model_path: str | Path,
    batches: Sequence[Batch],
    *,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    on_progress: Callable[[str], None] | None = None,
    **arguments: Any,
) -> EngineResult:
    """Run the batches one after the other in one engine.

    Args:
        model_path: directory of the model.
        batches: what to generate.
        env: changes to this process's environment.
        timeout: seconds for the whole run, start included.
        on_progress: called with "started", then "batch 1", "batch 2", ... as they finish.
        arguments: keyword arguments of `sglang.Engine`.

    Raises:
        EngineFailure: with the tail of the log.
    """
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        directory = Path(scratch)
        job = {
            "arguments": {"model_path": str(model_path), "log_level": "info", **arguments},
            "batches": [
                {
                    "prompts": [list(p) for p in b.prompts],
                    "lengths": b.lengths(),
                    "top_logprobs": b.top_logprobs,
                    "probe": b.probe,
                    "conversations": list(b.conversations),
                    "sampling": [dict(own) for own in b.sampling] or [{}] * len(b.prompts),
                    "session": b.session,
                    "abort_after": {str(index): tokens for index, tokens in b.abort_after.items()},
                }
                for b in batches
            ],
        }
        (directory / "job.json").write_text(json.dumps(job))
        code = _run_child(directory, {**os.environ, **(env or {})}, timeout, on_progress)
        log = (directory / "log").read_text(errors="replace")
        result_file = directory / "result.json"
        if not result_file.exists():
            reason = f"ran longer than {timeout:.0f} s" if code is None else f"exited with status {code}"
            raise EngineFailure(f"the engine {reason}\n--- end of its log ---\n{log[-LOG_TAIL:]}")
        result = json.loads(result_file.read_text())
    outputs = [[Output(**output) for output in batch] for batch in result["batches"]]
    return EngineResult(outputs, result["replayssm"], log, result["metrics"])


def _run_child(directory: Path, env: dict[str, str], timeout: float, on_progress) -> int | None:
    """Run this file as a script; its exit status, or None if it had to be killed."""
    with open(directory / "log", "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-u", __file__, str(directory)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the engine's own children share the group, so that none outlives the test
        )
        try:
            return _wait(child, directory / "progress", timeout, on_progress)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _wait(child: subprocess.Popen, progress: Path, timeout: float, on_progress) -> int:
    if on_progress is None:
        return child.wait(timeout)
    reported = 0
    tick = 0.2
    for _ in range(int(timeout / tick)):
        try:
            return child.wait(tick)
        except subprocess.TimeoutExpired:
            steps = progress.read_text().splitlines() if progress.exists() else []
            for step in steps[reported:]:
                on_progress(step)
            reported = len(steps)
    raise subprocess.TimeoutExpired(child.args, timeout)


def _serve(directory: Path) -> None:
    """The child: one engine, all batches, one JSON file."""
    import sglang

    job = json.loads((directory / "job.json").read_text())
    progress = open(directory / "progress", "a", buffering=1)  # noqa: SIM115
    engine = sglang.Engine(**job["arguments"])
    try:
        print("started", file=progress)
        sessions = {batch["session"] for batch in job["batches"]} - {""}
        for session in sessions:
            engine.open_session(capacity_of_str_len=1000, session_id=session, streaming=True)
        batches, said = [], {}
        for number, batch in enumerate(job["batches"], start=1):
            batches.append([asdict(output) for output in _run_batch(engine, batch, said)])
            print(f"batch {number}", file=progress)
        for session in sessions:
            engine.close_session(session)
        states = engine.get_server_info().get("internal_states") or [{}]
        replayssm = states[0].get("gdn_replayssm")
        metrics = _metrics(replayssm) if job["arguments"].get("enable_metrics") else ""
        result = {"batches": batches, "replayssm": replayssm, "metrics": metrics}
        partial = directory / "result.partial"
        partial.write_text(json.dumps(result))
        partial.rename(directory / "result.json")
    finally:
        engine.shutdown()


def _run_batch(engine, batch: dict[str, Any], said: dict[str, list[int]]) -> list[Output]:
    """`said`: conversation -> its tokens so far, brought up to date."""
    prompts, names = batch["prompts"], batch["conversations"]
    if names:
        prompts = [said.get(name, []) + prompt for name, prompt in zip(names, prompts, strict=True)]
    sampling = [
        {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **own}
        for n, own in zip(batch["lengths"], batch["sampling"], strict=True)
    ]
    logprobs = {}
    if batch["top_logprobs"]:
        logprobs = {"return_logprob": True, "top_logprobs_num": batch["top_logprobs"]}
        # SGLang takes no list of lists with copies, nor for a single prompt.
        if not batch["session"] and not any("n" in own for own in batch["sampling"]):
            logprobs["token_ids_logprob"] = [[batch["probe"]]] * len(prompts)
    if batch["session"]:
        turn = {"input_ids": prompts[0], "session_params": {"id": batch["session"]}}
        answer = engine.generate(sampling_params=sampling[0], **turn, **logprobs)
        outputs = [_output(answer)]
    elif batch["abort_after"]:
        outputs = engine.loop.run_until_complete(_run_with_aborts(engine, prompts, sampling, batch["abort_after"]))
    else:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, **logprobs)
        outputs = [_output(answer) for answer in answers]
    for name, prompt, output in zip(names, prompts, outputs, strict=bool(names)):
        if output.finish_reason != "abort":
            said[name] = prompt + output.tokens
    return outputs


async def _run_with_aborts(engine, prompts, sampling, abort_after: dict[str, int]) -> list[Output]:
    """All prompts at once, each as a request of its own; some are aborted on the way."""

    async def run(index: int) -> Output:
        rid, limit = uuid.uuid4().hex, abort_after.get(str(index))
        stream = await engine.async_generate(
            input_ids=prompts[index], sampling_params=sampling[index], rid=rid, stream=True
        )
        aborted, answer = False, None
        async for answer in stream:
            if limit is not None and not aborted and len(answer["output_ids"]) >= limit:
                engine.tokenizer_manager.abort_request(rid)
                aborted = True
        return Output([], "abort") if limit is not None else _output(answer)

    return await asyncio.gather(*(run(index) for index in range(len(prompts))))


def _metrics(replayssm: dict[str, Any] | None, timeout: float = 30) -> str:
    """The exposition of all processes, once the plugin has counted what it reports: it reads its counters rarely."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    accepted = (replayssm or {}).get("accepted_tokens", 0)
    for _ in range(int(timeout / 0.5)):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        text = generate_latest(registry).decode()
        counted = re.search(r"^sglang_replayssm:accepted_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        if not accepted or (counted and float(counted[1]) == accepted):
            break
        time.sleep(0.5)
    return text


def _output(answer: dict[str, Any]) -> Output:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    return Output(
        tokens=list(answer["output_ids"]),
        finish_reason=reason.get("type") if isinstance(reason, dict) else reason,
        verify_steps=meta.get("spec_verify_ct", 0),
        histogram=list(meta.get("spec_correct_drafts_histogram") or []),
        candidates=[
            [(logprob, token) for logprob, token, *_ in position] for position in meta.get("output_top_logprobs") or []
        ],
        cached_tokens=meta.get("cached_tokens", 0),
        probe=[position[0][0] for position in meta.get("output_token_ids_logprobs") or []],
    )


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
