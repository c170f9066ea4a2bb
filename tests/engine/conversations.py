"""Random scripts of multi-turn conversations: shared openings, prefix hits, evictions, aborts, stops inside a window.

A script is a list of rounds, and a round a batch of turns that are served together. It knows nothing of the answers: a
turn is what a user adds to whatever the conversation has said so far.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from engine_harness import Batch, Output

# Scripts of one engine run, each of which takes it a minute or less. CI has one; a thorough run sets SCRIPTS=50.
SCRIPTS = int(os.environ.get("SCRIPTS", "1"))
VOCABULARY = range(5, 500)
CONVERSATIONS, ROUNDS, ABORT_AFTER = 4, 3, 3
# Small enough that a script's prefixes do not all fit: 3 requests, and a few cached states and tokens.
SERVER: dict[str, Any] = {"max_running_requests": 3, "max_total_tokens": 256}


def script(seed: int, name: str = "") -> list[Batch]:
    """Rounds of one script. The same seed gives the same script; `name` sets its conversations apart from others'."""
    rng = random.Random(seed)
    openings = [rng.choices(VOCABULARY, k=rng.randint(9, 25)) for _ in range(2)]
    stops = sorted(rng.sample(VOCABULARY, 25))
    begun: set[int] = set()
    rounds = []
    for _ in range(ROUNDS):
        speakers = rng.sample(range(CONVERSATIONS), rng.randint(2, 3))
        prompts = []
        for speaker in speakers:
            own = rng.choices(VOCABULARY, k=rng.randint(1, 6))
            prompts.append(own if speaker in begun else rng.choice(openings) + own)
        begun.update(speakers)
        rounds.append(
            Batch(
                prompts=prompts,
                max_new_tokens=[rng.randint(4, 14) for _ in speakers],
                conversations=[f"{name}{seed}-{speaker}" for speaker in speakers],
                sampling=[{"stop_token_ids": stops, "ignore_eos": False}] * len(speakers),
                abort_after={0: ABORT_AFTER} if rng.random() < 0.4 else {},
            )
        )
    return rounds


def scripts(count: int = SCRIPTS, first: int = 0) -> tuple[Batch, ...]:
    """The rounds of `count` scripts, one script after the other."""
    return tuple(batch for seed in range(first, first + count) for batch in script(seed))


def hits_behind_a_prompt(batches: Sequence[Batch], answers: Sequence[Sequence[Output]]) -> int:
    """Turns for which the cache held more than the prompt of the conversation's turn before."""
    prompted: dict[str, int] = {}  # tokens of the last prompt, and with its answer
    said: dict[str, int] = {}
    hits = 0
    for batch, outputs in zip(batches, answers, strict=True):
        for name, prompt, output in zip(batch.conversations, batch.prompts, outputs, strict=True):
            if output.finish_reason == "abort":
                continue
            hits += name in prompted and output.cached_tokens > prompted[name]
            prompted[name] = said.get(name, 0) + len(prompt)
            said[name] = prompted[name] + len(output.tokens)
    return hits
