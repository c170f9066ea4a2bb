"""Watching the ring while it serves: Prometheus metrics beside SGLang's, and a log line now and then.

The counters live on the device. They are copied to the host without waiting, between two turns of the scheduler's
loop, and looked at in a later turn, when the copy has arrived: no step waits for them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from sglang_replayssm.plugin import activation
from sglang_replayssm.plugin.pool import RingPool, ring_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_replayssm.kernels import Cursors

logger = logging.getLogger(__name__)

PREFIX = "sglang_replayssm:"
READ_SECONDS = 10.0
LOG_SECONDS = 60.0
# The value of `fallback`'s label where there is no fallback, so that the series exists and an alert can rest on it.
NO_REASON = "none"

_COUNTER_TEXTS = {
    "verify_rows": "Windows of draft tokens that were verified from the ring, one a request and step.",
    "folds": "Rings that were folded into their request's state.",
    "accepted_tokens": "Tokens that verify accepted, bonus tokens included.",
}
_ATTRIBUTE = "gdn_replayssm_watch"
_STOPPED = object()


def process_input_requests(original, self: Scheduler, recv_reqs: list):
    """AROUND Scheduler.process_input_requests: each turn of every event loop, busy or idle, begins with it."""
    result = original(self, recv_reqs)
    watch = getattr(self, _ATTRIBUTE, None)
    if watch is not _STOPPED:
        try:
            if watch is None:
                watch = Watch(self)
                setattr(self, _ATTRIBUTE, watch)
            watch.turn(time.monotonic())
        except Exception:  # a full disk under the metrics, say, is no reason to stop serving
            setattr(self, _ATTRIBUTE, _STOPPED)
            logger.exception("GDN ReplaySSM: watching the ring failed and stops; serving goes on")
    return result


class Watch:
    """One scheduler's: reads every READ_SECONDS at most, logs every LOG_SECONDS at most."""

    def __init__(self, scheduler: Scheduler):
        reporter = scheduler.metrics_reporter
        self._scheduler = scheduler
        self._logs = reporter.is_stats_logging_rank
        self._pool = ring_of(scheduler.req_to_token_pool)
        self._metrics = None
        if reporter.current_scheduler_metrics_enabled:
            self._metrics = Metrics(scheduler.metrics_collector.labels, self._pool, activation.reasons or [])
        wanted = self._pool is not None and (self._logs or self._metrics is not None)
        self._reader = Reader(self._pool.cursors) if wanted else None
        self._rows: list[int] | None = None  # of the copy under way
        self._next_read = self._next_log = 0.0
        self._logged: dict[str, int] = {}

    def turn(self, now: float) -> None:
        """Start a copy if one is due, or use the one that has arrived. `now` is in seconds of a monotonic clock."""
        if self._reader is None:
            return
        if self._rows is None:
            if now >= self._next_read:
                self._next_read = now + READ_SECONDS
                self._rows = _running_rows(self._scheduler)
                self._reader.start()
        elif self._reader.arrived():
            counters, records = self._reader.read()
            fill = records[self._rows].double().mean().item() / self._pool.spec.window if self._rows else 0.0
            self._rows = None
            if self._metrics is not None:
                self._metrics.update(counters, fill)
            if self._logs and now >= self._next_log and counters["verify_rows"] > self._logged.get("verify_rows", 0):
                self._next_log = now + LOG_SECONDS
                self._log(counters, fill)

    def _log(self, counters: dict[str, int], fill: float) -> None:
        """What happened since the last line."""
        rows, folds, accepted = (
            counters[name] - self._logged.get(name, 0) for name in ("verify_rows", "folds", "accepted_tokens")
        )
        self._logged = counters
        logger.info(
            "GDN ReplaySSM: %d rows verified, %.2f tokens accepted a row, %d folds, rings %.0f %% full",
            rows,
            accepted / rows,
            folds,
            100 * fill,
        )


def _running_rows(scheduler: Scheduler) -> list[int]:
    return [req.req_pool_idx for req in scheduler.running_batch.reqs if req.req_pool_idx is not None]


class Reader:
    """Host copies of counters and cursors, made without waiting."""

    def __init__(self, cursors: Cursors):
        self._names = cursors.COUNTERS
        self._device = (cursors.counters, cursors.position)
        on_gpu = cursors.counters.is_cuda
        self._host = tuple(torch.zeros(t.shape, dtype=t.dtype, pin_memory=on_gpu) for t in self._device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def start(self) -> None:
        """Order the copy on the current stream. Steps that run meanwhile may be in it or not; every word is whole."""
        for host, device in zip(self._host, self._device, strict=True):
            host.copy_(device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def read(self) -> tuple[dict[str, int], torch.Tensor]:
        """Running totals by name, and the records of each request row: int32 [rows + 1]."""
        from sglang_replayssm.kernels.ring import WRITE_POS  # here, since a server without the ring imports no kernel

        counters, position = self._host
        return dict(zip(self._names, counters.tolist(), strict=True)), position[:, WRITE_POS]


class Metrics:
    """The series, with SGLang's labels and in the registry (or multiprocess directory) of SGLang's own."""

    def __init__(
        self,
        labels: dict[str, str],
        pool: RingPool | None,
        reasons: list[str],
        registry: CollectorRegistry | None = None,
    ):
        """`pool` is None, and `reasons` says why, where the recurrent verify serves. `registry` is for tests."""
        from prometheus_client import REGISTRY, Counter, Gauge  # not before SGLang has set PROMETHEUS_MULTIPROC_DIR

        registry = registry or REGISTRY
        names = list(labels)

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(PREFIX + name, text, [*names, *more], registry=registry, multiprocess_mode="mostrecent")

        fallback = gauge("fallback", "1 for each reason why the ring is not used.", "reason")
        for reason in reasons or [NO_REASON]:
            fallback.labels(**labels, reason=reason).set(bool(reasons))
        if pool is None:
            return
        self._counters = {
            name: Counter(PREFIX + name, _COUNTER_TEXTS.get(name, name), names, registry=registry).labels(**labels)
            for name in pool.cursors.COUNTERS
        }
        from sglang_replayssm.plugin.memory import saved_bytes  # here, since it imports the kernels

        self._seen = dict.fromkeys(self._counters, 0)
        self._fill = gauge("ring_fill", "Mean records of a running request over the window W.").labels(**labels)
        saved = gauge("bytes_saved", "Bytes that SGLang's state copies would take beyond ring and windows.")
        saved.labels(**labels).set(saved_bytes(pool))

    def update(self, counters: dict[str, int], fill: float) -> None:
        """Totals since the start, and the fill of the rings of running requests, 0 to 1."""
        for name, total in counters.items():
            self._counters[name].inc(total - self._seen[name])
        self._seen = counters
        self._fill.set(fill)
