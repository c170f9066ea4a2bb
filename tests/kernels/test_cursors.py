"""plan_window, commit and reset against their plain versions, and the promises of their docstrings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_replayssm.kernels import Cursors, RingSpec, commit, plan_window, reset
from sglang_replayssm.kernels.cursors import naive


def make(rows: int = 6, window: int = 16, max_draft_tokens: int = 4, device: str = "cpu") -> Cursors:
    return Cursors.allocate(RingSpec(1, rows, 1, 1, 16, 16, window, max_draft_tokens, torch.bfloat16), device)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_kernels_equal_naive(data) -> None:
    rows = data.draw(st.integers(1, 6))
    max_draft_tokens = data.draw(st.integers(1, 16))
    window = data.draw(st.integers(max_draft_tokens, 40))
    ours, plain = (make(rows, window, max_draft_tokens) for _ in range(2))
    base = torch.randint(ours.spec.records, (rows,), dtype=torch.int32)
    ours.position[1:, 0] = plain.position[1:, 0] = base
    index = data.draw(st.sampled_from([torch.int32, torch.int64]))
    for _ in range(4):
        # Distinct rows, padding (row 0, slot -1) and graph capture (row 0, slot 0).
        used = data.draw(st.lists(st.integers(1, rows), unique=True, max_size=rows - 1))
        batch = [(row, row) for row in used] + [(0, data.draw(st.sampled_from([-1, 0])))]
        row = torch.tensor([r for r, _ in batch], dtype=index)
        slot = torch.tensor([s for _, s in batch], dtype=torch.int32)
        accepted = torch.tensor(
            data.draw(st.lists(st.integers(0, max_draft_tokens), min_size=len(batch), max_size=len(batch)))
        )
        plan_window(ours, row, slot)
        naive.plan_window(plain, row, slot)
        assert torch.equal(ours.plan, plain.plan)
        commit(ours, row, accepted.to(index))
        naive.commit(plain, row, accepted)
        assert torch.equal(ours.position, plain.position)
        assert torch.equal(ours.counters, plain.counters)
        assert (ours.position[:, 1] <= window).all() and (ours.position[0] == 0).all()
    reset(ours, row[:1])
    naive.reset(plain, row[:1])
    assert torch.equal(ours.position, plain.position)


def test_folding_row_is_empty_before_its_verify_is_committed(device: str) -> None:
    cursors = make(device=device)
    cursors.position[2] = torch.tensor([18, 14], dtype=torch.int32)
    rows, slots = torch.tensor([2], device=device), torch.tensor([5], dtype=torch.int32, device=device)
    plan_window(cursors, rows, slots)
    assert cursors.plan[0, :5].tolist() == [5, 2, 18, 14, 1]
    assert cursors.position[2].tolist() == [12, 0]
    plan_window(cursors, rows, slots)  # the commit never came
    assert cursors.plan[0, :5].tolist() == [5, 2, 12, 0, 0]


def test_fold_rule_uses_the_largest_draft_length(device: str) -> None:
    cursors = make(device=device)
    for count, fold in ((12, 0), (13, 1)):
        cursors.position[1] = torch.tensor([0, count], dtype=torch.int32)
        plan_window(cursors, torch.tensor([1], device=device), torch.tensor([1], device=device))
        assert cursors.plan[0, 4] == fold


def test_dead_slot_of_a_real_row_moves_nothing(device: str) -> None:
    cursors = make(device=device)
    cursors.position[1] = torch.tensor([3, 16], dtype=torch.int32)
    plan_window(cursors, torch.tensor([1], device=device), torch.tensor([-1], device=device))
    assert cursors.position[1].tolist() == [3, 16] and cursors.plan[0, 4] == 0


def test_idle_batch_is_fine(device: str) -> None:
    cursors, empty = make(device=device), torch.zeros(0, dtype=torch.int64, device=device)
    plan_window(cursors, empty, empty)
    commit(cursors, empty, empty)
    reset(cursors, empty)
    assert not cursors.counters.any()


def test_a_batch_padded_beyond_the_rows_has_lines(device: str) -> None:
    """SGLang pads to a multiple of its attention group, whatever the number of request rows."""
    cursors = make(rows=50, device=device)
    padding = torch.zeros(14, dtype=torch.int64, device=device)
    rows = torch.cat([torch.arange(1, 51, device=device), padding])
    plan_window(cursors, rows, torch.cat([rows[:50], padding - 1]))
    assert (cursors.plan[50:64, 0] == -1).all()


def test_padding_has_no_history_whatever_row_0_holds(device: str) -> None:
    """A kernel may load a line's history before it sees that the line is padding."""
    cursors = make(rows=2, device=device)
    cursors.position[0] = 2**30
    rows = torch.tensor([1, 0, 0], device=device)
    plan_window(cursors, rows, torch.tensor([5, -1, 0], device=device))
    assert cursors.plan[1:3, 2:5].tolist() == [[0, 0, 0]] * 2
    assert cursors.position[0].tolist() == [2**30] * 2


def test_many_batch_rows(device: str) -> None:
    cursors = make(rows=300, device=device)
    rows = torch.randperm(300, device=device) + 1
    plan_window(cursors, rows, rows)
    commit(cursors, rows, rows % 5)
    assert torch.equal(cursors.plan[:300, 1].long(), rows)
    assert torch.equal(cursors.position[rows, 1].long(), rows % 5)
    assert cursors.counters.tolist() == [300, 0, int((rows % 5).sum())]


def test_errors(device: str) -> None:
    cursors, rows = make(rows=2, device=device), torch.zeros(68, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="68 batch rows"):
        plan_window(cursors, rows, rows)
    with pytest.raises(ValueError, match="one length"):
        plan_window(cursors, rows[:2], rows[:3])
    with pytest.raises(ValueError, match="float32"):
        commit(cursors, rows[:2], torch.zeros(2, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        reset(cursors, rows[::2])
