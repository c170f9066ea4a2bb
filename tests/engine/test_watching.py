"""What the real engine says of itself, in metrics and allocations, against its own report and against the plan."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

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
    lines = [line for line in run.log.splitlines() if "rows verified" in line]
    assert 1 <= len(lines) <= 2, "one a minute at most"
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
    model = write_tiny_model(tmp_path, "qwen3_next", dtype="float32", weights=False)
    args = solver.server_args(["--model-path", str(model), *OPTIONS], gpu_memory=16)
    stock, ring = (solver.pools(args, solver.Gpu(before_load=8, weights=0.1), ring) for ring in (False, True))
    report, rows = run.replayssm, ring.requests + 1
    assert re.search(rf"allocated for {ring.slots} slots and {ring.requests} request rows", run.log)
    assert ring.state == stock.state == (ring.slots + 1) * report["checkpoint_bytes_per_slot"]
    assert stock.scratch == rows * report["stock_scratch_bytes_per_request"]
    assert ring.windows + ring.ring == pytest.approx(rows * report["ring_bytes_per_request"], rel=0.01)
    assert stock.scratch - ring.scratch == series(run.metrics)["bytes_saved"]
    caches = re.findall(r"KV Cache is allocated\. .*?#tokens: (\d+)", run.log)
    assert list(map(int, caches)) == [ring.kv_tokens] * 2, "target and draft"
