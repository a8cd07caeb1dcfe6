"""Names to parameters, as data: which tensor of a checkpoint fills which parameter, and how.

A rule is written once and read both ways: forwards it tells the loader where a tensor goes; backwards it tells, from
the config alone, every tensor a checkpoint must hold. Templates carry ``{i}`` (a layer or block number) and ``{e}``
(an expert): ``Rule("model.layers.{i}.mlp.experts.{e}.up_proj.weight", "layers.{i}.channel.experts.up[{e}]")``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dayzero.checkpoint.rule_names import check_names
from dayzero.decl import Format, ParamDecl
from dayzero.errors import ModelError

Dim = int | str  # a size in the file, or "d0", "d1": that dimension of the parameter


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor is one parameter, or with ``[{e}]`` one slice of a stacked one.

    stored: shape in the file when it is a reshape of the parameter's, e.g. ``("d0", 1, "d1")``; also: further shapes
    that some converters write. transpose_plain: the last two dims are swapped when stored unquantised.
    """

    tensor: str
    param: str
    stored: tuple[Dim, ...] | None = None
    also: tuple[tuple[Dim, ...], ...] = ()
    transpose_plain: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor holds several parameters along ``dim``: one after another, or row by row when interleaved."""

    tensor: str
    params: tuple[str, ...]
    dim: int = 0
    interleaved: bool = False
    transpose_plain: bool = False
    stored: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fuse:
    """Several tensors, equal parts along ``dim``, are one parameter."""

    tensors: tuple[str, ...]
    param: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Narrow:
    """The parameter is the head of a longer, zero-padded tensor. size: its length in the file along dimension 0."""

    tensor: str
    param: str
    size: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that may be present although its parameter comes from another one (a tied head). Must be equal."""

    tensor: str
    param: str
    why: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The files store this pattern otherwise than the quantisation config claims, and the recipe knows why.

    pattern: ``*`` matches within and across segments. format None: plain, in whatever float type the file has.
    """

    pattern: str
    format: Format | None
    why: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Tensors left unused on purpose. pattern: ``*`` wildcard over the whole name."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Optional:
    """A tensor that a complete checkpoint may lack; then every element of the parameter is ``fill``."""

    tensor: str
    param: str
    fill: float
    why: str


@dataclass(frozen=True, slots=True)
class Either:
    """Ways to store the same parameters, the usual one first: a twin writes it. A checkpoint holds one of them."""

    options: tuple[tuple[RuleLike, ...], ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """Rules for the layers that also declare ``param``: for parameters that layers of two kinds both have."""

    param: str
    rules: tuple[RuleLike, ...]


Filling = Rule | Split | Fuse | Narrow | Optional
RuleLike = Filling | Either | Beside | Alias | Stored | Ignore


def glob_match(pattern: str, name: str) -> bool:
    """Whether ``name`` as a whole matches ``pattern``, in which ``*`` stands for any run of characters."""
    return _glob(pattern).fullmatch(name) is not None


_GLOBS: dict[str, re.Pattern[str]] = {}


def _glob(pattern: str) -> re.Pattern[str]:
    if pattern not in _GLOBS:
        _GLOBS[pattern] = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
    return _GLOBS[pattern]


@dataclass(frozen=True, slots=True)
class Slice:
    """start, stop, step along ``dim``."""

    dim: int
    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return -(-(self.stop - self.start) // self.step)


@dataclass(frozen=True, slots=True)
class Target:
    """Where (a slice of) a tensor goes: ``of_tensor`` of the logical tensor into ``of_param`` of the parameter.

    stacked: the parameter's dimension 0 is indexed by the tensor's {e}.
    """

    decl: ParamDecl
    stacked: bool = False
    of_tensor: Slice | None = None
    of_param: Slice | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Logical tensors of one shape that one rule asks for in one layer: a single one, or one for each expert.

    name: checkpoint name, with ``{e}`` left in when stacked. count: number of experts, None when single.
    shape: logical, in the parameter's orientation. plain_shapes: shapes accepted when stored unquantised.
    """

    rule: RuleLike
    name: str
    count: int | None
    shape: tuple[int, ...]
    plain_shapes: tuple[tuple[int, ...], ...]
    targets: tuple[Target, ...]

    @property
    def role(self) -> str:
        return self.targets[0].decl.role

    @property
    def numbers(self) -> Sequence[int | None]:
        return (None,) if self.count is None else range(self.count)

    def names(self) -> Iterator[str]:
        """Every logical tensor name of the group."""
        if self.count is None:
            yield self.name
        else:
            head, tail = self.name.split("{e}")
            for e in range(self.count):
                yield f"{head}{e}{tail}"


@dataclass
class Expansion:
    """groups: what a complete checkpoint holds. without_rule: declared parameters no rule fills (a recipe's fault).

    filled_twice: parameters two rules fill; used_twice: tensors two rules read. dead: rules for parameters that are not
    declared, as ``tensor -> parameter``. aliases, stored, ignores: the rules that are no demands.
    choices: for each ``Either``, the groups of its options; ``groups`` has those of the first.
    extra: what layers beside the plain forward ask for: a checkpoint holds all of it or nothing. copies: tensors of
    those layers that repeat others; each may be there or not.
    """

    groups: list[Group] = field(default_factory=list)
    choices: list[tuple[list[Group], ...]] = field(default_factory=list)
    without_rule: list[str] = field(default_factory=list)
    filled_twice: list[str] = field(default_factory=list)
    used_twice: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    ignores: list[Ignore] = field(default_factory=list)
    extra: Expansion | None = None
    copies: Expansion | None = None

    def choose(self, held: Callable[[Group], bool]) -> Expansion:
        """With each choice made: the option of which most groups are held, the earlier one where equally many are."""
        chosen = self
        for options in self.choices:
            best = max(options, key=lambda groups: sum(map(held, groups)))
            if best is not options[0]:
                dropped = {id(group) for group in options[0]}
                groups = [g for g in chosen.groups if id(g) not in dropped] + best
                chosen = replace(chosen, groups=groups)
        return chosen


_Decls = dict[str, dict[str | None, ParamDecl]]  # template -> layer number -> declaration

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def _template(name: str) -> tuple[str, str | None]:
    """``layers.3.mixer.q`` -> (``layers.{i}.mixer.q``, ``3``)."""
    found = _NUMBER.search(name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}.{{i}}{name[found.end() :]}", found.group(1)


def expand(decls: Iterable[ParamDecl], rules: Iterable[RuleLike]) -> Expansion:
    """Join declared parameters with rules. Every parameter must be filled exactly once; what is not is reported.

    ModelError for a rule that could fill nothing as it is written.
    """
    by_template: _Decls = {}
    for decl in decls:
        template, number = _template(decl.name)
        by_template.setdefault(template, {})[number] = decl
    out = Expansion()
    filled: dict[str, set[int]] = {}
    for position, rule in enumerate(rules):
        if isinstance(rule, Alias):
            out.aliases.append(rule)
        elif isinstance(rule, Stored):
            out.stored.append(rule)
        elif isinstance(rule, Ignore):
            out.ignores.append(rule)
        else:
            for group in _first_option(rule, by_template, out):
                out.groups.append(group)
                for target in group.targets:
                    filled.setdefault(target.decl.name, set()).add(position)
    names = [d.name for per in by_template.values() for d in per.values()]
    for first, *others in out.choices:
        for option in others:
            # An option that fills less than the first would leave parameters unfilled once it is chosen.
            for name in _filled_by(first) ^ _filled_by(option):
                filled.pop(name, None)
    out.without_rule = [n for n in names if n not in filled]
    out.filled_twice = [n for n, by in filled.items() if len(by) > 1]
    asked = Counter(group.name for group in out.groups)
    out.used_twice = [name for name, count in asked.items() if count > 1]
    return out


def _first_option(rule: RuleLike, by_template: _Decls, out: Expansion) -> list[Group]:
    """Groups of a rule; of an ``Either`` those of its first option, all options being noted in ``out``."""
    if isinstance(rule, Filling):
        tensors, params = _names_of(rule)
        check_names(tensors, params, isinstance(rule, Fuse))
        groups = list(_groups(rule, by_template))
        if not groups:
            out.dead.append(f"{', '.join(tensors)} -> {', '.join(params)}")
        return groups
    if isinstance(rule, Beside):
        layers = by_template.get(rule.param, {})
        here = {name: {n: d for n, d in per.items() if n in layers} for name, per in by_template.items()}
        return [group for r in rule.rules for group in _first_option(r, here, out)]
    if not isinstance(rule, Either):
        raise ModelError(f"a recipe's rules hold a {type(rule).__name__} ({str(rule)[:80]}) where a rule must stand.")
    options = [[g for r in rules for g in _first_option(r, by_template, out)] for rules in rule.options]
    out.choices.append(tuple(options))
    return options[0]


def _names_of(rule: Filling) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tensors, parameters) as the rule writes them."""
    tensors = rule.tensors if isinstance(rule, Fuse) else (rule.tensor,)
    return tensors, rule.params if isinstance(rule, Split) else (rule.param,)


def _filled_by(groups: list[Group]) -> set[str]:
    return {target.decl.name for group in groups for target in group.targets}


def _groups(rule: Filling, by_template: _Decls) -> Iterator[Group]:
    params = rule.params if isinstance(rule, Split) else (rule.param,)
    stacked = params[0].endswith("[{e}]")
    bases = [p.removesuffix("[{e}]") for p in params]
    for number, first in by_template.get(bases[0], {}).items():
        decls = [by_template.get(b, {}).get(number) for b in bases]
        if any(d is None for d in decls):
            continue
        known = [d for d in decls if d is not None]
        count = first.shape[0] if stacked else None
        shapes = [d.shape[1:] if stacked else d.shape for d in known]
        if isinstance(rule, Fuse):
            yield from _fuse(rule, known[0], shapes[0], number)
            continue
        shape, targets = _layout(rule, known, shapes, stacked)
        name = rule.tensor.replace("{i}", number) if number is not None else rule.tensor
        yield Group(rule, name, count, shape, _plain_shapes(rule, shape), targets)


def _layout(
    rule: Rule | Split | Narrow | Optional, decls: list[ParamDecl], shapes: list[tuple[int, ...]], stacked: bool
) -> tuple[tuple[int, ...], tuple[Target, ...]]:
    if isinstance(rule, Rule | Optional):
        return shapes[0], (Target(decls[0], stacked),)
    if isinstance(rule, Narrow):
        if rule.size < shapes[0][0]:
            raise ModelError(f"{rule.tensor} of length {rule.size} is shorter than {rule.param}, of {shapes[0][0]}.")
        shape = (rule.size, *shapes[0][1:])
        return shape, (Target(decls[0], stacked, Slice(0, 0, shapes[0][0])),)
    dim, total, start, targets = rule.dim, sum(s[rule.dim] for s in shapes), 0, []
    for number, (decl, shape) in enumerate(zip(decls, shapes, strict=True)):
        if rule.interleaved:
            piece = Slice(dim, number, total, len(shapes))
        else:
            piece = Slice(dim, start, start + shape[dim])
            start += shape[dim]
        targets.append(Target(decl, stacked, piece))
    whole = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
    rest = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    if len(rest) > 1 or (rule.interleaved and len({s[dim] for s in shapes}) > 1):
        raise ModelError(f"{rule.tensor} cannot hold parameters of the shapes {shapes} along dimension {dim}.")
    return whole, tuple(targets)


def _fuse(rule: Fuse, decl: ParamDecl, shape: tuple[int, ...], number: str | None) -> Iterator[Group]:
    parts = len(rule.tensors)
    if shape[rule.dim] % parts:
        raise ModelError(f"{decl.name} of shape {shape} does not divide into {parts} equal parts: {rule.tensors}.")
    size = shape[rule.dim] // parts
    part_shape = (*shape[: rule.dim], size, *shape[rule.dim + 1 :])
    for k, tensor in enumerate(rule.tensors):
        name = tensor.replace("{i}", number) if number is not None else tensor
        target = Target(decl, False, None, Slice(rule.dim, k * size, (k + 1) * size))
        yield Group(rule, name, None, part_shape, (part_shape,), (target,))


def _plain_shapes(rule: Rule | Split | Narrow | Optional, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if isinstance(rule, Narrow | Optional):
        return (shape,)
    if rule.transpose_plain:
        return ((*shape[:-2], shape[-1], shape[-2]),)
    forms = [rule.stored] if rule.stored is not None else []
    if isinstance(rule, Rule):
        forms += list(rule.also)
    if not forms:
        return (shape,)
    made = tuple(tuple(shape[int(d[1:])] if isinstance(d, str) else d for d in form) for form in forms)
    if any(prod(form) != prod(shape) for form in made):
        raise ModelError(f"{rule.tensor}: the stored shape {made} is no other arrangement of {shape}.")
    return made
