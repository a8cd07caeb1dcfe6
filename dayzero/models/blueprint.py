"""What a config alone tells through its recipe: spec, the tensors a complete checkpoint holds, and their formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.claims import unstorable
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.header import TensorEntry
from dayzero.checkpoint.quant_claim import read_quantization
from dayzero.checkpoint.quant_config import QuantTable
from dayzero.checkpoint.rules import Expansion
from dayzero.checkpoint.source import Source
from dayzero.decl import FORMATS, Format
from dayzero.errors import ConfigError, ModelError, UserError
from dayzero.models.recipe import Recipe, read_rules, read_spec
from dayzero.models.registry import find

PLAIN = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "auto": "bf16"}


@dataclass(frozen=True)
class Blueprint:
    """config and its ledger (raw), spec, the tensors a checkpoint of it must hold, the claimed quantisation, the plain
    element type."""

    config: dict[str, Any]
    raw: Raw
    spec: ModelSpec
    expansion: Expansion
    quant: QuantTable
    plain: Format


def read_config(source: Source) -> dict[str, Any]:
    """config.json of a source as a dict; ConfigError in one sentence when it is not one."""
    return read_object(source, "config.json")[0]


def blueprint(
    config: dict[str, Any],
    recipe: Recipe,
    *,
    source: Source | None = None,
    entries: Mapping[str, TensorEntry] = MappingProxyType({}),
) -> Blueprint:
    """Spec, expected tensors and formats of ``config``. source, entries: where further claims on storage are seen.

    Errors: ConfigError for a value the family does not have and for keys nobody reads, ModelError when a parameter
    has no rule or two.
    """
    raw = Raw(config)
    spec = read_spec(recipe, raw)
    refuse(f"config.json has keys that the recipe {recipe.name} does not read", raw.unread(), ConfigError)
    expansion = read_rules(recipe, spec)[1]
    refuse(f"the recipe {recipe.name} has no rule for parameters", expansion.without_rule, ModelError)
    refuse(f"the recipe {recipe.name} has two rules for parameters", expansion.filled_twice, ModelError)
    refuse(f"the recipe {recipe.name} reads tensors twice", expansion.used_twice, ModelError)
    quant = read_quantization(source, config, entries)
    refuse("there are quantisation keys that nothing reads", quant.unread, ConfigError)
    dtype = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    plain = FORMATS[PLAIN.get(str(dtype), "bf16")]
    refuse("the claimed formats cannot hold these tensors", unstorable(expansion, quant, plain), ConfigError)
    return Blueprint(config, raw, spec, expansion, quant, plain)


def refuse(what: str, names: Iterable[str], error: type[UserError]) -> None:
    """Raise ``error`` when there are names: ``what``, the first five of them, and how many more."""
    listed = list(names)
    if listed:
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise error(f"{what}: {', '.join(listed[:5])}{more}; `dayzero inspect` shows all.")


def require_recipe(config: Mapping[str, Any], given: str | None = None) -> Recipe:
    """The recipe that covers ``config``; ModelError naming the nearest known family when none does."""
    match = find(config, given)
    if match.recipe is None:
        raise ModelError(f"{match.why}; write a recipe (docs/new-model.md) and pass it with --recipe.")
    return match.recipe
