"""The causal convolution in front of the recurrence, for windows of draft tokens that may be rolled back.

A request's conv state, its last W - 1 inputs, stays as it is until the commit. `convolve` keeps the window's raw inputs
instead of a conv state a draft; `commit_conv` makes the new state of the old one and the accepted inputs.
"""

from .triton import commit_conv, convolve

__all__ = ["commit_conv", "convolve"]
