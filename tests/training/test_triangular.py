"""The inverse against substitution, values and gradients."""

from __future__ import annotations

import pytest
import torch
from training.triangular import unit_lower_inverse


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_values(size):
    below = torch.randn(3, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / size**0.5
    expected = torch.linalg.inv(below.tril(-1) + torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(unit_lower_inverse(below), expected, rtol=1e-9, atol=1e-10)


def test_gradients():
    below = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(unit_lower_inverse, below)


def test_fp32_where_powers_explode():
    """All ones below the diagonal: the inverse has 1 and -1 only, the powers of L reach 10^17."""
    inverse = unit_lower_inverse(torch.ones(64, 64))
    assert torch.equal(inverse, torch.eye(64) - torch.diag(torch.ones(63), -1))
