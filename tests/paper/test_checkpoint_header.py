"""One header: every way in which it can be wrong gives a finding that names file and tensor; nothing gives a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.checkpoint import header as header_module
from dayzero.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, TensorEntry, header_length, parse_header
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.source import LocalSource
from dayzero.finding import Finding
from tests.paper.files import header_of, num_bytes

FILE = "model.safetensors"
GOOD = {"a": ("F32", [2, 3], None), "b": ("BF16", [5], None), "c": ("F4", [2, 16], None)}
GOOD_BYTES = 24 + 10 + 16


def parse(header: bytes | object, data_bytes: int = GOOD_BYTES) -> tuple[list[TensorEntry], list[Finding]]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(raw, FILE, 8 + len(raw) + data_bytes)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    header: dict[str, Any] = header_of(GOOD)
    header[name] = {key: value for key, value in {**header[name], **fields}.items() if value is not ...}
    return header


def only(problems: list[Finding], kind: str, *named: str) -> Finding:
    assert [p.kind for p in problems] == [f"integrity.{kind}"], [p.claim for p in problems]
    found = problems[0]
    text = " ".join([found.claim, *found.evidence])
    for word in (FILE, *named):
        assert word in text, (word, text)
    assert found.layer == "weights"
    assert found.remedy
    return found


def test_sound_header_gives_absolute_offsets() -> None:
    raw = json.dumps(header_of(GOOD, {"format": "pt", "dtype": "x", "note": '{"a": "b"}'})).encode()
    entries, problems = parse_header(raw, FILE, 8 + len(raw) + GOOD_BYTES)
    assert problems == []
    assert [(e.name, e.dtype, e.shape, e.start - 8 - len(raw), e.nbytes, e.numel) for e in entries] == [
        ("a", "F32", (2, 3), 0, 24, 6),
        ("b", "BF16", (5,), 24, 10, 5),
        ("c", "F4", (2, 16), 34, 16, 32),
    ]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_is_held_to_its_width(dtype: str) -> None:
    tensors = {"w": (dtype, [3, 8], None), "empty": (dtype, [0, 7], None), "scalar": ("F32", [], None)}
    size = num_bytes(dtype, [3, 8])
    assert parse(header_of(tensors), size + 4)[1] == []
    header: Any = header_of(tensors)
    header["w"]["shape"] = [3, 16]
    found = only(parse(header, size + 4)[1], "size", "'w'")
    assert (found.measured, found.bound) == (size, 2 * size)


def test_sub_byte_tensor_must_fill_whole_bytes() -> None:
    assert parse({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2)[1][0].kind == "integrity.size"
    assert parse({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3)[1] == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"nonsense", b"\xff\xfe{}", b'{"a": NaN}', b"{} x", b"[" * 200_000, b'{"a":' * 200_000]
)
def test_not_json(text: bytes) -> None:
    entries, problems = parse(text, 0)
    assert entries == []
    only(problems, "header", "not a JSON object")


@pytest.mark.parametrize("value", [[], 3, "text", None])
def test_not_an_object(value: object) -> None:
    only(parse(value, 0)[1], "header", "not an object")


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"data_offsets": [-8, 10]}, "data_offsets"),
        ({"data_offsets": [24.0, 34.0]}, "data_offsets"),
        ({"data_offsets": [24, 34.5]}, "data_offsets"),
        ({"data_offsets": ["24", "34"]}, "data_offsets"),
        ({"data_offsets": [False, True]}, "data_offsets"),
        ({"data_offsets": [24]}, "data_offsets"),
        ({"data_offsets": [24, 34, 40]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
        ({"data_offsets": [24, 10**4000]}, "data_offsets"),
        ({"data_offsets": [34, 24]}, "before it begins"),
        ({"data_offsets": ...}, "lacks data_offsets"),
        ({"shape": ...}, "lacks shape"),
        ({"dtype": ..., "shape": ...}, "lacks dtype, shape"),
        ({"shape": [-5]}, "shape"),
        ({"shape": 5}, "shape"),
        ({"shape": [True]}, "shape"),
        ({"shape": [5.0]}, "shape"),
        ({"dtype": 7}, "no text: 7"),
        ({"dtype": ""}, "dtype"),
        ({"dtype": "\ud800"}, "no text: '\\ud800'"),
    ],
)
def test_malformed_entry(fields: dict[str, Any], word: str) -> None:
    entries, problems = parse(changed("b", **fields))
    assert [e.name for e in entries] == ["a", "c"]
    assert any(word in p.claim for p in problems)
    entry = next(p for p in problems if p.kind == "integrity.entry")
    assert entry.evidence == (FILE, "b")
    assert all(p.verdict == "fail" for p in problems if p.kind != "integrity.hole")


def test_entry_that_is_no_object() -> None:
    header: dict[str, Any] = header_of(GOOD)
    header["b"] = 5
    assert only(parse(header)[1], "entry", "'b'").verdict == "fail"


def test_metadata_that_is_no_object() -> None:
    only(parse({"__metadata__": 5, **header_of(GOOD)})[1], "header", "__metadata__")


def test_unknown_dtype_keeps_the_name() -> None:
    entries, problems = parse(changed("b", dtype="F7"))
    assert only(problems, "dtype", "b", "'F7'").verdict == "fail"
    assert "b" in [e.name for e in entries]


@pytest.mark.parametrize("shape", [[4], [6], [1 << 62, 1 << 62], [(1 << 63) - 1] * 20_000])
def test_size_against_shape(shape: list[int]) -> None:
    assert only(parse(changed("b", shape=shape))[1], "size", "'b'").measured == 10


def test_duplicate_names_are_found_however_they_are_spelt() -> None:
    first = b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
    second = b'"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}'
    for text in (
        b"{" + first + b"," + second + b"}",
        b"{" + first + b"," + second.replace(b'"a"', b'"\\u0061"') + b"}",
        b'{"__metadata__":{"dtype":"x"},' + first + b"," + second + b"}",
        b'{"__metadata__":{"a":"{\\"dtype\\""},' + first + b"," + second + b"}",
    ):
        entries, problems = parse(text, 4)
        assert only(problems, "duplicate", "a").measured == 1
        assert [e.start - 8 - len(text) for e in entries] == [0, 2]
    hidden = b'{"a":{},' + first + b"}"
    kinds = {p.kind for p in parse(hidden, 2)[1]}
    assert kinds == {"integrity.duplicate", "integrity.entry"}
    for key in (b"dtype", b"dt\\u0079pe"):
        twice = b'{"a":{"dtype":"U8","' + key + b'":"I8","shape":[2],"data_offsets":[0,2]}}'
        assert "states a key twice" in only(parse(twice, 2)[1], "entry", "a").claim


def test_metadata_twice() -> None:
    text = b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    only(parse(text, 1)[1], "duplicate", "__metadata__")


def test_metadata_with_json_inside_stays_on_the_quick_path() -> None:
    header = header_of(GOOD, {"config": json.dumps({"dtype": {"shape": "\\"}}), "dtype": "x", "note": "{}"})
    assert header_module._decode_quickly(json.dumps(header).encode()) is not None


def test_names_with_braces_quotes_and_keywords_are_ordinary() -> None:
    names = ["{", '"dtype"', "data_offsets", "a:{b}", "ü", "with\\backslash"]
    header = header_of({name: ("U8", [2], None) for name in names})
    entries, problems = parse(header, 12)
    assert problems == []
    assert [e.name for e in entries] == names


def test_overlap_names_both() -> None:
    found = only(parse(changed("b", data_offsets=[20, 30]), GOOD_BYTES)[1][:1], "overlap", "b [", "a up to")
    assert found.verdict == "fail"
    inside = header_of({"big": ("U8", [8], None), "last": ("U8", [1], None)})
    inside["small"] = {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}
    only(parse(inside, 9)[1], "overlap", "small", "big")


def test_hole_is_a_note() -> None:
    header: Any = header_of(GOOD)
    header["c"]["data_offsets"] = [40, 56]
    found = only(parse(header, 56)[1], "hole", "before c")
    assert (found.verdict, found.measured) == ("note", 6)


def test_truncated_says_how_much_and_which() -> None:
    found = only(parse(header_of(GOOD), GOOD_BYTES - 20)[1], "truncated", "20 of", "2 tensor(s)")
    assert found.evidence == (FILE, "b", "c")
    assert found.verdict == "fail"


def test_oversized() -> None:
    assert only(parse(header_of(GOOD), GOOD_BYTES + 3)[1], "oversized", "3 bytes after", "c").verdict == "fail"
    only(parse({}, 3)[1], "oversized")


def test_wrong_offset_beyond_the_end_is_not_called_a_cut_file() -> None:
    problems = parse(changed("c", data_offsets=[1000, 1016]))[1]
    assert {p.kind for p in problems} == {"integrity.out_of_range", "integrity.hole"}
    assert problems[0].evidence == (FILE, "c")
    assert problems[0].verdict == "fail"
    header: Any = {**header_of(GOOD), "nil": {"dtype": "U8", "shape": [0], "data_offsets": [999, 999]}}
    only(parse(header)[1], "out_of_range", "nil")


def test_many_faults_stay_few_findings() -> None:
    header = {f"t{i}": {"dtype": "U8", "shape": [9], "data_offsets": [0, 1]} for i in range(20_000)}
    problems = parse(header, 1)[1]
    assert len(problems) < 15
    assert sum(p.measured for p in problems if p.kind == "integrity.size" and "more tensor" in p.claim) == 19_992
    assert len(parse({f"t{i}": {} for i in range(20_000)}, 1)[1]) < 15


@pytest.mark.parametrize("unit", [b'"a":{},', b"[],", b"1,"])
def test_header_of_too_many_values_is_refused_unparsed(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MAX_VALUES", 1000)
    only(parse(b"[" + unit * 1001 + b"0]", 0)[1], "header", "over 1000 values")
    assert "not a JSON object" in parse(b"[" + b"1," * 900 + b"0]", 0)[1][0].claim


@pytest.mark.parametrize(
    "length, size", [(0, 100), (1 << 63, 100), ((1 << 64) - 1, 100), (93, 100), (MAX_HEADER_BYTES + 1, 1 << 40)]
)
def test_header_length(length: int, size: int) -> None:
    found = header_length(length.to_bytes(8, "little"), FILE, size)
    assert isinstance(found, Finding)
    assert only([found], "header_length", str(length)).verdict == "fail"
    assert header_length((92).to_bytes(8, "little"), FILE, 100) == 92


def test_file_too_short_for_a_length() -> None:
    found = header_length(b"1234567", FILE, 7)
    assert isinstance(found, Finding)
    only([found], "truncated", "7 bytes")


def read_bytes(folder: Path, content: bytes) -> None:
    """Through the whole reader; a file that can be opened gives findings, which must be printable."""
    (folder / FILE).write_bytes(content)
    index = read_index(LocalSource(folder))
    for problem in index.problems:
        json.dumps(problem.to_json(), ensure_ascii=False).encode()
    for entry in index.entries.values():
        assert 8 <= entry.start <= entry.end


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=200)
@given(content=st.binary(max_size=200))
def test_any_bytes_as_a_file(scratch: Path, content: bytes) -> None:
    read_bytes(scratch, content)


@settings(max_examples=200)
@given(header=st.binary(max_size=200), length=st.none() | st.integers(0, (1 << 64) - 1), tail=st.binary(max_size=20))
def test_any_bytes_as_a_header(scratch: Path, header: bytes, length: int | None, tail: bytes) -> None:
    read_bytes(scratch, (len(header) if length is None else length).to_bytes(8, "little") + header + tail)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBER = st.integers(-2, 70) | st.integers() | st.just(1 << 63) | st.just(10**30) | st.floats() | st.booleans()
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "F9", ""]) | JSON,
        "shape": st.lists(NUMBER, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBER, min_size=1, max_size=3) | JSON,
        "extra": JSON,
    },
)
NAME = st.sampled_from(["a", "b", "__metadata__", "dtype"]) | st.text(st.characters(exclude_categories=()), max_size=6)


@settings(max_examples=250)
@given(header=st.dictionaries(NAME, ENTRY | JSON, max_size=6), tail=st.binary(max_size=80))
def test_headers_of_nearly_right_entries(scratch: Path, header: dict[str, Any], tail: bytes) -> None:
    raw = json.dumps(header).encode()
    read_bytes(scratch, len(raw).to_bytes(8, "little") + raw + tail)


@settings(max_examples=250)
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_valid_file_with_bytes_changed(scratch: Path, edits: list[tuple[float, int]]) -> None:
    raw = json.dumps(header_of(GOOD, {"format": "pt"})).encode()
    content = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(GOOD_BYTES))
    for place, value in edits:
        content[int(place * (len(content) - 1))] = value
    read_bytes(scratch, bytes(content))


@given(pairs=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=6))
def test_repeated_names_are_always_seen(pairs: list[tuple[str, bool]]) -> None:
    texts, offset = [], 0
    for name, escaped in pairs:
        key = f"\\u{ord(name):04x}" if escaped else name
        texts.append(f'"{key}":{{"dtype":"U8","shape":[1],"data_offsets":[{offset},{offset + 1}]}}')
        offset += 1
    entries, problems = parse(("{" + ",".join(texts) + "}").encode(), offset)
    assert len(entries) == len(pairs)
    names = [name for name, _ in pairs]
    assert [p.kind for p in problems] == (["integrity.duplicate"] if len(set(names)) < len(names) else [])
