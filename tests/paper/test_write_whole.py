"""Files that are there whole or not at all: who may read them, and what an interruption leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dayzero.checkpoint import files
from dayzero.checkpoint.files import write_whole


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o027, 0o640)])
def test_who_may_read_it_follows_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    path, before = tmp_path / "a.json", os.umask(umask)
    try:
        write_whole(path, b"1")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode and path.read_bytes() == b"1"


def test_what_a_killed_process_leaves_is_no_marker_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the rename: nothing else ran then, so what is seen here is what would be left."""
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(b"old")
    seen: list[str] = []

    def stopped(source: Path, target: Path) -> None:
        seen.extend(sorted(one.name for one in tmp_path.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert len(seen) == 2 and seen[0] == path.name
    assert seen[1].startswith(path.name) and seen[1].endswith(".partial")
    assert [one.name for one in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"old"
