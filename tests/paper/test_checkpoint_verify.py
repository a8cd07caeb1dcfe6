"""Hashes: manifests in both forms, every disagreement named, and a second run that reads only what is left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.checkpoint import verify
from dayzero.checkpoint.source import LocalSource, open_source
from dayzero.checkpoint.verify import load_manifest, parse_manifest, sha256, verify_hashes
from dayzero.errors import UsageError
from dayzero.finding import Finding, worst

FILES = {"config.json": b"{}", "a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 3000, "empty.txt": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for file, data in FILES.items():
        (path / file).write_bytes(data)
    return path


@pytest.fixture
def stated() -> dict[str, str]:
    return {file: hashlib.sha256(data).hexdigest() for file, data in FILES.items()}


def kinds(findings: list[Finding]) -> list[str]:
    return [f.kind.removeprefix("hash.") for f in findings]


def test_all_good(folder: Path, stated: dict[str, str]) -> None:
    calls: list[tuple[int, int]] = []
    upper = {file: digest.upper() for file, digest in stated.items()}
    findings = verify_hashes(open_source(str(folder)), upper, None, lambda done, total: calls.append((done, total)))
    assert kinds(findings) == ["verified"]
    assert worst(findings) == "pass"
    assert calls[-1] == (8002, 8002)
    assert calls == sorted(calls)


def test_mismatch_missing_and_unlisted(folder: Path, stated: dict[str, str]) -> None:
    (folder / "b.safetensors").write_bytes(b"b" * 2999 + b"x")
    stated["c.safetensors"] = "0" * 64
    del stated["empty.txt"]
    findings = verify_hashes(open_source(str(folder)), stated, None)
    assert kinds(findings) == ["mismatch", "missing", "unlisted"]
    mismatch, missing, unlisted = findings
    assert mismatch.evidence == ("b.safetensors",)
    assert mismatch.bound == stated["b.safetensors"]
    assert mismatch.measured == hashlib.sha256(b"b" * 2999 + b"x").hexdigest()
    assert missing.evidence == ("c.safetensors",)
    assert (mismatch.verdict, missing.verdict, unlisted.verdict) == ("fail", "fail", "note")
    assert unlisted.evidence == ("empty.txt",)


def test_pieces_of_any_size_give_the_same_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 7, 4999, 5000, 5001):
        monkeypatch.setattr(verify, "READ_BYTES", size * 10 if size == 1 else size)
        assert sha256(open_source(str(folder)), "a.safetensors") == hashlib.sha256(b"a" * 5000).hexdigest()


class Counting(LocalSource):
    """Remembers what was read, and fails where told to."""

    def __init__(self, folder: Path, fail: str = "") -> None:
        super().__init__(folder)
        self.read_files: list[str] = []
        self.fail = fail

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        self.read_files.append(file)
        if file == self.fail:
            raise KeyboardInterrupt
        return super()._fetch(file, start, length)


def test_interrupted_run_resumes(folder: Path, stated: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "cache" / "hashes.json"
    first = Counting(folder, fail="b.safetensors")
    with pytest.raises(KeyboardInterrupt):
        verify_hashes(first, stated, state)
    assert list(state.parent.iterdir()) == [state]  # nothing half-written beside it
    second = Counting(folder)
    assert kinds(verify_hashes(second, stated, state)) == ["verified"]
    assert set(second.read_files) == {"b.safetensors", "config.json"}
    third = Counting(folder)
    stated["a.safetensors"] = "0" * 64
    assert kinds(verify_hashes(third, stated, state)) == ["mismatch"]  # the digest is remembered, not the verdict
    assert third.read_files == []


def test_changed_file_is_read_again(folder: Path, stated: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "hashes.json"
    verify_hashes(LocalSource(folder), stated, state)
    (folder / "a.safetensors").write_bytes(b"A" * 5000)
    os.utime(folder / "a.safetensors", ns=(1, 1))
    source = Counting(folder)
    assert kinds(verify_hashes(source, stated, state)) == ["mismatch"]
    assert source.read_files == ["a.safetensors"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 1, "source": "other", "files": {}}', "\udc80"])
def test_useless_state_is_told_and_replaced(folder: Path, stated: dict[str, str], tmp_path: Path, content: str) -> None:
    state = tmp_path / "hashes.json"
    state.write_bytes(content.encode("utf-8", "surrogateescape"))
    findings = verify_hashes(LocalSource(folder), stated, state)
    assert kinds(findings) == ["state", "verified"]
    assert kinds(verify_hashes(LocalSource(folder), stated, state)) == ["verified"]


def test_state_of_a_copy_elsewhere_is_not_trusted(folder: Path, stated: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "hashes.json"
    verify_hashes(LocalSource(folder), stated, state)
    moved = folder.rename(tmp_path / "copy")
    source = Counting(moved)
    assert kinds(verify_hashes(source, stated, state)) == ["state", "verified"]
    assert len(set(source.read_files)) == 3  # the empty file needs no read


def test_state_that_cannot_be_written(folder: Path, stated: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="state file"):
        verify_hashes(LocalSource(folder), stated, tmp_path / "file" / "hashes.json")


def test_file_that_vanishes_while_hashing(folder: Path, stated: dict[str, str]) -> None:
    source = LocalSource(folder)
    source.files()
    (folder / "a.safetensors").unlink()
    findings = verify_hashes(source, stated, None)
    assert kinds(findings) == ["unreadable"]
    assert findings[0].evidence == ("a.safetensors",)
    assert findings[0].verdict == "fail"


def test_file_that_changes_while_hashing(folder: Path, stated: dict[str, str], tmp_path: Path) -> None:
    class Changing(LocalSource):
        def _fetch(self, file: str, start: int, length: int) -> bytes:
            data = super()._fetch(file, start, length)
            if file == "a.safetensors":
                os.utime(self.folder / file, ns=(7, 7))
            return data

    findings = verify_hashes(Changing(folder), stated, tmp_path / "state.json")
    assert kinds(findings) == ["unreadable"]
    assert "changed" in findings[0].claim
    assert "a.safetensors" not in json.loads((tmp_path / "state.json").read_text())["files"]


def test_hashes_the_source_knows(tmp_path: Path) -> None:
    data = b"weights"
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest).write_bytes(data)
    links = tmp_path / "snapshots" / "x"
    links.mkdir(parents=True)
    (links / "model.safetensors").symlink_to(tmp_path / "blobs" / digest)
    source = open_source(str(links))
    assert kinds(verify_hashes(source, source.hashes(), None)) == ["verified"]
    (tmp_path / "blobs" / digest).write_bytes(b"weightX")
    assert kinds(verify_hashes(source, source.hashes(), None)) == ["mismatch"]


H1, H2 = "a1" * 32, "b2" * 32


@pytest.mark.parametrize(
    "text, want",
    [
        (f"{H1}  a.safetensors\n{H2} *b.bin\n", {"a.safetensors": H1, "b.bin": H2}),
        (f"# made by hand\n\n{H1.upper()}  ./sub/a b.txt\r\n", {"sub/a b.txt": H1}),
        (f"\\{H1}  odd\\nname\\\\x\n", {"odd\nname\\x": H1}),
        (json.dumps({"a": H1, "b": f"sha256:{H2}"}), {"a": H1, "b": H2}),
        (f"{H1}  a\n{H1}  ./a\n", {"a": H1}),
        (f"\ufeff{H1}  a\n", {"a": H1}),
    ],
)
def test_manifest(tmp_path: Path, text: str, want: dict[str, str]) -> None:
    (tmp_path / "SHA256SUMS").write_text(text, "utf-8", newline="")
    assert load_manifest(tmp_path / "SHA256SUMS") == want


@pytest.mark.parametrize(
    "text, word",
    [
        ("", "holds no hashes"),
        ("{}", "holds no hashes"),
        (f"{H1}  a\n{H1[:-1]}  b\n", "line 2"),
        (f"{H1} a\n", "line 1"),
        (f"{H1}  a\n{H2}  a\n", "two different hashes for a"),
        (f'{{"a": "{H1}", "a": "{H2}"}}', "two different hashes for a"),
        ('{"a": 5}', "for a"),
        ('{"a": "md5"}', "for a"),
        ('{"a": {"b": 1}}', "for a"),
        ("{nonsense", "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
    ],
)
def test_bad_manifest_names_line_or_file(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_text(text)
    with pytest.raises(UsageError, match=word) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)


def test_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_manifest(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_manifest(tmp_path / "binary")


@given(text=st.text(max_size=80) | st.text('{}":, \\a0', max_size=40))
def test_any_manifest(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_manifest(text, "m")
