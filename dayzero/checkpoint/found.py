"""What a checkpoint was found to hold: where each logical tensor is, and all that is left over or contradicts.

Experts make up nearly all names of a large checkpoint. A group whose experts are all stored alike is therefore one
``Alike`` record; it reads as the sequence of sources it stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dayzero.checkpoint.rules import Group, Optional
from dayzero.decl import Format, ParamDecl


class Entry(Protocol):
    """What an index knows of one tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Scheme(Protocol):
    """Which format the quantisation config claims for a module."""

    def scheme(self, module: str, role: str = "linear") -> Format | None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where one logical tensor was found: its format and, in order of role, the physical tensors that hold it."""

    name: str
    format: Format
    parts: tuple[tuple[str, str], ...]  # (role, tensor name)


class Alike(Sequence[Source]):
    """Sources of all experts of a group, which differ in nothing but the number in their names."""

    def __init__(self, name: str, fmt: Format, parts: tuple[tuple[str, str], ...], size: int) -> None:
        """name, parts: with ``{e}`` in every tensor's name."""
        self.name, self.format, self.parts, self.size = name, fmt, parts, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, e: Any) -> Any:  # int -> Source, slice -> list, as in any sequence
        if isinstance(e, slice):
            return [self[i] for i in range(*e.indices(self.size))]
        if not -self.size <= e < self.size:
            raise IndexError(e)
        number = str(e % self.size)
        found = tuple((role, name.replace("{e}", number)) for role, name in self.parts)
        return Source(self.name.replace("{e}", number), self.format, found)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A module whose stored format is not the claimed one. why: the recipe's acknowledgement, None when there is none.

    name: the tensor's; with ``{e}`` when it stands for ``count`` experts.
    """

    name: str
    claimed: str
    stored: str
    why: str | None
    count: int = 1


@dataclass
class Coverage:
    """used: physical tensors in use. ignored: name -> reason. unknown and missing: names -> nearest match or "".

    misfit: name -> what is wrong with its shape or dtype. resized: those of them that only have other sizes, in as many
    dimensions and not the expected ones in another order. narrowed: name -> why its stored dtype loses bits.
    sources: group position -> sources in order of {e}. roots: prefix in the rules -> prefix in the files, where they
    differ. aliases: tensor present although its parameter comes from another one -> that parameter. groups: those of
    the expansion that the files may hold. filled: parameter that no tensor fills -> the rule that says with what.
    extra: physical tensors of layers that the plain forward does not run, apart from ``used``; extra_groups and
    extra_sources: theirs, as groups and sources.
    """

    groups: list[Group]
    sources: list[Sequence[Source]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    misfit: dict[str, str] = field(default_factory=dict)
    resized: set[str] = field(default_factory=set)
    narrowed: dict[str, str] = field(default_factory=dict)
    contradictions: list[Contradiction] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    filled: dict[ParamDecl, Optional] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    extra: set[str] = field(default_factory=set)
    extra_groups: list[Group] = field(default_factory=list)
    extra_sources: list[Sequence[Source]] = field(default_factory=list)

    def whole(self) -> Coverage:
        """The same with the extra layers' groups behind the others."""
        groups, sources = [*self.groups, *self.extra_groups], [*self.sources, *self.extra_sources]
        return replace(self, groups=groups, sources=sources, extra_groups=[], extra_sources=[])

    @property
    def complete(self) -> bool:
        return not (self.unknown or self.missing or self.misfit)
