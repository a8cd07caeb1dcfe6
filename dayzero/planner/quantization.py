"""Which module is stored in which format, held against what the config claims, in both directions; and its scales."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dayzero.checkpoint.claims import unstorable
from dayzero.checkpoint.coverage import Coverage, module_of
from dayzero.checkpoint.coverage import Source as Stored
from dayzero.checkpoint.header import TensorEntry
from dayzero.checkpoint.likeness import folded
from dayzero.checkpoint.quant_config import QuantTable
from dayzero.checkpoint.rules import Expansion
from dayzero.checkpoint.source import Source
from dayzero.decl import FORMATS
from dayzero.errors import CheckpointError
from dayzero.finding import Finding, Verdict

SAMPLE_BYTES = 64 * 1024  # of scales, for each format of a large checkpoint
NUM_SAMPLED = 16  # scale tensors it is taken from
WHOLE_BYTES = 4 * 1024 * 1024  # scales of a format up to this size are read whole
MAX_WHOLE = 20_000  # tensors
MAX_EVIDENCE = 40
MAX_ROWS = 200


def ask_all(quant: QuantTable, expansion: Expansion, coverage: Coverage | None) -> None:
    """Ask the table for modules that no rule fills, so that entries naming them count as hit."""
    for alias in expansion.aliases:
        quant.scheme(module_of(alias.tensor), "embed")
    if coverage is not None:
        for name in (*coverage.ignored, *coverage.aliases, *coverage.unknown):
            quant.scheme(module_of(name), "norm")


def quantization_json(quant: QuantTable, where: str | None, coverage: Coverage | None) -> dict[str, Any]:
    """method, where it is claimed, the table module pattern -> formats, the config's entries and whether they hit."""
    table: Counter[tuple[str, str]] = Counter()
    if coverage is not None:
        for group, sources in zip(coverage.groups, coverage.sources, strict=True):
            formats = Counter(s.format.name for s in (sources[:1] if _uniform(sources) else sources))
            for name, count in formats.items():
                number = len(sources) if _uniform(sources) else count
                table[folded(group.name.replace("{e}", "0")), name] += number
    claims = {(folded(c.name.replace("{e}", "0")), c.stored): c for c in coverage.contradictions} if coverage else {}
    rows = []
    for (pattern, stored), count in sorted(table.items()):
        odd = claims.get((pattern, stored))
        claimed = (
            odd.claimed
            if odd
            else stored
            if FORMATS.get(stored) is None or FORMATS[stored].quantized
            else "unquantised"
        )
        rows.append(
            {"modules": pattern, "claimed": claimed, "stored": stored, "count": count, "why": odd.why if odd else None}
        )
    entries = [{"entry": text, "key": key, "hit": hits > 0} for text, key, hits in quant.entries()]
    return {
        "method": quant.method,
        "where": where,
        "formats": dict(coverage.formats) if coverage is not None else {},
        "table": rows[:MAX_ROWS],
        "entries": entries,
        "facts": quant.facts,
        "ignored": dict(quant.ignored),
        "unread": quant.unread,
    }


def _uniform(sources: Sequence[Any]) -> bool:
    return not isinstance(sources, list)


def shape_findings(quant: QuantTable, expansion: Expansion) -> list[Finding]:
    """Tensors whose shape the claimed format cannot hold: with no file yet, only this shows that they do not fit."""
    odd = unstorable(expansion, quant, FORMATS["bf16"])
    if not odd:
        return []
    claim = f"{len(odd)} tensor(s) have a shape that the format which the config claims cannot hold"
    return [
        Finding(
            "quantization.shape", "config", "fail", claim, measured=len(odd), bound=0,
            evidence=tuple(odd[:MAX_EVIDENCE]), remedy="check the sizes and the group size in config.json",
        )
    ]  # fmt: skip


def claim_findings(quant: QuantTable, coverage: Coverage | None) -> list[Finding]:
    """Contradictions between claim and files, entries that hit nothing, keys of the claim that nothing read."""
    out = []
    if quant.unread:
        out.append(
            Finding(
                "quantization.unread", "config", "fail",
                f"{len(quant.unread)} key(s) of the quantisation config are read by nothing",
                measured=len(quant.unread), bound=0, evidence=tuple(quant.unread),
                remedy="an unread key may change how weights are stored; dayzero must learn it, or the key must go",
            )
        )  # fmt: skip
    if coverage is None:
        return out
    for why in dict.fromkeys(c.why for c in coverage.contradictions):
        out.append(_contradiction(coverage, why))
    return out + _entries_without_hit(quant)


def _contradiction(coverage: Coverage, why: str | None) -> Finding:
    found = [c for c in coverage.contradictions if c.why == why]
    count = sum(c.count for c in found)
    kinds = dict.fromkeys(
        f"{folded(c.name.replace('{e}', '0'))}: claimed {c.claimed}, stored {c.stored}" for c in found
    )
    said = "acknowledged by the recipe" if why else "and the recipe does not say why"
    verdict: Verdict = "note" if why else "fail"
    return Finding(
        "quantization.acknowledged" if why else "quantization.contradiction", "weights", verdict,
        f"{count} module(s) are not stored as the quantisation config claims, {said}" + (f": {why}" if why else ""),
        measured=count, bound=None if why else 0, evidence=tuple(kinds),
        remedy="" if why else "if the files are right, add Stored(pattern, format, why) to the recipe",
    )  # fmt: skip


def _entries_without_hit(quant: QuantTable) -> list[Finding]:
    named = [
        (text, key, hits)
        for text, key, hits in quant.entries()
        if key not in ("quant_method", "quant_algo") and text != "Linear"
    ]
    lost = [(text, key) for text, key, hits in named if not hits]
    if not lost:
        return []
    all_lost = len(lost) == len(named) and len(named) > 1
    return [
        Finding(
            "quantization.no_hit", "config", "fail" if all_lost else "note",
            "no entry of the quantisation config names a module of this model; it was written for other names"
            if all_lost else f"{len(lost)} of {len(named)} entries of the quantisation config name no module",
            measured=len(lost), bound=0, evidence=tuple(f"{key}: {text}" for text, key in lost),
            remedy="compare the entries with the tensor names; a module that should stay unquantised may be quantised",
        )
    ]  # fmt: skip


def scale_findings(
    source: Source, entries: Mapping[str, TensorEntry], coverage: Coverage, holes: Collection[str] = ()
) -> list[Finding]:
    """Stored scales that are NaN, infinite, or all zero, by range reads: all of them where they are few, else samples.

    holes: files that are not there in full; zeros in them mean nothing.
    """
    by_format: dict[str, list[Sequence[Stored]]] = {}
    for sources in coverage.sources:
        if len(sources) and sources[0].format.quantized:
            by_format.setdefault(sources[0].format.name, []).append(sources)
    out = []
    for fmt, groups in by_format.items():
        size = sum(len(sources) * sum(e.nbytes for e in _scales(sources[:1], entries)) for sources in groups)
        number = sum(len(sources) for sources in groups)
        whole = size <= WHOLE_BYTES and number <= MAX_WHOLE
        found = [e for sources in groups for e in _scales(sources if whole else _ends(sources), entries)]
        if not whole:
            found = found[:: max(1, len(found) // NUM_SAMPLED)][:NUM_SAMPLED]
        out += _check_scales(source, found, fmt, WHOLE_BYTES if whole else SAMPLE_BYTES // NUM_SAMPLED, holes)
    return out


def _ends(sources: Sequence[Stored]) -> Sequence[Stored]:
    return sources[:: max(1, len(sources) - 1)]


def _scales(sources: Iterable[Stored], entries: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    parts = (part for stored in sources for part in stored.parts)
    return [entries[name] for role, name in parts if role in ("scale", "tensor_scale") and name in entries]


def _check_scales(
    source: Source, entries: Sequence[TensorEntry], fmt: str, most_bytes: int, holes: Collection[str]
) -> list[Finding]:
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    sick, num_zero, num_seen = [], 0, 0
    for file, held in by_file.items():
        try:
            pieces = source.read_ranges(file, [(e.start, min(most_bytes, e.nbytes)) for e in held])
        except CheckpointError as error:
            return [_odd_scale(fmt, held[0], str(error))]
        for entry, data in zip(held, pieces, strict=True):
            bad, nonzero = scale_health(data, entry.dtype)
            num_seen += 1
            num_zero += bool(data) and not nonzero and file not in holes
            if bad:
                sick.append(f"{entry.name} in {file} holds {bad} scale(s) that are NaN or infinite")
    out = [_odd_scale(fmt, entries[0], sick[0], sick)] if sick else []
    if num_seen and num_zero == num_seen:
        first = f"{entries[0].name} in {entries[0].file}"
        out.append(
            _odd_scale(fmt, entries[0], f"all {fmt} scales read are zero ({first} first): no weight would count")
        )
    return out


def _odd_scale(fmt: str, entry: TensorEntry, claim: str, told: Sequence[str] = ()) -> Finding:
    more = len(told) - 1
    return Finding(
        "quantization.scale", "weights", "fail", claim + (f", and {more} more tensor(s) like it" if more > 0 else ""),
        measured=fmt, evidence=tuple(told[:MAX_EVIDENCE]) or (f"{entry.name} in {entry.file}",),
        remedy="download the file again; if it stays so, ask the publisher",
    )  # fmt: skip


def scale_health(data: bytes, dtype: str) -> tuple[int, bool]:
    """(how many stored scales are NaN or infinite, whether any differs from zero).

    U8 means e8m0, in which 255 is NaN and nothing is zero; e4m3 has NaN at 127 and 255 and no infinities.
    """
    if dtype in ("U8", "F8_E8M0"):
        return data.count(255), True
    if dtype == "F8_E4M3":
        return data.count(127) + data.count(255), any(code & 127 for code in set(data))
    code, exponent = {"BF16": ("H", 0x7F80), "F16": ("H", 0x7C00), "F32": ("I", 0x7F800000)}[dtype]
    words = [word for (word,) in struct.iter_unpack(f"<{code}", data)]
    sign = 1 << (struct.calcsize(f"<{code}") * 8 - 1)
    return sum(word & exponent == exponent for word in words), any(word & ~sign for word in words)
