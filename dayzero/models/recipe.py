"""What a recipe is: one file of data over specs. Built-in, given by path, or from another package: all the same.

A recipe module has ``ARCHITECTURES`` (names from config.json), ``TRAITS`` (keys that tell it from look-alikes),
``spec(raw) -> ModelSpec`` and ``RULES`` (or ``rules(spec)``). Optional: ``ORACLE`` (where the publisher's modules
are in transformers), ``TWIN`` (sizes for a small twin, by config key), ``DRAFT`` notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.rules import RuleLike


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
    Both None where the family has none. file: a plain forward shipped under dayzero/oracles instead of a library.
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
    twin: Mapping[str, Any]
