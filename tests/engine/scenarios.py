"""What the engine tests run: prompts that reuse rows and slots and end in awkward chunks, in a few configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    max_new_tokens=[24, 3, 14, 1, 20, 6],
)
# Alone, so that no other request shares its chunks: the last one has a single token.
ONE_TOKEN_LAST_CHUNK = Batch(prompts=[[(7 * i) % 480 + 5 for i in range(2 * CHUNK + 1)]], max_new_tokens=10)
# What a broken commit needs to show itself.
SINGLE = Batch(prompts=CROWD.prompts[:1], max_new_tokens=12)

REPLAYSSM = {"enable_gdn_replayssm_spec": True}


@dataclass(frozen=True)
class Scenario:
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    overlap: bool = False
    batches: tuple[Batch, ...] = (CROWD, ONE_TOKEN_LAST_CHUNK)


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
    "next-broken-commit": Scenario(
        "qwen3_next", {**NEXTN, **REPLAYSSM}, env={"CPUSIM_BREAK_COMMIT": "1"}, batches=(SINGLE,)
    ),
}


def run_scenario(scenario: Scenario, directory: Path) -> EngineResult:
    """Run one scenario on the CPU; its model is written below `directory`."""
    from sglang_cpusim import engine_arguments, environment

    from sglang_replayssm.tiny import write_tiny_model

    model = write_tiny_model(directory / f"{id(scenario)}", scenario.architecture, dtype="float32")
    return run_engine(
        model,
        scenario.batches,
        env={**environment(), **scenario.env},
        **engine_arguments(),
        disable_radix_cache=True,
        disable_overlap_schedule=not scenario.overlap,
        max_running_requests=3,
        max_mamba_cache_size=8,
        chunked_prefill_size=CHUNK,
        **scenario.arguments,
    )
