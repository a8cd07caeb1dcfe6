"""Folders of shards: what counts, and every disagreement between index file and shards as a finding with its names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.checkpoint.index import Index, read_index
from dayzero.checkpoint.source import LocalSource, open_source
from dayzero.errors import CheckpointError
from dayzero.finding import Finding, worst
from tests.paper.files import write_checkpoint, write_index, write_raw, write_safetensors

A, B, C = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = {
        A: {"a.0": ("F32", [2, 2], bytes(16)), "a.1": ("BF16", [4], bytes(8))},
        B: {"b.0": ("U8", [8], bytes(8)), "b.1": ("F8_E8M0", [2], bytes(2))},
        C: {"c.0": ("I64", [1], bytes(8))},
    }
    write_checkpoint(tmp_path / "model", shards)
    return tmp_path / "model"


def read(folder: Path) -> Index:
    return read_index(open_source(str(folder)))


def kinds(index: Index) -> list[str]:
    return sorted(p.kind.removeprefix("integrity.") for p in index.problems)


def one(index: Index, kind: str, *named: str) -> Finding:
    assert kinds(index) == [kind], [p.claim for p in index.problems]
    found = index.problems[0]
    text = " ".join([found.claim, *found.evidence])
    assert all(word in text for word in named), text
    return found


def change_index(folder: Path, **weight_map: str | None) -> None:
    """Sets places of tensors in the index ('_' stands for '.'), None removes."""
    content = json.loads((folder / INDEX).read_text())
    for name, shard in weight_map.items():
        if shard is None:
            del content["weight_map"][name.replace("_", ".")]
        else:
            content["weight_map"][name.replace("_", ".")] = shard
    (folder / INDEX).write_text(json.dumps(content))


def test_sound_folder(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    source = open_source(str(folder))
    index = read_index(source, lambda done, total: calls.append((done, total)))
    assert index.problems == []
    assert list(index.files) == [A, B, C]
    assert index.files[A] == (folder / A).stat().st_size
    assert index.total_bytes == 42
    assert sorted(index.entries) == ["a.0", "a.1", "b.0", "b.1", "c.0"]
    entry = index.entries["b.1"]
    assert (entry.file, entry.dtype, entry.shape, entry.nbytes) == (B, "F8_E8M0", (2,), 2)
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_reads_headers_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": {"w": ("F32", [1 << 30], None)}})
    source = open_source(str(tmp_path))
    index = read_index(source)
    assert index.total_bytes == 4 << 30
    assert index.problems == []
    assert source.num_reads == 2
    assert source.bytes_read < 200


def test_entry_offsets_find_the_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": {"x": ("U8", [3], b"abc"), "y": ("U8", [2], b"de")}})
    source = open_source(str(tmp_path))
    entry = read_index(source).entries["y"]
    assert source.read(entry.file, entry.start, entry.nbytes) == b"de"


def test_missing_shard(folder: Path) -> None:
    (folder / B).unlink()
    found = one(read(folder), "missing_shard", B, "2 tensor(s)", "b.0", "b.1")
    assert found.verdict == "fail"


def test_missing_shard_without_an_index_is_told_by_the_numbers(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert kinds(read(folder)) == []
    (folder / B).unlink()
    assert one(read(folder), "missing_shard", "1 of 3").evidence == (B,)


def test_numbers_keep_their_width(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"m-00001-of-000002.safetensors": {"a": ("U8", [1], b"x")}})
    assert one(read(tmp_path), "missing_shard").evidence == ("m-00002-of-000002.safetensors",)


def test_tensor_the_shard_lacks(folder: Path) -> None:
    change_index(folder, b_9=B)
    assert one(read(folder), "index_tensor_missing", B, "b.9", INDEX).verdict == "fail"


def test_tensor_in_another_shard_than_stated(folder: Path) -> None:
    change_index(folder, b_0=A)
    index = read(folder)
    assert one(index, "index_wrong_shard", A, B, "b.0").verdict == "fail"
    assert index.entries["b.0"].file == B


def test_tensor_the_index_does_not_name(folder: Path) -> None:
    change_index(folder, a_1=None)
    index = read(folder)
    assert one(index, "index_unlisted", A, "a.1").verdict == "fail"
    assert "a.1" in index.entries


def test_shard_the_index_does_not_name_is_a_note(folder: Path) -> None:
    (folder / "original").mkdir()
    write_safetensors(folder / "original" / "consolidated.safetensors", {"z": ("U8", [1], b"x")})
    write_safetensors(folder / "consolidated.safetensors", {"z": ("U8", [1], b"x")})
    index = read(folder)
    found = one(index, "extra_file")
    assert found.evidence == ("consolidated.safetensors", "original/consolidated.safetensors")
    assert found.verdict == "note"
    assert "z" not in index.entries


def test_single_file_counts_alone_without_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": {"a": ("U8", [1], b"x")}})
    write_safetensors(tmp_path / "consolidated.safetensors", {"z": ("U8", [1], b"x")})
    index = read(tmp_path)
    assert one(index, "extra_file").evidence == ("consolidated.safetensors",)
    assert list(index.entries) == ["a"]


def test_nested_shards_that_the_index_names_count(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    write_safetensors(tmp_path / "part" / "x.safetensors", {"z": ("U8", [1], b"x")})
    write_index(tmp_path, {"z": "part/x.safetensors"}, 1)
    index = read(tmp_path)
    assert index.problems == []
    assert index.entries["z"].file == "part/x.safetensors"


def test_total_size_is_a_note(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["metadata"]["total_size"] = 41
    (folder / INDEX).write_text(json.dumps(content))
    found = one(read(folder), "total_size", "41", "42")
    assert (found.verdict, found.measured, found.bound) == ("note", 42, 41)


def test_same_tensor_in_two_shards(folder: Path) -> None:
    write_safetensors(folder / C, {"c.0": ("I64", [1], bytes(8)), "b.0": ("U8", [8], bytes(8))})
    found = one(read(folder), "duplicate", B, C, "b.0")
    assert found.verdict == "fail"
    change_index(folder, b_0=C)
    index = read(folder)
    one(index, "duplicate", B, C, "b.0")
    assert index.entries["b.0"].file == C


def test_same_name_twice_in_one_shard_is_told_once(folder: Path) -> None:
    entry = '"c.0":{"dtype":"I64","shape":[1],"data_offsets":[%d,%d]}'
    write_raw(folder / C, ("{" + entry % (0, 8) + "," + entry % (8, 16) + "}").encode(), bytes(16))
    index = read(folder)
    one(index, "duplicate", C, "c.0")


def test_same_name_twice_in_the_index(folder: Path) -> None:
    text = (folder / INDEX).read_text().replace('"a.0"', f'"a.0": "{B}", "a.0"')
    (folder / INDEX).write_text(text)
    assert one(read(folder), "duplicate", INDEX, "a.0").verdict == "fail"


def test_index_with_more_than_it_needs(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["metadata"]["note"] = {"a:b": ["c:d"]}
    content["weight_map"] = {"x:y": A, **content["weight_map"]}
    (folder / INDEX).write_text(json.dumps({**content, "more": [1, {"k": 2}]}))
    one(read(folder), "index_tensor_missing", "x:y")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 100_000, '{"weight_map": {"a": "b"'
    , '{"weight_map": {}, "metadata": 5}']
)  # fmt: skip
def test_broken_index_file(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    index = read(folder)
    assert one(index, "index_file", INDEX).verdict == "fail"
    assert len(index.entries) == 5


def test_index_file_of_absurd_size_is_not_read(folder: Path) -> None:
    os.truncate(folder / INDEX, 1 << 40)
    source = open_source(str(folder))
    index = read_index(source)
    one(index, "index_file", INDEX, str(1 << 40))
    assert source.bytes_read < 10_000


def test_several_index_files(folder: Path) -> None:
    write_index(folder, {"z": "gone.safetensors"}, 1, "consolidated.safetensors.index.json")
    found = one(read(folder), "other_index", INDEX)
    assert found.evidence == ("consolidated.safetensors.index.json",)
    (folder / INDEX).unlink()
    assert "missing_shard" in kinds(read(folder))


def test_index_by_another_name(folder: Path) -> None:
    (folder / INDEX).rename(folder / "model.fp8.safetensors.index.json")
    (folder / B).unlink()
    one(read(folder), "missing_shard", B, "model.fp8.safetensors.index.json")


def test_truncated_shard_names_missing_bytes_and_tensors(folder: Path) -> None:
    size = (folder / B).stat().st_size
    os.truncate(folder / B, size - 3)
    index = read(folder)
    found = one(index, "truncated", B, "3 of", "b.0", "b.1")
    assert (found.measured, found.bound) == (size - 3, size)
    assert len(index.entries) == 5


def test_shard_cut_in_its_header_loses_its_tensors_once(folder: Path) -> None:
    os.truncate(folder / B, 20)
    index = read(folder)
    assert kinds(index) == ["header_length", "index_tensor_missing"]
    assert all(B in p.evidence for p in index.problems)
    assert "2 tensor(s)" in index.problems[1].claim
    assert "cannot be read" in index.problems[1].claim
    assert worst(index.problems) == "fail"
    os.truncate(folder / B, 0)
    assert kinds(read(folder)) == ["index_tensor_missing", "truncated"]


def test_header_that_is_no_json_in_one_shard(folder: Path) -> None:
    write_raw(folder / B, b"not json")
    index = read(folder)
    assert kinds(index) == ["header", "index_tensor_missing"]
    assert sorted(index.entries) == ["a.0", "a.1", "c.0"]


def test_huge_length_allocates_nothing(folder: Path) -> None:
    write_raw(folder / A, b"{}", length=1 << 63)
    source = open_source(str(folder))
    index = read_index(source)
    assert index.problems[0].kind == "integrity.header_length"
    assert str(1 << 63) in index.problems[0].claim
    assert source.bytes_read < 10_000


class Vanishing(LocalSource):
    """A folder whose files disappear between listing and reading."""

    def __init__(self, folder: Path, gone: set[str]) -> None:
        super().__init__(folder)
        self.gone = gone

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        if file in self.gone:
            raise FileNotFoundError(file)
        return super()._fetch(file, start, length)


def test_shard_that_vanishes_half_way(folder: Path) -> None:
    index = read_index(Vanishing(folder, {B}))
    assert kinds(index) == ["index_tensor_missing", "unreadable"]
    assert B in index.problems[0].claim
    assert "disappeared" in index.problems[0].claim
    with pytest.raises(CheckpointError, match="disappeared"):
        read_index(Vanishing(folder, {A, B, C}))


def test_folder_without_weights_is_a_note_and_a_lone_config_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert one(read(tmp_path), "no_weights", str(tmp_path)).verdict == "note"
    index = read(tmp_path / "config.json")
    assert (index.entries, index.files, index.total_bytes, index.problems) == ({}, {}, 0, [])


def test_entries_are_compact_and_shared(folder: Path) -> None:
    entries = read(folder).entries
    assert entries["a.0"].file is entries["a.1"].file
    assert not hasattr(entries["a.0"], "__dict__")
    with pytest.raises(AttributeError):
        entries["a.0"].start = 5  # type: ignore[misc]


MAP = st.dictionaries(
    st.sampled_from(["a.0", "a.1", "b.0", "x", "\ud800"]) | st.text(max_size=3),
    st.sampled_from([A, "other.safetensors", "../up.safetensors", ""]) | st.none() | st.integers(),
    max_size=5,
)
CONTENT = st.fixed_dictionaries(
    {},
    optional={"weight_map": MAP | st.integers(), "metadata": st.dictionaries(st.text(max_size=3), st.floats() | MAP)},
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    write_safetensors(path / A, {"a.0": ("U8", [2], b"xy"), "a.1": ("U8", [1], b"z")})
    return path


@settings(max_examples=200)
@given(content=CONTENT | st.binary(max_size=60))
def test_any_index_file(scratch: Path, content: Any) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (scratch / INDEX).write_bytes(raw)
    index = read_index(LocalSource(scratch))
    for problem in index.problems:
        json.dumps(problem.to_json(), ensure_ascii=False).encode()
    assert set(index.files) <= {A}
