"""What a soak found: mismatches, leaks, crashes."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

from evaluation.near_ties import Difference

from soak.pools import leaks
from soak.settings import NEXTN
from soak.side import Side
from soak.workload import Request, Sizes, requests

DRAFT_TOKENS = NEXTN["speculative_num_draft_tokens"]
# A process may grow by caches that fill up; a leak of this size in minutes is one.
GROWTH = {"host": 256 << 20, "gpu": 64 << 20}


@dataclass
class Verdict:
    """Counts, and a line of text for everything that is wrong.

    Attributes:
        differences: first differences of ring and stock, near ties or not.
        stock_differences: those of stock and itself at other batch compositions.
        mismatches: differences that are no near ties, and answers that break their request's terms.
    """

    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    stock_differences: list[Difference] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.mismatches or self.leaks or self.crashes)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def asked(side: Side, seed: int, sizes: Sizes, rate: float) -> dict[int, Request]:
    """The requests that a side was sent, by index."""
    seen = [event["index"] for kind in ("answer", "failure") for event in side.of(kind)]
    return {r.index: r for r in itertools.islice(requests(seed, sizes, rate), max(seen, default=-1) + 1)}


def comparable(side: Side, sent: dict[int, Request]) -> list[dict[str, Any]]:
    """The answers that stock must give as well: greedy and not aborted, with what to ask it for."""
    return [
        {**answer, "sampling": {k: v for k, v in sent[answer["index"]].sampling().items() if k != "n"}}
        for answer in side.of("answer")
        if sent[answer["index"]].greedy and answer["finish"] != "abort"
    ]


def broken_terms(request: Request, answer: dict[str, Any], vocabulary: int) -> str | None:
    """How an answer, sampled ones included, fails its request; None if it does not."""
    tokens, finish = answer["tokens"], answer["finish"]
    if finish == "abort":  # SGLang does not cut it: the last window may go beyond the limit
        fine = request.abort_after is not None and len(tokens) < request.max_new_tokens + DRAFT_TOKENS
    elif finish == "length":
        fine = len(tokens) == request.max_new_tokens and not set(tokens[:-1]) & set(request.stops)
    else:
        fine = finish == "stop" and 0 < len(tokens) <= request.max_new_tokens and tokens[-1] in request.stops
        fine = fine and not set(tokens[:-1]) & set(request.stops)
    if fine and all(0 <= token < vocabulary for token in tokens):
        return None
    return f"request {request.index}: finish {finish!r} with tokens {tokens} of at most {request.max_new_tokens}"


def judge(ring: Side, stock: Side | None, sent: dict[int, Request], vocabulary: int) -> Verdict:
    """Args: stock: None if there was nothing to replay."""
    found, answers, again = Verdict(), comparable(ring, sent), []
    for answer in ring.of("answer"):
        broken = broken_terms(sent[answer["index"]], answer, vocabulary)
        found.mismatches += [broken] if broken else []
    copies = {i: sum(a["index"] == i for a in ring.of("answer")) for i, r in sent.items() if r.copies > 1}
    failed = {failure["index"] for failure in ring.of("failure")}
    lost = [i for i, n in copies.items() if n != sent[i].copies and i not in failed and not ring.crash]
    found.mismatches += [f"request {i}: {copies[i]} answers instead of {sent[i].copies}" for i in lost]
    found.leaks = leaks([event["pools"] for event in ring.of("pools")], GROWTH)
    found.crashes = [f"request {f['index']}: {f['error']}" for f in ring.of("failure")]
    for name, side in (("ring", ring), ("stock", stock)):
        if side and side.crash:
            (found.leaks if side.leak_in_log else found.crashes).append(f"{name}: {side.crash}")
    if stock:
        numbers = [event["number"] for event in stock.of("replayed")]
        again = stock.of("replayed again")
        found.differences = _differences(stock.of("replayed"), answers)
        found.stock_differences = _differences(again, answers)
        largest = max((d.gap for d in found.stock_differences if d.gap < float("inf")), default=0.0)
        found.mismatches += [
            f"request {d.prompt}: differs from stock at token {d.position}, {d.gap:.4g} between the two logits"
            for d in found.differences
            if not d.is_near_tie(largest)
        ]
        missing = len(answers) - len(numbers)
        if missing and not stock.crash:
            found.crashes.append(f"{missing} answers were not replayed")
    if not ring.crash and not answers:
        found.crashes.append("there is no answer to compare: give it more seconds")
    finishes = [answer["finish"] for answer in ring.of("answer")]
    found.counts = {
        "requests": len(sent),
        "answers": len(finishes),
        **{name: finishes.count(name) for name in ("length", "stop", "abort")},
        "sampled": sum(not r.greedy for r in sent.values()),
        "continued": sum(r.parent is not None for r in sent.values()),
        "with cached prefix": sum(answer["cached"] > 0 for answer in ring.of("answer")),
        "retracted": sum(answer["retractions"] > 0 for answer in ring.of("answer")),
        "output tokens": sum(len(answer["tokens"]) for answer in ring.of("answer")),
        "idle moments": len(ring.of("pools")),
        "compared with stock": len(stock.of("replayed")) if stock else 0,
        "stock with itself": len(again),
    }
    return found


def _differences(events: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[Difference]:
    """By request index instead of number."""
    return [
        Difference(answers[event["number"]]["index"], **event["difference"]) for event in events if event["difference"]
    ]
