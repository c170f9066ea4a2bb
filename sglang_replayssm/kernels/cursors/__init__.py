"""Where each request row stands in its ring, and the three ways it moves."""

from .triton import commit, plan_window, reset

__all__ = ["commit", "plan_window", "reset"]
