"""Commands on a checkpoint in an object store: the same answers as on a folder, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero.checkpoint import remote
from dayzero.cli import main
from tests.paper.inspect_checkpoints import config_of, table_of, write_folder
from tests.paper.store import s3_server, upload

SMALL = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_experts": 16, "moe_intermediate_size": 256, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The same checkpoint as a folder and in a bucket."""
    config = config_of("qwen3_30b_a3b", **SMALL)
    folder = write_folder(tmp_path_factory.mktemp("release"), config, table_of(config), num_shards=3)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes())  # no holes: a store keeps none, and inspection tells of them
    with s3_server():
        yield folder, upload(folder, "models/small")


class Ranges:
    """Every range that a store was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []
        fetch = remote.StoreSource._fetch

        def counted(source: remote.StoreSource, file: str, start: int, length: int) -> bytes:
            self.seen.append((file, start, length))
            return fetch(source, file, start, length)

        monkeypatch.setattr(remote.StoreSource, "_fetch", counted)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_says_the_same_as_on_a_folder(
    places: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = places
    asked = Ranges(monkeypatch)
    code, far = command(capsys, "inspect", store)
    near_code, near = command(capsys, "inspect", str(folder))
    assert code == near_code == 0 and far["family"] is not None and far["bytes_read"] == sum(n for *_, n in asked.seen)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    shards = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    assert far["bytes_read"] < sum(sizes.values()) / 20
    for name, size in shards.items():
        read = [(start, length) for file, start, length in asked.seen if file == name]
        assert read and max(start + length for start, length in read) < size / 20, "headers only"
    for report, where in ((far, store), (near, str(folder))):
        assert report.pop("source") == where
        report.pop("bytes_read")
    assert json.loads(json.dumps(far).replace(store, "HERE")) == json.loads(
        json.dumps(near).replace(str(folder), "HERE")
    )


def test_plan_places_it_from_there(
    places: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = places
    asked = Ranges(monkeypatch)
    code, far = command(capsys, "plan", store, "--hardware", "h100x4", "--ep", "4")
    near_code, near = command(capsys, "plan", str(folder), "--hardware", "h100x4", "--ep", "4")
    assert (code, near_code) == (0, 0) and far["exactly_once"]["holds"]
    assert sum(n for *_, n in asked.seen) < sum(path.stat().st_size for path in folder.iterdir()) / 20
    assert json.loads(json.dumps(far).replace(store, "HERE")) == json.loads(
        json.dumps(near).replace(str(folder), "HERE")
    )


def test_a_prefix_that_holds_nothing_is_one_sentence(
    places: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = command(capsys, "inspect", "s3://releases/models/none")
    assert code == 2 and "s3://releases/models/none" in json.dumps(said)
    code, said = command(capsys, "plan", "s3://no-such-bucket/x", "--hardware", "h100")
    assert code == 2 and "does not exist" in json.dumps(said)
