"""The Hopper kernel's layouts and arithmetic, emulated lane by lane on a CPU (the kernel itself needs the device).

That conversions between layouts move no data is asserted by the kernel's own compilation (`assert_trivial`). Here: that
the fragments are those of the PTX ISA, that both operands rename K alike, that shared memory is read without conflicts,
and that the sums of bf16 parts lose nothing.
"""

from itertools import product

import pytest
import torch

from sglang_replayssm.kernels.recurrence import norm, recurrence
from sglang_replayssm.kernels.verify import hopper


def elements(layout, lane: int, warp: int = 0) -> list[tuple[int, int]]:
    """(row, column) of each register of a lane, register by register."""

    def combine(bases, bits: int) -> tuple[int, int]:
        row = column = 0
        for i, (r, c) in enumerate(bases):
            if bits >> i & 1:
                row, column = row ^ r, column ^ c
        return row, column

    fixed = [combine(layout.lane_bases, lane), combine(layout.warp_bases, warp)]
    registers = (combine(layout.reg_bases, r) for r in range(2 ** len(layout.reg_bases)))
    return [(r ^ fixed[0][0] ^ fixed[1][0], c ^ fixed[0][1] ^ fixed[1][1]) for r, c in registers]


def renamed() -> dict[int, int]:
    """Column in memory -> column in fragment order, by the kernel's own function."""
    order = hopper._fragment_order.fn(torch.arange(128)[None])[0]
    assert torch.equal(hopper._memory_order.fn(order[None])[0], torch.arange(128))
    return {int(memory): fragment for fragment, memory in enumerate(order)}


def operand_columns(c: int) -> set[int]:
    """Columns of K that lane (g, c) holds of an m16n8k16 operand row, over the 8 MMAs of K = 128."""
    return {16 * mma + offset + 2 * c + p for mma in range(8) for offset in (0, 8) for p in (0, 1)}


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("lane", range(32))
def test_state_registers_are_operand_and_accumulator_fragments(lane: int, warps: int) -> None:
    column, (g, c) = renamed(), divmod(lane, 4)
    for warp in range(warps):
        held = {(row, column[k]) for row, k in elements(hopper._state_layout(warps), lane, warp)}
        rows = {16 * warp + g, 16 * warp + g + 8}
        columns = {k for k in operand_columns(c) if k < hopper.CHUNK.value}
        assert held == set(product(rows, columns))  # A operand of m16n8k16
        assert held == set(product(rows, {8 * n + 2 * c + p for n in range(4) for p in (0, 1)}))  # accumulator


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("lane", range(32))
def test_key_registers_are_operand_fragments(lane: int, rows: int) -> None:
    """Of both operands: rows are tokens, and K is renamed as in S."""
    column, (g, c) = renamed(), divmod(lane, 4)
    held = {(row, column[k]) for row, k in elements(hopper._keys_layout(rows, 1, 1), lane)}
    assert held == set(product(range(g, rows, 8), operand_columns(c)))


def test_state_reads_have_no_bank_conflict() -> None:
    """Each quarter of a warp reads 8 x 16 bytes from 8 different groups of banks."""
    layout = hopper._state_layout(1)
    for first_lane, register in product(range(0, 32, 8), range(0, 16, 4)):
        banks = set()
        for lane in range(first_lane, first_lane + 8):
            row, column = elements(layout, lane)[register]
            assert [c for _, c in elements(layout, lane)[register : register + 4]] == list(range(column, column + 4))
            banks.add((column % 32 // 4) ^ (row % 8))  # 128-byte swizzle of the line that a row of 32 columns fills
        assert len(banks) == 8


@pytest.mark.parametrize(("block_v", "warps"), [(16, 1), (32, 1), (64, 1), (32, 2), (64, 2), (128, 4), (64, 4)])
def test_rows_of_the_solve_stay_in_their_warp(block_v: int, warps: int) -> None:
    layout = hopper._rows_layout(block_v, 8, warps)
    seen = set()
    for warp, lane in product(range(warps), range(32)):
        mine = {row for row, _ in elements(layout, lane, warp)}
        assert all(row // 16 % warps == warp for row in mine)
        seen |= mine
    assert seen == set(range(block_v))


def split(x: torch.Tensor) -> list[torch.Tensor]:
    """The kernel's three bf16 parts of fp32."""
    parts = []
    for _ in range(3):
        part = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(part)
        x = x - part
    return parts


def test_three_parts_are_everything() -> None:
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    parts = split(x)
    assert torch.equal(sum(p.double() for p in parts), x.double())
    assert all(torch.equal(p.bfloat16().float(), p) for p in parts)


@pytest.mark.parametrize("T", range(1, 9))
def test_recurrence_on_projections(T: int) -> None:
    """`_solve`, transcribed for T tokens in P padded columns, equals the recurrence on the state."""
    P, K, V = hopper._padded_tokens(T), 128, 16
    random = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(T, n, generator=random, dtype=torch.float64) for n in (K, K, V))
    a, b = torch.randn(2, T, generator=random, dtype=torch.float64)
    A_log, bias = torch.zeros(1, dtype=torch.float64), torch.full((1,), -2.0, dtype=torch.float64)
    state = torch.randn(V, K, generator=random, dtype=torch.float64)
    inputs = (x[None, :, None] for x in (q, k, v, a, b))
    expected = recurrence(*inputs, A_log, bias, state[None, None])

    padded = [min(t, T - 1) for t in range(P)]
    x = torch.cat([k[padded], q[padded]])
    norms = 1 / norm(x)[:, 0]
    norms[P:] *= K**-0.5
    total = torch.cumsum(expected.log_decay[0, :, 0][padded], 0)
    scales = total.exp().repeat(2) * norms
    strengths = torch.sigmoid(b)[padded] * norms[:P]
    scores = (x[:P] @ x.T) * (total.repeat(2)[None] - total[:, None]).exp() * norms[None]
    u = (state @ x.T).T
    deltas = []
    for t in range(T):
        missing = v[t] - u[t] * scales[t] - sum(deltas[s] * scores[s, t] for s in range(t))
        deltas.append(missing * strengths[t])
        output = u[P + t] * scales[P + t] + sum(deltas[s] * scores[s, P + t] for s in range(t + 1))
        torch.testing.assert_close(output, expected.out[0, t, 0])
        torch.testing.assert_close(deltas[t] * norm(k[t]), expected.deltas[0, t, 0])
