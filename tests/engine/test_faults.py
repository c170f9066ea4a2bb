"""Faults put into the scheduler (`sglang_cpusim.faults`): the server refuses or serves as stock, and never says what
stock would not, with one exception that stock shares: a NaN in a request's own state."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

from engine_harness import NEXTN, EngineFailure
from scenarios import CROWD, ONE_TOKEN_LAST_CHUNK, REPLAYSSM, SINGLE, Scenario, run_scenario

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

# The request whose row is poisoned: the longest of those that start first.
POISONED = 0


def run(directory, fault: str, batches=(SINGLE,), **env):
    arguments = {**NEXTN, **REPLAYSSM, "gdn_replayssm_cache_len": 8}
    return run_scenario(Scenario("qwen3_next", arguments, {"CPUSIM_FAULT": fault, **env}, batches=batches), directory)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("hook", "SGLang did not apply the hooks on .*commit_mamba_states_after_verify", id="hook"),
        pytest.param("memory", "OutOfMemoryError", id="memory"),
        pytest.param(
            "compile",
            r"CPUSIM_FAULT=compile.*direct cause.*RuntimeError: --enable-gdn-replayssm-spec: the kernel `verify` "
            r"\(portable Triton, T=4, fold=fp32, W=8\) does not compile .* Start without the flag",
            id="compile",
        ),
    ],
)
def test_a_server_that_cannot_use_the_ring_refuses(tmp_path, fault, words):
    """No answer at all, and a log that says why; not the rest of the time limit, but at once."""
    with pytest.raises(EngineFailure, match=rf"(?s)exited with status .*{words}"):
        run(tmp_path, fault)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    return run(tmp_path_factory.mktemp("poisoned"), "poison", (CROWD, ONE_TOKEN_LAST_CHUNK))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run_scenario(Scenario("qwen3_next", NEXTN), tmp_path_factory.mktemp("stock")).tokens()


class TestPoisonedRing:
    """NaN in dead records after every commit, and once in all records of a live row."""

    def test_the_row_had_records_and_its_request_is_lost(self, poisoned, stock):
        """As a NaN in a request's state is with stock: SGLang takes the NaN for the largest logit."""
        assert "CPUSIM_FAULT=poison" in poisoned.log and "poison: 0 live records" not in poisoned.log
        said, right = poisoned.tokens()[0][POISONED], stock[0][POISONED]
        assert said != right and len(said) == len(right)
        assert set(said[-8:]) == {0}, said

    def test_no_other_request_notices(self, poisoned, stock):
        """Neither those beside it, nor those that get its row and slot."""
        said = poisoned.tokens()
        assert said[1:] == stock[1:]
        assert said[0][POISONED + 1 :] == stock[0][POISONED + 1 :]

    def test_sglangs_own_assertions_make_it_a_refusal(self, tmp_path):
        with pytest.raises(EngineFailure, match=r"(?s)exited with status .*NaN detected"):
            run(tmp_path, "poison", (CROWD,), SGLANG_ENABLE_ASYNC_ASSERT="1")
