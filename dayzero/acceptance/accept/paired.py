"""Two runs over the same items: did what changed change the results, beyond chance? Paper.

McNemar's exact test (Q. McNemar, Psychometrika 12, 1947; the exact form is the binomial test on the discordant pairs)
for items that are right or wrong; a bootstrap over pairs (B. Efron, Annals of Statistics 7, 1979; percentile interval)
for items with a number; Holm's step-down method (S. Holm, Scandinavian Journal of Statistics 6, 1979) where several
tests are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, lgamma, log

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
MOST_AT_ONCE = 1 << 22  # numbers drawn at once: 32 MiB


@dataclass(frozen=True)
class McNemar:
    """mended: wrong in A, right in B. broken: right in A, wrong in B. p: two-sided, of so uneven a split by chance."""

    num_items: int
    right_a: int
    right_b: int
    mended: int
    broken: int
    p: float


@dataclass(frozen=True)
class Bootstrap:
    """Means of A and B over the items, and the mean difference B - A with its 95 % interval; None with one item."""

    num_items: int
    mean_a: float
    mean_b: float
    difference: float
    low: float | None
    high: float | None


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> McNemar:
    """Exact, two-sided; a and b by item, in one order."""
    assert len(a) == len(b)
    mended = sum(y and not x for x, y in zip(a, b, strict=True))
    broken = sum(x and not y for x, y in zip(a, b, strict=True))
    return McNemar(len(a), sum(a), sum(b), mended, broken, binomial_p(mended, broken))


def binomial_p(one: int, other: int) -> float:
    """Two-sided p of a split at least as uneven as ``one`` to ``other`` among fair coin throws; 1 for none at all."""
    return min(1.0, 2 * tail(min(one, other), one + other, 0.5, above=False))


def tail(count: int, total: int, chance: float, above: bool) -> float:
    """Chance that of ``total`` draws ``count`` or more (above), or ``count`` or fewer, are of a kind that has
    ``chance``: a tail of the binomial distribution, its terms by logarithms of factorials."""
    if not 0 < chance < 1:
        sure = total if chance >= 1 else 0
        return float(sure >= count if above else sure <= count)
    logs = [
        lgamma(total + 1) - lgamma(k + 1) - lgamma(total - k + 1) + k * log(chance) + (total - k) * log(1 - chance)
        for k in (range(count, total + 1) if above else range(count + 1))
    ]
    return min(1.0, fsum(exp(value) for value in logs))


def bootstrap(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Bootstrap:
    """Interval of the mean difference over RESAMPLES draws of the pairs, with replacement; a and b by item."""
    assert len(a) == len(b) and len(a) > 0
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    gaps = second - first
    low = high = None
    if len(gaps) > 1:
        draw = np.random.default_rng(seed)
        at_once = max(1, MOST_AT_ONCE // len(gaps))
        means = []
        for start in range(0, RESAMPLES, at_once):
            count = min(at_once, RESAMPLES - start)
            means.append(gaps[draw.integers(len(gaps), size=(count, len(gaps)))].mean(axis=1))
        out = 100 * (1 - LEVEL) / 2
        low, high = (float(value) for value in np.percentile(np.concatenate(means), [out, 100 - out]))
    return Bootstrap(len(gaps), float(first.mean()), float(second.mean()), float(gaps.mean()), low, high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p of each, in the order given."""
    out = [1.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        out[at] = largest
    return out
