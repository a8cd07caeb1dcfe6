"""docs/new-model.md does what it says: its files are written out, its commands run, their exit codes checked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "new-model.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<kind>\w+)(?: file=(?P<file>\S+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT = re.compile(r"\s+#\s*exit (\d+)\s*$")
MAX_RECIPE_LINES = 150


@dataclass(frozen=True)
class Done:
    """A command of the page, the exit code that the page states, and what came of it."""

    line: str
    stated: int
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    made = tmp_path_factory.mktemp("nova")
    for block in FENCE.finditer(TEXT):
        if block["file"]:
            (made / block["file"]).write_text(block["body"], encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def done(folder: Path) -> list[Done]:
    """Every line of every sh block, in order, each in a shell where ``dayzero`` is this tree's."""
    programs = folder.with_name(f"{folder.name}-bin")
    programs.mkdir()
    (programs / "dayzero").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dayzero "$@"\n')
    (programs / "dayzero").chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    lines = [line for block in FENCE.finditer(TEXT) if block["kind"] == "sh" for line in block["body"].splitlines()]
    out = []
    for line in filter(str.strip, lines):
        stated = EXIT.search(line)
        ran = subprocess.run(
            ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        out.append(Done(EXIT.sub("", line), int(stated[1]) if stated else 0, ran.returncode, ran.stdout, ran.stderr))
    return out


def test_every_command_ends_as_the_page_says(done: list[Done]) -> None:
    wrong = [f"{d.line}: exit {d.code}, the page says {d.stated}\n{d.out[-600:]}{d.err[-600:]}" for d in done
             if d.code != d.stated or "Traceback" in d.err]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_page_walks_the_whole_way(done: list[Done]) -> None:
    words = [d.line.split()[1] for d in done if d.line.startswith("dayzero ")]
    assert words == ["inspect", "inspect", "inspect", "plan", "twin", "inspect", "align"]
    assert any(d.stated == 1 for d in done)


def test_what_the_page_says_of_the_reports_is_there(done: list[Done]) -> None:
    said = {d.line: " ".join(d.out.split()) for d in done}
    first = said["dayzero inspect config.json"]
    assert (
        "nearest known family" in first and "operators reused" in first and "unknown key full_attention_every" in first
    )
    unread = said["dayzero inspect later/config.json --recipe nova.py"]
    quote = re.search(r"^> (fail .*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert quote is not None
    for piece in " ".join(quote[1].replace("\n> ", " ").split()).split(" … "):
        assert piece in unread, piece
    aligned = said["dayzero align nova-twin --recipe nova.py --oracle nova_oracle.py"]
    assert "verdict: pass" in aligned and "layers.7.channel" in aligned and "attention window 12" in aligned


def test_the_recipe_is_short_and_the_oracle_independent(folder: Path) -> None:
    num_lines = (folder / "nova.py").read_text().count("\n")
    assert num_lines <= MAX_RECIPE_LINES and f"It is {num_lines} lines long" in TEXT
    assert not re.search(r"^\s*(?:from|import) dayzero", (folder / "nova_oracle.py").read_text(), re.MULTILINE)
