"""Greedy decoding token by token, as a server does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_replayssm.demo_task import vocabulary
from training.model import DemoModel


@torch.no_grad()
def generate(
    model: DemoModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_step: Callable[[int, list], None] | None = None,
    ignore_end: bool = False,
) -> list[list[int]]:
    """The most likely tokens behind each prompt, up to and including the end token.

    Args:
        prompts: of one length.
        max_tokens: at most so many new ones.
        on_step: called with the number of tokens written so far and the layers' caches, before every further step; it
            may change the caches.
        ignore_end: write `max_tokens`, whatever they are.

    Raises:
        ValueError: the prompts differ in length.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("prompts decoded together must have one length")
    ids = torch.tensor(prompts, device=model.lm_head.weight.device)
    caches = model.empty_caches(len(prompts), ids.shape[1] + max_tokens)
    token = model.logits(model.hidden(ids, caches)[:, -1:]).argmax(-1)
    written = [token]
    ended = token == vocabulary.END_ID
    while len(written) < max_tokens and (ignore_end or not ended.all()):
        if on_step:
            on_step(len(written), caches)
        token = model.logits(model.hidden(token, caches, ids.shape[1] + len(written) - 1)).argmax(-1)
        ended |= token == vocabulary.END_ID
        written.append(token)
    rows = torch.cat(written, dim=1).tolist()
    return rows if ignore_end else [_until_end(row) for row in rows]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(vocabulary.END_ID) + 1] if vocabulary.END_ID in row else row
