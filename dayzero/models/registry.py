"""Which recipe covers a config: by traits, never by model_type alone.

``find`` answers with a recipe or with the nearest known family and how the config differs from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dayzero.errors import UsageError
from dayzero.extensions import IMPORT_ERRORS, MODELS, ask_point, load_point, points_of, said_of
from dayzero.models.nearness import Nearness, nearness, patterns_of
from dayzero.models.reading import read_through
from dayzero.models.recipe import Oracle, Recipe, Traits

BUILT_IN = ("llama", "qwen3", "deepseek_v3", "deepseek_v32", "glm5", "kimi_linear", "kimi_k3", "gpt_oss", "qwen3_5")


@dataclass(frozen=True, slots=True)
class Match:
    """recipe: the one that covers the config, None when none does. nearest: then, the most similar known family.

    why: one sentence on how the decision came about. given: the caller named the recipe.
    """

    recipe: Recipe | None
    nearest: Nearness | None
    why: str
    given: bool = False


def load_recipe(where: str) -> Recipe:
    """A recipe from a ``.py`` file path or a module name. Raises UsageError when it is no recipe."""
    if where.endswith(".py"):
        return _from_module(_module_from_path(where), where)
    try:
        module = importlib.import_module(where)
    except IMPORT_ERRORS as error:
        raise UsageError(
            f"recipe {where} is no .py file, and as a module it does not import: {type(error).__name__}: {error}."
        ) from error
    return _from_module(module, where)


def _module_from_path(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"recipe {where} is no file; give the path of a .py file with ARCHITECTURES, spec and RULES.")
    name = f"dayzero_recipe_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    made = importlib.util.spec_from_file_location(name, path)
    if made is None or made.loader is None:
        raise UsageError(f"recipe {where} cannot be imported as a Python file.")
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module
    try:
        made.loader.exec_module(module)
    except (*IMPORT_ERRORS, SystemExit) as error:  # a script that ends the process must not end it as passed
        del sys.modules[name]
        raise UsageError(f"recipe {where} does not import: {type(error).__name__}: {error}.") from error
    return module


def _from_module(module: ModuleType, origin: str) -> Recipe:
    missing = [n for n in ("ARCHITECTURES", "spec") if not hasattr(module, n)]
    if not hasattr(module, "RULES") and not hasattr(module, "rules"):
        missing.append("RULES")
    if missing:
        raise UsageError(f"recipe {origin} has no {', '.join(missing)}; see docs/new-model.md for what a recipe holds.")
    _check_kinds(module, origin)
    rules = getattr(module, "rules", None) or (lambda spec: module.RULES)
    return Recipe(
        name=getattr(module, "NAME", Path(origin).stem if origin.endswith(".py") else origin.rsplit(".", 1)[-1]),
        origin=origin,
        architectures=tuple(module.ARCHITECTURES),
        traits=getattr(module, "TRAITS", None) or Traits(),
        make_spec=module.spec,
        make_rules=lambda spec: tuple(rules(spec)),
        oracle=getattr(module, "ORACLE", None),
        twin=getattr(module, "TWIN", {}),
        model_types=tuple(getattr(module, "MODEL_TYPES", ())),
        make_extra=getattr(module, "extra_rules", None),
    )


def _check_kinds(module: ModuleType, origin: str) -> None:
    for name in ("ARCHITECTURES", "MODEL_TYPES"):
        value = getattr(module, name, ())
        if isinstance(value, str) or not isinstance(value, (tuple, list)) or not all(isinstance(v, str) for v in value):
            raise UsageError(f"recipe {origin}: {name} must be a tuple of names, but is {value!r}.")
    for name, kind in (("TRAITS", Traits), ("ORACLE", Oracle)):
        value = getattr(module, name, None)
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"recipe {origin}: {name} must be of the kind {kind.__name__}, but is {value!r}.")
    twin = getattr(module, "TWIN", {})
    if not isinstance(twin, Mapping) and not callable(twin):
        raise UsageError(f"recipe {origin}: TWIN must give sizes by config key, or be a function, but is {twin!r}.")


def recipes() -> list[Recipe]:
    """Built-in recipes, then those of installed packages (entry points ``dayzero.models``, each a recipe module).

    UsageError, naming the package, when one of theirs does not load or is no recipe.
    """
    places = [f"dayzero.models.{name}" for name in BUILT_IN]
    out = [_from_module(importlib.import_module(place), place) for place in places]
    for point in points_of(MODELS):
        module = load_point(point)
        if not isinstance(module, ModuleType):
            raise UsageError(f"{said_of(point)} names no module; a recipe is a module, so leave out what follows ':'.")
        out.append(ask_point(point, partial(_from_module, module, module.__name__)))
    return out


def find(config: Mapping[str, Any], recipe: str | None = None, names: Iterable[str] = ()) -> Match:
    """The recipe for a parsed config.json. recipe: a path or module that the caller names; it is taken as it is.

    names: of the files' tensors, where they are known; they help to say which family is nearest.
    """
    if recipe is not None:
        given = load_recipe(recipe)
        return Match(given, None, f"recipe given: {recipe}", given=True)
    known = recipes()
    declared = _architectures(config)
    fitting = [r for r in known if not trait_faults(r.traits, config)]
    named = [r for r in fitting if set(r.architectures) & declared]
    if named:
        best = max(named, key=lambda r: len(r.traits.needs) + len(r.traits.lacks))
        return Match(best, None, f"architecture {sorted(declared)[0]} with the traits of {best.name}")
    # A text_config on its own often names no architecture; then its model_type may, and the traits still count.
    typed = [r for r in fitting if config.get("model_type") in r.model_types] if not declared else []
    if typed:
        return Match(
            typed[0], None, f"no architectures; model_type {config['model_type']} with the traits of {typed[0].name}"
        )
    nearest = _nearest(known, config, names)
    alike = [r for r in known if set(r.architectures) & declared]
    if alike:
        faults = "; ".join(trait_faults(alike[0].traits, config))
        why = f"{sorted(declared)[0]} is {alike[0].name}'s name, but the traits differ: {faults}"
    else:
        said = ", ".join(sorted(declared))
        why = f"no recipe knows {said}" if said else "the config names no architectures that a recipe knows"
    part = f" for its {nearest.reading.part}" if nearest.reading.part else ""
    return Match(None, nearest, f"{why}; the nearest known family{part} is {nearest.name}, {nearest.said()}")


def _nearest(known: Iterable[Recipe], config: Mapping[str, Any], names: Iterable[str]) -> Nearness:
    """The family that accounts for most keys and tensor names; where equal, the one whose traits fit best."""
    patterns = patterns_of(names)

    def rank(near: Nearness) -> tuple[float, int, int]:
        traits = near.reading.recipe.traits
        needs = sum(present(config, key) for key in traits.needs)
        return round(near.score, 9), -len(trait_faults(traits, config)), needs

    all_near = [nearness(read_through(recipe, config), config, patterns) for recipe in known]
    best = max(all_near, key=rank)
    best.as_near = [near.name for near in all_near if near is not best and rank(near)[0] == rank(best)[0]]
    return best


def _architectures(config: Mapping[str, Any]) -> set[str]:
    out: set[str] = set()
    for part in (config, config.get("text_config") or {}):
        names = part.get("architectures") if isinstance(part, Mapping) else None
        if isinstance(names, list):
            out |= {n for n in names if isinstance(n, str)}
        if out:
            break  # the outer name is what the publisher released; the inner one may be a look-alike's
    return out


def _at(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def present(config: Mapping[str, Any], key: str) -> bool:
    """Whether ``key`` is there with a value that means something, at the root or in text_config."""
    return any(_at(part, key) not in (None, False) for part in (config, config.get("text_config") or {}))


def trait_faults(traits: Traits, config: Mapping[str, Any]) -> list[str]:
    """What speaks against a family: needed keys that are absent, keys it must lack that are there."""
    out = [f"has no {key}" for key in traits.needs if not present(config, key)]
    return out + [f"has {key}" for key in traits.lacks if present(config, key)]
