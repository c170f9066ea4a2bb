"""The real engine on the tiny models: with ReplaySSM on, it must say exactly what it says with it off.

Everything is fp32, where rounding differences (other batch compositions, the fold's other order of summation) stay far
below the gaps between logits, so greedy tokens must be equal.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

import conversations
from engine_harness import EngineFailure
from scenarios import CROWD, ONE_TOKEN_LAST_CHUNK, SCENARIOS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


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


if conversations.SCRIPTS > 1:  # an engine more, so not in CI, where test_tracking.py shows stock's crash

    @pytest.mark.scenarios("next-crash-of-stock", "next-extra-buffer")
    def test_a_request_that_finishes_inside_the_next_batch(runs):
        """Trap 14: SGLang's scheduler dies of it; with the flag it goes on, as `next-extra-buffer`'s tokens say."""
        with pytest.raises(EngineFailure, match="set_mamba_track_indices_from_reqs"):
            runs["next-crash-of-stock"]
        assert runs["next-extra-buffer"].replayssm["active"]
