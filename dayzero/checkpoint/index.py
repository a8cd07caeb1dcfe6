"""All tensors of a checkpoint: every shard's header joined with the index file, and what contradicts what.

Problems are findings, not exceptions: a damaged checkpoint should be described whole, not by its first fault.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from sys import intern
from typing import Any

import msgspec

from dayzero.checkpoint.header import AGAIN, TensorEntry, finding, header_length, parse_header
from dayzero.checkpoint.ranges import in_order
from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError
from dayzero.finding import Finding
from dayzero.units import GIB

Progress = Callable[[int, int], None]  # (shards read, shards in all)

INDEX_SUFFIX = ".safetensors.index.json"
PREFERRED_INDEX = "model" + INDEX_SUFFIX
MAX_INDEX_BYTES = 1 * GIB  # half a million tensors need 55 MB
SINGLE_FILE = "model.safetensors"
NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Index:
    """entries: tensor name -> where it is. files: the shards that count, name -> size in bytes. total_bytes: sum of
    the tensors' bytes. problems: all that is wrong or odd, in the order it was met."""

    entries: dict[str, TensorEntry]
    files: dict[str, int]
    total_bytes: int
    problems: list[Finding]


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


class _Repeats(list[str]):
    """Keys that stood twice in the object being read."""


@dataclass(slots=True)
class _Claims:
    """What the index file says. left: tensors not yet met in a shard; shards: every file it names; total: its
    metadata.total_size."""

    file: str
    left: dict[str, str]
    shards: dict[str, int]
    total: Any = None


@dataclass(slots=True)
class _Gathered:
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    num_vanished: int = 0
    twice: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (first shard, second shard) -> names
    misplaced: dict[str, str] = field(default_factory=dict)  # name -> shard the index states
    unlisted: dict[str, list[str]] = field(default_factory=dict)  # shard -> names the index lacks


def read_index(source: Source, progress: Progress | None = None) -> Index:
    """Headers of all shards that count, checked against each other and the index file.

    With an index file the shards it names count; without one model.safetensors, or else every *.safetensors at the top.
    CheckpointError only when shards exist and not one could be opened.
    """
    got = _Gathered()
    claims = _read_claims(source, got.problems)
    shards = _choose_shards(source, claims, got.problems)
    _report_not_files(source, claims, got.problems)
    heads = in_order([partial(_read_head, source, shard) for shard in shards], source.parallel_reads)
    for done, (shard, head) in enumerate(zip(shards, heads, strict=True), 1):
        _add_shard(got, shard, head, shards[shard], claims)
        if progress is not None:
            progress(done, len(shards))
    if shards and got.num_vanished == len(shards):
        raise CheckpointError(got.problems[-1].claim)
    _report_shards(got)
    if claims is not None:
        _report_claims(got, claims, source)
    total_bytes = sum(entry.end - entry.start for entry in got.entries.values())
    if claims is not None:
        _check_total(claims, total_bytes, got.problems)
    return Index(got.entries, shards, total_bytes, got.problems)


def _report_not_files(source: Source, claims: _Claims | None, problems: list[Finding]) -> None:
    """Shards and index files that are there by name only; without this a folder of them looks like one without any."""
    for file, what in source.not_files.items():
        wanted = file in claims.shards if claims is not None else file != "config.json" and "/" not in file
        if wanted or file.endswith(INDEX_SUFFIX):
            problems.append(finding("not_a_file", f"{file} is {what}, not a file of weights", [file]))


def _read_head(source: Source, shard: str) -> bytes | Finding | CheckpointError:
    """The shard's header JSON, or why there is none. The length is checked before anything of that size is read."""
    size = source.size(shard)
    try:
        length = header_length(source.read(shard, 0, min(8, size)), shard, size)
        return length if isinstance(length, Finding) else source.read(shard, 8, length)
    except CheckpointError as error:
        return error


def _add_shard(
    got: _Gathered, shard: str, head: bytes | Finding | CheckpointError, size: int, claims: _Claims | None
) -> None:
    if isinstance(head, CheckpointError):
        got.num_vanished += 1
        head = finding("unreadable", str(head), [shard])
    if isinstance(head, Finding):
        got.unreadable.add(shard)
        got.problems.append(head)
        return
    entries, problems = parse_header(head, shard, size)
    got.problems += problems
    if not entries and any(p.kind == "integrity.header" for p in problems):
        got.unreadable.add(shard)
    for entry in entries:
        name = entry.name
        first = got.entries.get(name)
        if first is not None:
            if first.file != shard:  # within one header parse_header has told it
                got.twice.setdefault((first.file, shard), []).append(name)
                if got.misplaced.get(name) == shard:
                    del got.misplaced[name]
                    got.entries[name] = entry
            continue
        got.entries[name] = entry
        if claims is None:
            continue
        stated = claims.left.pop(name, None)
        if stated is None:
            got.unlisted.setdefault(shard, []).append(name)
        elif stated != shard:
            got.misplaced[name] = stated


def _report_shards(got: _Gathered) -> None:
    for (first, second), names in got.twice.items():
        claim = f"{len(names)} tensor(s) are stored in both {first} and {second}"
        got.problems.append(finding("duplicate", claim, [first, second, *names], measured=len(names), bound=0))


def _report_claims(got: _Gathered, claims: _Claims, source: Source) -> None:
    """Where index file and shards disagree: one finding per shard and kind."""
    files = source.files()
    lacking: dict[str, list[str]] = {}
    for name, shard in claims.left.items():
        lacking.setdefault(shard, []).append(name)
    for shard in claims.shards:
        names = lacking.get(shard, [])
        if shard not in files:
            claim = f"{claims.file} places {claims.shards[shard]} tensor(s) in {shard}, which is missing"
            remedy = "download the shard (in a hub cache the link may dangle)"
            got.problems.append(finding("missing_shard", claim, [shard, *names], measured=len(names), remedy=remedy))
        elif names and shard in got.unreadable:
            claim = f"{len(names)} tensor(s) that {claims.file} places in {shard} are lost, as it cannot be read"
            got.problems.append(finding("index_tensor_missing", claim, [shard, *names], measured=len(names), bound=0))
        elif names:
            claim = f"{claims.file} places {len(names)} tensor(s) in {shard}, which does not hold them"
            got.problems.append(finding("index_tensor_missing", claim, [shard, *names], measured=len(names), bound=0))
    moved: dict[tuple[str, str], list[str]] = {}
    for name, stated in got.misplaced.items():
        moved.setdefault((stated, got.entries[name].file), []).append(name)
    for (stated, found), names in moved.items():
        claim = f"{claims.file} places {len(names)} tensor(s) in {stated}, but {found} holds them"
        got.problems.append(finding("index_wrong_shard", claim, [stated, found, *names], measured=len(names), bound=0))
    for shard, names in got.unlisted.items():
        claim = f"{shard} holds {len(names)} tensor(s) that {claims.file} does not name"
        got.problems.append(finding("index_unlisted", claim, [shard, *names], measured=len(names), bound=0))


def _check_total(claims: _Claims, total_bytes: int, problems: list[Finding]) -> None:
    # With shards missing or cut the sums cannot agree, and the cause has been told.
    if claims.total is None or claims.total == total_bytes or any(p.verdict == "fail" for p in problems):
        return
    claim = f"metadata.total_size of {claims.file} is {claims.total}, the tensors have {total_bytes} bytes"
    remedy = "harmless to read; the index was probably written before the last conversion"
    more = {"measured": total_bytes, "bound": claims.total}
    problems.append(finding("total_size", claim, [claims.file], verdict="note", remedy=remedy, **more))


def _read_claims(source: Source, problems: list[Finding]) -> _Claims | None:
    """The index file's content, None when there is none that can be read."""
    found = sorted(file for file in source.files() if file.endswith(INDEX_SUFFIX) and "/" not in file)
    if not found:
        return None
    file = PREFERRED_INDEX if PREFERRED_INDEX in found else found[0]
    if len(found) > 1:
        claim = f"{len(found)} index files; {file} counts, the others describe other copies of the weights"
        others = [other for other in found if other != file]
        problems.append(finding("other_index", claim, others, verdict="note", remedy="remove what is not meant"))
    if source.size(file) > MAX_INDEX_BYTES:
        claim = f"{file} has {source.size(file)} bytes, too many for an index file"
        problems.append(finding("index_file", claim, [file], measured=source.size(file), bound=MAX_INDEX_BYTES))
        return None
    try:
        raw = source.read(file, 0, source.size(file))
        content = msgspec.json.decode(raw, type=_IndexFile)
        repeated = _repeated_names(raw, content)
    except RecursionError:
        problems.append(finding("index_file", f"{file} is nested too deeply to be an index", [file]))
        return None
    except ValueError as error:
        claim = str(error) if isinstance(error, CheckpointError) else f"{file} is no index file: {str(error)[:160]}"
        problems.append(finding("index_file", claim, [file]))
        return None
    if repeated:
        claim = f"{file} names {len(repeated)} tensor(s) twice"
        problems.append(finding("duplicate", claim, [file, *repeated], measured=len(repeated), bound=0))
    left, shards = content.weight_map, dict[str, int]()
    for name, shard in left.items():
        left[name] = shard = intern(shard)
        shards[shard] = shards.get(shard, 0) + 1
    return _Claims(file, left, dict(sorted(shards.items())), (content.metadata or {}).get("total_size"))


def _repeated_names(raw: bytes, content: _IndexFile) -> list[str]:
    """Names that stand twice in the weight map; the quick decoder keeps the last one in silence.

    Every pair has a colon. When the text has no more colons than the pairs that were kept, none was dropped.
    """
    metadata = content.metadata
    num_pairs = 1 + len(content.weight_map) + (1 + len(metadata) if metadata is not None else 0)
    if raw.count(b":") == num_pairs:
        return []

    def keep_repeats(pairs: list[tuple[str, Any]]) -> _Repeats | dict[str, Any]:
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return {"weight_map": fields["weight_map"]} if "weight_map" in fields else {}
        counts = Counter(name for name, _ in pairs)
        return _Repeats(name for name, count in counts.items() if count > 1)

    value = json.loads(raw, object_pairs_hook=keep_repeats)
    if isinstance(value, _Repeats):
        return list(value)
    repeats = value.get("weight_map")
    return list(repeats) if isinstance(repeats, _Repeats) else []


def _choose_shards(source: Source, claims: _Claims | None, problems: list[Finding]) -> dict[str, int]:
    """The shards that count, name -> size; the others in the folder become one note."""
    files = source.files()
    stored = sorted(file for file in files if file.endswith(".safetensors"))
    top = [file for file in stored if "/" not in file]
    if claims is not None:
        chosen = [shard for shard in claims.shards if shard in files]
    elif SINGLE_FILE in top:
        chosen = [SINGLE_FILE]
    else:
        chosen = top
        _check_numbering(top, problems)
    extra = [file for file in stored if file not in set(chosen)]
    if extra:
        why = f"{claims.file} does not name" if claims else "are not part of the checkpoint beside the chosen ones"
        claim = f"{len(extra)} safetensors file(s) that {why}; they are not read"
        remedy = "often a second copy in the publisher's own names; remove it or name it in the index"
        problems.append(finding("extra_file", claim, extra, verdict="note", measured=len(extra), remedy=remedy))
    if not chosen and claims is None and not source.config_only:
        claim = f"{source.name} holds no safetensors file; only the config can be checked"
        problems.append(
            finding("no_weights", claim, [source.name], verdict="note", remedy="give a folder with weights")
        )
    return {file: files[file] for file in chosen}


def _check_numbering(shards: list[str], problems: list[Finding]) -> None:
    """Without an index, names such as model-00002-of-00003 still tell which shards are missing."""
    groups: dict[tuple[str, str, int], set[int]] = {}
    for shard in shards:
        match = NUMBERED.fullmatch(shard)
        if match:
            key = (match["stem"], match["total"], len(match["number"]))
            groups.setdefault(key, set()).add(int(match["number"]))
    for (stem, total, width), numbers in groups.items():
        if not 0 < int(total) <= 100_000:
            continue
        first = 0 if 0 in numbers else 1
        missing = [n for n in range(first, int(total) + first) if n not in numbers]
        if missing:
            names = [f"{stem}{n:0{width}d}-of-{total}.safetensors" for n in missing]
            claim = f"{len(missing)} of {int(total)} shards are missing, by the numbers in the files' names"
            problems.append(finding("missing_shard", claim, names, measured=len(missing), bound=0, remedy=AGAIN))
