"""The fold policies: what a token leaves behind in the ring, from which everything else follows.

A policy says which *rank-1 factors* and whether the *raw inputs* of a token are recorded. Verify, fold, buffers and
their bytes look at these two fields, never at a name:

* with rank-1 factors, verify projects checkpoint and ring on the window; without, it runs the recurrence and the ring
  can hold no history, so every commit folds;
* with raw inputs, a fold replays them token by token, right after the commit that fills the ring; without, the verify
  that finds the ring full adds the factors to the checkpoint in the same launch.

Imports neither torch nor Triton: the server's flags are made of this table before any kernel may be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FoldPolicy:
    """One fold policy.

    Attributes:
        name: value of `--gdn-replayssm-fold`.
        summary: one clause for the flag's help.
        factors: torch dtype name of the rank-1 factors d, or None if none are recorded. "bfloat16" also stores keys
            normalised, and rounds the checkpoint at folds, all to bf16.
        inputs: whether raw v and the gates (g, beta) are recorded beside the raw k, so that a fold can replay them.
    """

    name: str
    summary: str
    factors: str | None
    inputs: bool

    def __post_init__(self) -> None:
        if self.factors is None and not self.inputs:
            raise ValueError(f"fold policy {self.name!r} records nothing that a fold could use")


FP32 = FoldPolicy("fp32", "lazy fold of fp32 rank-1 records, all arithmetic accurate to fp32", "float32", inputs=False)
EXACT = FoldPolicy(
    "exact",
    "lazy fold by replay of the raw inputs, state bit-identical to SGLang's own recurrence",
    "float32",
    inputs=True,
)
EVERY_COMMIT = FoldPolicy(
    "every-commit",
    "SGLang's recurrence without state copies and a replay after every step, state and outputs bit-identical",
    None,
    inputs=True,
)
BF16 = FoldPolicy(
    "bf16", "lazy fold of bf16 records into a bf16-rounded state, drifts, for comparison only", "bfloat16", inputs=False
)

POLICIES = {policy.name: policy for policy in (FP32, EXACT, EVERY_COMMIT, BF16)}
