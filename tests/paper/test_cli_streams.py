"""Where a command's words go: closed, full, or spoken in a locale that lacks the characters. Never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dayzero.cli import main
from tests.paper.inspect_checkpoints import table_of, write_folder
from tests.paper.test_inspect_findings import small_dense

REPOSITORY = Path(__file__).resolve().parents[2]
C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", small_dense(), table_of(small_dense()))


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """``$DAYZERO`` and ``$MODEL`` in ``line`` stand for the command line and the checkpoint."""
    names = {"DAYZERO": f"{sys.executable} -m dayzero", "MODEL": str(folder)}
    return subprocess.run(
        ["/bin/sh", "-c", line], cwd=REPOSITORY, env={**os.environ, **names, **environment}, capture_output=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("flags", ["", "--json", "-q"])
def test_closed_streams(flags: str, folder: Path) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = shell(f'$DAYZERO inspect "$MODEL" {flags} {closed}', folder)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), (closed, done.stderr[-300:])
    done = shell(f'$DAYZERO inspect "$MODEL/nothing" {flags} >&- 2>&-', folder)
    assert done.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_full_disk_is_said_once_more_on_stderr(flags: str, folder: Path) -> None:
    done = shell(f'$DAYZERO inspect "$MODEL" {flags} > /dev/full', folder)
    assert done.returncode == 3 and b"No space left" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["inspect --all", "plan --hardware h100x2", "inspect --json"])
def test_a_locale_without_the_characters(command: str, folder: Path) -> None:
    name, _, flags = command.partition(" ")
    done = shell(f'$DAYZERO {name} "$MODEL" {flags}', folder, **C_LOCALE)
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout and b"internal error" not in done.stderr


def test_names_that_are_no_utf8(tmp_path: Path, folder: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/m\xff"
    os.rename(folder, odd)
    for flags in ("", "--json"):
        done = shell(f'$DAYZERO inspect "$(printf \'%s/m\\377\' "$PLACE")" {flags}', folder, PLACE=str(tmp_path))
        assert done.returncode == 0, done.stderr[-300:]
    assert json.loads(done.stdout)["source"].endswith("m\udcff")


@pytest.mark.parametrize("where", ["~nosuchuser/model", "a\0b"])
def test_paths_that_cannot_be(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", where]) == 2
    assert "internal error" not in capsys.readouterr().err
