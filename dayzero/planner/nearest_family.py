"""What a model without a recipe has in common with the nearest known family, and what not: keys, tensors, layers."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.arch.raw import Ledger, Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.likeness import unpacked
from dayzero.checkpoint.rules import Expansion, expand
from dayzero.errors import ConfigError
from dayzero.models.recipe import RECIPE_ERRORS, Recipe
from dayzero.planner.layer_text import layer_json, map_text, numbers_text

MAX_PATTERNS = 200


class Probe(Raw):
    """A config that answers a recipe's every question: what is absent or refused gets a stand-in and is remembered."""

    def __init__(
        self, data: Mapping[builtins.str, Any], *, path: builtins.str = "", ledger: Ledger | None = None
    ) -> None:
        super().__init__(data, path=path, ledger=ledger)
        self.faults: builtins.list[builtins.str] = []

    def _or(self, ask: Callable[[], Any], stand_in: Any) -> Any:
        try:
            return ask()
        except ConfigError as error:
            self.faults.append(builtins.str(error))
            return stand_in

    def int(self, *names: builtins.str, **options: Any) -> builtins.int:
        return self._or(lambda: Raw.int(self, *names, **options), 2)

    def float(self, *names: builtins.str, **options: Any) -> builtins.float:
        return self._or(lambda: Raw.float(self, *names, **options), 1.0)

    def bool(self, *names: builtins.str, **options: Any) -> builtins.bool:
        return self._or(lambda: Raw.bool(self, *names, **options), False)

    def str(self, *names: builtins.str, **options: Any) -> builtins.str:
        return self._or(lambda: Raw.str(self, *names, **options), "")

    def list(self, *names: builtins.str, **options: Any) -> builtins.list[Any]:
        return self._or(lambda: Raw.list(self, *names, **options), [])

    def ints(self, *names: builtins.str, **options: Any) -> tuple[builtins.int, ...]:
        return self._or(lambda: Raw.ints(self, *names, **options), ())

    def one_of(self, *names: builtins.str, allowed: Iterable[Any], **options: Any) -> Any:
        choices = builtins.list(allowed)
        return self._or(lambda: Raw.one_of(self, *names, allowed=choices, **options), choices[0])

    def sub(self, name: builtins.str) -> Raw:
        if name not in self._opened:
            value = self.peek(name)
            if not isinstance(value, Mapping):
                self.faults.append(f"config.json has no object {self.full(name)}, which this family needs.")
                value = {}
            self.ledger.read.add(self.full(name))
            child = Probe(value, path=self.full(name), ledger=self.ledger)
            child.faults = self.faults
            self._opened[name] = child
        return self._opened[name]


@dataclass
class Nearest:
    """name and why; the differences. spec, expansion: the family's reading of this config, None when it cannot."""

    name: str
    why: str
    unread: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    spec: ModelSpec | None = None
    expansion: Expansion | None = None
    tensors: dict[str, list[str]] = field(default_factory=lambda: {"only_here": [], "only_there": []})
    layer_kinds: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.name,
            "why": self.why,
            "config": {"only_here": self.unread, "absent_or_refused": self.absent},
            "tensors": self.tensors,
            "layer_kinds": self.layer_kinds,
            "layer_map": map_text(layer_json(self.spec)) if self.spec is not None else None,
        }


def compare(recipe: Recipe, why: str, config: Mapping[str, Any], names: Iterable[str]) -> Nearest:
    """Read ``config`` as the nearest family would, and list where it does not fit. names: tensors of the files."""
    out = Nearest(recipe.name, why)
    probe = Probe(config, ledger=out.ledger)
    try:
        spec = recipe.make_spec(probe)
        rules = recipe.make_rules(spec)
        out.expansion, out.spec = expand(spec.params(), rules), spec
    except RECIPE_ERRORS as error:
        out.absent.append(f"the recipe stops there: {error}")
    out.absent = list(dict.fromkeys(probe.faults)) + out.absent
    out.unread = probe.unread()
    held = list(names)
    if held:
        patterns = [unpacked(name) for name in held]
        here = dict.fromkeys(patterns)
        there = (
            dict.fromkeys(unpacked(g.name.replace("{e}", "0")) for g in out.expansion.groups) if out.expansion else {}
        )
        out.tensors["only_here"] = [p for p in here if p not in there][:MAX_PATTERNS]
        out.tensors["only_there"] = [p for p in there if p not in here][:MAX_PATTERNS]
        out.layer_kinds = _layer_kinds(zip(held, patterns, strict=True), set(there))
    return out


_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|block)\.(\d+)\.")


def _layer_kinds(names: Iterable[tuple[str, str]], known: set[str]) -> list[dict[str, Any]]:
    """Layers with the same set of patterns, and which of these the nearest family lacks."""
    per_layer: dict[tuple[str, int], set[str]] = {}
    for name, pattern in names:
        hit = _LAYER.search(name)
        if hit:
            per_layer.setdefault((name[: hit.start(1)], int(hit[1])), set()).add(pattern)
    kinds: dict[tuple[str, frozenset[str]], list[int]] = {}
    for (root, number), patterns in per_layer.items():
        kinds.setdefault((root, frozenset(patterns)), []).append(number)
    return [
        {
            "root": root,
            "layers": numbers_text(numbers),
            "count": len(numbers),
            "unknown_tensors": sorted(patterns - known),
        }
        for (root, patterns), numbers in kinds.items()
    ]
