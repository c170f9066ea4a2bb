"""The random workload: a function of the seed alone, so that a run can be had again.

A request knows nothing of answers: what continues an earlier request says only whose prompt and answer come first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SHARED_PREFIXES = 4
# How far back the request may lie that another one continues, and how often a conversation goes on.
REACH, TURNS = 8, 3


@dataclass(frozen=True)
class Sizes:
    """What is large on a GPU and small on a CPU: ranges of tokens, and how often everything is drained.

    Attributes:
        vocabulary: token ids of prompts and stops.
        prefix, own, answer: tokens of a shared prefix, of a request's own part, and of an answer.
        tiny: share of answers of 1 to 3 tokens, fewer than a window's.
        drain: share of requests before which everything else ends, so that SGLang idles and checks its pools.
    """

    vocabulary: range
    prefix: tuple[int, int]
    own: tuple[int, int]
    answer: tuple[int, int]
    tiny: float = 0.2
    drain: float = 0.06

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, its last answer included."""
        return self.prefix[1] + TURNS * (self.own[1] + self.answer[1])


CPU = Sizes(range(5, 500), prefix=(9, 25), own=(1, 12), answer=(4, 16))
GPU = Sizes(range(5, 480), prefix=(64, 400), own=(1, 200), answer=(8, 256), drain=0.004)


@dataclass(frozen=True)
class Request:
    """One arrival.

    Attributes:
        gap: seconds after the arrival before it.
        drain: it waits until nothing else runs.
        parent: index of the request that it continues, None for a new conversation.
        prompt: what it adds to the parent's prompt and answer, or the whole prompt.
        stops: tokens that end the answer; without any, it has `max_new_tokens`.
        temperature: 0 for greedy.
        copies: answers to the one prompt (`n`).
        abort_after: tokens after which it is aborted, 0 for at once, None for never.
    """

    index: int
    gap: float
    drain: bool
    parent: int | None
    prompt: tuple[int, ...]
    max_new_tokens: int
    stops: tuple[int, ...] = ()
    temperature: float = 0.0
    copies: int = 1
    abort_after: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def sampling(self) -> dict:
        """SGLang's sampling parameters."""
        ending = {"stop_token_ids": list(self.stops)} if self.stops else {"ignore_eos": True}
        shape = {} if self.greedy else {"top_p": 0.95, "top_k": 40}
        copies = {"n": self.copies} if self.copies > 1 else {}
        limit = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        return {**limit, **ending, **shape, **copies}


def requests(seed: int, sizes: Sizes, rate: float) -> Iterator[Request]:
    """Arrivals without end.

    Args:
        rate: mean arrivals a second; the gaps are exponential.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, sizes, sizes.prefix) for _ in range(SHARED_PREFIXES)]
    turns: list[int] = []  # of each request's conversation so far
    while True:
        index = len(turns)
        earlier = [i for i in range(max(0, index - REACH), index) if turns[i] < TURNS]
        parent = rng.choice(earlier) if earlier and rng.random() < 0.35 else None
        turns.append(1 if parent is None else turns[parent] + 1)
        own = _tokens(rng, sizes, sizes.own)
        shared = rng.choice(prefixes) if parent is None and rng.random() < 0.6 else ()
        stops = rng.sample(sizes.vocabulary, len(sizes.vocabulary) // 20) if rng.random() < 0.4 else ()
        answer = rng.randint(1, 3) if rng.random() < sizes.tiny else rng.randint(*sizes.answer)
        copies = rng.choice((2, 3)) if rng.random() < 0.08 else 1
        yield Request(
            index=index,
            gap=rng.expovariate(rate),
            drain=rng.random() < sizes.drain,
            parent=parent,
            prompt=shared + own,
            max_new_tokens=answer,
            stops=tuple(sorted(stops)),
            temperature=rng.choice((0.5, 1.0)) if rng.random() < 0.15 else 0.0,
            copies=copies,
            abort_after=rng.randint(0, answer) if copies == 1 and rng.random() < 0.15 else None,
        )


def _tokens(rng: random.Random, sizes: Sizes, length: tuple[int, int]) -> tuple[int, ...]:
    return tuple(rng.choices(sizes.vocabulary, k=rng.randint(*length)))
