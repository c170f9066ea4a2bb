"""The ring of recent tokens that replaces per-draft copies of the recurrent state, and the kernels that work on it.

One step of the host is `plan_window` once, `convolve` and `verify` once a layer, and after sampling `commit_conv`,
`commit` and `fold_due` once.
`reset` empties the ring of a row given to a new request; `fold` brings checkpoints up to date before anything else
reads them; `materialize` writes the state at a token inside the window into another slot. What a token leaves in the
ring, and so which kernel verifies and folds, is up to the fold policy (`sglang_replayssm.policies`).

Every kernel lives in a folder: `naive.py`, plain PyTorch to be read and tested against, and `triton.py`, the portable
kernel; `verify` has two more, `hopper.py` and `recurrent.py`, and chooses. This package knows nothing of SGLang.
"""

from .conv import commit_conv, convolve
from .cursors import commit, plan_window, reset
from .fold import fold, fold_due, materialize
from .ring import Cursors, Ring, RingSpec
from .verify import kernel_name, verify

__all__ = [
    "Cursors",
    "Ring",
    "RingSpec",
    "commit",
    "commit_conv",
    "convolve",
    "fold",
    "fold_due",
    "kernel_name",
    "materialize",
    "plan_window",
    "reset",
    "verify",
]
