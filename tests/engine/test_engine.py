"""The real engine on the tiny models: with ReplaySSM on, it must say exactly what it says with it off.

One file for all tests that share engine runs: test workers take whole files, and each would start its own engines.

Everything is fp32, where rounding differences (other batch compositions, the fold's other order of summation) stay far
below the gaps between logits, so greedy tokens must be equal.
"""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise

import pytest

pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

import conversations
from engine_harness import EngineFailure
from scenarios import CROWD, ONE_TOKEN_LAST_CHUNK, SCENARIOS, SMALL

from sglang_replayssm.plugin import solver
from sglang_replayssm.tiny import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Of scenarios.run_scenario and sglang_cpusim.settings.
OPTIONS = (
    "--dtype=float32",
    "--disable-radix-cache",
    "--max-running-requests=3",
    "--max-mamba-cache-size=8",
    "--max-total-tokens=2048",
)


@pytest.mark.scenarios("next-plain", "next-stock")
def test_speculation_does_not_change_the_text(runs):
    assert runs["next-stock"].tokens() == runs["next-plain"].tokens()


@pytest.mark.scenarios("next-stock", "3.5-stock-overlap")
@pytest.mark.parametrize("name", ["next-stock", "3.5-stock-overlap"])
def test_the_tiny_model_is_lively(runs, name):
    """Without mixed acceptance and varied text, the comparisons below would prove little."""
    stock = runs[name]
    assert all(count > 0 for count in stock.histogram()[:3]), stock.histogram()
    assert len(set(stock.batches[0][0].tokens)) > 6


@pytest.mark.scenarios(
    "next-stock", "next-replay-overlap", "next-exact", "3.5-stock-overlap", "3.5-replay", "3.5-every-commit-overlap"
)
@pytest.mark.parametrize(
    ("replay", "stock"),
    [
        ("next-replay-overlap", "next-stock"),
        ("next-exact", "next-stock"),
        ("3.5-replay", "3.5-stock-overlap"),
        ("3.5-every-commit-overlap", "3.5-stock-overlap"),
    ],
)
class TestReplayEqualsStock:
    def test_tokens(self, runs, replay, stock):
        """Row and slot reuse, requests shorter than a window, a one-token last chunk, overlap on against off."""
        assert runs[replay].tokens() == runs[stock].tokens()

    def test_lengths(self, runs, replay, stock):
        for batch, outputs in zip((CROWD, ONE_TOKEN_LAST_CHUNK), runs[replay].batches, strict=True):
            assert [len(output.tokens) for output in outputs] == batch.lengths()

    def test_acceptance(self, runs, replay, stock):
        """Equal states accept the same drafts, so even the number of steps is the same."""
        assert runs[replay].histogram() == runs[stock].histogram()

    def test_it_was_on_and_folded(self, runs, replay, stock):
        """Equality is worth nothing if the server fell back to stock."""
        report = runs[replay].replayssm
        assert report is not None, "the engine reports no gdn_replayssm state"
        assert report["active"], report["reasons"]
        assert report["folds"] > 0
        assert report["ring_bytes_per_request"] < report["stock_scratch_bytes_per_request"]
        assert runs[stock].replayssm is None or not runs[stock].replayssm["active"]


@pytest.mark.scenarios("next-stock", "next-broken-commit")
def test_a_broken_commit_is_noticed(runs):
    """The same comparison fails when the commit does nothing, so it has teeth."""
    broken = runs["next-broken-commit"]
    assert broken.replayssm["active"], broken.replayssm["reasons"]
    assert broken.replayssm["accepted_tokens"] == 0, "the commit was not broken"
    expected = runs["next-stock"].batches[0][0].tokens
    tokens = broken.batches[0][0].tokens
    assert tokens[0] == expected[0], "the prefill has nothing to do with commits"
    assert tokens != expected[: len(tokens)]


def series(text: str) -> dict[str, float]:
    """Name -> value of this package's series; their labels must be SGLang's own."""
    labels = re.search(r"^sglang:num_running_reqs\{(.*)\}", text, re.MULTILINE)[1]
    found = re.findall(r"^sglang_replayssm:(\w+)\{(.*?)\} (\S+)$", text, re.MULTILINE)
    assert {re.sub(r'reason=".*?",?', "", shown) for _, shown, _ in found} == {labels}
    return {name: float(value) for name, _, value in found}


@pytest.mark.scenarios("next-replay-overlap")
def test_metrics_are_what_the_server_reports(runs):
    run = runs["next-replay-overlap"]
    found = series(run.metrics)
    for counter in ("verify_rows", "folds", "accepted_tokens"):
        assert found[f"{counter}_total"] == run.replayssm[counter] > 0
    assert found["fallback"] == 0 and 0 <= found["ring_fill"] < 1
    shown = re.findall(r"^\[(.{19})\] GDN ReplaySSM: .* rows verified", run.log, re.MULTILINE)
    times = [datetime.fromisoformat(time) for time in shown]
    assert times and all((b - a).total_seconds() >= 59 for a, b in pairwise(times)), "one a minute at most"
    assert "watching the ring failed" not in run.log


@pytest.mark.scenarios("3.5-replay")
def test_no_metrics_without_the_option(runs):
    run = runs["3.5-replay"]
    assert run.metrics == "" and "watching the ring failed" not in run.log
    assert "rows verified" in run.log


@pytest.mark.scenarios("next-replay-overlap")
def test_the_plan_is_what_the_engine_allocates(runs, tmp_path, monkeypatch):
    run = runs["next-replay-overlap"]
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")  # as the engine's environment has it
    model = write_tiny_model(tmp_path, "qwen3_next", dtype="float32", weights=False, **SMALL)
    args = solver.server_args(["--model-path", str(model), *OPTIONS], gpu_memory=16)
    stock, ring = (solver.pools(args, solver.Gpu(before_load=8, weights=0.1), ring) for ring in (False, True))
    report, rows = run.replayssm, ring.requests + 1
    assert re.search(rf"allocated for {ring.slots} slots and {ring.requests} request rows", run.log)
    assert ring.state == stock.state == (ring.slots + 1) * report["checkpoint_bytes_per_slot"]
    assert stock.scratch == rows * report["stock_scratch_bytes_per_request"]
    # The step plan and the cursors are no request's own: 3 % of so small a ring, nothing of a real one.
    assert ring.windows + ring.ring == pytest.approx(rows * report["ring_bytes_per_request"], rel=0.03)
    assert stock.scratch - ring.scratch == series(run.metrics)["bytes_saved"]
    caches = re.findall(r"KV Cache is allocated\. .*?#tokens: (\d+)", run.log)
    assert list(map(int, caches)) == [ring.kv_tokens] * 2, "target and draft"


@pytest.mark.slow
@pytest.mark.scenarios("next-cached-stock", "next-no-buffer", "next-extra-buffer")
@pytest.mark.parametrize("replay", ["next-no-buffer", "next-extra-buffer"])
class TestPrefixCaching:
    """Random multi-turn scripts with shared openings, evictions, aborts and stops: no token differs from stock's.

    Stock has `extra_buffer` and overlap scheduling; `no_buffer` without overlap must still say the same.
    """

    def test_tokens(self, runs, replay):
        assert runs[replay].tokens() == runs["next-cached-stock"].tokens()
        assert runs[replay].histogram() == runs["next-cached-stock"].histogram()

    def test_some_turns_continue_from_a_state_that_verify_has_left(self, runs, replay):
        """Hits alone might be of openings, whose states a prefill has left."""
        assert conversations.hits_behind_a_prompt(SCENARIOS[replay].batches, runs[replay].batches) > 0

    def test_it_was_on_and_folded(self, runs, replay):
        report = runs[replay].replayssm
        assert report["active"], report["reasons"]
        assert report["folds"] > 0


if conversations.SCRIPTS > 1:  # an engine more, so not by default; test_tracking.py shows stock's crash too

    @pytest.mark.slow
    @pytest.mark.scenarios("next-crash-of-stock", "next-extra-buffer")
    def test_a_request_that_finishes_inside_the_next_batch(runs):
        """Trap 14: SGLang's scheduler dies of it; with the flag it goes on, as `next-extra-buffer`'s tokens say."""
        with pytest.raises(EngineFailure, match="set_mamba_track_indices_from_reqs"):
            runs["next-crash-of-stock"]
        assert runs["next-extra-buffer"].replayssm["active"]
