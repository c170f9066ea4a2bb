"""One evaluation from the command line to the summary."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import openai
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from evaluation import data, loops
from evaluation.client import Client, Reply, Sampling
from evaluation.data import Question
from evaluation.records import Record, ResultFile, acceptance_length, outcomes
from evaluation.stats import accuracy
from evaluation.task import Task


def main(task: Task, description: str, argv: list[str] | None = None) -> int:
    """Run a task; exit status 1 if some questions got no answer (running it again asks only those)."""
    options = _parse(task, description, argv)
    if options.data:
        questions = data.from_jsonl(options.data, task.parse_reference)
    else:
        questions = data.from_hub(task.source, task.parse_reference)
    results = ResultFile(options.out)
    try:
        failed = asyncio.run(_evaluate(task, questions[: options.limit], results, options))
    except (ValueError, openai.OpenAIError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console().print(summary(results))
    if failed:
        print(f"{failed} questions got no answer: run the same command again to ask only those", file=sys.stderr)
    return 1 if failed else 0


def _parse(task: Task, description: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server offers")
    parser.add_argument("--out", type=Path, default=Path(f"results/{task.name}.jsonl"), help="default: %(default)s")
    parser.add_argument("--data", type=Path, help=f"local JSONL file instead of {task.source.path} from the hub")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--shots", type=int, default=len(task.exemplars), help="worked examples (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="answers to each question (default: 1)")
    parser.add_argument("--concurrency", type=int, default=32, help="questions under way at once (default: 32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=task.max_tokens, help="default: %(default)s")
    parser.add_argument("--template-kwargs", type=json.loads, default={}, help="'{\"enable_thinking\": false}'")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one answer (default: 3600)")
    options = parser.parse_args(argv)
    if not 0 <= options.shots <= len(task.exemplars):
        parser.error(f"--shots: there are {len(task.exemplars)} worked examples")
    if min(options.repeats, options.concurrency, options.max_tokens) < 1:
        parser.error("--repeats, --concurrency and --max-tokens are at least 1")
    return options


async def _evaluate(task: Task, questions: list[Question], results: ResultFile, options: argparse.Namespace) -> int:
    """Ask what the result file lacks; returns how many questions got no answer."""
    client = await Client.open(options.url, options.model, os.environ.get("OPENAI_API_KEY", "none"), options.timeout)
    results.begin(_settings(task, client.model, options), client.server)
    done = {record.key for record in results.records}
    pending = [(q, r) for r in range(options.repeats) for q in questions if (q.id, r) not in done]
    sampling = Sampling(options.temperature, options.top_p, options.max_tokens, options.template_kwargs)
    places = asyncio.Semaphore(options.concurrency)
    failed = right = 0

    with tqdm(total=len(done) + len(pending), initial=len(done), desc=task.name, unit="answer") as bar:

        async def answer(question: Question, repeat: int) -> None:
            nonlocal failed, right
            async with places:
                try:
                    reply = await client.ask(task.messages(question, options.shots), sampling)
                except openai.OpenAIError as error:
                    failed += 1
                    bar.write(f"question {question.id}: {error}", file=sys.stderr)
                    return
            record = await asyncio.to_thread(score, task, question, repeat, reply)
            results.append(record)
            right += record.correct
            bar.update()
            bar.set_postfix(right=right, failed=failed)

        await asyncio.gather(*(answer(question, repeat) for question, repeat in pending))
    return failed


def _settings(task: Task, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """What must not change within one result file. Limit and repeats may grow: they only add questions."""
    names = ("shots", "temperature", "top_p", "max_tokens", "template_kwargs")
    source = options.data.name if options.data else task.source.path
    return {"task": task.name, "data": source, "model": model, **{name: getattr(options, name) for name in names}}


def score(task: Task, question: Question, repeat: int, reply: Reply) -> Record:
    """Judge one reply. The answer is looked for outside the thinking, loops in both."""
    answer = task.extract(reply.text.rpartition("</think>")[2])
    return Record(
        id=question.id,
        repeat=repeat,
        reference=str(question.reference),
        answer=None if answer is None else str(answer),
        correct=answer == question.reference,
        finish_reason=reply.finish_reason,
        truncated=reply.finish_reason == "length",
        loop_repeats=max(loops.repetitions(reply.reasoning or ""), loops.repetitions(reply.text)),
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        verify_steps=reply.verify_steps,
        seconds=reply.seconds,
        text=reply.text,
        reasoning=reply.reasoning,
    )


def summary(results: ResultFile) -> Table:
    """The run's numbers."""
    records = results.records
    table = Table(title=f"{results.run['settings']['task']}: {results.run['settings']['model']}", show_header=False)
    if not records:
        table.add_row("answers", "0")
        return table
    right, length = accuracy(outcomes(records)), acceptance_length(records)
    table.add_row("answers", str(len(records)))
    table.add_row("accuracy", f"{right.value:.4f}  (95 % interval {right.low:.4f} to {right.high:.4f})")
    table.add_row("no answer found", str(sum(r.answer is None for r in records)))
    table.add_row("truncated", str(sum(r.truncated for r in records)))
    table.add_row(f"loops (>= {loops.LOOP} times)", str(sum(r.loops for r in records)))
    table.add_row(f"loops (>= {loops.LONG_LOOP} times)", str(sum(r.loops_long for r in records)))
    table.add_row("output tokens, mean", f"{mean(r.completion_tokens for r in records):.1f}")
    table.add_row("acceptance length", "not told by the server" if length is None else f"{length:.3f}")
    return table
