"""The soak without an engine: the workload and the verdict; and a short one on the CPU engine."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS)]

from soak import verdict, workload  # noqa: E402
from soak.side import Side, _lines  # noqa: E402

VOCABULARY = 512
ZERO = {"cached": 0, "retractions": 0}
IDLE = {"rows": 0, "slots": 0, "tokens": 0, "memory": {"host": 10 << 30, "gpu": 0}}


def script():
    spec = importlib.util.spec_from_file_location("soak_script", SCRIPTS / "soak.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sent(count: int, seed: int = 0, sizes: workload.Sizes = workload.CPU) -> list[workload.Request]:
    return list(itertools.islice(workload.requests(seed, sizes, rate=2.0), count))


class TestWorkload:
    def test_the_seed_decides(self):
        assert sent(200) == sent(300)[:200]
        assert sent(20, seed=1) != sent(20, seed=2)

    def test_another_rate_changes_the_gaps_only(self):
        fast = list(itertools.islice(workload.requests(0, workload.CPU, rate=20.0), 100))
        assert [r.prompt for r in fast] == [r.prompt for r in sent(100)]
        assert sum(r.gap for r in fast) == pytest.approx(sum(r.gap for r in sent(100)) / 10)

    def test_everything_happens(self):
        requests = sent(300)
        openings = [r.prompt[:9] for r in requests if r.parent is None]
        assert any(openings.count(opening) > 10 for opening in openings), "shared prefixes"
        assert {r.max_new_tokens for r in requests} > {1, 2, 3, 16}
        assert {r.copies for r in requests} == {1, 2, 3}
        assert {r.abort_after for r in requests} > {None, 0, 1, 4}
        for happens in ("greedy", "drain", "stops", "parent"):
            assert 0 < sum(bool(getattr(r, happens)) for r in requests) < 300, happens

    @pytest.mark.parametrize("sizes", [workload.CPU, workload.GPU], ids=["CPU", "GPU"])
    def test_conversations_end(self, sizes):
        total: list[int] = []
        for r in sent(500, sizes=sizes):
            assert r.parent is None or r.index - workload.REACH <= r.parent < r.index
            total.append((total[r.parent] if r.parent is not None else 0) + len(r.prompt) + r.max_new_tokens)
        assert max(total) <= sizes.longest


def plain(index: int = 0, **fields) -> workload.Request:
    return workload.Request(index, 0.1, False, None, (7, 8), fields.pop("max_new_tokens", 3), **fields)


def answer(tokens, finish="length", index=0, copy=0):
    return {"index": index, "copy": copy, "prompt": [7, 8], "tokens": tokens, "finish": finish} | ZERO


def ring(*answers, pools=(IDLE,), crash=None) -> Side:
    return Side({"answer": list(answers), "pools": [{"pools": p} for p in pools], "done": [{}]}, crash)


def stock(*differences, again=()) -> Side:
    return Side(
        {
            "replayed": [{"number": n, "difference": d} for n, d in enumerate(differences)],
            "replayed again": [{"number": n, "difference": d} for n, d in enumerate(again)],
        }
    )


def judged(ring_side: Side, stock_side: Side | None, *requests) -> verdict.Verdict:
    return verdict.judge(ring_side, stock_side, {r.index: r for r in requests}, VOCABULARY)


class TestVerdict:
    def test_nothing_wrong(self):
        found = judged(ring(answer([1, 2, 3])), stock(None), plain())
        assert found.ok and found.counts["compared with stock"] == 1

    @pytest.mark.parametrize(
        ("gap", "stock_gap", "fine"),
        [(0.05, None, True), (0.07, None, False), (0.07, 0.02, True), (float("inf"), float("inf"), False)],
    )
    def test_a_difference_must_be_a_near_tie(self, gap, stock_gap, fine):
        again = [{"position": 0, "gap": stock_gap, "ulp": 0.03}] if stock_gap else []
        found = judged(ring(answer([1, 2, 3])), stock({"position": 2, "gap": gap, "ulp": 0.03}, again=again), plain())
        assert found.ok is fine and len(found.differences) == 1
        assert fine or "request 0: differs from stock at token 2" in found.mismatches[0]

    @pytest.mark.parametrize(
        ("request_", "given", "fine"),
        [
            (plain(), answer([1, 2]), False),
            (plain(), answer([1, 2, VOCABULARY]), False),
            (plain(stops=(9,)), answer([1, 9], "stop"), True),
            (plain(stops=(9,)), answer([1, 2], "stop"), False),
            (plain(stops=(9,)), answer([9, 2, 3]), False),
            (plain(abort_after=1), answer([1, 2], "abort"), True),
            (plain(abort_after=2), answer([1, 2, 3, 4, 5, 6], "abort"), True),
            (plain(abort_after=2), answer([1, 2, 3, 4, 5, 6, 7], "abort"), False),
            (plain(), answer([1, 2], "abort"), False),
        ],
    )
    def test_answers_keep_to_their_request(self, request_, given, fine):
        assert (verdict.broken_terms(request_, given, VOCABULARY) is None) is fine

    def test_every_copy_is_answered(self):
        both = [answer([1, 2, 3]), answer([1, 2, 3], copy=1)]
        assert judged(ring(*both), stock(None, None), plain(copies=2)).ok
        assert judged(ring(both[0]), stock(None), plain(copies=2)).mismatches == ["request 0: 1 answers instead of 2"]

    def test_sampled_and_aborted_requests_are_not_compared(self):
        requests = [plain(), plain(1, temperature=1.0), plain(2, abort_after=1)]
        side = ring(answer([1, 2, 3]), answer([4, 5, 6], index=1), answer([1], "abort", index=2))
        assert [a["index"] for a in verdict.comparable(side, {r.index: r for r in requests})] == [0]

    @pytest.mark.parametrize("what", ["rows", "slots", "tokens"])
    def test_what_is_held_at_idle_is_a_leak(self, what):
        found = judged(ring(answer([1, 2, 3]), pools=(IDLE, IDLE | {what: 2})), stock(None), plain())
        assert found.leaks == [f"2 {what} held at idle, sample 2 of 2"]

    def test_memory_may_not_grow_without_end(self):
        grown = IDLE | {"memory": {"host": 11 << 30, "gpu": 0}}
        assert judged(ring(answer([1, 2, 3]), pools=(IDLE, grown, grown)), stock(None), plain()).ok, "a cache filled up"
        found = judged(ring(answer([1, 2, 3]), pools=(IDLE, IDLE, grown)), stock(None), plain())
        assert found.leaks == ["host memory grew by 1024 MiB"]

    def test_crashes(self):
        found = judged(ring(answer([1, 2, 3]), crash="the engine exited with status 1"), stock(None), plain())
        assert len(found.crashes) == 1 and not found.leaks
        found = judged(ring(answer([1, 2, 3]), crash="pool memory leak detected! [mamba]"), stock(None), plain())
        assert len(found.leaks) == 1 and not found.crashes

    def test_nothing_compared_is_no_success(self):
        assert not judged(ring(), None).ok
        assert judged(ring(answer([1, 2, 3])), stock(), plain()).crashes == ["1 answers were not replayed"]


def test_a_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "events"
    path.write_text('{"event": "a"}\n{"event"')
    with open(path) as events, open(path, "a") as more:
        assert list(_lines(events)) == [{"event": "a"}]
        more.write(': "b"}\n')
        more.flush()
        assert list(_lines(events)) == [{"event": "b"}]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestShortSoak:
    """On SGLang's engine on the CPU, as large as its speed lets it be."""

    @pytest.fixture(autouse=True)
    def cpusim(self):
        pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

    @staticmethod
    def soak(out: Path, *options: str) -> tuple[int, dict]:
        status = script().main(["--seconds", "150", "--cache-len", "8", "--out", str(out), *options])
        (path,) = out.glob("soak-*.json")
        return status, json.loads(path.read_text())

    @pytest.mark.parametrize("radix", ["off", "extra_buffer"])
    def test_nothing_is_wrong(self, tmp_path, radix):
        status, result = self.soak(tmp_path, "--radix", radix)
        assert status == 0 and result["ok"], result
        assert result["ring"]["active"] and result["counts"]["compared with stock"] > 3

    def test_a_broken_commit_is_found(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CPUSIM_BREAK_COMMIT", "1")
        status, result = self.soak(tmp_path)
        assert status == 1 and "differs from stock" in result["mismatches"][0]
        assert not result["leaks"] and not result["crashes"]
