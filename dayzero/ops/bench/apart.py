"""Entries one after another in a process beside this one, and in another behind one that ended it: a kernel that faults
takes its process along, and one that hangs has to be stopped from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "dayzero.ops.bench")
GRACE = 30.0  # seconds beyond its time that a process may take for the entry it is at
_NOTHING: dict[str, Any] = {"entries": [], "whole": False}


def run_apart(names: Sequence[str], seconds: float, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """{"ceilings", "entries" by name}. What ended its process is tried again without its peers, and ``failed`` if it
    ends that too; what there was no time for is left out.

    command: takes ``--named`` for each entry, ``--alone``, ``--limit`` and ``--out``, as this package does."""
    found: dict[str, Any] = {"ceilings": {}, "entries": {}}
    left, end = list(names), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        while left and (room := end - time.monotonic()) > 0:
            code, made = _made(command, left, room, out)
            _add(found, made)
            left = left[len(made["entries"]) :]
            if made["whole"] or code in (2, 3) or not left:
                break
            name = left.pop(0)
            again, alone = _made([*command, "--alone"], [name], max(0.0, end - time.monotonic()), out)
            found["entries"][name] = {"right": False, "failed": f"ended its process: {code}, alone: {again}"}
            _add(found, alone)
    return found


def _add(found: dict[str, Any], made: dict[str, Any]) -> None:
    found["ceilings"] |= made.get("ceilings", {})
    found["entries"] |= {one["name"]: one for one in made["entries"]}


def _made(command: Sequence[str], names: list[str], room: float, out: Path) -> tuple[int | str, dict[str, Any]]:
    """How a process ended that was to run these, and the figures that it left."""
    out.unlink(missing_ok=True)
    code = _run([*command, *(f"--named={name}" for name in names), f"--limit={room:.0f}", f"--out={out}"], room)
    made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else _NOTHING
    return code, made


def _run(command: Sequence[str], seconds: float) -> int | str:
    try:
        return subprocess.run(command, timeout=seconds + GRACE, check=False).returncode
    except subprocess.TimeoutExpired:
        return "too slow"
