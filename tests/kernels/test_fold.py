"""Fold against its plain version in fp64, at the edges of the ring and of the decays."""

from dataclasses import replace

import pytest
import torch

from sglang_replayssm.kernels import Cursors, Ring, RingSpec, fold
from sglang_replayssm.kernels.fold import naive

ROW, SLOT = 2, 3


def make(dtype: torch.dtype, device: str, layers: int = 2, **sizes) -> tuple[torch.Tensor, Ring, Cursors]:
    """A state of 5 slots, a random ring whose log-decay is -0.1 a token, and cursors."""
    torch.manual_seed(0)
    shape = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 32, "head_v_dim": 64, "window": 10} | sizes
    spec = RingSpec(layers=layers, rows=3, max_draft_tokens=4, activation_dtype=dtype, **shape)
    ring = Ring.allocate(spec, device)
    ring.d.normal_()
    ring.k.normal_()
    set_log_decay(ring, 0, -0.1)
    state = torch.randn(layers, 5, spec.num_v_heads, spec.head_v_dim, spec.head_k_dim, device=device)
    return state, ring, Cursors.allocate(spec, device)


def set_log_decay(ring: Ring, base: int, per_token: float, before: float = 0.0) -> None:
    """Accumulated log-decays of records base, base + 1, ... as high and low parts.

    `before`: extra log-decay of the first token."""
    records = ring.spec.records
    total = before + per_token * torch.arange(1, records + 1, dtype=torch.float64, device=ring.g.device)
    at = (base + torch.arange(records)) % records
    ring.g[..., at, 0] = total.float()
    ring.g[..., at, 1] = (total - total.float()).float()


def check(state: torch.Tensor, ring: Ring, cursors: Cursors, rows: torch.Tensor, slots: torch.Tensor) -> None:
    expected, plain = state.double(), replace(cursors, position=cursors.position.clone())
    naive.fold(expected, ring, plain, rows, slots, dtype=torch.float64)
    fold(state, ring, cursors, rows, slots)
    assert ((state.double() - expected).norm() / expected.norm()).item() < 3e-7
    assert torch.equal(cursors.position, plain.position)


def indices(*values: int, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("base", "count"), [(0, 0), (0, 1), (9, 10), (13, 10), (5, 7)])
def test_ring_phases(dtype: torch.dtype, base: int, count: int, device: str) -> None:
    state, ring, cursors = make(dtype, device)
    set_log_decay(ring, base, -0.1)
    cursors.position[ROW] = indices(base, count, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


@pytest.mark.parametrize(
    ("per_token", "before"), [(0.0, 0.0), (-1e-6, 0.0), (-8.0, 0.0), (-80.0, 0.0), (-0.0123, -60.0)]
)
def test_decays(per_token: float, before: float, device: str) -> None:
    """From none to one that underflows: exp(G_i) * exp(-G_j) would be 0 * inf. After a fast token, the differences of
    the slow ones are in the low parts."""
    state, ring, cursors = make(torch.bfloat16, device)
    set_log_decay(ring, 12, per_token, before)
    cursors.position[ROW] = indices(12, 10, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


def test_zero_keys_only_decay_the_checkpoint(device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device)
    ring.k.zero_()
    cursors.position[ROW] = indices(0, 10, device=device)
    before = state.clone()
    fold(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))
    torch.testing.assert_close(state[:, SLOT], before[:, SLOT] * torch.tensor(-1.0).exp().to(device))


def test_only_live_rows_and_records_count(device: str) -> None:
    """Row 0, slot -1, empty rows and NaN in dead records; what is not folded stays bit for bit."""
    state, ring, cursors = make(torch.bfloat16, device, layers=1)
    dead = (4 + torch.arange(3, ring.spec.records)) % ring.spec.records
    set_log_decay(ring, 4, -0.5)
    for tensor in (ring.d, ring.k, ring.g):
        tensor[:, :, :, dead] = float("nan")
    cursors.position[:] = indices(4, 3, device=device)
    cursors.position[1, 1] = 0
    before = state.clone()
    rows, slots = indices(0, 1, 3, ROW, device=device), indices(0, 1, -1, SLOT, device=device, dtype=torch.int32)
    check(state, ring, cursors, rows, slots)
    others = [0, 1, 2, 4]
    assert torch.equal(state[:, others], before[:, others]) and not torch.equal(state[:, SLOT], before[:, SLOT])
    assert cursors.position.tolist() == [[4, 3], [4, 0], [7, 0], [4, 3]]


@pytest.mark.parametrize(
    "sizes",
    [{"head_k_dim": 256, "head_v_dim": 16}, {"head_k_dim": 16, "window": 40}, {"num_k_heads": 2, "num_v_heads": 4}],
    ids=str,
)
def test_shapes(sizes: dict, device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device, layers=1, **sizes)
    cursors.position[ROW] = indices(0, ring.spec.window, device=device)
    check(state, ring, cursors, indices(ROW, device=device), indices(SLOT, device=device))


def test_errors(device: str) -> None:
    state, ring, cursors = make(torch.bfloat16, device)
    rows = indices(1, 2, device=device)
    with pytest.raises(ValueError, match="fp32 state"):
        fold(state[0], ring, cursors, rows, rows)
    with pytest.raises(ValueError, match="packed"):
        fold(state.transpose(3, 4).contiguous().transpose(3, 4), ring, cursors, rows, rows)
    with pytest.raises(ValueError, match="all layers"):
        fold(state, ring.layer(0), cursors, rows, rows)
    with pytest.raises(ValueError, match="one length"):
        fold(state, ring, cursors, rows, rows[:1])


@pytest.mark.gpu
def test_trap_12_indices_past_2_31(device: str) -> None:
    """Slots and ring rows beyond 2^31 elements."""
    big = 2**31 // (256 * 256) + 2
    spec = RingSpec(1, 2, 1, 1, 256, 256, 8, 4, torch.bfloat16)
    state = torch.zeros(1, big + 1, 1, 256, 256, device=device)
    ring, cursors = Ring.allocate(spec, device), Cursors.allocate(spec, device)
    ring.d.normal_()
    ring.k.normal_()
    cursors.position[1, 1] = 8
    small = torch.zeros(1, 1, 1, 256, 256, device=device)
    naive.fold(
        small,
        ring,
        replace(cursors, position=cursors.position.clone()),
        indices(1, device=device),
        indices(0, device=device),
    )
    fold(state, ring, cursors, indices(1, device=device), indices(big, device=device))
    torch.testing.assert_close(state[:, big], small[:, 0], rtol=1e-5, atol=1e-5)
    assert not state[:, :big].any()
