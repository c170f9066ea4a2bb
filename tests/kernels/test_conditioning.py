"""The window's triangular system is well conditioned, whatever the keys: docs/numerics.md has the proof."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def windows(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit keys [T, K] from independent to identical or opposite, beta [T] in 0..1, log-decays [T] <= 0, in fp64."""
    T, K = draw(st.integers(1, 32)), draw(st.sampled_from([1, 2, 8, 64]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    spread = draw(st.sampled_from([0.0, 1e-6, 1e-2, 1.0]))
    signs = normal(T, 1).sign() if draw(st.booleans()) else 1.0
    keys = signs * (normal(1, K) + spread * normal(T, K))
    beta = torch.rand(T, generator=random, dtype=torch.float64) ** draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    decay = -draw(st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 80.0])) * torch.rand(T, generator=random, dtype=torch.float64)
    return keys / keys.norm(dim=-1, keepdim=True), beta, decay


def system(keys: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """I + A, A_ts = beta_t e^{Γ_t - Γ_s} (k_t . k_s) for s < t."""
    total = log_decay.cumsum(0)
    weight = torch.exp((total[:, None] - total[None, :]).tril(-1))  # of differences: a product could overflow
    return torch.eye(len(beta), dtype=beta.dtype) + (beta[:, None] * weight * (keys @ keys.T)).tril(-1)


def forward_substitution(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    solution = torch.zeros_like(right)
    for t in range(len(right)):
        solution[t] = right[t] - matrix[t, :t] @ solution[:t]
    return solution


@settings(max_examples=200, deadline=None)
@given(windows())
def test_entries_of_the_inverse_are_at_most_one(window) -> None:
    matrix = system(*window)
    identity = torch.eye(len(matrix), dtype=torch.float64)
    assert forward_substitution(matrix, identity).abs().max() <= 1 + 1e-12


@settings(max_examples=100, deadline=None)
@given(windows())
def test_forward_substitution_in_fp32_loses_no_digits(window) -> None:
    matrix = system(*window)
    identity = torch.eye(len(matrix), dtype=torch.float64)
    error = forward_substitution(matrix.float(), identity.float()).double() - forward_substitution(matrix, identity)
    assert error.abs().max() <= 2.0**-24 * len(matrix) ** 2


def test_the_power_series_cancels_where_substitution_does_not() -> None:
    """Identical keys, beta 1, no decay, 32 tokens: the inverse is bidiagonal, but its series has terms near 2^28."""
    T = 32
    matrix = system(torch.ones(T, 1).double(), torch.ones(T).double(), torch.zeros(T).double())
    inverse = forward_substitution(matrix, torch.eye(T).double())
    assert torch.equal(inverse, torch.eye(T).double() - torch.ones(T - 1).double().diag(-1))
    term, series, largest = torch.eye(T), torch.eye(T), 0.0
    for _ in range(T - 1):
        term = -(matrix.float() - torch.eye(T)) @ term
        largest = max(largest, float(term.abs().max()))
        series = series + term
    assert inverse.abs().max() == 1 and largest > 2.0**26
    assert (forward_substitution(matrix.float(), torch.eye(T)) - inverse).abs().max() == 0
    assert (series - inverse).abs().max() > 0.1
