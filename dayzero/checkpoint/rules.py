"""Names to parameters, as data: which tensor of a checkpoint fills which parameter, and how.

A rule is written once and read both ways: forwards it tells the loader where a tensor goes; backwards it tells, from
the config alone, every tensor a checkpoint must hold. Templates carry ``{i}`` (a layer or block number) and ``{e}``
(an expert): ``Rule("model.layers.{i}.mlp.experts.{e}.up_proj.weight", "layers.{i}.channel.experts.up[{e}]")``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dayzero.decl import Format, ParamDecl

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
    """Tensors left unused on purpose. pattern: ``*`` wildcard over the whole name. draft: loaded by a later rung."""

    pattern: str
    why: str
    draft: bool = False


RuleLike = Rule | Split | Fuse | Narrow | Alias | Stored | Ignore


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

    filled_twice: parameters two rules fill. aliases, stored, ignores: the rules that are no demands.
    """

    groups: list[Group] = field(default_factory=list)
    without_rule: list[str] = field(default_factory=list)
    filled_twice: list[str] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    ignores: list[Ignore] = field(default_factory=list)


_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def _template(name: str) -> tuple[str, str | None]:
    """``layers.3.mixer.q`` -> (``layers.{i}.mixer.q``, ``3``)."""
    found = _NUMBER.search(name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}.{{i}}{name[found.end() :]}", found.group(1)


def expand(decls: Iterable[ParamDecl], rules: Iterable[RuleLike]) -> Expansion:
    """Join declared parameters with rules. Every parameter must be filled exactly once; what is not is reported."""
    by_template: dict[str, dict[str | None, ParamDecl]] = {}
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
            for group in _groups(rule, by_template):
                out.groups.append(group)
                for target in group.targets:
                    filled.setdefault(target.decl.name, set()).add(position)
    names = [d.name for per in by_template.values() for d in per.values()]
    out.without_rule = [n for n in names if n not in filled]
    out.filled_twice = [n for n, by in filled.items() if len(by) > 1]
    return out


def _groups(rule: Rule | Split | Fuse | Narrow, by_template: dict[str, dict[str | None, ParamDecl]]) -> Iterator[Group]:
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
    rule: Rule | Split | Narrow, decls: list[ParamDecl], shapes: list[tuple[int, ...]], stacked: bool
) -> tuple[tuple[int, ...], tuple[Target, ...]]:
    if isinstance(rule, Rule):
        return shapes[0], (Target(decls[0], stacked),)
    if isinstance(rule, Narrow):
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
    return whole, tuple(targets)


def _fuse(rule: Fuse, decl: ParamDecl, shape: tuple[int, ...], number: str | None) -> Iterator[Group]:
    parts = len(rule.tensors)
    assert shape[rule.dim] % parts == 0, f"{decl.name}: {shape} does not divide into {parts} equal parts"
    size = shape[rule.dim] // parts
    part_shape = (*shape[: rule.dim], size, *shape[rule.dim + 1 :])
    for k, tensor in enumerate(rule.tensors):
        name = tensor.replace("{i}", number) if number is not None else tensor
        target = Target(decl, False, None, Slice(rule.dim, k * size, (k + 1) * size))
        yield Group(rule, name, None, part_shape, (part_shape,), (target,))


def _plain_shapes(rule: Rule | Split | Narrow, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if isinstance(rule, Narrow):
        return (shape,)
    if rule.transpose_plain:
        return ((*shape[:-2], shape[-1], shape[-2]),)
    forms = [rule.stored] if rule.stored is not None else []
    if isinstance(rule, Rule):
        forms += list(rule.also)
    if not forms:
        return (shape,)
    return tuple(tuple(shape[int(d[1:])] if isinstance(d, str) else d for d in form) for form in forms)
