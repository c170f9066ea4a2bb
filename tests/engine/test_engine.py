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
import endings
from engine_harness import EngineFailure, Output
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
    assert ring.windows + ring.ring == rows * report["ring_bytes_per_request"]
    assert ring.cursors == report["cursor_bytes"] > 0
    assert stock.scratch - ring.scratch == series(run.metrics)["bytes_saved"]
    caches = re.findall(r"KV Cache is allocated\. .*?#tokens: (\d+)", run.log)
    assert list(map(int, caches)) == [ring.kv_tokens] * 2, "target and draft"


def by_name(run) -> dict[str, Output]:
    return dict(zip(endings.NAMES, run.batches[0], strict=True))


def assert_same_candidates(outputs: list[Output], expected: list[Output]) -> None:
    """The same best tokens everywhere, log-probabilities equal but for rounding."""
    for mine, stocks in zip(outputs, expected, strict=True):
        assert mine.tokens == stocks.tokens and len(mine.candidates) == len(mine.tokens)
        for ours, theirs in zip(mine.candidates, stocks.candidates, strict=True):
            assert [token for _, token in ours] == [token for _, token in theirs]
            assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=0.01)


@pytest.mark.scenarios("3.5-endings-stock", "3.5-endings-replay")
class TestEndings:
    """What bends or ends an answer inside a window, copies of a request, log-probabilities, a streaming session."""

    def test_answers_end_as_with_stock(self, runs):
        stock, replay = (by_name(runs[name]) for name in ("3.5-endings-stock", "3.5-endings-replay"))
        for name in endings.NAMES:
            if name not in endings.NOT_COMPARED:
                assert replay[name] == stock[name], name

    def test_they_ended_for_the_reasons_meant(self, runs):
        """Early, by a stop or by the grammar; the sampled one has its length, the aborted one left nothing behind."""
        replay = by_name(runs["3.5-endings-replay"])
        early = ("stop string", "stop token", "end of sequence", "grammar")
        assert all(replay[name].finish_reason == "stop" for name in early), replay
        assert str(replay["stop string"].tokens[-1]).startswith("3")
        assert replay["stop token"].tokens[-1] in endings.STOPS
        assert replay["end of sequence"].tokens[-1] in endings.END
        assert all(len(replay[name].tokens) < endings.LONG for name in early)
        bounds = [tuple(map(int, place.split("-"))) for place in endings.GRAMMAR.split()]
        allowed = zip(bounds, replay["grammar"].tokens, strict=True)
        assert all(low <= token <= high for (low, high), token in allowed)
        assert [len(replay[name].tokens) for name in ("two tokens", "sampled")] == [2, 5]
        assert replay["aborted"].finish_reason == "abort"

    def test_copies_and_their_log_probabilities(self, runs):
        stock, replay = (runs[name].batches[1] for name in ("3.5-endings-stock", "3.5-endings-replay"))
        assert [len(output.tokens) for output in replay] == [4, 4]
        assert_same_candidates(replay, stock)

    def test_a_session_goes_on_from_its_records(self, runs):
        """The second prefill finds the state of the first turn's end, records included. (A text alone may agree by
        chance.)"""
        names = ("3.5-endings-stock", "3.5-endings-replay")
        stock, replay = ([turn for (turn,) in runs[name].batches[2:]] for name in names)
        assert [len(turn.tokens) for turn in replay] == [3, 6] and replay[1].cached_tokens > 3
        assert_same_candidates(replay, stock)

    def test_it_was_on_and_folded(self, runs):
        report = runs["3.5-endings-replay"].replayssm
        assert report["active"] and report["folds"] > 0


@pytest.mark.slow
@pytest.mark.scenarios("3.5-stock-overlap", "3.5-retracted")
def test_retracted_requests_say_the_same(runs):
    """Memory runs out, so requests lose row and slot, and get others later."""
    retracted = runs["3.5-retracted"]
    assert "Retract requests" in retracted.log and retracted.replayssm["active"]
    assert retracted.tokens()[0] == runs["3.5-stock-overlap"].tokens()[0]


@pytest.mark.slow
@pytest.mark.scenarios("3.5-stock-overlap", "3.5-adaptive")
def test_draft_lengths_that_change_while_serving(runs):
    """Windows of 1, 2, 4 and 16 tokens over the same rings."""
    adaptive = runs["3.5-adaptive"]
    taken = set(re.findall(r"steps (\d+) -> (\d+)", adaptive.log))
    assert {int(steps) for change in taken for steps in change} == {0, 1, 3, 15}, taken
    assert adaptive.replayssm["active"] and adaptive.replayssm["max_draft_tokens"] == 16
    assert adaptive.tokens()[0] == runs["3.5-stock-overlap"].tokens()[0]


@pytest.mark.slow
@pytest.mark.scenarios("3.5-stock-overlap", "3.5-tree")
def test_a_fallback_says_why_and_serves_as_stock(runs):
    tree = runs["3.5-tree"]
    reason = "--speculative-eagle-topk is 2 (tree verify); only 1 is a chain"
    assert tree.replayssm == {"active": False, "reasons": [reason]}
    assert tree.log.count(f"the ring is not used because {reason}. Serving through SGLang's recurrent verify.") == 1
    shown = [line for line in tree.metrics.splitlines() if line.startswith("sglang_replayssm:")]
    assert len(shown) == 1 and f'reason="{reason}"' in shown[0] and shown[0].endswith(" 1.0"), shown
    (said,) = tree.batches[0]
    assert said.tokens == runs["3.5-stock-overlap"].tokens()[0][0][: len(said.tokens)] and len(said.tokens) == 12


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
