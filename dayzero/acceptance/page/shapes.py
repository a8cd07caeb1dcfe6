"""What a figure's data must look like, and what a drawer gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from dayzero.finding import VERDICTS


class Undrawable(ValueError):
    """A figure's data are not what its kind says. The sentence stands on the page in the picture's place."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as it came, with its labels cleaned."""

    kind: str
    title: str
    data: Mapping[str, Any]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    identity: str = "figure"


@dataclass(frozen=True, slots=True)
class Drawn:
    """height: of the picture. parts: its elements. says: what it shows, in a sentence. keys: (picture of a mark,
    what it means). columns, rows: the same data as a table. left_out: what was not drawn, in a sentence."""

    height: float
    parts: list[Markup]
    says: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    keys: list[tuple[Markup, str]] = field(default_factory=list)
    left_out: str = ""


def listed(data: Mapping[str, Any], key: str) -> list[Any]:
    """The list at ``key``; Undrawable when it is none."""
    found = data.get(key)
    if not isinstance(found, list | tuple):
        raise Undrawable(f"its data have no list “{key}”")
    return list(found)


def mapped(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object at ``key``; empty when it is absent."""
    found = data.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise Undrawable(f"“{key}” of its data is no object")
    return {str(name): value for name, value in found.items()}


def row_objects(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects of ``rows``."""
    found = listed(data, "rows")
    if not all(isinstance(row, Mapping) for row in found):
        raise Undrawable("“rows” of its data holds something that is no object")
    return found


def verdict_of(row: Mapping[str, Any]) -> str:
    """A row's verdict; empty when it has none that we know."""
    found = row.get("verdict")
    return found if found in VERDICTS else ""


def counted_verdicts(verdicts: Iterable[str]) -> str:
    """``3 fail, 1 note`` of several; ``all pass`` where nothing else is there."""
    seen = list(verdicts)
    parts = [f"{seen.count(word)} {word}" for word in ("fail", "note") if word in seen]
    return ", ".join(parts) or "none fails"
