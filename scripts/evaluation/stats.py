"""Intervals and paired tests. Repeats of one question are not independent: the question is what is resampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Accuracy of B minus that of A on the same questions.

    Attributes:
        only_a, only_b: answers that only A, only B has right.
        p_value: of the hypothesis that both are equally accurate.
        test: how the p-value was computed.
    """

    difference: Estimate
    only_a: int
    only_b: int
    p_value: float
    test: str


def accuracy(outcomes: dict[str, list[bool]]) -> Estimate:
    """Mean over questions of the share of right answers.

    Args:
        outcomes: for each question, whether each of its repeats is right. One repeat each: Wilson's interval, which
            holds for few questions and at 0 and 1; several: bootstrap over questions.
    """
    shares = np.array([np.mean(repeats) for repeats in outcomes.values()])
    if all(len(repeats) == 1 for repeats in outcomes.values()):
        interval = stats.binomtest(int(shares.sum()), len(shares)).proportion_ci(CONFIDENCE, method="wilson")
        return Estimate(float(shares.mean()), float(interval.low), float(interval.high))
    return _bootstrap(shares)


def paired(a: dict[str, list[bool]], b: dict[str, list[bool]]) -> Paired:
    """Compare two runs over the same questions and repeats.

    One repeat each: exact McNemar test (binomial test of the answers that differ). Several: sign-flip permutation
    test of the questions' differences.

    Raises:
        ValueError: the runs do not hold the same questions and repeats.
    """
    if {key: len(value) for key, value in a.items()} != {key: len(value) for key, value in b.items()}:
        raise ValueError("a paired test needs the same questions and repeats on both sides")
    pairs = [pair for question in a for pair in zip(a[question], b[question], strict=True)]
    only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
    differences = np.array([np.mean(b[question]) - np.mean(a[question]) for question in a])
    if len(pairs) == len(a):
        test = "exact McNemar"
        p_value = stats.binomtest(only_b, only_a + only_b).pvalue if only_a + only_b else 1.0
    else:
        test = "sign-flip permutation over questions"
        p_value = _sign_flip(differences)
    return Paired(_bootstrap(differences), only_a, only_b, float(p_value), test)


def _bootstrap(values: np.ndarray) -> Estimate:
    rng = np.random.default_rng(0)
    means = np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def _sign_flip(differences: np.ndarray) -> float:
    """Two-sided p-value; scipy enumerates all flips where they are few."""
    if not differences.any():
        return 1.0
    result = stats.permutation_test(
        (differences,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
        vectorized=True,
    )
    return float(result.pvalue)
