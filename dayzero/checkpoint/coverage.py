"""Exactly once: every tensor of a checkpoint used or ignored with a reason, every parameter filled.

``cover`` joins what the rules ask for with what the headers hold. It never skips: what is left over on either side is
listed with its nearest match, and so is every module whose stored format is not the one the config claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from dayzero.checkpoint.claims import (
    Claim,
    NoScheme,
    claim_of,
    expected_parts,
    module_of,
    numbered,
    parts_of,
    same_claim,
    stored_format,
)
from dayzero.checkpoint.formats import StoredPart
from dayzero.checkpoint.found import Alike, Contradiction, Coverage, Entry, Scheme, Source
from dayzero.checkpoint.likeness import find_roots, nearest, present, rooted
from dayzero.checkpoint.rules import Expansion, Group, Ignore, Optional, glob_match
from dayzero.decl import PLAIN_FORMATS, QUANTIZED_FORMATS, Format

__all__ = [
    "Alike",
    "Contradiction",
    "Coverage",
    "Entry",
    "Scheme",
    "Source",
    "cover",
    "expected_parts",
    "module_of",
    "stored_format",
]

PLAIN_CODES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
_BY_ELEMENT = {f.element: f for f in PLAIN_FORMATS}


def cover(expansion: Expansion, entries: Mapping[str, Entry], quant: Scheme | None = None) -> Coverage:
    """Join ``expansion`` with the index's ``entries``. Pure; nothing is read but names, dtypes and shapes."""
    choices = (g for options in expansion.choices for groups in options[1:] for g in groups)
    roots = find_roots((g.name for g in chain(expansion.groups, choices)), entries)

    def held(group: Group) -> bool:
        return present(rooted(group.name.replace("{e}", "0"), roots), entries)

    expansion = expansion.choose(held)
    out = Coverage([], roots=roots)
    join = _Join(expansion, entries, quant or NoScheme(), out)
    for group in expansion.groups:
        if isinstance(group.rule, Optional) and not held(group):
            out.filled[group.targets[0].decl] = group.rule
        else:
            out.groups.append(group)
            out.sources.append(join.alike(group) or join.one_by_one(group))
    _join_extra(expansion, join, held, out)
    _left_over(expansion, entries, join.left, out)
    return out


def _join_extra(expansion: Expansion, join: _Join, held: Callable[[Group], bool], out: Coverage) -> None:
    """Layers beside the plain forward: all of them when the files hold any tensor of theirs."""
    if expansion.extra is None or not any(held(group) for group in expansion.extra.groups):
        return
    before = set(join.left)
    copies = expansion.copies.groups if expansion.copies is not None else []
    for group in (*expansion.extra.choose(held).groups, *filter(held, copies)):
        out.extra_groups.append(group)
        out.extra_sources.append(join.alike(group) or join.one_by_one(group))
    out.extra = before - join.left


@dataclass(slots=True)
class _Join:
    """Finds the sources of one group after another. left: tensors not used so far; ``out`` is filled as it goes."""

    expansion: Expansion
    entries: Mapping[str, Entry]
    quant: Scheme
    out: Coverage
    left: set[str] = field(default_factory=set)
    _made: dict[Format, tuple[StoredPart, ...]] = field(default_factory=dict)  # of the group at hand

    def __post_init__(self) -> None:
        self.left = set(self.entries)

    def alike(self, group: Group) -> Alike | None:
        """The group as one record when all its experts have the expected shapes in one format; None otherwise."""
        self._made = {}
        template = rooted(group.name, self.out.roots)
        claim = same_claim(group, template, self.quant, self.expansion) if group.count else None
        if claim is None or group.count is None:
            return None
        for fmt in self._candidates(group, claim.expect):
            wanted = self._templates(group, fmt)
            kept = [p for p in wanted if not p.optional or p.name.replace("{e}", "0") in self.entries]
            names = self._all_present(kept, group.count)
            if names is None:
                continue
            self.left.difference_update(names)
            found = tuple((p.role, p.name) for p in kept)
            self.out.formats[fmt.name] += group.count
            self._note(group, template, fmt, claim, group.count)
            return Alike(template, fmt, found, group.count)
        return None

    def _candidates(self, group: Group, expect: Format | None) -> Iterator[Format]:
        if expect is not None:
            yield expect
        else:
            yield from PLAIN_FORMATS
        if group.role == "linear":
            yield from (f for f in QUANTIZED_FORMATS if f != expect)
        if expect is not None:
            yield from PLAIN_FORMATS

    def _templates(self, group: Group, fmt: Format) -> tuple[StoredPart, ...]:
        """Parts by the files' names; empty when the format cannot hold the shape."""
        if fmt not in self._made:
            try:
                wanted = parts_of(group, fmt)
            except ValueError:
                wanted = ()
            self._made[fmt] = tuple(p._replace(name=rooted(p.name, self.out.roots)) for p in wanted)
        return self._made[fmt]

    def _all_present(self, wanted: Sequence[StoredPart], count: int) -> list[str] | None:
        """Names of every expert's parts, None as soon as one is absent or does not fit."""
        if not wanted:
            return None
        entries, names = self.entries, []
        for part in wanted:
            head, tail = part.name.split("{e}")
            for e in range(count):
                name = f"{head}{e}{tail}"
                entry = entries.get(name)
                if entry is None or (
                    (entry.dtype != part.dtype[0] or entry.shape != part.shape)
                    and part.misfit(entry.dtype, tuple(entry.shape))
                ):
                    return None
                names.append(name)
        return names

    def one_by_one(self, group: Group) -> list[Source]:
        found = []
        possible: set[str] = set()
        if group.count is not None:  # a hundred thousand lost experts must not each be tried in every format
            formats = (*PLAIN_FORMATS, *QUANTIZED_FORMATS) if group.role == "linear" else PLAIN_FORMATS
            possible = {p.name for fmt in formats for p in self._templates(group, fmt)}
            possible.add(rooted(group.name, self.out.roots))
        template = rooted(group.name, self.out.roots)
        same = same_claim(group, template, self.quant, self.expansion)
        for number in group.numbers:
            real = numbered(template, number)
            if possible and not any(numbered(p, number) in self.entries for p in possible):
                self.out.missing[real] = ""
                continue
            claim = same or claim_of(group, real, self.quant, self.expansion)
            source = self._find(group, number, real, claim.expect)
            if source is None:
                continue
            self.left.difference_update(part for _, part in source.parts)
            self.out.formats[source.format.name] += 1
            self._note(group, real, source.format, claim, 1)
            found.append(source)
        return found

    def _find(self, group: Group, number: int | None, real: str, expect: Format | None) -> Source | None:
        """The tensor in the expected format, or in any other that the files hold in its place."""
        for fmt in self._candidates(group, expect):
            if not fmt.quantized:
                source = self._plain(group, real)
                if source is not None:
                    return source
                continue
            wanted = [p._replace(name=numbered(p.name, number)) for p in self._templates(group, fmt)]
            if wanted and self._holds(wanted):
                self._check_shapes(wanted, fmt)
                return Source(real, fmt, tuple((p.role, p.name) for p in wanted if p.name in self.entries))
        self._explain(group, number, real, expect)
        return None

    def _holds(self, wanted: Sequence[StoredPart]) -> bool:
        for part in wanted:
            entry = self.entries.get(part.name)
            if entry is None and not part.optional:
                return False
            if entry is not None and entry.dtype not in part.dtype:
                return False
        return True

    def _plain(self, group: Group, real: str) -> Source | None:
        entry = self.entries.get(real)
        if entry is None or entry.dtype not in PLAIN_CODES:
            return None
        if tuple(entry.shape) not in group.plain_shapes:
            expected = " or ".join(str(list(s)) for s in group.plain_shapes)
            self.out.misfit[real] = f"shape {list(entry.shape)}, expected {expected}"
            if all(_resized(entry.shape, shape) for shape in group.plain_shapes):
                self.out.resized.add(real)
        return Source(real, _BY_ELEMENT[PLAIN_CODES[entry.dtype]], (("weight", real),))

    def _check_shapes(self, wanted: Sequence[StoredPart], fmt: Format) -> None:
        """wanted: the values first. Scales that alone do not fit were cut wrong by whoever wrote them."""
        for part in wanted:
            entry = self.entries.get(part.name)
            if entry is not None and part.misfit(entry.dtype, tuple(entry.shape)):
                self.out.misfit[part.name] = f"shape {list(entry.shape)}, expected {list(part.shape)} for {fmt.name}"
                with_values = part is wanted[0] or wanted[0].name in self.out.resized
                if with_values and entry.dtype in part.dtype and _resized(entry.shape, part.shape):
                    self.out.resized.add(part.name)

    def _explain(self, group: Group, number: int | None, real: str, expect: Format | None) -> None:
        """Say what is missing: the part that is not there when another one is, else the tensor itself."""
        for fmt in self._candidates(group, expect):
            wanted = [p._replace(name=numbered(p.name, number)) for p in self._templates(group, fmt)]
            held = [p for p in wanted if p.name in self.entries and self.entries[p.name].dtype in p.dtype]
            if held and fmt.quantized and self.entries[held[0].name].dtype not in PLAIN_CODES:
                self.left.difference_update(p.name for p in held)
                for part in wanted:
                    entry = self.entries.get(part.name)
                    if entry is None and not part.optional:
                        self.out.missing[part.name] = ""
                    elif entry is not None and part not in held:
                        self.left.discard(part.name)
                        self.out.misfit[part.name] = part.misfit(entry.dtype, tuple(entry.shape)) or ""
                return
        entry = self.entries.get(real)
        if entry is None:
            self.out.missing[real] = ""
        else:
            self.left.discard(real)
            self.out.misfit[real] = f"dtype {entry.dtype}, which no known format stores in this place"

    def _note(self, group: Group, name: str, fmt: Format, claim: Claim, count: int) -> None:
        """Remember a format that is not the claimed one, and a dtype that is narrower than it may be."""
        stored = fmt if fmt.quantized else None
        if stored != claim.claimed:
            said = claim.claimed.name if claim.claimed else "unquantised"
            why = claim.why if stored == claim.expect else None
            self.out.contradictions.append(Contradiction(name, said, fmt.name, why, count))
        wide = claim.expect is not None and claim.expect.name == "f32"
        wanted = "f32" if wide else group.targets[0].decl.stored
        if wanted is not None and fmt.name != wanted:
            self.out.narrowed[name] = (
                f"stored as {fmt.name}; this parameter is published in {wanted} and loses bits below it"
            )


def _left_over(expansion: Expansion, entries: Mapping[str, Entry], left: set[str], out: Coverage) -> None:
    aliases = {rooted(a.tensor, out.roots): a for a in expansion.aliases}
    patterns = [(rule, rooted(rule.pattern, out.roots)) for rule in expansion.ignores]
    unknown = []
    for name in entries:
        if name in out.extra:
            continue
        if name not in left:
            out.used.add(name)
        elif name in aliases:
            out.aliases[name] = aliases[name].param
        else:
            why = _ignored(name, patterns)
            if why is None:
                unknown.append(name)
            else:
                out.ignored[name] = why
    if unknown:
        expected = out.missing or {rooted(g.name.replace("{e}", "0"), out.roots): "" for g in expansion.groups}
        out.unknown = nearest(unknown, expected)
    out.missing = nearest(list(out.missing), unknown or entries) if out.missing else {}


def _ignored(name: str, patterns: Sequence[tuple[Ignore, str]]) -> str | None:
    for rule, real in patterns:
        if glob_match(rule.pattern, name) or (real != rule.pattern and glob_match(real, name)):
            return rule.why
    return None


def _resized(stored: Sequence[int], expected: Sequence[int]) -> bool:
    return len(stored) == len(expected) and sorted(stored) != sorted(expected)
