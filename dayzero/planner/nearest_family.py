"""What a model without a recipe has in common with the nearest known family, and what not: keys, tensors, layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dayzero.checkpoint.likeness import unpacked
from dayzero.checkpoint.rules import Expansion
from dayzero.models.nearness import Nearness, expansion_of
from dayzero.models.reading import Reading
from dayzero.planner.layer_text import map_text, numbers_text
from dayzero.planner.reading_facts import refusal_lines

MAX_PATTERNS = 200


@dataclass
class Nearest:
    """name and why; the differences. expansion: what the family would store, None when its reading does not tell.

    unsure: tensor patterns whose shape depends on a guess.
    """

    name: str
    why: str
    reading: Reading
    absent: list[str] = field(default_factory=list)
    expansion: Expansion | None = None
    unsure: set[str] = field(default_factory=set)
    tensors: dict[str, Any] = field(default_factory=lambda: {"only_here": [], "only_there": []})
    layer_kinds: list[dict[str, Any]] = field(default_factory=list)
    layer_map: str | None = None

    @property
    def unread(self) -> list[str]:
        return self.reading.unread

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.name,
            "why": self.why,
            "config": {"only_here": self.unread, "absent_or_refused": self.absent},
            "tensors": self.tensors,
            "layer_kinds": self.layer_kinds,
            "layer_map": self.layer_map,
        }


def compare(near: Nearness, why: str, names: Iterable[str], layers: list[dict[str, Any]]) -> Nearest:
    """The nearest family's reading of a config as a list of differences. names: tensors of the files.

    layers: the reading's, in words.
    """
    reading = near.reading
    out = Nearest(near.name, why, reading, refusal_lines(reading), layer_map=map_text(layers) if layers else None)
    held = list(names)
    if held and near.tensors is not None:
        found = near.tensors
        out.tensors = {"only_here": found.only_here[:MAX_PATTERNS], "only_there": found.only_there[:MAX_PATTERNS]}
        out.layer_kinds = _layer_kinds(held, set(found.only_here))
        out.expansion, out.unsure = _stored(reading)
    return out


def _stored(reading: Reading) -> tuple[Expansion | None, set[str]]:
    """(what the family would store, patterns of unsure shape); (None, none) where the names hang on a guess."""
    first = expansion_of(reading.spec, reading, whole=True) if reading.spec is not None else None
    if first is None or reading.vague:
        return None, set()
    unsure = set()
    for other in reading.others:
        second = expansion_of(other, reading, whole=True)
        if second is None or [g.name for g in first.groups] != [g.name for g in second.groups]:
            return None, set()
        pairs = zip(first.groups, second.groups, strict=True)
        unsure |= {a.name for a, b in pairs if (a.shape, a.count) != (b.shape, b.count)}
    return first, {unpacked(name.replace("{e}", "0")) for name in unsure}


_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|block)\.(\d+)\.")


def _layer_kinds(names: Iterable[str], unknown: set[str]) -> list[dict[str, Any]]:
    """Layers with the same set of patterns, and which of these the nearest family lacks."""
    per_layer: dict[tuple[str, int], set[str]] = {}
    for name in names:
        hit = _LAYER.search(name)
        if hit:
            per_layer.setdefault((name[: hit.start(1)], int(hit[1])), set()).add(unpacked(name))
    kinds: dict[tuple[str, frozenset[str]], list[int]] = {}
    for (root, number), patterns in per_layer.items():
        kinds.setdefault((root, frozenset(patterns)), []).append(number)
    return [
        {
            "root": root,
            "layers": numbers_text(numbers),
            "count": len(numbers),
            "unknown_tensors": sorted(patterns & unknown),
        }
        for (root, patterns), numbers in kinds.items()
    ]
