"""Fold: add the ring's history to the checkpoint, S_c <- S_n; or write S_n, or a state ahead of it, elsewhere."""

from .triton import fold, fold_due, materialize

__all__ = ["fold", "fold_due", "materialize"]
