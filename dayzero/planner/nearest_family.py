"""What a model without a recipe has in common with the nearest known family, and what not: keys, tensors, layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.arch.traits import KIND_TRAITS, is_layer_list, rows_of
from dayzero.checkpoint.likeness import unpacked
from dayzero.checkpoint.rules import Expansion
from dayzero.models.nearness import Nearness, expansion_of
from dayzero.models.reading import Reading
from dayzero.planner.layer_text import map_text, numbers_text
from dayzero.planner.operators import value_at
from dayzero.planner.reading_facts import refusal_lines, refused_kinds

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

    @property
    def foreign_kinds(self) -> list[str]:
        """Kinds of layers by name that no operator is known for, in words."""
        told = [kind for kind in self.layer_kinds if kind["kind"] and not rows_of(kind["kind"], KIND_TRAITS)]
        return [f"{kind['kind']!r} of {kind['key']} (layers {kind['layers']})" for kind in told]


def compare(
    near: Nearness, why: str, config: Mapping[str, Any], names: Iterable[str], layers: list[dict[str, Any]]
) -> Nearest:
    """The nearest family's reading of ``config`` as a list of differences. names: tensors of the files.

    layers: the reading's, in words.
    """
    reading = near.reading
    out = Nearest(near.name, why, reading, refusal_lines(reading), layer_map=map_text(layers) if layers else None)
    out.layer_kinds = list(_stated_kinds(reading, config))
    held = list(names)
    if held and near.tensors is not None:
        found = near.tensors
        out.tensors = {"only_here": found.only_here[:MAX_PATTERNS], "only_there": found.only_there[:MAX_PATTERNS]}
        out.layer_kinds += _layer_kinds(held, set(found.only_here))
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


def _stated_kinds(reading: Reading, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Layers of each kind that the config names and the family does not: in lists it does not read, or refuses."""
    lists = {key: dict(enumerate(value_at(config, key)[0] or ())) for key in _layer_lists(reading, config)}
    for key, kinds in (refused_kinds(reading) | lists).items():
        layers: dict[str, list[int]] = {}
        for i, kind in kinds.items():
            layers.setdefault(kind, []).append(i)
        for kind, numbers in layers.items():
            yield _kind_row(numbers, key=key, kind=kind)


def _layer_lists(reading: Reading, config: Mapping[str, Any]) -> list[str]:
    """Keys of lists with a kind for each layer that nothing reads."""
    return [key for key in reading.unread if is_layer_list(key, value_at(config, key)[0])]


def _kind_row(
    layers: list[int], *, root: str = "", unknown: Iterable[str] = (), key: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    return {
        "key": key, "kind": kind, "root": root, "layers": numbers_text(layers), "count": len(layers),
        "unknown_tensors": sorted(unknown),
    }  # fmt: skip


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
    return [_kind_row(numbers, root=root, unknown=patterns & unknown) for (root, patterns), numbers in kinds.items()]
