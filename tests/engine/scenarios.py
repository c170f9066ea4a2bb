"""What the engine tests run: prompts that reuse rows and slots and end in awkward chunks, in a few configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conversations
import endings
from engine_harness import NEXTN, Batch, EngineResult, run_engine

CHUNK = 16

# More requests than rows, of different lengths: some end inside their first window, and their rows and slots go to the
# waiting ones at once.
CROWD = Batch(
    prompts=[
        [5, 6, 7, 8, 9, 10],
        [100, 101, 102],
        [300, 7, 300, 7, 300, 7, 12, 13, 14],
        [42],
        [17, 200, 31, 200],
        [400, 3, 9, 27, 81, 243],
    ],
    max_new_tokens=[24, 3, 8, 1, 14, 5],
)
# Alone, so that no other request shares its chunks: the last one has a single token.
ONE_TOKEN_LAST_CHUNK = Batch(prompts=[[(7 * i) % 480 + 5 for i in range(CHUNK + 1)]], max_new_tokens=7)
# A pool that cannot hold three of these to their ends: requests are retracted, and prefilled again later.
PRESSURE = {"max_total_tokens": 64, "schedule_conservativeness": 0.1}
# Windows of 16, 4 and 2 tokens by what the last step has accepted; of 2, and of 1 (no drafts), while three requests
# run.
EAGER = {"ema_alpha": 1.0, "update_interval": 1, "warmup_batches": 0, "down_hysteresis": 0.75}
ADAPTIVE = {"1": {"candidate_steps": [1, 3, 15], **EAGER}, "3": {"candidate_steps": [0, 1], **EAGER}}
# What a broken commit needs to show itself.
SINGLE = Batch(prompts=CROWD.prompts[:1], max_new_tokens=12)

REPLAYSSM = {"enable_gdn_replayssm_spec": True}

# The interpreter pays by layer and head: two layers with a ring and one of attention, two heads in a group.
SMALL = {
    "num_layers": 3,
    "full_attention_interval": 3,
    "num_k_heads": 1,
    "num_v_heads": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
}

# Prefix caching as SGLang has it, with and without overlap scheduling. No state is tracked in a short prefill, so what
# `extra_buffer` finds again is what verify steps have tracked: at every sixth token, hence inside most windows.
NO_BUFFER = {**NEXTN, **conversations.SERVER, "disable_radix_cache": False, "max_mamba_cache_size": 12}
EXTRA_BUFFER = {
    **NO_BUFFER,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 6,
    "max_mamba_cache_size": 18,
}
# The order of events in which stock crashes, in every other batch.
GRAMMAR_SYNC = {"CPUSIM_GRAMMAR_SYNC": "1"}


@dataclass(frozen=True)
class Scenario:
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    overlap: bool = False
    batches: tuple[Batch, ...] = (CROWD, ONE_TOKEN_LAST_CHUNK)
    shape: dict[str, int] = field(default_factory=lambda: SMALL)
    tokenizer: bool = False
    adaptive: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600 + 60 * conversations.SCRIPTS


def cached(arguments: dict[str, Any], **changes) -> Scenario:
    """Conversations on the tiny model as it comes."""
    return Scenario("qwen3_next", arguments, batches=conversations.scripts(), shape={}, **changes)


SCENARIOS = {
    "next-plain": Scenario("qwen3_next"),
    "next-stock": Scenario("qwen3_next", NEXTN),
    "next-replay-overlap": Scenario("qwen3_next", {**NEXTN, **REPLAYSSM, "enable_metrics": True}, overlap=True),
    "3.5-stock-overlap": Scenario("qwen3_5", NEXTN, overlap=True),
    # A ring of two windows folds at every other step or so.
    "3.5-replay": Scenario("qwen3_5", {**NEXTN, **REPLAYSSM, "gdn_replayssm_cache_len": 8}),
    "next-exact": Scenario(
        "qwen3_next", {**NEXTN, **REPLAYSSM, "gdn_replayssm_fold": "exact", "gdn_replayssm_cache_len": 8}
    ),
    "3.5-every-commit-overlap": Scenario(
        "qwen3_5", {**NEXTN, **REPLAYSSM, "gdn_replayssm_fold": "every-commit"}, overlap=True
    ),
    "3.5-endings-stock": Scenario(
        "qwen3_5", {**NEXTN, **endings.SERVER}, overlap=True, batches=endings.BATCHES, tokenizer=True
    ),
    "3.5-endings-replay": Scenario(
        "qwen3_5",
        {**NEXTN, **REPLAYSSM, "gdn_replayssm_cache_len": 8, **endings.SERVER},
        overlap=True,
        batches=endings.BATCHES,
        tokenizer=True,
    ),
    "3.5-retracted": Scenario(
        "qwen3_5",
        {**NEXTN, **REPLAYSSM, "gdn_replayssm_cache_len": 8, **PRESSURE},
        overlap=True,
        batches=(CROWD,),
    ),
    "3.5-adaptive": Scenario("qwen3_5", {**NEXTN, **REPLAYSSM}, batches=(CROWD,), adaptive=ADAPTIVE),
    "3.5-tree": Scenario(
        "qwen3_5", {**NEXTN, **REPLAYSSM, "speculative_eagle_topk": 2, "enable_metrics": True}, batches=(SINGLE,)
    ),
    "next-cached-stock": cached(EXTRA_BUFFER, overlap=True),
    "next-no-buffer": cached({**NO_BUFFER, **REPLAYSSM, "gdn_replayssm_cache_len": 8}),
    "next-extra-buffer": cached(
        {**EXTRA_BUFFER, **REPLAYSSM, "gdn_replayssm_fold": "every-commit"}, env=GRAMMAR_SYNC, overlap=True
    ),
    "next-crash-of-stock": cached(EXTRA_BUFFER, env=GRAMMAR_SYNC, overlap=True),
    "next-broken-commit": Scenario(
        "qwen3_next", {**NEXTN, **REPLAYSSM}, env={"CPUSIM_BREAK_COMMIT": "1"}, batches=(SINGLE,)
    ),
}


def run_scenario(scenario: Scenario, directory: Path) -> EngineResult:
    """Run one scenario on the CPU; its model is written below `directory`."""
    from sglang_cpusim import engine_arguments, environment

    from sglang_replayssm.tiny import write_tiny_model

    model = write_tiny_model(directory / f"{id(scenario)}", scenario.architecture, dtype="float32", **scenario.shape)
    arguments = engine_arguments() | {
        "disable_radix_cache": True,
        "disable_overlap_schedule": not scenario.overlap,
        "max_running_requests": 3,
        "max_mamba_cache_size": 8,
        "chunked_prefill_size": CHUNK,
    }
    if scenario.tokenizer:
        endings.add_tokenizer(model)
    if scenario.adaptive:
        (model / "adaptive.json").write_text(json.dumps(scenario.adaptive))
        arguments |= {"speculative_adaptive": True, "speculative_adaptive_config": str(model / "adaptive.json")}
    env = {**environment(), **scenario.env}
    return run_engine(model, scenario.batches, env=env, timeout=scenario.timeout, **arguments | scenario.arguments)
