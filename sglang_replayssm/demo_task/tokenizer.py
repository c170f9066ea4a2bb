"""The tokenizer's files, as Transformers and SGLang load them."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_replayssm.demo_task.vocabulary import CHAT_TEMPLATE, END, IDS, PATTERN, SPECIAL, UNKNOWN


def write_tokenizer(directory: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template. Needs the package `tokenizers`."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(WordLevel(dict(IDS), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    directory = Path(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 65536,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
