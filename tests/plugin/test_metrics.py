"""The watch on a scheduler that is only what it reads of one: rates, values, labels, fallback, and failures."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import prometheus_client
import pytest
import torch

from sglang_replayssm.kernels import Cursors, Ring, RingSpec
from sglang_replayssm.kernels.ring import WRITE_POS
from sglang_replayssm.plugin import activation, memory, metrics
from sglang_replayssm.plugin.pool import RingPool

LABELS = {"model_name": "tiny", "tp_rank": "0"}
SPEC = RingSpec(3, 6, 2, 4, 32, 32, window=16, max_draft_tokens=4, activation_dtype=torch.bfloat16)


@pytest.fixture
def registry(monkeypatch):
    """An empty one in the place of the process's."""
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(activation, "reasons", [])
    return registry


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now)
    return clock


def ring_pool() -> RingPool:
    cursors = Cursors.allocate(SPEC, "cpu")
    return RingPool(SPEC, Ring.allocate(SPEC, "cpu"), cursors, 0, 1000, 1_000_000)


def scheduler(pool: RingPool | None, enabled: bool = True, logs: bool = True):
    """With two running requests in rows 2 and 5, and one that has just lost its row."""
    requests = [SimpleNamespace(req_pool_idx=row) for row in (2, None, 5)]
    return SimpleNamespace(
        metrics_reporter=SimpleNamespace(is_stats_logging_rank=logs, current_scheduler_metrics_enabled=enabled),
        metrics_collector=SimpleNamespace(labels=LABELS) if enabled else None,
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(gdn_verify_ring=pool)),
        running_batch=SimpleNamespace(reqs=requests),
    )


def turns(server, count: int = 2) -> None:
    """As the event loop: a turn starts a copy, the next one finds it."""
    for _ in range(count):
        assert metrics.process_input_requests(lambda self, reqs: reqs, server, ["request"]) == ["request"]


def step(pool: RingPool, verify_rows: int, folds: int, accepted_tokens: int) -> None:
    pool.cursors.counters.add_(torch.tensor([verify_rows, folds, accepted_tokens]))


def value(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"sglang_replayssm:{name}", LABELS | labels)


def test_totals_fill_and_savings(registry, clock):
    pool = ring_pool()
    server = scheduler(pool)
    for total in (1, 2):
        step(pool, 10, 3, 27)
        pool.cursors.position[2, WRITE_POS], pool.cursors.position[5, WRITE_POS] = 4 * total, 8
        pool.cursors.position[3, WRITE_POS] = 16  # of nobody
        turns(server)
        clock.now += metrics.READ_SECONDS
        assert value(registry, "verify_rows_total") == 10 * total
        assert value(registry, "folds_total") == 3 * total
        assert value(registry, "accepted_tokens_total") == 27 * total
        assert value(registry, "ring_fill") == (4 * total + 8) / 2 / 16
    assert value(registry, "bytes_saved") == 7 * (1_000_000 - 1000) - memory.ring_bytes(pool)
    assert value(registry, "fallback", reason=metrics.NO_REASON) == 0


def test_without_running_requests_the_rings_are_empty(registry, clock):
    pool = ring_pool()
    server = scheduler(pool)
    server.running_batch.reqs.clear()
    pool.cursors.position[2, WRITE_POS] = 4
    turns(server)
    assert value(registry, "ring_fill") == 0


def test_reads_are_rare(registry, clock, monkeypatch):
    started = []
    start = metrics.Reader.start
    monkeypatch.setattr(metrics.Reader, "start", lambda self: (started.append(clock.now), start(self)))
    server = scheduler(ring_pool())
    for _ in range(400):
        turns(server)
        clock.now += 0.1
    assert len(started) == 4
    assert all(later - earlier >= metrics.READ_SECONDS for earlier, later in itertools.pairwise(started))


def test_a_copy_that_has_not_arrived_is_not_waited_for(registry, clock, monkeypatch):
    arrived = False
    monkeypatch.setattr(metrics.Reader, "arrived", lambda self: arrived)
    pool = ring_pool()
    server = scheduler(pool)
    step(pool, 1, 0, 2)
    turns(server, 5)
    assert value(registry, "verify_rows_total") == 0
    arrived = True
    turns(server, 1)
    assert value(registry, "verify_rows_total") == 1


def test_one_line_a_minute_and_none_without_traffic(registry, clock, caplog):
    pool = ring_pool()
    server = scheduler(pool, enabled=False)
    with caplog.at_level("INFO"):
        for second in range(180):
            if second < 100:
                step(pool, 2, 1, 5)
            turns(server)
            clock.now += 1
    lines = [record.message for record in caplog.records if "rows verified" in record.message]
    assert len(lines) == 3
    rows = [int(line.split()[2]) for line in lines]
    assert sum(rows) == 200, "each line counts from the one before"
    assert all("2.50 tokens accepted a row" in line for line in lines)


def test_one_rank_of_a_group_logs(registry, clock, caplog):
    pool = ring_pool()
    server = scheduler(pool, logs=False)
    step(pool, 2, 1, 5)
    with caplog.at_level("INFO"):
        turns(server)
    assert value(registry, "verify_rows_total") == 2 and not caplog.records


def test_nothing_is_registered_when_metrics_are_off(registry, clock):
    turns(scheduler(ring_pool(), enabled=False))
    assert list(registry.collect()) == []


def test_a_rank_without_metrics_and_log_copies_nothing(registry, clock, monkeypatch):
    monkeypatch.setattr(metrics.Reader, "start", lambda self: pytest.fail("copied"))
    turns(scheduler(ring_pool(), enabled=False, logs=False))


def test_a_fallback_says_why(registry, clock, monkeypatch):
    reasons = ["--enable-hierarchical-cache is on", "--enable-pdmux is on"]
    monkeypatch.setattr(activation, "reasons", reasons)
    turns(scheduler(None))
    assert [value(registry, "fallback", reason=reason) for reason in reasons] == [1, 1]
    assert {metric.name for metric in registry.collect()} == {"sglang_replayssm:fallback"}


def test_a_failure_stops_the_watching_and_not_the_server(registry, clock, caplog, monkeypatch):
    def fail(self):
        raise OSError("no space left on device")

    monkeypatch.setattr(metrics.Reader, "start", fail)
    turns(scheduler(ring_pool()), 5)
    assert caplog.text.count("watching the ring failed") == 1


def test_host_copies_are_as_large_as_what_they_copy():
    reader = metrics.Reader(ring_pool().cursors)
    reader.start()
    counters, records = reader.read()
    assert set(counters) == set(Cursors.COUNTERS) and records.shape == (SPEC.rows + 1,)
    assert all(host.is_cpu for host in reader._host)


@pytest.mark.gpu
def test_on_a_gpu_the_copy_is_pinned_and_not_waited_for():
    """While the device is busy the copy has not arrived; nothing synchronises (torch would raise)."""
    cursors = Cursors.allocate(SPEC, "cuda")
    reader = metrics.Reader(cursors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        cursors.counters.add_(3)
        reader.start()
        early = reader.arrived()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not early and reader.arrived() and reader._host[0].is_pinned()
    assert set(reader.read()[0].values()) == {3}
