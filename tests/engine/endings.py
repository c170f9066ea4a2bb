"""Answers that end, or are bent, inside a window: what a server's users ask for beyond "so many tokens, greedily"."""

from __future__ import annotations

import json
from pathlib import Path

from engine_harness import Batch

VOCABULARY = 512
END = range(5, VOCABULARY, 6)  # what the model's configuration calls the end of a sequence
STOPS = range(380, 480)
# A grammar (`sglang_cpusim.grammar`) that ends with the sixth token, wherever that is in a window.
GRAMMAR = "300-400 10-500 10-200 300-400 10-500 10-200"
LONG = 8

# One request each, on three rows: see NAMES.
ENDINGS = Batch(
    prompts=[[5, 6, 7, 8], [100, 101], [30, 40, 30], [42], [17, 200, 31], [400, 3, 9], [300, 7, 300]],
    max_new_tokens=[LONG, LONG, LONG, LONG, 2, 5, LONG],
    sampling=[
        {"stop": ["t3"]},
        {"stop_token_ids": list(STOPS), "ignore_eos": False},
        {"ignore_eos": False},
        {"regex": GRAMMAR},
        {},
        {"temperature": 0.8},
        {},
    ],
    abort_after={6: 2},
)
NAMES = ("stop string", "stop token", "end of sequence", "grammar", "two tokens", "sampled", "aborted")
NOT_COMPARED = ("sampled", "aborted")
# Two copies of one request, with log-probabilities.
COPIES = Batch(prompts=[[5, 6, 7, 8]], max_new_tokens=4, sampling=[{"n": 2}], top_logprobs=2)
# A streaming session keeps its row, and so the records in its ring, until the next turn. The first turn is so short
# that no window has folded its records.
TURNS = tuple(
    Batch(prompts=[prompt], max_new_tokens=length, session="talk", top_logprobs=2)
    for prompt, length in (([60, 61, 62], 3), ([70, 71], 6))
)
BATCHES = (ENDINGS, COPIES, *TURNS)
SERVER = {"skip_tokenizer_init": False, "grammar_backend": "ranges", "enable_streaming_session": True}


def add_tokenizer(model: Path) -> None:
    """Token 7 is the word "t7", and END ends an answer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t2"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *END]}))
