"""Which state of a row a launch is to bring about, and where it goes: what both kinds of fold begin with."""

import triton
import triton.language as tl


@triton.jit
def reach(position, rows, slots, steps, targets, strides, n, least):
    """Read what batch row `n` asks for.

    Args:
        position: pointer to `Cursors.position`.
        rows, slots: pointers to request rows and mamba slots; padding has row 0 or slot -1.
        steps: pointer to window steps, -1 for none, of rows whose window is verified and not yet committed: the state
            after that step is wanted, in the slot of `targets`. None: all committed records, in the row's own slot.
        strides: of rows, slots, steps and targets; the last two only with `steps`.
        least: without `steps`, records from which on a row is wanted.

    Returns:
        row, slot and target slot (int64); base and count of the records that lead there; whether the row is wanted.
    """
    row = tl.load(rows + n * strides[0]).to(tl.int64)
    slot = tl.load(slots + n * strides[1]).to(tl.int64)
    base = tl.load(position + 2 * row)
    count = tl.load(position + 2 * row + 1)
    if steps is None:
        target = slot
        wanted = count >= least
    else:
        step = tl.load(steps + n * strides[2]).to(tl.int32)
        target = tl.load(targets + n * strides[3]).to(tl.int64)
        count += step + 1
        wanted = (step >= 0) & (target >= 0)
    return row, slot, target, base, count, wanted & (row > 0) & (slot >= 0)
