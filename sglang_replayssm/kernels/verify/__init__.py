"""Verify: the outputs of a window of draft tokens, from the checkpoint and the ring."""

from .triton import verify

__all__ = ["verify"]
