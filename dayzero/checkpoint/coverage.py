"""Exactly once: every tensor of a checkpoint used or ignored with a reason, every parameter filled.

``cover`` joins what the rules ask for with what the headers hold. It never skips: what is left over on either side is
listed with its nearest match, and so is every module whose stored format is not the one the config claims.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dayzero.checkpoint.formats import StoredPart, parts
from dayzero.checkpoint.rules import Expansion, Group, Ignore, glob_match
from dayzero.decl import PLAIN_FORMATS, QUANTIZED_FORMATS, Format

PLAIN_CODES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
_BY_ELEMENT = {f.element: f for f in PLAIN_FORMATS}


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


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A module whose stored format is not the claimed one. why: the recipe's acknowledgement, None when there is none."""

    name: str
    claimed: str
    stored: str
    why: str | None


@dataclass
class Coverage:
    """used: physical tensors in use. ignored: name -> reason. unknown and missing: names -> nearest match or "".

    misfit: name -> what is wrong with its shape or dtype. sources: group position -> sources in order of {e}.
    roots: prefix in the rules -> prefix in the files, where they differ.
    """

    groups: list[Group]
    sources: list[list[Source]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    misfit: dict[str, str] = field(default_factory=dict)
    narrowed: dict[str, str] = field(default_factory=dict)
    contradictions: list[Contradiction] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)

    @property
    def complete(self) -> bool:
        return not (self.unknown or self.missing or self.misfit)


class _NoScheme:
    def scheme(self, module: str, role: str = "linear") -> Format | None:
        del module, role
        return None


def cover(expansion: Expansion, entries: Mapping[str, Entry], quant: Scheme | None = None) -> Coverage:
    """Join ``expansion`` with the index's ``entries``. Pure; nothing is read but names, dtypes and shapes."""
    roots = find_roots(expansion.groups, entries)
    out = Coverage(expansion.groups, roots=roots)
    for group in expansion.groups:
        out.sources.append(list(_cover_group(group, entries, quant or _NoScheme(), expansion, out)))
    _left_over(expansion, entries, out)
    return out


def expected_parts(
    expansion: Expansion, quant: Scheme | None, plain: Format
) -> Iterator[tuple[str, StoredPart, tuple[int, ...]]]:
    """Every physical tensor a complete checkpoint holds, from the config alone: (logical name, part, file shape).

    plain: the format of what is not quantised. Parameters that must be stored in float32 are.
    """
    for group in expansion.groups:
        fmt = stored_format(group, group.name, expansion, quant, plain)
        templates = _parts_of(group, fmt)
        for number in group.numbers:
            for part in templates:
                name = part.name if number is None else part.name.replace("{e}", str(number))
                logical = group.name if number is None else group.name.replace("{e}", str(number))
                yield logical, StoredPart(part.role, name, part.dtype, part.shape, part.optional), part.shape


def stored_format(
    group: Group, name: str, expansion: Expansion, quant: Scheme | None, plain: Format
) -> Format:
    """How a complete checkpoint stores logical tensor ``name``: the claimed format, else float32 where it must be, else plain."""
    claim = _claim(group, name, quant or _NoScheme(), expansion)[0]
    return claim or (_BY_ELEMENT["f32"] if group.targets[0].decl.stored == "f32" else plain)


def module_of(tensor: str) -> str:
    """The module a tensor belongs to: its name without a trailing ``.weight``."""
    return tensor.removesuffix(".weight")


def _claim(
    group: Group, name: str, quant: Scheme, expansion: Expansion
) -> tuple[Format | None, Format | None, str | None]:
    """(format to expect, format the config claims, the recipe's reason when the two differ)."""
    role = group.role
    claimed = quant.scheme(module_of(name), role) if role == "linear" and len(group.shape) >= 2 else None
    for stored in expansion.stored:
        if glob_match(stored.pattern, name):
            return stored.format, claimed, stored.why
    return claimed, claimed, None


def _parts_of(group: Group, fmt: Format) -> tuple[StoredPart, ...]:
    shape = group.shape if fmt.quantized else group.plain_shapes[0]
    return parts(fmt, group.name, shape)


def _cover_group(
    group: Group, entries: Mapping[str, Entry], quant: Scheme, expansion: Expansion, out: Coverage
) -> Iterator[Source]:
    cached: dict[str, tuple[StoredPart, ...]] = {}

    def templates(fmt: Format) -> tuple[StoredPart, ...]:
        if fmt.name not in cached:
            cached[fmt.name] = _parts_of(group, fmt)
        return cached[fmt.name]

    first = _rooted(group.name, out.roots)
    expect, claimed, why = _claim(group, first, quant, expansion)
    for number, name in zip(group.numbers, group.names(), strict=True):
        real = _rooted(name, out.roots)
        source = _find(group, number, real, expect, entries, templates, out)
        if source is None:
            out.missing[real] = ""
            continue
        out.used.update(part for _, part in source.parts)
        out.formats[source.format.name] += 1
        stored = source.format if source.format.quantized else None
        if stored is not claimed and stored != claimed:
            out.contradictions.append(
                Contradiction(
                    real,
                    claimed.name if claimed else "unquantised",
                    source.format.name,
                    why if stored == expect else None,
                )
            )
        _check_width(group, real, source, out)
        yield source


def _check_width(group: Group, real: str, source: Source, out: Coverage) -> None:
    wanted = group.targets[0].decl.stored
    if wanted is not None and source.format.name != wanted:
        out.narrowed[real] = (
            f"stored as {source.format.name}; this parameter is published in {wanted} and loses bits below it"
        )


def _find(
    group: Group,
    number: int | None,
    real: str,
    expect: Format | None,
    entries: Mapping[str, Entry],
    templates: object,
    out: Coverage,
) -> Source | None:
    """The tensor in the expected format, or in any other that the files hold in its place."""
    plain = entries.get(real)
    if expect is None and plain is not None and plain.dtype in PLAIN_CODES:
        return _plain(group, real, plain, out)
    order = [expect] if expect is not None else []
    if group.role == "linear":
        order += [f for f in QUANTIZED_FORMATS if f is not expect]
    for fmt in order:
        try:
            wanted = templates(fmt)  # type: ignore[operator]
        except ValueError:
            continue  # this format cannot hold the shape
        names = [
            (p, _rooted(p.name if number is None else p.name.replace("{e}", str(number)), out.roots)) for p in wanted
        ]
        if all(name in entries or p.optional for p, name in names) and _dtypes_fit(names, entries):
            for part, name in names:
                if name in entries and not _shape_fits(part, entries[name]):
                    out.misfit[name] = f"shape {list(entries[name].shape)}, expected {list(part.shape)} for {fmt.name}"
            found = tuple((p.role, name) for p, name in names if name in entries)
            return Source(real, fmt, found)
    if plain is not None:
        if plain.dtype in PLAIN_CODES:
            return _plain(group, real, plain, out)
        out.misfit[real] = f"dtype {plain.dtype}, which no known format stores in this place"
        out.used.add(real)
    return None


def _plain(group: Group, real: str, entry: Entry, out: Coverage) -> Source:
    if tuple(entry.shape) not in group.plain_shapes:
        out.misfit[real] = (
            f"shape {list(entry.shape)}, expected {' or '.join(str(list(s)) for s in group.plain_shapes)}"
        )
    return Source(real, _BY_ELEMENT[PLAIN_CODES[entry.dtype]], (("weight", real),))


def _dtypes_fit(names: list[tuple[StoredPart, str]], entries: Mapping[str, Entry]) -> bool:
    for part, name in names:
        entry = entries.get(name)
        if entry is None:
            continue
        allowed = (part.dtype,) if isinstance(part.dtype, str) else part.dtype
        if entry.dtype not in allowed:
            return False
    return True


def _shape_fits(part: StoredPart, entry: Entry) -> bool:
    shape = tuple(entry.shape)
    return shape == part.shape or (part.shape in ((), (1,)) and shape in ((), (1,)))


def find_roots(groups: Iterable[Group], entries: Mapping[str, Entry]) -> dict[str, str]:
    """Prefixes in which the files differ from the rules, e.g. ``model.`` -> ``backbone.``, by counting agreements."""
    stems = Counter(name.split(".", 1)[0] + "." for name in (g.name for g in groups) if "." in name)
    roots: dict[str, str] = {}
    file_names = list(entries)
    for stem in stems:
        members = [g.name for g in groups if g.name.startswith(stem)]
        if any(_present(next(iter(_first_names(m))), entries) for m in members):
            continue
        votes: Counter[str] = Counter()
        for member in members[:40]:
            tail = member[len(stem) :].replace("{e}", "0")
            base = tail.removesuffix(".weight") + "."
            for name in _ending(file_names, tail, base):
                votes[name] += 1
        if votes:
            best = max(votes.items(), key=lambda kv: (kv[1], -len(kv[0])))[0]
            if best != stem:
                roots[stem] = best
    return roots


def _first_names(member: str) -> tuple[str, ...]:
    return (member.replace("{e}", "0"),)


def _present(name: str, entries: Mapping[str, Entry]) -> bool:
    if name in entries:
        return True
    base = name.removesuffix(".weight")
    return any(f"{base}{end}" in entries for end in (".weight_packed", ".weight", "_blocks"))


def _ending(names: list[str], tail: str, base: str) -> Iterator[str]:
    for name in names:
        at = len(name) - len(tail)
        if name.endswith(tail) and (at == 0 or name[at - 1] == "."):
            yield name[:at]
        elif base in name and (name.find(base) == 0 or name[name.find(base) - 1] == ".") and "_packed" in name:
            yield name[: name.find(base)]


def _rooted(name: str, roots: Mapping[str, str]) -> str:
    for old, new in roots.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _left_over(expansion: Expansion, entries: Mapping[str, Entry], out: Coverage) -> None:
    aliases = {_rooted(a.tensor, out.roots): a for a in expansion.aliases}
    unknown = []
    for name in entries:
        if name in out.used:
            continue
        if name in aliases:
            out.aliases[name] = aliases[name].param
            continue
        why = _ignored(name, expansion.ignores, out.roots)
        if why is None:
            unknown.append(name)
        else:
            out.ignored[name] = why
    expected = [_rooted(g.name.replace("{e}", "0"), out.roots) for g in expansion.groups]
    out.unknown = nearest(unknown, list(out.missing) or expected)
    out.missing = nearest(list(out.missing), unknown or list(entries))


def _ignored(name: str, ignores: list[Ignore], roots: Mapping[str, str]) -> str | None:
    for rule in ignores:
        if glob_match(rule.pattern, name) or glob_match(_rooted(rule.pattern, roots), name):
            return rule.why
    return None


_DIGITS = re.compile(r"\d+")


def nearest(names: list[str], candidates: list[str], most: int = 60) -> dict[str, str]:
    """Each name with the most similar candidate ("" where none is near); the search stops after ``most`` names.

    Candidates are compared by shape of the name first (digits folded), so that 80,000 experts cost as much as one.
    """
    folded: dict[str, list[str]] = {}
    for candidate in candidates:
        folded.setdefault(_DIGITS.sub("#", candidate), []).append(candidate)
    keys = list(folded)
    out: dict[str, str] = {}
    for position, name in enumerate(names):
        out[name] = ""
        if position < most:
            hit = difflib.get_close_matches(_DIGITS.sub("#", name), keys, 1, 0.6)
            if hit:
                numbers = _DIGITS.findall(name)
                out[name] = max(
                    folded[hit[0]][:500],
                    key=lambda c: sum(a == b for a, b in zip(numbers, _DIGITS.findall(c), strict=False)),
                )
    return out
