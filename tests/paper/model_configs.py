"""Real configs, rebuilt from published facts, and what their recipes make of them. Imports no torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.quant_config import QuantTable, find_quant_config, resolve
from dayzero.checkpoint.rules import Expansion, RuleLike, expand
from dayzero.models.recipe import Recipe, with_extra
from dayzero.models.registry import find

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Opened:
    """A config seen through the recipe that ``find`` chose for it."""

    config: dict[str, Any]
    recipe: Recipe
    raw: Raw
    spec: ModelSpec
    rules: tuple[RuleLike, ...]
    expansion: Expansion

    @property
    def quant(self) -> QuantTable | None:
        claim = find_quant_config(self.config)
        return resolve(claim[1], claim[0]) if claim else None


def config_of(name: str) -> dict[str, Any]:
    """A copy that a test may change."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def opened(config: dict[str, Any]) -> Opened:
    match = find(config)
    assert match.recipe is not None, match.why
    raw = Raw(config)
    spec = match.recipe.make_spec(raw)
    rules = match.recipe.make_rules(spec)
    return Opened(config, match.recipe, raw, spec, rules, with_extra(expand(spec.params(), rules), match.recipe, spec))


@lru_cache(maxsize=2)
def real(name: str) -> Opened:
    """Read only."""
    return opened(config_of(name))


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A real config after ``change`` was called with its text part."""
    config = copy.deepcopy(config_of(name))
    change(config.get("text_config", config))
    return config
