"""One safetensors header, from bytes to entries and findings. Never raises on bad content, never trusts a length.

File: 8-byte little-endian header length N, N bytes of JSON, then the tensors' bytes. JSON: name -> {"dtype", "shape",
"data_offsets": [begin, end)} relative to byte 8+N, and optionally "__metadata__". Source: the format's description in
the safetensors repository, and the dtype names of its release 0.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from sys import intern
from typing import Annotated, Any

import msgspec

from dayzero.finding import Finding, Verdict

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # what the format's own library refuses to exceed
MAX_VALUES = 10_000_000  # JSON values in one header: the largest allowed one needs about 7 million
MAX_EVIDENCE = 12
METADATA = "__metadata__"
AGAIN = "download the file again, or ask the publisher"


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor. dtype: the file's code, e.g. BF16, U8, F8_E4M3, F4. start, end: byte offsets in the file
    itself (not in its data section), end exclusive: ``source.read(e.file, e.start, e.nbytes)`` is the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Elements in ``shape``. F4 counts four-bit elements; a U8 tensor that packs two counts bytes."""
        return prod(self.shape)


MAX_SIZE = (1 << 63) - 1  # no file is longer, no dimension larger; keeps every sum printable
MAX_SINGLE = 8  # findings about one tensor each, per file and kind; the rest become one finding
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class _Stored(msgspec.Struct, gc=False):
    """A header entry as written. The defaults let ``__metadata__`` pass through the same quick decoder."""

    dtype: str = ""
    shape: tuple[Size, ...] | None = None
    data_offsets: tuple[Size, Size] | None = None


class _Metadata(msgspec.Struct):
    text: msgspec.Raw = msgspec.field(name=METADATA)


_DECODER = msgspec.json.Decoder(dict[str, _Stored])
_METADATA_DECODER = msgspec.json.Decoder(_Metadata)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with every pair kept, repeated keys included."""


def finding(
    kind: str, claim: str, names: Iterable[str], *, verdict: Verdict = "fail", remedy: str = AGAIN, **more: Any
) -> Finding:
    """A finding about stored weights. more: measured, bound. At most MAX_EVIDENCE names are kept, the rest counted."""
    listed = list(names)
    kept = listed[:MAX_EVIDENCE]
    if len(listed) > MAX_EVIDENCE:
        kept.append(f"and {len(listed) - MAX_EVIDENCE} more")
    return Finding(f"integrity.{kind}", "weights", verdict, claim, evidence=tuple(kept), remedy=remedy, **more)


def header_length(first: bytes, file: str, file_bytes: int) -> int | Finding:
    """Length of the JSON by the file's first 8 bytes, or the finding why it cannot be one."""
    if len(first) < 8:
        return finding(
            "truncated", f"{file} has {file_bytes} bytes, too few for a header", [file], measured=file_bytes, bound=8
        )
    length = int.from_bytes(first[:8], "little")
    room = file_bytes - 8
    if length == 0:
        reason = "which no header can have"
    elif length > MAX_HEADER_BYTES:
        reason = f"above the {MAX_HEADER_BYTES} that the format allows: this is no safetensors file"
    elif length > room:
        reason = f"but only {room} bytes follow: the file ends inside its header"
    else:
        return length
    claim = f"{file} states a header of {length} bytes, {reason}"
    return finding("header_length", claim, [file], measured=length, bound=min(room, MAX_HEADER_BYTES))


def parse_header(header: bytes, file: str, file_bytes: int) -> tuple[list[TensorEntry], list[Finding]]:
    """Entries in header order and what is wrong with them. file_bytes: size of the whole file.

    Entries whose dtype or size is wrong are kept (their names exist); those without a usable shape or offsets are not.
    A name written twice gives two entries.
    """
    if sum(header.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        # Python needs up to a hundred bytes for a value of one: refuse before it takes the machine's memory.
        claim = f"the header of {file} holds over {MAX_VALUES} values: it is no safetensors header"
        return [], [finding("header", claim, [file], bound=MAX_VALUES)]
    stored = _decode_quickly(header)
    malformed: list[Finding] = []
    if stored is None:
        pairs = _decode_fully(header, file)
        if isinstance(pairs, Finding):
            return [], [pairs]
        stored, malformed = _stored_pairs(pairs, file)
    entries, wrong = _entries(stored, file, 8 + len(header))
    layout = _layout(entries, file, 8 + len(header), file_bytes, complete=not malformed, sound=not wrong)
    return entries, malformed + wrong + layout


def _decode_quickly(header: bytes) -> list[tuple[str, _Stored]] | None:
    """The pairs of a header in which nothing is odd, else None.

    Decoding into a dict would drop repeated names in silence. Each top-level value is an object, so the text outside
    the metadata has at least one opening brace for the whole and one for each entry; when it has exactly one more than
    there are distinct names, no name was repeated. Likewise for the keys inside an entry, which without backslashes
    can only be spelt literally.
    """
    try:
        decoded = _DECODER.decode(header)
        metadata = bytes(_METADATA_DECODER.decode(header).text) if METADATA in decoded else b""
    except (ValueError, RecursionError):
        return None

    def outside(mark: bytes) -> int:
        return header.count(mark) - metadata.count(mark)

    decoded.pop(METADATA, None)
    if outside(b"{") != len(decoded) + 1 or outside(b"\\"):
        return None
    if any(outside(key) != len(decoded) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')):
        return None
    for item in decoded.values():
        if item.shape is None or item.data_offsets is None or not item.dtype:
            return None
    return list(decoded.items())


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _decode_fully(header: bytes, file: str) -> _Pairs | Finding:
    try:
        value = json.loads(header.decode("utf-8"), object_pairs_hook=_Pairs, parse_constant=_no_constant)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # bad UTF-8, bad JSON, an integer of thousands of digits
        reason = str(error)[:120]
    else:
        if isinstance(value, _Pairs):
            return value
        reason = f"it is a {type(value).__name__}, not an object"
    return finding("header", f"the header of {file} is not a JSON object: {reason}", [file])


def _stored_pairs(pairs: _Pairs, file: str) -> tuple[list[tuple[str, _Stored]], list[Finding]]:
    """The well-formed entries, repeated names included, and findings for the others."""
    stored: list[tuple[str, _Stored]] = []
    problems: list[Finding] = []
    seen: set[str] = set()
    repeated: list[str] = []
    for name, value in pairs:
        if name in seen:
            repeated.append(name)
        seen.add(name)
        if name == METADATA:
            if not isinstance(value, _Pairs):
                problems.append(finding("header", f"{METADATA} in the header of {file} is not an object", [file]))
            continue
        item = _stored_entry(name, value)
        if isinstance(item, str):
            shown = _printable(name)
            problems.append(finding("entry", f"the entry of tensor {shown!r} in {file} {item}", [file, shown]))
        else:
            stored.append((name, item))
    if repeated:
        claim = f"the header of {file} lists {len(repeated)} tensor name(s) twice"
        problems.append(finding("duplicate", claim, [file, *map(_printable, repeated)], measured=len(repeated)))
    return stored, _few(problems, "entry", file)


def _few(problems: list[Finding], kind: str, file: str) -> list[Finding]:
    """The findings, with those of one kind beyond MAX_SINGLE told as one."""
    same = [p for p in problems if p.kind == f"integrity.{kind}"]
    if len(same) <= MAX_SINGLE:
        return problems
    rest = same[MAX_SINGLE:]
    left_out = {id(p) for p in rest}
    kept = [p for p in problems if id(p) not in left_out]
    claim = f"{len(rest)} more tensor(s) of {file} have the same kind of fault as {same[0].evidence[-1]!r}"
    return [*kept, finding(kind, claim, [file, *(p.evidence[-1] for p in rest)], measured=len(rest))]


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _stored_entry(name: str, value: Any) -> _Stored | str:
    """The entry, or what is wrong with it, to follow 'the entry of tensor … in …'."""
    if _printable(name) != name:
        return "has a name that is not valid Unicode"
    if not isinstance(value, _Pairs):
        return f"is a {type(value).__name__}, not an object"
    fields = dict(value)
    if len(fields) != len(value):
        return "states a key twice"
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in fields]
    if missing:
        return f"lacks {', '.join(missing)}"
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not dtype or _printable(dtype) != dtype:
        return f"has a dtype that is no text: {dtype!r:.40}"
    if not _are_sizes(shape):
        return f"has a shape that is no list of whole numbers from 0 to 2^63: {str(shape)[:60]}"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"has data_offsets that are no two whole numbers from 0 to 2^63: {str(offsets)[:60]}"
    return _Stored(dtype, tuple(shape), (offsets[0], offsets[1]))


def _are_sizes(value: Any) -> bool:
    # bool is an int to Python, not to the format.
    return type(value) is list and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)


def _entries(
    stored: Sequence[tuple[str, _Stored]], file: str, data_start: int
) -> tuple[list[TensorEntry], list[Finding]]:
    entries: list[TensorEntry] = []
    problems: list[Finding] = []
    unknown: dict[str, list[str]] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, item in stored:
        assert item.shape is not None
        assert item.data_offsets is not None
        begin, end = item.data_offsets
        dtype, shape = intern(item.dtype), shapes.setdefault(item.shape, item.shape)
        if end < begin:
            claim = f"the entry of tensor {name!r} in {file} ends at {end}, before it begins at {begin}"
            problems.append(finding("entry", claim, [file, name]))
            continue
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            unknown.setdefault(dtype, []).append(name)
        else:
            key = (dtype, shape)
            num_bits = sizes.get(key)
            if num_bits is None:
                num_bits = sizes[key] = _numel(shape) * bits
            if num_bits != 8 * (end - begin):
                problems.append(_size_finding(name, item, file, num_bits))
        entries.append(TensorEntry(name, dtype, shape, file, data_start + begin, data_start + end))
    for dtype, names in unknown.items():
        claim = f"{file} stores {len(names)} tensor(s) as {dtype[:40]!r}, which is no safetensors dtype"
        remedy = "check which tool wrote the file; a newer format needs its dtype added"
        problems.append(finding("dtype", claim, [file, *names], measured=dtype[:40], remedy=remedy))
    return entries, _few(_few(problems, "entry", file), "size", file)


def _numel(shape: tuple[int, ...]) -> int:
    """Product, stopped early: a hostile shape would otherwise make a number of millions of digits."""
    if 0 in shape:
        return 0
    total = 1
    for size in shape:
        total *= size
        if total >= 1 << 64:
            return 1 << 64
    return total


def _size_finding(name: str, item: _Stored, file: str, num_bits: int) -> Finding:
    assert item.shape is not None
    assert item.data_offsets is not None
    begin, end = item.data_offsets
    shape = list(item.shape) if len(item.shape) <= 8 else f"of {len(item.shape)} dimensions"
    needed: int | str = num_bits // 8 if num_bits % 8 == 0 else f"{num_bits} bits, not a whole number of"
    if num_bits >= 1 << 64:
        needed = "over 2^61"
    claim = f"tensor {name!r} in {file}: {item.dtype} {shape} needs {needed} bytes, its offsets hold {end - begin}"
    return finding("size", claim, [file, name], measured=end - begin, bound=needed)


def _layout(
    entries: list[TensorEntry], file: str, data_start: int, file_bytes: int, *, complete: bool, sound: bool
) -> list[Finding]:
    """Overlaps, holes and the file's end. complete: no entry was left out, so that a hole is one; sound: each
    entry's size fits its shape, so that a missing tail is a cut file and not a wrong offset."""
    overlaps: list[str] = []
    holes: list[str] = []
    hole_bytes = 0
    cursor, last = data_start, ""
    for entry in sorted(entries, key=lambda e: (e.start, e.end)):
        if entry.start == entry.end:
            continue
        if entry.start < cursor:
            overlaps.append(f"{entry.name} [{entry.start}, {entry.end}) and {last} up to {cursor}")
        elif entry.start > cursor:
            holes.append(f"before {entry.name} at byte {entry.start}")
            hole_bytes += entry.start - cursor
        if entry.end > cursor:
            cursor, last = entry.end, entry.name
    found = []
    if overlaps:
        claim = f"{len(overlaps)} tensor(s) of {file} share bytes with another"
        found.append(finding("overlap", claim, [file, *overlaps], measured=len(overlaps), bound=0))
    furthest = max((e.start for e in entries), default=data_start)  # an empty tensor may lie beyond all others
    if max(cursor, furthest) > file_bytes:
        regular = complete and sound and not overlaps and not holes and furthest <= cursor
        found.append(_past_end(entries, file, file_bytes, cursor, regular))
    if not complete:
        return found
    if holes:
        claim = f"{file} has {hole_bytes} bytes between tensors that no tensor owns"
        remedy = "harmless to read; the format's own library refuses such a file"
        found.append(
            finding("hole", claim, [file, *holes], verdict="note", measured=hole_bytes, bound=0, remedy=remedy)
        )
    if cursor < file_bytes:
        extra = file_bytes - cursor
        claim = f"{file} has {extra} bytes after the last tensor ends at byte {cursor}"
        found.append(finding("oversized", claim, [file, last or "no tensor"], measured=file_bytes, bound=cursor))
    return found


def _past_end(entries: list[TensorEntry], file: str, file_bytes: int, needed: int, regular: bool) -> Finding:
    hit = [e.name for e in entries if e.end > file_bytes or e.start > file_bytes]
    if regular:
        claim = (
            f"{file} is cut short: {needed - file_bytes} of {needed} bytes are missing, {len(hit)} tensor(s) are hit"
        )
        return finding("truncated", claim, [file, *hit], measured=file_bytes, bound=needed)
    claim = f"{len(hit)} tensor(s) of {file} point beyond its end at byte {file_bytes}"
    return finding("out_of_range", claim, [file, *hit], measured=needed, bound=file_bytes)
