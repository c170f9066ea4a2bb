"""The vocabulary: a word, a digit or a sign is one token, and text is the concatenation of its tokens."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from sglang_replayssm.demo_task.stories import ITEMS, NAMES, TOTAL

USER, ASSISTANT, END, UNKNOWN = "<|user|>", "<|assistant|>", "<|end|>", "<|unknown|>"
SPECIAL = (UNKNOWN, USER, ASSISTANT, END)

PATTERN = r"[A-Za-z]+|[0-9]|\s|[^A-Za-z0-9\s]"

_SIGNS = "\n +-=,.:?#[]{}\\"
_WORDS = (
    *("Registers", "reads", "Rounds", "boxed"),
    *("has", "have", "finds", "loses", "gives", "to", "How", "many", "does", TOTAL),
)
TOKENS = tuple(dict.fromkeys((*SPECIAL, *string.digits, *_SIGNS, *string.ascii_letters, *_WORDS, *NAMES, *ITEMS)))
VOCAB_SIZE = 128
IDS = {token: number for number, token in enumerate(TOKENS)}
END_ID = IDS[END]
DIGIT_IDS = tuple(IDS[digit] for digit in string.digits)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_SPLIT = re.compile(PATTERN)


def encode(text: str) -> list[int]:
    """Token ids of a text without special tokens; what the vocabulary lacks becomes `UNKNOWN`."""
    unknown = IDS[UNKNOWN]
    return [IDS.get(piece, unknown) for piece in _SPLIT.findall(text)]


def decode(ids: Sequence[int]) -> str:
    """The text of some tokens, special ones left out."""
    return "".join(TOKENS[i] for i in ids if len(SPECIAL) <= i < len(TOKENS))


def prompt_ids(question: str) -> list[int]:
    """What the model is given: the chat template applied to one question."""
    return [IDS[USER], *encode(question), IDS[ASSISTANT]]


def answer_ids(solution: str) -> list[int]:
    """What the model is to write: the solution and the end token."""
    return [*encode(solution), END_ID]
