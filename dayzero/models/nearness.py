"""How near a known family is to a config that no recipe covers: the keys it accounts for, the tensor names it knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.arch.raw import BOOKKEEPING
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.likeness import find_roots, rooted, unpacked
from dayzero.checkpoint.rules import Expansion, expand, glob_match
from dayzero.decl import ParamDecl
from dayzero.errors import UserError
from dayzero.models.reading import PARTS, Reading
from dayzero.models.recipe import RECIPE_ERRORS, with_extra

# Keys that say nothing about the family: every config may have them.
NEUTRAL_KEYS = {*BOOKKEEPING, "quantization_config", "compression_config", "dtype", "torch_dtype"}


@dataclass
class TensorMatch:
    """Tensor patterns of files against a family's. only_here, only_there: patterns (digits folded) of one side alone.

    ignored: patterns the family leaves unused on purpose. roots: beginnings of its names -> of the files' names.
    """

    known: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    only_here: list[str] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        held = len(self.known) + len(self.ignored)
        count = held + len(self.only_here) + len(self.only_there)
        return held / count if count else 0.0


@dataclass
class Nearness:
    """score: share of keys, plus share of tensor patterns where files are known.

    num_read: of num_keys keys, those that are not unread; the keys of an object count one by one where some are unread.
    as_near: other families of this score.
    """

    reading: Reading
    keys: float
    num_read: int
    num_keys: int
    tensors: TensorMatch | None = None
    as_near: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.reading.recipe.name

    @property
    def score(self) -> float:
        return self.keys + (self.tensors.share if self.tensors is not None else 0.0)

    def said(self) -> str:
        """``which reads 41 of the config's 44 keys and knows 25 of the files' 26 kinds of tensors``."""
        out = f"which reads {self.num_read} of the config's {self.num_keys} keys"
        if self.tensors is not None:
            held = len(self.tensors.known) + len(self.tensors.ignored)
            out += f" and knows {held} of the files' {held + len(self.tensors.only_here)} kinds of tensors"
        return out + (f" (as near: {', '.join(self.as_near)})" if self.as_near else "")


def patterns_of(names: Iterable[str]) -> dict[str, str]:
    """Pattern of tensor names (digits folded, packing left out) -> the first name that has it."""
    out: dict[str, str] = {}
    for name in names:
        out.setdefault(unpacked(name), name)
    return out


def nearness(reading: Reading, config: Mapping[str, Any], patterns: Mapping[str, str]) -> Nearness:
    """patterns: of the files' tensors, by ``patterns_of``; empty when no files are known."""
    units = dict(_weighed(config))
    # What is wrong below an object makes the object half as good, however many keys it concerns.
    faulty = {_unit(r.key) for r in reading.refusals}
    unread = set(reading.unread)
    shares = {key: _share_read(key, value, unread) for key, value in units.items()}
    held = sum(share / 2 if key in faulty else share for key, share in shares.items())
    missing = {_unit(r.key) for r in reading.refusals if r.stated is None} - set(units)
    num_read = sum(_num_read(key, value, unread) for key, value in units.items())
    out = Nearness(reading, held / max(len(units) + len(missing), 1), num_read, num_read + len(unread))
    if patterns:
        out.tensors = match_tensors(reading, patterns)
    return out


def _unit(dotted: str) -> str:
    """The key at the level of a model's config that a dotted key belongs to."""
    first, *rest = dotted.split(".")
    return ".".join((first, *rest[:1])) if first in PARTS else first


def _weighed(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys at the level of a model's config, each counted once whatever stands below it."""
    for key, value in config.items():
        if value is None or key in NEUTRAL_KEYS or key.endswith("_token_id"):
            continue
        if key in PARTS and not prefix and isinstance(value, Mapping):
            yield from _weighed(value, f"{key}.")
        else:
            yield f"{prefix}{key}", value


def _share_read(path: str, value: Any, unread: set[str]) -> float:
    """Of a key and all below it."""
    if path in unread:
        return 0.0
    if not isinstance(value, Mapping) or not value:
        return 1.0
    return sum(_share_read(f"{path}.{key}", inner, unread) for key, inner in value.items()) / len(value)


def _num_read(path: str, value: Any, unread: set[str]) -> int:
    """How many keys a key stands for, itself or those below it, without the unread ones."""
    if path in unread:
        return 0
    if not any(key.startswith(f"{path}.") for key in unread):
        return 1
    return sum(_num_read(f"{path}.{key}", inner, unread) for key, inner in value.items())


def match_tensors(reading: Reading, patterns: Mapping[str, str]) -> TensorMatch:
    """The files' patterns against those that the reading's model would store."""
    expansion = expansion_of(reading.spec, reading, whole=False) if reading.spec is not None else None
    if expansion is None:
        return TensorMatch(only_here=list(patterns))
    choices = [[group.name for group in groups] for option in expansion.choices for groups in option]
    asked = [group.name for group in expansion.groups]
    there = {unpacked(name.replace("{e}", "0")) for name in [*asked, *(n for names in choices for n in names)]}
    out = TensorMatch(roots=find_roots(sorted(there), set(patterns)))
    back = {new: old for old, new in out.roots.items()}
    # Of each choice, the option that the files hold; the first where they hold none.
    chosen = expansion.choose(lambda group: rooted(unpacked(group.name.replace("{e}", "0")), out.roots) in patterns)
    wanted = {rooted(unpacked(g.name.replace("{e}", "0")), out.roots): None for g in chosen.groups}
    beside = (part for part in (expansion.extra, expansion.copies) if part is not None)
    extra = {unpacked(group.name.replace("{e}", "0")) for part in beside for group in part.groups}
    others = {alias.tensor for alias in expansion.aliases}
    for pattern, name in patterns.items():
        own = rooted(name, back)
        if pattern in wanted or unpacked(own) in extra:
            out.known.append(pattern)
        elif own in others or any(glob_match(rule.pattern, own) for rule in expansion.ignores):
            out.ignored.append(pattern)
        else:
            out.only_here.append(pattern)
    out.only_there = [pattern for pattern in wanted if pattern not in patterns]
    return out


def expansion_of(spec: ModelSpec, reading: Reading, *, whole: bool) -> Expansion | None:
    """What a complete checkpoint of ``spec`` holds, by the reading's recipe; None where its rules do not work out.

    whole False: of layers that are alike one stands for all, which has the same patterns and is fast.
    """
    try:
        decls = spec.params() if whole else list(_one_of_each(spec))
        return with_extra(expand(decls, reading.recipe.make_rules(spec)), reading.recipe, spec)
    except (UserError, *RECIPE_ERRORS, SystemExit):
        return None


def _one_of_each(spec: ModelSpec) -> Iterator[ParamDecl]:
    """Parameters of the model with each kind of layer once."""
    first: dict[LayerSpec, int] = {}
    for i, layer in enumerate(spec.layers):
        first.setdefault(layer, i)
    for layer, i in first.items():
        yield from layer.params(f"layers.{i}")
    yield from (d for d in replace(spec, layers=spec.layers[-1:]).params() if not d.name.startswith("layers."))
