"""How good the model is, in parallel over all positions of the reference solution.

Greedy decoding writes the reference exactly if and only if every token of it is the most likely one given those before,
which one forward pass shows (up to rounding, which decoding does in another order; decode.py does it step by step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_replayssm.demo_task import vocabulary
from training.data import batch_of
from training.model import DemoModel
from training.objective import DRAFTS

WINDOW = 1024


@dataclass(frozen=True)
class Report:
    """Attributes:
    problems, exact: how many, and how many solved without a wrong token.
    tokens, wrong: supervised tokens, and how many of them the model would not choose.
    acceptance: tokens a verify step, of at most DRAFTS + 1, over the first `WINDOW` positions of the answers.
    """

    problems: int
    exact: int
    tokens: int
    wrong: int
    acceptance: float

    def __str__(self) -> str:
        return (
            f"{self.exact}/{self.problems} exact, {self.wrong} of {self.tokens} tokens wrong, "
            f"acceptance length {self.acceptance:.2f} of {DRAFTS + 1}"
        )


@torch.no_grad()
def evaluate(model: DemoModel, problems: Sequence, rows: int = 8) -> Report:
    """Judge the model on problems, so many at a time."""
    exact = total = wrong = steps = written = 0
    for begin in range(0, len(problems), rows):
        documents = []
        for problem in problems[begin : begin + rows]:
            prompt = vocabulary.prompt_ids(problem.question)
            documents.append((prompt + vocabulary.answer_ids(problem.solution), len(prompt)))
        batch = batch_of(documents, max(len(ids) for ids, _ in documents) + DRAFTS + 1)
        tokens = torch.from_numpy(batch.tokens).to(model.lm_head.weight.device)
        supervised = torch.from_numpy(batch.supervised).to(tokens.device)
        hidden = model.hidden(tokens)
        missed = (model.logits(hidden[:, :-1]).argmax(-1) != tokens[:, 1:]) & supervised[:, 1:]
        exact += int((~missed.any(1)).sum())
        wrong += int(missed.sum())
        total += int(supervised.sum())
        begin_window = min(prompt for _, prompt in documents) - 1
        window = range(begin_window, min(begin_window + WINDOW, tokens.shape[1] - 1 - DRAFTS))
        right = drafts_right(model, tokens, hidden, window)
        for row, (ids, prompt) in enumerate(documents):
            run = right[row, prompt - 1 - begin_window : len(ids) - 1 - begin_window]
            count, length = walk(run)
            steps, written = steps + count, written + length
    return Report(len(problems), exact, total, wrong, written / max(1, steps))


def drafts_right(model: DemoModel, tokens: torch.Tensor, hidden: torch.Tensor, window: range) -> torch.Tensor:
    """[B, len(window), DRAFTS] bool: whether each draft of the chains that begin in the window is the true token."""
    right = []
    for j, out in enumerate(model.mtp.chain(model.embed(tokens), hidden, window, DRAFTS), start=1):
        truth = tokens[:, window.start + j + 1 : window.stop + j + 1]
        right.append(model.logits(out).argmax(-1) == truth)
    return torch.stack(right, -1)


def walk(right: torch.Tensor) -> tuple[int, int]:
    """Verify steps, and tokens they write, of a server that goes through the positions of `right` [n, DRAFTS]."""
    accepted = right.int().cumprod(-1).sum(-1).tolist()
    position = steps = 0
    while position < len(accepted):
        position += accepted[position] + 1
        steps += 1
    return steps, position
