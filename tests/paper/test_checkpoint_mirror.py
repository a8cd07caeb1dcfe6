"""Mirroring: whole files or none, resumed where it broke off, verified, and nothing outside its folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayzero.checkpoint import mirror as module
from dayzero.checkpoint.files import PARTIAL
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.mirror import STATE, Mirrored, await_publication, mirror, why_unpublished
from dayzero.checkpoint.source import LocalSource, Source, open_source
from dayzero.console import no_progress
from dayzero.errors import CheckpointError, MachineError, UsageError
from dayzero.planner.storage import storage_findings
from tests.paper.store import s3_server, upload

FILES = {"config.json": b"{}", "model-1.safetensors": os.urandom(5000), "sub/notes.txt": b"hello", "empty.txt": b""}


class Remote(LocalSource):
    """A folder that is read as a remote: it counts bytes, states hashes, and can break off or change."""

    def __init__(self, folder: Path, *, breaks_at: int | None = None, hashes: dict[str, str] | None = None) -> None:
        super().__init__(folder)
        self.left, self.told = breaks_at, hashes or {}
        self.read_of: Counter[str] = Counter()

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        if self.left is not None:
            self.left -= length
            if self.left < 0:
                raise MachineError("the network has gone")
        self.read_of[file] += length
        return super()._fetch(file, start, length)

    def hashes(self) -> dict[str, str]:
        return self.told


def publish(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def copy(source: Source, folder: Path) -> Mirrored:
    with no_progress("") as bar:
        return mirror(source, folder, bar)


def held(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*") if path.is_file() and not path.name.startswith(STATE)
    }  # fmt: skip


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 700)


def test_every_file_once_and_then_none(tmp_path: Path) -> None:
    source = Remote(publish(tmp_path / "up"), hashes={"config.json": hashlib.sha256(b"{}").hexdigest().upper()})
    got = copy(source, tmp_path / "here")
    assert held(tmp_path / "here") == FILES and got.verified == ("config.json",) and got.left == ()
    assert got.files == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    assert got.fetched == sum(map(len, FILES.values())) == sum(source.read_of.values())
    again = Remote(tmp_path / "up")
    second = copy(again, tmp_path / "here")
    assert not again.read_of and second.fetched == 0 and second.files == got.files


@pytest.mark.parametrize("breaks_at", [1, 700, 3000, 4999])
def test_it_goes_on_where_it_broke_off(breaks_at: int, tmp_path: Path) -> None:
    up = publish(tmp_path / "up")
    with pytest.raises(MachineError, match="gone"):
        copy(Remote(up, breaks_at=breaks_at), tmp_path / "here")
    assert "model-1.safetensors" not in held(tmp_path / "here"), "a file is whole or not there"
    rest = Remote(up)
    got = copy(rest, tmp_path / "here")
    assert held(tmp_path / "here") == FILES
    there = breaks_at // 700 * 700 if breaks_at > 700 else 0
    assert got.fetched <= 5007 - max(0, there - 700), "what came over before is not fetched again"


def test_an_unfinished_copy_and_the_state_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    up, here = publish(tmp_path / "up", {"config.json": b"{}", "sub/notes.txt": b"hello"}), tmp_path / "here"
    write_shards(up)
    with pytest.raises(MachineError, match="gone"):
        copy(Remote(up, breaks_at=3000), here)
    assert (here / f"model-2.safetensors{PARTIAL}").stat().st_size, "what this test is about"
    source = open_source(str(here))
    assert set(source.files()) == {"config.json", "sub/notes.txt", "model-1.safetensors"}
    assert source.unfinished == (f"model-2.safetensors{PARTIAL}",)
    with pytest.raises(
        CheckpointError, match=r"no file model-2.safetensors yet, only model-2.safetensors.partial: let"
    ):
        source.size("model-2.safetensors")
    (told,) = (f for f in storage_findings(source, read_index(source)) if f.kind == "integrity.unfinished")
    assert told.verdict == "note" and told.evidence == source.unfinished and told.layer == "weights"
    beyond = copy(LocalSource(here), tmp_path / "copied")
    assert beyond.left == source.unfinished and set(beyond.files) == set(source.files())
    before = [(name, source.stamp(name)) for name in source.files()]
    with open(here / f"model-2.safetensors{PARTIAL}", "ab") as part:
        part.write(b"more")
    (here / f"{STATE}.lock").touch()
    again = open_source(str(here))
    assert [(name, again.stamp(name)) for name in again.files()] == before, "no other checkpoint by what is beside it"
    copy(Remote(up), here)
    whole = open_source(str(here))
    assert set(whole.files()) == set(Remote(up).files()) and whole.unfinished == ()
    assert not [f for f in storage_findings(whole, read_index(whole)) if f.kind == "integrity.unfinished"]


def write_shards(folder: Path) -> None:
    """Two sound shards without an index file, the second the larger."""
    for number in (1, 2):
        data = bytes(1000 * number**2)
        header = {f"t{number}": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
        text = json.dumps(header).encode()
        (folder / f"model-{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_folder_of_nothing_but_unfinished_copies_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / f"config.json{PARTIAL}").write_text("{")
    with pytest.raises(UsageError, match=r"is no checkpoint: .*found config\.json\.partial\."):
        open_source(str(tmp_path))


def test_a_file_that_changed_is_fetched_anew(tmp_path: Path) -> None:
    up = publish(tmp_path / "up")
    with pytest.raises(MachineError):
        copy(Remote(up, breaks_at=3000), tmp_path / "here")
    changed = {**FILES, "model-1.safetensors": os.urandom(5000)}
    publish(up, changed)
    os.utime(up / "model-1.safetensors", ns=(1, 1))
    copy(Remote(up), tmp_path / "here")
    assert held(tmp_path / "here") == changed, "no half of the old file"
    publish(up, {"config.json": b'{"a": 1}'})
    os.utime(up / "config.json", ns=(2, 2))
    assert copy(Remote(up), tmp_path / "here").fetched == 8


def test_another_hash_than_the_publishers_is_refused(tmp_path: Path) -> None:
    source = Remote(publish(tmp_path / "up"), hashes={"model-1.safetensors": "0" * 64})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="its publisher says 000000000000"):
            copy(source, tmp_path / "here")
        assert not [n for n in held(tmp_path / "here") if "safetensors" in n], "neither the file nor its part stays"


def test_pickles_and_other_formats_stay_where_they_are(tmp_path: Path) -> None:
    up = publish(tmp_path / "up", {**FILES, "pytorch_model.bin": b"x", "model.gguf": b"y"})
    got = copy(Remote(up), tmp_path / "here")
    assert got.left == ("model.gguf", "pytorch_model.bin") and held(tmp_path / "here") == FILES


class Listing(Remote):
    def _list(self) -> dict[str, int]:
        return {"config.json": 2, "../outside.txt": 2}

    def stamp(self, file: str) -> str:
        return "1"


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    publish(tmp_path / "up", {"config.json": b"{}", "../outside.txt": b"!!"})
    (tmp_path / "outside.txt").unlink()
    with pytest.raises(CheckpointError, match="lies outside"):
        copy(Listing(tmp_path / "up"), tmp_path / "down" / "here")
    assert not list(tmp_path.rglob("outside*"))


def test_what_the_source_has_no_more_goes(tmp_path: Path) -> None:
    up = publish(tmp_path / "up")
    copy(Remote(up), tmp_path / "here")
    (up / "model-1.safetensors").unlink()
    publish(up, {"model.safetensors": b"new"})
    (tmp_path / "here" / "mine.txt").write_text("a note")
    copy(Remote(up), tmp_path / "here")
    want = {name: data for name, data in FILES.items() if name != "model-1.safetensors"}
    assert held(tmp_path / "here") == {**want, "model.safetensors": b"new", "mine.txt": b"a note"}


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Remote(publish(tmp_path / "up"))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("U", (), {"free": 4000})())
    with pytest.raises(MachineError, match="5,007|still to come"):
        copy(source, tmp_path / "here")
    assert not source.read_of


def test_one_run_at_a_time_and_one_source_a_folder(tmp_path: Path) -> None:
    source = Remote(publish(tmp_path / "up"))
    copy(source, tmp_path / "here")
    with module._alone(tmp_path / "here"), pytest.raises(UsageError, match="written by another run"):
        copy(source, tmp_path / "here")
    with pytest.raises(UsageError, match="is a mirror of"):
        copy(Remote(publish(tmp_path / "other")), tmp_path / "here")


def test_a_damaged_state_is_no_end(tmp_path: Path) -> None:
    copy(Remote(publish(tmp_path / "up")), tmp_path / "here")
    for damaged in ("{", '{"source": "%s", "done": {"config.json": {}}, "begun": {}}' % (tmp_path / "up")):
        (tmp_path / "here" / STATE).write_text(damaged)
        copy(Remote(tmp_path / "up"), tmp_path / "here")
    assert held(tmp_path / "here") == FILES and not list((tmp_path / "here").rglob(f"*{PARTIAL}"))


# --- waiting ----------------------------------------------------------------------------------------------------------


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(shards)}}).encode()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a.safetensors": b""}, "has no config.json yet"),
        ({"config.json": b"{}"}, "has no .safetensors yet"),
        ({"config.json": b"{}", "model.safetensors.index.json": index("a.safetensors", "b.safetensors"),
          "a.safetensors": b""}, "lacks 1 of 2 shards, e.g. b.safetensors"),
        ({"config.json": b"{}", "model.safetensors.index.json": b'{"weight_'}, "is not complete yet"),
        ({"config.json": b"{}", "m-00001-of-00003.safetensors": b""}, "has 1 of 3 shards"),
        ({"config.json": b"{}", "m-1-of-2.safetensors": b"", "m-2-of-2.safetensors": b""}, "has no model.safetensors"),
        ({"config.json": b"{}", "a.safetensors": b""}, None),
        ({"config.json": b"{}", "m-00001-of-00001.safetensors": b""}, None),
    ],
)  # fmt: skip
def test_what_is_published_whole(files: dict[str, bytes], why: str | None, tmp_path: Path) -> None:
    told = why_unpublished(LocalSource(publish(tmp_path, files)))
    assert told is None if why is None else why in str(told)


def test_it_is_waited_for(tmp_path: Path) -> None:
    """Nothing, then a config, then the shard."""
    folder, told, slept = tmp_path / "up", [], []
    steps: Iterator[dict[str, bytes]] = iter([{"config.json": b"{}"}, {"a.safetensors": b""}])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        publish(folder, next(steps))

    source = await_publication(str(folder), 100.0, 20.0, told.append, sleep)
    assert source.exists("a.safetensors") and slept == [20.0, 20.0]
    assert "no such" in told[0].lower() or "not" in told[0].lower()
    assert "has no .safetensors yet" in told[1]
    (folder / "a.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no .safetensors yet; it is not published whole. --wait"):
        await_publication(str(folder), 0.0, 20.0, told.append)


def test_from_an_object_store(tmp_path: Path) -> None:
    with s3_server():
        where = upload(publish(tmp_path / "up", {**FILES, "empty.txt": b"."}), "new/model")
        got = copy(open_source(where), tmp_path / "here")
        assert held(tmp_path / "here") == {**FILES, "empty.txt": b"."} and got.fetched == 5008
        assert copy(open_source(where), tmp_path / "here").fetched == 0
