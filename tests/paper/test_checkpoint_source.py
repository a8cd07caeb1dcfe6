"""Folders as sources: what is accepted, what is refused and with which sentence, ranges, files that change."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.ranges import MAX_SPAN_BYTES, in_order, merge_ranges
from dayzero.checkpoint.source import LocalSource, open_source
from dayzero.errors import CheckpointError, ConfigError, UsageError
from tests.paper.files import write_checkpoint, write_safetensors

BYTES = bytes(range(256)) * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", {"model.safetensors": {"w": ("U8", [1024], BYTES)}})
    return tmp_path / "model"


def test_lists_top_and_nested_files_but_no_hidden_folders(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    source = open_source(str(folder))
    assert set(source.files()) == {"config.json", "model.safetensors", "original/params.json"}
    assert source.files()["original/params.json"] == 2
    assert source.exists("config.json")
    assert not source.exists("tokenizer.json")
    assert source.path("config.json") == folder / "config.json"
    assert source.name == str(folder)


def test_counts_reads_and_bytes(folder: Path) -> None:
    source = open_source(str(folder))
    size = source.files()["model.safetensors"]
    assert source.read("model.safetensors", size - 256, 256) == bytes(range(256))
    assert source.read("model.safetensors", 3, 0) == b""
    assert (source.num_reads, source.bytes_read) == (1, 256)


def test_ranges_come_in_the_order_asked_and_near_ones_as_one_read(folder: Path) -> None:
    source = open_source(str(folder))
    start = source.files()["model.safetensors"] - 1024
    wanted = [(start + 900, 10), (start, 4), (start + 2, 4), (start + 5, 0), (start, 1024)]
    got = source.read_ranges("model.safetensors", wanted)
    assert got == [BYTES[s - start : s - start + n] for s, n in wanted]
    assert (source.num_reads, source.bytes_read) == (1, 1024)
    source.merge_gap_bytes = 0
    assert source.read_ranges("model.safetensors", [(start, 4), (start + 8, 4)]) == [BYTES[:4], BYTES[8:12]]
    assert source.num_reads == 3


@given(
    ranges=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=20),
    gap=st.integers(0, 40),
)
def test_merged_reads_cover_each_range_once(ranges: list[tuple[int, int]], gap: int) -> None:
    spans = merge_ranges(ranges, gap)
    owner = {member: (start, end) for start, end, members in spans for member in members}
    assert sorted(owner) == [i for i, (_, length) in enumerate(ranges) if length]
    assert sum(len(members) for _, _, members in spans) == len(owner)
    for member, (start, end) in owner.items():
        assert start <= ranges[member][0]
        assert ranges[member][0] + ranges[member][1] <= end
    assert all(left[1] + gap < right[0] for left, right in pairwise(spans))


def test_merged_reads_stay_bounded() -> None:
    step = MAX_SPAN_BYTES // 4
    spans = merge_ranges([(i * step, step) for i in range(10)], 0)
    assert [end - start for start, end, _ in spans] == [4 * step, 4 * step, 2 * step]


@pytest.mark.parametrize("width", [1, 3])
def test_calls_ahead_keep_their_order(width: int) -> None:
    assert list(in_order([lambda i=i: i * i for i in range(20)], width)) == [i * i for i in range(20)]


@pytest.mark.parametrize("start, length", [(0, 1 << 63), (1 << 63, 8), (-1, 4), (0, -1), (5, 1 << 40)])
def test_range_outside_the_file_is_refused_before_anything_is_allocated(folder: Path, start: int, length: int) -> None:
    source = open_source(str(folder))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        source.read("config.json", start, length)
    assert source.num_reads == 0


def test_file_that_vanishes_half_way(folder: Path) -> None:
    source = open_source(str(folder))
    source.files()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* disappeared .*byte 8") as caught:
        source.read("model.safetensors", 8, 4)
    assert "\n" not in str(caught.value)


def test_file_that_shrinks_names_file_and_offset(folder: Path) -> None:
    source = open_source(str(folder))
    source.files()
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* ends at byte 100, 8 bytes early"):
        source.read("model.safetensors", 90, 18)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* lacks byte 104: it became shorter"):
        source.read("model.safetensors", 104, 4)


def test_text_names_what_is_missing_or_not_utf8(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    source = open_source(str(folder))
    assert source.text("config.json") == '{"model_type": "test"}'
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja .*byte 2"):
        source.text("chat_template.jinja")
    with pytest.raises(CheckpointError, match=r"no file tokenizer\.json"):
        source.text("tokenizer.json")


def test_text_of_absurd_size_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)
    source = open_source(str(folder))
    with pytest.raises(CheckpointError, match=r"config\.json .*too many"):
        source.text("config.json")
    assert source.num_reads == 0


def test_lone_config_is_a_source_without_shards(folder: Path) -> None:
    source = open_source(str(folder / "config.json"))
    assert source.config_only
    assert list(source.files()) == ["config.json"]
    assert not open_source(str(folder)).config_only


def snapshot(tmp_path: Path) -> tuple[Path, str]:
    """A hub cache: a snapshot of links into blobs named by content."""
    digest = "ab" * 32
    cache = tmp_path / "models--org--name"
    links = cache / "snapshots" / "c0ffee"
    links.mkdir(parents=True)
    (cache / "blobs").mkdir()
    write_safetensors(cache / "blobs" / digest, {"w": ("U8", [4], b"abcd")})
    (cache / "blobs" / ("1" * 40)).write_text("{}")
    (links / "model.safetensors").symlink_to(Path("../../blobs") / digest)
    (links / "config.json").symlink_to(Path("../../blobs") / ("1" * 40))
    (links / "gone.safetensors").symlink_to(Path("../../blobs") / "not-there")
    return links, digest


def test_hub_cache_snapshot_of_links(tmp_path: Path) -> None:
    links, digest = snapshot(tmp_path)
    source = open_source(str(links))
    assert set(source.files()) == {"config.json", "model.safetensors"}
    size = source.files()["model.safetensors"]
    assert source.read("model.safetensors", size - 4, 4) == b"abcd"
    assert source.hashes() == {"model.safetensors": digest}


def test_hashes_that_a_plain_download_left(folder: Path) -> None:
    record = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    record.parent.mkdir(parents=True)
    record.write_text("1" * 40 + "\n" + "cd" * 32 + "\n1712656091.123\n")
    (record.parent / "config.json.metadata").write_text("1" * 40 + "\n" + "2" * 40 + "\n1712656091.123\n")
    assert open_source(str(folder)).hashes() == {"model.safetensors": "cd" * 32}


def test_loop_of_links_ends(folder: Path) -> None:
    (folder / "again").symlink_to(folder)
    assert open_source(str(folder)).exists("again/config.json")


def test_folder_that_is_no_checkpoint_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.safetensors").write_bytes(b"")
    (tmp_path / "notes.md").write_text("x")
    assert list(LocalSource(tmp_path).files()) == ["notes.md"]
    with pytest.raises(UsageError, match=r"no checkpoint: expected config\.json.*found notes\.md") as caught:
        open_source(str(tmp_path))
    assert caught.value.exit_code == 2
    assert str(tmp_path) in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found no files"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickles_are_never_loaded(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"\x80")
    with pytest.raises(UsageError, match=f"{file}.*never loaded; .*safetensors"):
        open_source(str(tmp_path))
    with pytest.raises(UsageError, match="pickle"):
        open_source(str(tmp_path / file))
    assert open_source(str(tmp_path / "config.json")).config_only


def test_pickles_beside_safetensors_are_no_obstacle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert open_source(str(folder)).exists("model.safetensors")


def test_trainer_leavings_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"\x80")
    assert open_source(str(tmp_path)).exists("config.json")


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"GGUF \(model-Q4_1\.gguf\)"):
        open_source(str(tmp_path))
    with pytest.raises(UsageError, match="GGUF"):
        open_source(str(tmp_path / "model-Q4_1.gguf"))


def test_one_shard_alone_is_refused_with_its_folder(folder: Path) -> None:
    with pytest.raises(UsageError, match="is one file; give the folder"):
        open_source(str(folder / "model.safetensors"))


@pytest.mark.parametrize("where", ["/no/such/folder", "./nowhere", "a/b/c", "", "x\0y", "a" * 5000, "ftp://host/x"])
def test_what_does_not_exist(where: str) -> None:
    with pytest.raises(UsageError):
        open_source(where)


def test_unreadable_file_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(folder))

    def refuse(file: str, start: int, length: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(source, "_fetch", refuse)
    with pytest.raises(CheckpointError, match=r"config\.json .*byte 0: Permission denied"):
        source.read("config.json", 0, 2)


@pytest.mark.parametrize("name", ["other.json", "qwen3.config.json"])
def test_a_json_file_is_a_config_alone_whatever_its_name(folder: Path, name: str) -> None:
    (folder / "config.json").rename(folder / name)
    source = open_source(str(folder / name))
    assert source.config_only and list(source.files()) == ["config.json"]
    assert source.text("config.json") == (folder / name).read_text()
    assert source.path("config.json") == folder / name and source.stamp("config.json").startswith("mtime_ns:")


def test_an_index_file_is_no_config(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="give the folder that holds it"):
        open_source(str(folder / "model.safetensors.index.json"))


def test_a_config_alone_is_named_in_its_errors(folder: Path) -> None:
    (folder / "other.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^\S*other\.json is not JSON"):
        read_object(open_source(str(folder / "other.json")), "config.json")
