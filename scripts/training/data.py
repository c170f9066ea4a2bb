"""Training rows, made on the fly: one document a row, from its beginning.

Rows of equal length need no isolation of documents from each other and no attention mask.
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_replayssm.demo_task import draw_register, draw_story, registers, vocabulary

STORY_ROW = 448
FULL_ROUNDS = registers.rounds_within(32768 - 1)


@dataclass(frozen=True)
class TaskSize:
    """Registers of the long task, and the most rounds that a training problem asks for."""

    fast: int = registers.FAST
    slow: int = registers.SLOW
    rounds: int = FULL_ROUNDS


@dataclass(frozen=True)
class Batch:
    """tokens: [rows, length] int64; supervised: [rows, length] bool, whether a token is the model's to write."""

    tokens: np.ndarray
    supervised: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape


def long_batch(rng: random.Random, task: TaskSize, longest: int, tokens: int) -> Batch:
    """About `tokens` tokens of long documents, in rows of one random length, at most `longest`.

    Every other batch has the longest rows; the lengths of the others are log-uniform, so that solutions of every length
    keep being seen.
    """
    most = max(1, registers.rounds_within(longest - row_tokens(0, task), task.fast))
    rounds = most if rng.random() < 0.5 else round(math.exp(rng.uniform(0, math.log(most))))
    length = row_tokens(rounds, task)
    documents = [register_row(rng, rounds, task) for _ in range(max(1, tokens // length))]
    return batch_of(documents, length)


def row_tokens(rounds: int, task: TaskSize) -> int:
    """Tokens of a document with so many rounds; with 0, all that is not the solution."""
    solution = registers.solution_tokens(rounds, task.fast) if rounds else 0
    return 2 + registers.question_tokens(task.fast, task.slow) + solution + 1


def register_row(rng: random.Random, rounds: int, task: TaskSize, split: str = "train") -> tuple[list[int], int]:
    """Tokens of a long document, and how many of them are the prompt.

    Every other one asks for so many rounds. The others ask for more and are cut off at the same length: long solutions
    begin as short ones do, but for the number of rounds.
    """
    length = row_tokens(rounds, task)
    asked = rounds if rng.random() < 0.5 else rng.randint(rounds, max(rounds, task.rounds))
    problem = draw_register(split, rng.getrandbits(48), asked, task.fast, task.slow)
    ids = vocabulary.prompt_ids(problem.question)
    prompt = len(ids)
    for piece in problem.pieces():
        ids += vocabulary.encode(piece)
        if len(ids) >= length:
            break
    return [*ids, vocabulary.END_ID][:length], prompt


def story_row(rng: random.Random, split: str = "train") -> tuple[list[int], int]:
    """Tokens of a story, at most `STORY_ROW`, and how many of them are the prompt."""
    problem = draw_story(split, rng.getrandbits(48))
    ids = vocabulary.prompt_ids(problem.question)
    return ids + vocabulary.answer_ids(problem.solution), len(ids)


def batch_of(documents: list[tuple[list[int], int]], length: int) -> Batch:
    """Pad documents to one length."""
    tokens = np.full((len(documents), length), vocabulary.END_ID, dtype=np.int64)
    supervised = np.zeros((len(documents), length), dtype=bool)
    for row, (ids, prompt) in enumerate(documents):
        tokens[row, : len(ids)] = ids
        supervised[row, prompt : len(ids)] = True
    return Batch(tokens, supervised)


class Batches:
    """An endless stream of (long batch, story batch), from worker processes or, with none of them, made when asked.

    Args:
        seed: another seed, other documents; a resumed run takes another one.
        task: size of the long task.
        story_rows: of the story batch.
        workers: processes.
    """

    def __init__(self, seed: str, task: TaskSize, story_rows: int, workers: int) -> None:
        self._task, self._story_rows = task, story_rows
        context = multiprocessing.get_context("spawn")
        self._size = context.Array("i", 2)
        self._queue = context.Queue(maxsize=2 * workers) if workers else None
        self._rng = random.Random(f"{seed}/here")
        settings = (task, story_rows, self._size, self._queue)
        self._workers = [
            context.Process(target=_work, args=(f"{seed}/{n}", *settings), daemon=True) for n in range(workers)
        ]

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.terminate()

    def stream(self, longest: int, tokens: int) -> Iterator[tuple[Batch, Batch]]:
        """Endless; a few batches of the old size may follow a `resize`."""
        self.resize(longest, tokens)
        for worker in self._workers:
            worker.start()
        while True:
            if self._queue is None:
                yield _pair(self._rng, self._task, self._story_rows, *self._size[:])
            else:
                yield self._queue.get(timeout=120)

    def resize(self, longest: int, tokens: int) -> None:
        """From now on long batches are made with these two, see `long_batch`."""
        self._size[:] = longest, tokens


def _pair(rng: random.Random, task: TaskSize, story_rows: int, longest: int, tokens: int) -> tuple[Batch, Batch]:
    stories = batch_of([story_row(rng) for _ in range(story_rows)], STORY_ROW)
    return long_batch(rng, task, longest, tokens), stories


def _work(seed: str, task: TaskSize, story_rows: int, size, queue) -> None:
    rng = random.Random(seed)
    while True:
        queue.put(_pair(rng, task, story_rows, *size[:]))
