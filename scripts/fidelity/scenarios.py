"""What the study runs: decay regimes as value heads, everything else as batch rows, all drawn on the device.

Every draw happens in place in buffers made once, without a host sync, so that a step can be captured as a CUDA graph
(hence no Python scalars in `torch.where`: they may be copied to the device).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product

import torch

from sglang_replayssm.kernels.recurrence import norm, softplus


@dataclass(frozen=True)
class Regime:
    """Decay of one value head: g = -rate softplus(bias + spread n), n standard normal, anew for every token.

    Attributes:
        bar: largest overall error, as a multiple of the fp32 recurrence's (design: 1.0, and 1.5 in fast decay).
    """

    name: str
    rate: float
    bias: float
    spread: float
    bar: float = 1.0


ONE = math.log(math.expm1(1.0))  # softplus(ONE) = 1

# "tail": the same decay from a far negative softplus argument, where log(1 + e^x), unlike log1p, loses most digits.
REGIMES = (
    Regime("none", 1e-6, ONE, 0.0),
    Regime("none, tail", 1.0, -13.8, 0.25),
    Regime("slow", 1e-4, ONE, 0.5),
    Regime("slow, tail", 1.0, -9.0, 0.5),
    Regime("medium", 1e-2, ONE, 0.5),
    Regime("mixed", 1.0, -4.0, 3.0),
    Regime("fast", 1.0, ONE, 0.5, bar=1.5),
    Regime("very fast", 10.0, ONE, 0.5, bar=1.5),
)

KEYS = ("random", "alike in a window", "alike everywhere")
BETAS = ("any", "near 1")
VALUES = ("normal", "spikes")
ACCEPTANCE = ("uniform", "bursts")

NOISE = 0.02  # of keys that are alike, relative: a few bf16 ulps
DRIFT = 0.02  # a step, of the direction of keys that are alike everywhere
SPIKE, SPIKE_RATE = 100.0, 1 / 32  # v scaled as a whole would change nothing: the recurrence is linear in v
STUMBLE, RECOVER = 0.08, 0.5  # probability a step that a burst of full acceptance ends, and that the next one begins


@dataclass(frozen=True)
class Scenario:
    """What one batch row is fed with; the fields take the names above."""

    keys: str
    beta: str
    values: str
    acceptance: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def scenarios(count: int) -> list[Scenario]:
    """`count` of the 24 combinations, in an order in which the first few already differ in everything."""
    every = [Scenario(*choice) for choice in product(KEYS, BETAS, VALUES, ACCEPTANCE)]
    return [every[7 * i % len(every)] for i in range(min(count, len(every)))]


class Inputs:
    """One step's inputs of B scenarios and HV regimes (value heads), redrawn in place by `draw`.

    Attributes:
        q, k: [B T, H, K], raw; v: [B T, HV, V]; a, b: [B T, HV]; all of the activation dtype.
        A_log, dt_bias: fp32 [HV].
        accepted: int64 [B], 1..T, tokens of the window that are kept.
    """

    def __init__(
        self,
        rows: list[Scenario],
        regimes: list[Regime],
        T: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.rows, self.regimes, self.T, self.head_dim, self.device = rows, regimes, T, head_dim, device
        batch, heads = len(rows), len(regimes)
        self.k_heads = heads // 2 if heads % 2 == 0 else heads

        def like(*shape: int) -> torch.Tensor:
            return torch.zeros(batch * T, *shape, dtype=dtype, device=device)

        self.q, self.k = like(self.k_heads, head_dim), like(self.k_heads, head_dim)
        self.v, self.a, self.b = like(heads, head_dim), like(heads), like(heads)
        self.accepted = torch.ones(batch, dtype=torch.int64, device=device)
        self.A_log = torch.tensor([math.log(r.rate) for r in regimes], device=device)
        self.dt_bias = torch.tensor([r.bias for r in regimes], device=device)
        self._spread = torch.tensor([r.spread for r in regimes], device=device)

        def which(attribute: str, value: str, trailing: int) -> torch.Tensor:
            mask = torch.tensor([getattr(row, attribute) == value for row in rows], device=device)
            return mask.view(batch, *[1] * trailing)

        self._alike = ~which("keys", KEYS[0], 3)
        self._lasting = which("keys", KEYS[2], 3)
        self._beta_shift = 8.0 * which("beta", BETAS[1], 2)
        self._spikes = which("values", VALUES[1], 3)
        self._bursts = which("acceptance", ACCEPTANCE[1], 0)
        self._all = torch.full_like(self.accepted, T)
        self._direction = torch.randn(batch, 1, self.k_heads, head_dim, device=device)  # of keys alike everywhere
        self._in_burst = torch.ones(batch, dtype=torch.bool, device=device)

    @property
    def batch(self) -> int:
        return len(self.rows)

    def tokens(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v, a, b as [B, T, ...] of `dtype`."""
        return [x.view(self.batch, self.T, *x.shape[1:]).to(dtype) for x in (self.q, self.k, self.v, self.a, self.b)]

    def by_value_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, K] -> [B, T, HV, K], the key heads of the value heads."""
        group = len(self.regimes) // self.k_heads
        return x[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, device=self.device)

    def draw(self) -> None:
        """New tokens and a new acceptance. Rejected drafts are never seen again, as when a model draws others."""
        T, heads, dim = self.T, len(self.regimes), self.head_dim
        self._direction.mul_(math.sqrt(1 - DRIFT**2)).add_(self._normal(1, self.k_heads, dim), alpha=DRIFT)
        common = torch.where(self._lasting, self._direction, self._normal(1, self.k_heads, dim))
        own = self._normal(T, self.k_heads, dim)
        keys = torch.where(self._alike, common + NOISE * own, own)
        spikes = self._spikes & (torch.rand(self.batch, T, heads, 1, device=self.device) < SPIKE_RATE)
        values = self._normal(T, heads, dim) * (1 + (SPIKE - 1) * spikes)
        # Queries near the keys too: outputs that read what was just written.
        queries = self._normal(T, self.k_heads, dim) + keys
        b = self._normal(T, heads) + self._beta_shift
        a = self._normal(T, heads) * self._spread
        for buffer, new in ((self.q, queries), (self.k, 2 * keys), (self.v, values), (self.a, a), (self.b, b)):
            buffer.copy_(new.flatten(0, 1))
        self._draw_accepted()

    def _draw_accepted(self) -> None:
        change, pick = torch.rand(2, self.batch, device=self.device)
        self._in_burst.copy_(torch.where(self._in_burst, change >= STUMBLE, change < RECOVER))
        uniform = (pick * self.T).long() + 1
        short = (pick * (self.T - 1)).long() + 1
        bursts = torch.where(self._in_burst, self._all, short)
        self.accepted.copy_(torch.where(self._bursts, bursts, uniform).clamp(1, self.T))


def largest_inverse_entry(inputs: Inputs) -> torch.Tensor:
    """Largest magnitude in (I + A)^-1 of the current windows, in fp64: [B, HV]. Proved to be at most 1."""
    _, k, _, a, b = inputs.tokens(torch.float64)
    k = inputs.by_value_head(k / norm(k)).transpose(1, 2)  # [B, HV, T, K]
    g = -torch.exp(inputs.A_log.double()) * softplus(a + inputs.dt_bias.double())
    total = g.cumsum(1).transpose(1, 2)  # [B, HV, T]
    # Clamped: the upper triangle, which tril drops, must not overflow.
    decay = torch.exp((total[..., :, None] - total[..., None, :]).clamp(max=0))
    A = (torch.sigmoid(b).transpose(1, 2)[..., None] * decay * (k @ k.mT)).tril(-1)
    identity = torch.eye(inputs.T, dtype=A.dtype, device=A.device)
    inverse = torch.linalg.solve_triangular(A + identity, identity.expand_as(A), upper=False, unitriangular=True)
    return inverse.abs().amax((-1, -2))
