"""A covering array: rows of settings in which every pair of settings of two features comes at least once. Paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row) -> set[Pair]:
    """Every two (feature, setting) of a row, features in the order of their names."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def all_pairs(features: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> set[Pair]:
    """The pairs that some possible row has."""
    return {pair for row in _rows(features) if possible(row) for pair in pairs_of(row)}


def covering(features: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[dict[str, Any]]:
    """Rows that together have every possible pair, few of them: each row is the one with most pairs that are left, the
    first of equals in the order of the settings. Within a small factor of the least there can be."""
    rows = [row for row in _rows(features) if possible(row)]
    left = {pair for row in rows for pair in pairs_of(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs_of(row) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def _rows(features: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(features, settings, strict=True)) for settings in product(*features.values())]
