"""The loss: next token from the trunk, and every draft of the MTP head's chains."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from training.data import Batch
from training.model import DemoModel

DRAFTS = 3
WINDOW = 512  # chains begin at this many consecutive positions of a row


def losses(model: DemoModel, batch: Batch, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy over supervised tokens, in nats: the trunk's, and that of each draft [DRAFTS]."""
    device = model.lm_head.weight.device
    tokens = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
    supervised = torch.from_numpy(batch.supervised).to(device, non_blocking=True)
    hidden = model.hidden(tokens)
    trunk = _cross_entropy(model.logits(hidden[:, :-1]), tokens[:, 1:], supervised[:, 1:])

    room = tokens.shape[1] - 1 - DRAFTS
    size = min(WINDOW, room)
    start = rng.randint(0, room - size)
    window = range(start, start + size)
    drafts = []
    for j, out in enumerate(model.mtp.chain(model.embed(tokens), hidden, window, DRAFTS), start=1):
        target = slice(window.start + j + 1, window.stop + j + 1)
        drafts.append(_cross_entropy(model.logits(out), tokens[:, target], supervised[:, target]))
    return trunk, torch.stack(drafts)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weights = mask.flatten().float()
    return (each * weights).sum() / weights.sum().clamp(min=1)
