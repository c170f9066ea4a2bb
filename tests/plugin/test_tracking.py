"""Trap 14: a request that finishes inside the next verify batch ends SGLang's scheduler, and not ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_replayssm.plugin import seams, tracking


@pytest.fixture
def stock(monkeypatch):
    """SGLang's function; pinned memory, which it asks for, takes CUDA."""
    from sglang.srt.managers import schedule_batch

    if not torch.cuda.is_available():
        tensor = torch.tensor
        unpinned = SimpleNamespace(tensor=lambda *args, pin_memory, **kw: tensor(*args, **kw))
        monkeypatch.setattr(schedule_batch, "torch", SimpleNamespace(**{**vars(torch), **vars(unpinned)}))
    return schedule_batch.set_mamba_track_indices_from_reqs


def batch(*indices: int | None) -> SimpleNamespace:
    """Requests in rows 1, 2, ..., whose track buffers are slots [11, 12], [21, 22], ..."""
    buffers = torch.tensor([[10 * row + 1, 10 * row + 2] for row in range(len(indices) + 1)])
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_index_to_mamba_ping_pong_track_buffer_mapping=buffers),
        req_pool_indices=torch.arange(1, len(indices) + 1),
        reqs=[SimpleNamespace(mamba_next_track_idx=index) for index in indices],
    )


def test_stock_crashes(stock):
    """If it no longer does, the hook can go."""
    with pytest.raises(TypeError):
        stock(batch(0, None, 1))


def test_a_finished_request_tracks_into_nobodys_slot(stock):
    """Its former slots may be the prefix cache's by now; the others' are as ever."""
    scheduled = batch(0, None, 1, None)
    tracking.set_mamba_track_indices_from_reqs(stock, scheduled)
    assert scheduled.mamba_track_indices.tolist() == [11, tracking.NOBODYS_SLOT, 32, tracking.NOBODYS_SLOT]
    assert [req.mamba_next_track_idx for req in scheduled.reqs] == [0, None, 1, None]


def test_otherwise_it_is_stock(stock):
    ours, theirs = batch(1, 0), batch(1, 0)
    tracking.set_mamba_track_indices_from_reqs(stock, ours)
    stock(theirs)
    assert torch.equal(ours.mamba_track_indices, theirs.mamba_track_indices)
    assert ours.mamba_track_indices.dtype == theirs.mamba_track_indices.dtype


def test_nobodys_slot_is_never_given_away():
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

    allocator = MambaSlotAllocator(size=5, device="cpu")
    assert tracking.NOBODYS_SLOT not in allocator.alloc(5).tolist() and allocator.alloc(1) is None


def test_it_is_in_place_with_the_flag_ring_or_not():
    assert any(seam.hook.endswith("tracking:set_mamba_track_indices_from_reqs") for seam in seams.WITH_FLAG)
