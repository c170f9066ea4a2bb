"""Engine runs shared by all tests of this folder.

An engine takes half a minute to start, so each scenario runs once, and those that the selected tests need run in
the background, two at a time, from the first test on.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes
from engine_harness import EngineResult
from scenarios import SCENARIOS, run_scenario

CONCURRENT = 2


def pytest_configure(config):
    config.addinivalue_line("markers", "scenarios(*names): the engine runs that a test compares")


class Runs:
    """Looks a scenario's result up, waiting for it; a failed engine fails each test that asks for it."""

    def __init__(self, futures: dict[str, Future]):
        self._futures = futures

    def __getitem__(self, name: str) -> EngineResult:
        return self._futures[name].result()


@pytest.fixture(scope="session")
def runs(request, tmp_path_factory):
    names = {
        name: None for item in request.session.items for mark in item.iter_markers("scenarios") for name in mark.args
    }
    directory = tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(CONCURRENT) as pool:
        yield Runs({name: pool.submit(run_scenario, SCENARIOS[name], directory) for name in names})
        pool.shutdown(cancel_futures=True)
