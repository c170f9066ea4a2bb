"""Verify: the outputs of a window of draft tokens, from the checkpoint and the ring.

Three kernels with one contract (see `triton.py`): `recurrent.py` for policies that record no rank-1 factors, and for
the others `hopper.py` for what Hopper GPUs serve most, `triton.py` for the rest. Which one runs is decided here and
nowhere else.
"""

from __future__ import annotations

import functools

import torch

from ..ring import Cursors, Ring, RingSpec
from . import recurrent
from . import triton as portable

__all__ = ["kernel_name", "verify"]

PORTABLE, HOPPER, RECURRENT = "portable Triton", "Hopper Gluon", "recurrent Triton"


@functools.cache
def kernel_name(spec: RingSpec, draft_tokens: int, device: torch.device) -> str:
    """The kernel that serves this ring and draft length on this device: PORTABLE, HOPPER or RECURRENT."""
    if spec.policy.factors is None:
        return RECURRENT
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability[0] == 9:
            from . import hopper

            if hopper.supports(spec, draft_tokens, capability):
                return HOPPER
    return PORTABLE


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring: Ring,
    cursors: Cursors,
    draft_tokens: int,
    out: torch.Tensor | None = None,
    out_fp32: torch.Tensor | None = None,
    overlap_previous: bool = False,
) -> torch.Tensor:
    """Outputs of B windows of draft tokens by the best kernel for them; arguments and errors are those of `triton.py`.

    Args:
        overlap_previous: let the kernel start before the previous one of the stream has ended (where it can). Legal
            only if that kernel writes neither this layer's checkpoint and ring nor the plan; it may write q, k, v, a
            and b.
    """
    arguments = (q, k, v, a, b, A_log, dt_bias, state, ring, cursors, draft_tokens, out, out_fp32)
    name = kernel_name(ring.spec, draft_tokens, q.device)
    if name == HOPPER:
        from . import hopper

        return hopper.verify_hopper(*arguments, overlap_previous=overlap_previous)
    return (recurrent if name == RECURRENT else portable).verify(*arguments)
