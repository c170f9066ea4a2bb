"""A grammar backend that needs no parser: `grammar_backend="ranges"`.

The `regex` of a request lists, place by place, the tokens that its answer may have: "5-9 100-199 7-7" allows three
tokens, each of its own range, and ends there.
"""

from __future__ import annotations

import torch

NAME = "ranges"
WORD = 32  # bits of a mask's element


def install() -> None:
    from sglang.srt.constrained.base_grammar_backend import (
        BaseGrammarBackend,
        BaseGrammarObject,
        register_grammar_backend,
    )

    class Ranges(BaseGrammarObject):
        def __init__(self, places: list[range]):
            super().__init__()
            self.places, self.position = places, 0

        def accept_token(self, token: int) -> None:
            if self.is_terminated() or token not in self.places[self.position]:
                raise ValueError(f"token {token} is not allowed at place {self.position}")
            self.position += 1

        def rollback(self, k: int) -> None:
            self.position -= k

        def is_terminated(self) -> bool:
            return self.position == len(self.places)

        def copy(self) -> Ranges:
            return Ranges(self.places)

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device) -> torch.Tensor:
            return torch.full((batch_size, -(-vocab_size // WORD)), -1, dtype=torch.int32)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            bits = torch.zeros(vocab_mask.shape[1] * WORD, dtype=torch.int64)
            bits[list(self.places[self.position])] = 1
            vocab_mask[idx] = (bits.view(-1, WORD) << torch.arange(WORD)).sum(-1).to(torch.int32)

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device) -> torch.Tensor:
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            allowed = (vocab_mask.unsqueeze(-1) >> torch.arange(WORD)) & 1
            logits.masked_fill_(allowed.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))

    class Backend(BaseGrammarBackend):
        def dispatch_regex(self, key_string: str) -> Ranges:
            bounds = [place.split("-") for place in key_string.split()]
            return Ranges([range(int(low), int(high) + 1) for low, high in bounds])

    register_grammar_backend(NAME, lambda server_args, tokenizer, vocab_size, eos_token_ids: Backend())
