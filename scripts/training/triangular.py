"""The inverse of unit lower triangular matrices, in a few batched products.

Halves of a block are inverted first, then the corner below them: exact forward substitution by blocks, which stays as
accurate as substitution row by row (a power series does not: entries of the powers grow like binomials).
"""

from __future__ import annotations

import torch


def unit_lower_inverse(below: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 of strictly lower triangular matrices L [..., C, C]; C is a power of 2. Differentiable.

    What stands on and above the diagonal of `below` is ignored.
    """
    return _Inverse.apply(below)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, below):
        size = below.shape[-1]
        inverse = torch.eye(size, dtype=below.dtype, device=below.device).expand_as(below).clone()
        half = 1
        while half < size:
            for_corner = _corners(below, half)
            first, second = _diagonal(inverse, half)
            _corners(inverse, half).copy_(-(second @ for_corner @ first))
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradient @ transposed).tril(-1)


def _blocks(matrix: torch.Tensor, half: int) -> torch.Tensor:
    """The blocks of 2 `half` rows and columns along the diagonal, as a view [..., blocks, 2, half, 2, half]."""
    count = matrix.shape[-1] // (2 * half)
    tiles = matrix.unflatten(-1, (count, 2, half)).unflatten(-4, (count, 2, half))
    return tiles.diagonal(dim1=-6, dim2=-3).movedim(-1, -5)


def _corners(matrix: torch.Tensor, half: int) -> torch.Tensor:
    """[..., blocks, half, half]: the lower left quarter of each diagonal block."""
    return _blocks(matrix, half)[..., 1, :, 0, :]


def _diagonal(matrix: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper left and the lower right quarters."""
    blocks = _blocks(matrix, half)
    return blocks[..., 0, :, 0, :], blocks[..., 1, :, 1, :]
