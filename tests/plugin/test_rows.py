"""Life of a request row (traps 1, 2, 8 and 9): rows given, reused and continued."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_replayssm.kernels import Cursors, Ring, RingSpec
from sglang_replayssm.kernels.ring import CACHE_BASE, WRITE_POS
from sglang_replayssm.plugin import rows
from sglang_replayssm.plugin.pool import RingPool

SPEC = RingSpec(
    layers=2,
    rows=4,
    num_k_heads=1,
    num_v_heads=2,
    head_k_dim=16,
    head_v_dim=16,
    window=8,
    max_draft_tokens=4,
    activation_dtype=torch.float32,
)


class Mode(SimpleNamespace):
    """A ForwardMode of the given name."""

    def is_extend(self):
        return self.name in ("EXTEND", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND_V2")

    def is_target_verify(self):
        return self.name == "TARGET_VERIFY"

    def is_draft_extend_v2(self):
        return self.name == "DRAFT_EXTEND_V2"


@pytest.fixture
def world():
    """A pool with ring, and a runner on it; slot of row r is r + 3."""
    torch.manual_seed(0)
    ring_pool = RingPool(SPEC, Ring.allocate(SPEC, "cpu"), Cursors.allocate(SPEC, "cpu"), 0, 0, 0)
    for tensor in (ring_pool.ring.d, ring_pool.ring.k):
        tensor.normal_()
    ring_pool.ring.g[..., 0] = -torch.rand(2, 5, 2, SPEC.records)  # accumulated log-decay, high part
    mamba_pool = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=torch.randn(2, 8, 2, 16, 16)))
    ring_pool.attach(mamba_pool)
    pool = SimpleNamespace(mamba_pool=mamba_pool, get_mamba_indices=lambda r: (r + 3).to(torch.int32))
    return ring_pool, SimpleNamespace(req_to_token_pool=pool, is_draft_worker=False)


def extend(runner, *batch: int, mode: str = "EXTEND") -> None:
    forward_batch = SimpleNamespace(
        forward_mode=Mode(name=mode), req_pool_indices=torch.tensor(batch, dtype=torch.int64)
    )
    rows.before_extend(lambda self, batch: None, runner, forward_batch)


def position(pool, row) -> tuple[int, int]:
    return tuple(pool.cursors.position[row].tolist())


def set_position(pool, row, base, count):
    pool.cursors.position[row, CACHE_BASE], pool.cursors.position[row, WRITE_POS] = base, count


def give_rows(runner, *new_rows: int, kept: int | None = None):
    """HybridReqToTokenPool.alloc for new requests and, if `kept` is given, a continued one in row `kept`."""
    reqs = [SimpleNamespace(req_pool_idx=None) for _ in new_rows]
    continued = [SimpleNamespace(req_pool_idx=kept)] if kept is not None else []

    def stock_alloc(self, requests):
        for request, row in zip(reqs, new_rows, strict=True):
            request.req_pool_idx = row
        return [r.req_pool_idx for r in requests]

    assert rows.alloc(stock_alloc, runner.req_to_token_pool, reqs + continued) == [
        *new_rows,
        *([kept] if kept is not None else []),
    ]


def test_a_reused_row_starts_empty_and_its_state_is_untouched(world):
    """Trap 2: the previous owner's cursors and records must not reach the new owner's slot."""
    pool, runner = world
    state = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    before = state.clone()
    set_position(pool, 2, 5, 3)
    pool.ring.d[:, 2] = float("nan")
    give_rows(runner, 2)
    assert position(pool, 2) == (5, 3)  # not on the scheduling thread
    extend(runner, 2)
    assert position(pool, 2) == (0, 0)
    assert torch.equal(state, before) and not pool.fresh_rows


def test_commit_of_the_previous_owner_cannot_overtake_the_reset(world):
    """Trap 1: an in-flight batch commits into a row that was already given away; the reset comes behind it."""
    from sglang_replayssm.kernels import commit

    pool, runner = world
    give_rows(runner, 2)
    commit(pool.cursors, torch.tensor([2]), torch.tensor([3], dtype=torch.int32))
    extend(runner, 2)
    assert position(pool, 2) == (0, 0)


def test_a_continued_row_with_records_is_folded(world):
    """A second turn, or a mixed batch: the plain extend must find the whole state in the slot."""
    pool, runner = world
    state = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    before = state.clone()
    set_position(pool, 1, 10, 3)
    extend(runner, 1, 2)
    records = [10, 11, 0]  # R = 12: wraps
    d, k, g = (t[:, 1][:, :, records] for t in (pool.ring.d, pool.ring.k, pool.ring.g))
    total = g[:, :, -1].sum(-1)
    weights = (total[..., None] - g.sum(-1)).exp()
    expected = total.exp()[..., None, None] * before[:, 4] + torch.einsum(
        "lhj,lhjv,lhjk->lhvk", weights, d, k.expand_as(d)
    )
    torch.testing.assert_close(state[:, 4], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[:, [3, 5, 6, 7]], before[:, [3, 5, 6, 7]])
    assert position(pool, 1) == (1, 0) and position(pool, 2) == (0, 0)


def test_a_continued_row_is_replayed_if_the_policy_records_inputs():
    """The same by the other kind of fold: one token with beta 1 and no decay puts its value at its key."""
    spec = replace(SPEC, fold="exact")
    pool = RingPool(spec, Ring.allocate(spec, "cpu"), Cursors.allocate(spec, "cpu"), 0, 0, 0)
    mamba_pool = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=torch.randn(2, 8, 2, 16, 16)))
    pool.attach(mamba_pool)
    world = SimpleNamespace(mamba_pool=mamba_pool, get_mamba_indices=lambda r: (r + 3).to(torch.int32))
    runner = SimpleNamespace(req_to_token_pool=world, is_draft_worker=False)
    record, state = 7, mamba_pool.mamba_cache.temporal
    before, value = state.clone(), torch.randn(2, 2, 16)
    pool.ring.k[:, 1, :, record, 3] = 1000.0  # so that the norm's epsilon does not show
    pool.ring.v[:, 1, :, record] = value
    pool.ring.gates[:, 1, :, record, 1] = 1.0
    set_position(pool, 1, record, 1)
    extend(runner, 1)
    torch.testing.assert_close(state[:, 4, :, :, 3], value)
    others = [column for column in range(16) if column != 3]
    assert torch.equal(state[:, 4][..., others], before[:, 4][..., others])
    assert position(pool, 1) == (0, 0)  # R = W = 8: wraps


def test_chunked_prefill_keeps_an_empty_row_empty(world):
    """Trap 8: later chunks, also of one token, neither reset nor fold anything."""
    pool, runner = world
    before = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal.clone()
    give_rows(runner, 3)
    for _ in range(3):
        extend(runner, 3)
        give_rows(runner, kept=3)
    assert position(pool, 3) == (0, 0) and not pool.fresh_rows
    assert torch.equal(runner.req_to_token_pool.mamba_pool.mamba_cache.temporal, before)


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_verify_and_draft_extend_leave_rows_alone(world, mode):
    pool, runner = world
    set_position(pool, 1, 2, 3)
    give_rows(runner, 2)
    extend(runner, 1, mode=mode)
    assert position(pool, 1) == (2, 3) and pool.fresh_rows == {2}


def test_a_draft_worker_leaves_rows_alone(world):
    pool, runner = world
    runner.is_draft_worker = True
    set_position(pool, 1, 2, 3)
    extend(runner, 1)
    assert position(pool, 1) == (2, 3)


def test_a_failed_allocation_notes_nothing(world):
    pool, runner = world
    assert rows.alloc(lambda self, reqs: None, runner.req_to_token_pool, [SimpleNamespace(req_pool_idx=None)]) is None
    assert not pool.fresh_rows


def test_an_empty_extend(world):
    """Trap 4: a rank without rows."""
    _, runner = world
    extend(runner)
