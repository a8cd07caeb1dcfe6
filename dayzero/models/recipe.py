"""What a recipe is: one file of data over specs. Built-in, given by path, or from another package: all the same.

A recipe module has ``ARCHITECTURES`` (names from config.json), ``TRAITS`` (keys that tell it from look-alikes),
``spec(raw) -> ModelSpec`` and ``RULES`` (or ``rules(spec)``). Optional: ``ORACLE`` (where the publisher's modules
are in transformers), ``TWIN`` (sizes for a small twin, by config key, or a function that gives them for a config),
``MODEL_TYPES`` (for configs without architectures, such as a bare text_config), ``extra_rules(spec)`` (rules of the
layers in ``spec.extra``, and rules of copies among their tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.sound import unsound
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.rules import Expansion, RuleLike, expand
from dayzero.errors import ConfigError, ModelError, UserError
from dayzero.extensions import IMPORT_ERRORS

# What a recipe can come to when a config is not its own: wrong kinds, sizes that do not divide, lists too short.
RECIPE_ERRORS = IMPORT_ERRORS


@dataclass(frozen=True, slots=True)
class Traits:
    """Dotted config keys by which a family is told from its look-alikes.

    needs: keys that are present and not null or false. lacks: keys that are absent, null or false.
    """

    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Oracle:
    """Where the publisher's modules are in an independent library, so that outputs can be compared one by one.

    class_name: the model class in transformers. layer, mixer, channel: module paths with ``{i}``; embed, final_norm,
    head likewise. router: module whose output holds expert ids, index: module that returns selected positions.
    Both None where the family has none. file: a plain forward instead of a library: a name under
    dayzero/oracles, or the absolute path of one that another package ships.
    class_of: architecture -> class, where one recipe covers several. mixer_of_kind: other paths by ``mixer.kind``.
    images: the plain forward of ``file`` takes images too.
    """

    class_name: str = ""
    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{i}"
    mixer: str = "model.layers.{i}.self_attn"
    channel: str = "model.layers.{i}.mlp"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    router: str | None = None
    index: str | None = None
    mixer_of_kind: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    class_of: Mapping[str, str] = field(default_factory=dict)
    images: bool = False

    def class_for(self, architectures: Iterable[str]) -> str:
        """The model class for a config that names ``architectures``."""
        return next((self.class_of[name] for name in architectures if name in self.class_of), self.class_name)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe module, checked. origin: module name or file path; it is what travels to worker processes."""

    name: str
    origin: str
    architectures: tuple[str, ...]
    traits: Traits
    make_spec: Callable[[Raw], ModelSpec]
    make_rules: Callable[[ModelSpec], tuple[RuleLike, ...]]
    oracle: Oracle | None
    twin: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]
    model_types: tuple[str, ...] = ()
    make_extra: Callable[[ModelSpec], tuple[tuple[RuleLike, ...], tuple[RuleLike, ...]]] | None = None


def read_spec(recipe: Recipe, raw: Raw) -> ModelSpec:
    """The recipe's reading of a config. ConfigError when the recipe stops, or its numbers do not go together."""
    try:
        spec = recipe.make_spec(raw)
        if not isinstance(spec, ModelSpec):
            raise ConfigError(f"spec() of the recipe {recipe.name} gives a {type(spec).__name__}, not a ModelSpec.")
        faults = unsound(spec)
    except UserError:
        raise
    except (*RECIPE_ERRORS, SystemExit) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"config.json does not fit the recipe {recipe.name}: {reason}.") from error
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(f"config.json describes no model that can run: {'; '.join(faults[:3])}{more}.")
    return spec


def read_rules(recipe: Recipe, spec: ModelSpec) -> tuple[tuple[RuleLike, ...], Expansion]:
    """The recipe's rules, and what they ask of a checkpoint. ModelError when the recipe stops or a rule is none."""
    try:
        rules = recipe.make_rules(spec)
        return rules, with_extra(expand(spec.params(), rules), recipe, spec)
    except UserError:
        raise
    except (*RECIPE_ERRORS, SystemExit) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelError(f"the rules of the recipe {recipe.name} do not work out: {reason}; mend RULES.") from error


def with_extra(expansion: Expansion, recipe: Recipe, spec: ModelSpec) -> Expansion:
    """``expansion`` with what the layers beside the plain forward ask for; parameters of theirs that no rule fills, and
    the like, are faults of the whole."""
    if spec.extra is None:
        return expansion
    rules, of_copies = recipe.make_extra(spec) if recipe.make_extra is not None else ((), ())
    extra, copies = expand(spec.extra.params(), rules), expand(spec.extra.copies(), of_copies)
    return replace(
        expansion,
        extra=extra,
        copies=copies,
        without_rule=[*expansion.without_rule, *extra.without_rule],
        filled_twice=[*expansion.filled_twice, *extra.filled_twice, *copies.filled_twice],
        used_twice=[*expansion.used_twice, *extra.used_twice, *copies.used_twice],
    )
