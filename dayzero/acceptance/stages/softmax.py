"""What a sampler must make of the softmax that a server states, and how likely draws are under it.

Log-probabilities are of the model's own distribution, at temperature 1. What a temperature T makes of it is known among
the stated tokens, p_i^(1/T) over its sum, so they are counted given that one of them came. Of the others it is known
that none is likelier than the last one stated, p_n. So for T below 1 their p_j^(1/T) add up to no more than what they
have in all times p_n^(1/T - 1), and for T above 1 to no less: a bound on how often a stated token comes. At temperature
1 it is known exactly. Where the server cuts by top_k, the likeliest k alone are left to T, and nothing is unknown: so
temperatures are tried with it where it was seen to hold, in as many draws as would find a sampler that leaves T out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import ceil, exp, sqrt
from typing import Any

import numpy as np

from dayzero.acceptance.stages.answers import Api

OTHER = "(other)"
DRAWS = 20_000  # of the multinomial distribution, for the chance of a statistic
LEAST_EXPECTED = 1.0  # of one kind; rarer ones are counted together
CLEAR = 1.01  # one chance over the next at least, where rounding cannot exchange them (see ``clear_of``)
LEAST_SHARE = 1e-9


@dataclass(frozen=True)
class Told:
    """What the server says of the first token behind a prompt: key -> probability at temperature 1. hidden: those of
    stated tokens that cannot be told from others by their text. whole: all of the likeliest are stated; completions
    state them by their text, where those of one text leave one entry."""

    api: Api
    prompt: str
    chances: Mapping[Any, float]
    hidden: tuple[float, ...] = ()
    whole: bool = True

    @property
    def listed(self) -> list[tuple[Hashable, float]]:
        """All stated tokens, likeliest first; the hidden ones are OTHER."""
        return sorted([*self.chances.items(), *((OTHER, p) for p in self.hidden)], key=lambda pair: -pair[1])

    @property
    def inside(self) -> float:
        return sum(self.chances.values())

    @property
    def kinds(self) -> float:
        """How many tokens it is as if one were drawn from: exp of the entropy of what is stated."""
        p = np.array(list(self.chances.values()))
        p = p[p > 0] / p.sum()
        return float(np.exp(-(p * np.log(p)).sum()))


def chance_of(counts: Mapping[Hashable, int], chances: Mapping[Hashable, float], seed: int) -> float:
    """How likely a sound sampler is to be as far from ``chances`` as ``counts``, by Pearson's statistic: a share of
    DRAWS from the multinomial distribution, so that it is true of small numbers too. 0 when something was drawn that
    cannot be."""
    total = sum(counts.values())
    if not total or any(key not in chances for key in counts):
        return 0.0 if total else 1.0
    keys = sorted(chances, key=lambda key: -chances[key])
    p = np.array([chances[key] for key in keys])
    seen = np.array([counts.get(key, 0) for key in keys])
    p = p / p.sum()
    large = max(1, int((p * total >= LEAST_EXPECTED).sum()))
    if large < len(p):
        p, seen = np.append(p[:large], p[large:].sum()), np.append(seen[:large], seen[large:].sum())
    if (seen[p == 0] > 0).any():
        return 0.0
    seen, p = seen[p > 0], p[p > 0]
    drawn = np.random.default_rng(seed).multinomial(total, p, size=DRAWS)
    far = ((drawn - total * p) ** 2 / (total * p)).sum(axis=1)
    own = ((seen - total * p) ** 2 / (total * p)).sum()
    return float((1 + (far >= own - 1e-9).sum()) / (DRAWS + 1))


def tempered(chances: Mapping[Hashable, float], temperature: float) -> dict[Hashable, float]:
    """Of the stated tokens alone, what a temperature makes of them."""
    powers = {key: p ** (1 / temperature) for key, p in chances.items()}
    total = sum(powers.values())
    return {key: p / total for key, p in powers.items()}


def inside(told: Told, temperature: float) -> float:
    """Bound on the chance that a stated token comes: the least one below temperature 1, the most above."""
    powers = sum(p ** (1 / temperature) for p in told.chances.values())
    hidden = sum(p ** (1 / temperature) for p in told.hidden)
    least = min((*told.chances.values(), *told.hidden))
    rest = max(0.0, 1 - told.inside - sum(told.hidden)) * least ** (1 / temperature - 1)
    return powers / (powers + hidden + rest)


def clear_of(rounding: float) -> float:
    """By how much one stated chance must be over the next for rounding not to exchange them. rounding: how far two
    log-probabilities that are the same may lie apart, in nat (``ties.bound_of``)."""
    return max(CLEAR, exp(rounding))


def nucleus(chances: Mapping[Hashable, float], clear: float = CLEAR) -> tuple[float, dict[Hashable, float]] | None:
    """A top_p whose set is well inside what is stated and does not hang on rounding, and that set with its chances.
    None: behind no set there is a clear step, so that another token may stand in for its last."""
    keys = sorted(chances, key=lambda key: -chances[key])
    sums = np.cumsum([chances[key] for key in keys])
    # the cut falls in the middle of a token: the one that crosses top_p is the last that stays
    inner = range(1, max(2, len(keys) // 2))
    steps = [n for n in inner if n + 1 < len(keys) and chances[keys[n]] > clear * chances[keys[n + 1]]]
    if not steps:
        return None
    size = 1 + max(steps, key=lambda n: chances[keys[n]])
    top_p = float((sums[size - 2] + sums[size - 1]) / 2)
    kept = {key: chances[key] / float(sums[size - 1]) for key in keys[:size]}
    return top_p, kept


def likeliest(told: Told, count: int, temperature: float) -> dict[Hashable, float]:
    """What a temperature makes of the ``count`` likeliest tokens alone, as ``top_k`` leaves them. Those that cannot be
    told from others by their text are one kind, OTHER."""
    powers: dict[Hashable, float] = {}
    for key, chance in told.listed[:count]:
        powers[key] = powers.get(key, 0.0) + chance ** (1 / temperature)
    total = sum(powers.values())
    return {key: power / total for key, power in powers.items()}


def clear_cuts(told: Told, clear: float = CLEAR) -> list[int]:
    """How many of the likeliest tokens there are before each clear step from one stated chance to the next: which ones
    ``top_k`` of that number leaves does not hang on rounding. Empty: there is no such step, or not all are stated."""
    p = [chance for _, chance in told.listed] if told.whole else []
    return [n for n in range(2, len(p)) if p[n - 1] > clear * p[n]]


def clear_cut(told: Told, clear: float = CLEAR) -> int:
    """The last of ``clear_cuts``; 0 where there is none."""
    return max(clear_cuts(told, clear), default=0)


def draws_for(right: Mapping[Hashable, float], wrong: Mapping[Hashable, float]) -> int:
    """Draws of which a sampler of ``wrong`` is found nearly always where ``right`` is due: the sum of their
    log(wrong / right) has other means under the two, which are to lie three and a half deviations of the one and two
    and a half of the other apart (a chance of 1 in 1000 by ``ratio_chance``, halved, and one miss in 150)."""
    r, w = _shares(right, wrong)
    each = np.log(w / r)
    means = [float((p * each).sum()) for p in (r, w)]
    spreads = [sqrt(float((p * (each - mean) ** 2).sum())) for p, mean in zip((r, w), means, strict=True)]
    return ceil(((3.5 * spreads[0] + 2.5 * spreads[1]) / max(means[1] - means[0], 1e-9)) ** 2)


def ratio_chance(
    counts: Mapping[Hashable, int], right: Mapping[Hashable, float], wrong: Mapping[Hashable, float], seed: int
) -> float:
    """How likely a sound sampler of ``right`` is to look as much like one of ``wrong`` as ``counts`` do: the ratio of
    their likelihoods, which of all tests of one against the other is the most powerful (Neyman and Pearson, 1933), by
    DRAWS from the multinomial distribution."""
    total = sum(counts.get(key, 0) for key in right)
    r, w = _shares(right, wrong)
    each = np.log(w / r)
    own = float(sum(counts.get(key, 0) * value for key, value in zip(right, each, strict=True)))
    drawn = np.random.default_rng(seed).multinomial(total, r, size=DRAWS) @ each
    return float((1 + (drawn >= own - 1e-9).sum()) / (DRAWS + 1))


def _shares(right: Mapping[Hashable, float], wrong: Mapping[Hashable, float]) -> tuple[np.ndarray, np.ndarray]:
    """Of the kinds of ``right``, both with a least share, so that their ratio is a number."""
    both = [np.maximum([one.get(key, 0.0) for key in right], LEAST_SHARE) for one in (right, wrong)]
    r, w = (p / p.sum() for p in both)
    return r, w
