"""The chains of drafts: all positions at once say what one chain after the other says, and see no future."""

from __future__ import annotations

import pytest
import torch
from training.objective import DRAFTS


@pytest.fixture
def chain(model, tokens):
    embedded, hidden = model.embed(tokens), model.hidden(tokens)

    def run(window: range, embedded=embedded, hidden=hidden):
        with torch.no_grad():
            return model.mtp.chain(embedded, hidden, window, DRAFTS)

    run.embedded, run.hidden = embedded.detach(), hidden.detach()
    return run


def test_one_position_at_a_time(chain):
    whole = chain(range(10, 80))
    for i in (10, 33, 79):
        for together, alone in zip(whole, chain(range(i, i + 1)), strict=True):
            torch.testing.assert_close(together[:, i - 10 : i - 9], alone, rtol=1e-4, atol=1e-5)


def test_drafts_are_made_as_a_server_makes_them(model, tokens, chain):
    """Step by step with a cache: the first draft from the trunk's states, the others from the head's own."""
    i, head = 41, model.mtp
    layer = head.layers[0]
    attention = layer.self_attn
    with torch.no_grad():
        x = head.combine(chain.embedded[:, 1 : i + 2], chain.hidden[:, : i + 1])
        expected = chain(range(i, i + 1))
        keys = values = None
        for j in range(1, DRAFTS + 1):
            positions = torch.arange(i + 1)[None] if j == 1 else torch.tensor([[i + j - 1]])
            normed = layer.input_layernorm(x)
            k, v = attention.keys_values(normed, positions)
            keys, values = (k, v) if j == 1 else (torch.cat([keys, k], 2), torch.cat([values, v], 2))
            q, gate = attention.queries(normed[:, -1:], positions[:, -1:])
            scores = q @ keys.repeat_interleave(2, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
            mixed = scores.softmax(-1) @ values.repeat_interleave(2, 1)
            state = head.norm(layer.experts(x[:, -1:] + attention.output(mixed, gate)))
            torch.testing.assert_close(state, expected[j - 1], rtol=1e-4, atol=1e-5)
            x = head.combine(chain.embedded[:, i + j + 1 : i + j + 2], state)


def test_no_draft_sees_what_it_predicts(chain):
    """Draft j at position i reads tokens up to i + j: changing those behind changes nothing, changing that one does."""
    i = 30
    before = chain(range(i, i + 1))
    for j in range(1, DRAFTS + 1):
        behind = chain.embedded.clone()
        behind[:, i + j + 1 :] += 1
        future = chain.hidden.clone()
        future[:, i + 1 :] += 1
        assert torch.equal(chain(range(i, i + 1), behind, future)[j - 1], before[j - 1])
        read = chain.embedded.clone()
        read[:, i + j] += torch.linspace(-1, 1, read.shape[-1])
        assert not torch.allclose(chain(range(i, i + 1), read)[j - 1], before[j - 1])
