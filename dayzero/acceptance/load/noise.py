"""Whether one set of repeats is really slower than another. Paper; plain arithmetic.

Times vary by factors, so logarithms are compared. The interval is Welch's: the difference of two means by their own two
spreads, with Student's t for the few repeats that there are (B. L. Welch, Biometrika 34, 1947). It needs no noise level
given from outside, and with noisy repeats it grows until it decides nothing, which is right.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

STEPS = 300
MOST_FREEDOM = 200.0  # from here on t is the normal distribution to three digits


def ratio_interval(now: Sequence[float], before: Sequence[float], doubt: float) -> tuple[float, float]:
    """(low, high) between which now / before lies; either end is passed with a probability of ``doubt``.

    All values above zero, two or more of each (else ValueError): one value has no spread.
    """
    if min(len(now), len(before)) < 2:
        raise ValueError("an interval needs two repeats on each side")
    a, b = [math.log(value) for value in now], [math.log(value) for value in before]
    parts = [statistics.variance(a) / len(a), statistics.variance(b) / len(b)]
    middle = statistics.fmean(a) - statistics.fmean(b)
    error = sum(parts)
    if error == 0:
        return math.exp(middle), math.exp(middle)
    freedom = min(error**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)), MOST_FREEDOM)
    half = t_quantile(1 - doubt, math.floor(10 * freedom) / 10) * math.sqrt(error)
    return math.exp(middle - half), math.exp(middle + half)


@cache
def t_quantile(share: float, freedom: float) -> float:
    """Student's t with ``share`` (0.5 to 1, both excluded) of its distribution below; freedom: degrees, 1 or more."""
    low, high = 0.0, math.pi / 2
    for _ in range(45):
        middle = (low + high) / 2
        if 0.5 + _mass(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _mass(angle: float, freedom: float) -> float:
    """Share of t between 0 and sqrt(freedom) tan(angle): with that angle the density is a power of a cosine, which
    Simpson's rule integrates well however heavy the tail."""
    norm = math.gamma((freedom + 1) / 2) / (math.gamma(freedom / 2) * math.sqrt(math.pi))
    width = angle / STEPS
    weights = (1 if i in (0, STEPS) else 4 if i % 2 else 2 for i in range(STEPS + 1))
    return norm * width / 3 * sum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights))
