"""Fold: add the ring's history to the checkpoint, S_c <- S_n."""

from .triton import fold, fold_due

__all__ = ["fold", "fold_due"]
