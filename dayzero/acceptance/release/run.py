"""Running the steps: each a process of its own, its report kept, stopped at the first gate that does not hold."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dayzero import __version__
from dayzero.acceptance.files import write_json
from dayzero.acceptance.release.steps import STEPS, Setting, Step
from dayzero.checkpoint.mirror import Mirrored, await_publication, mirror
from dayzero.checkpoint.source import Source
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import UsageError
from dayzero.finding import Verdict

POLL_SECONDS = 20.0
MOST_FAILS = 5


@dataclass(frozen=True, slots=True)
class Done:
    """A step's end. status: ``passed``, ``taken`` (of an earlier run, nothing has changed since), ``left out`` or
    ``failed``. said: why, of a failed one: its findings that failed, or its error."""

    name: str
    title: str
    status: str
    seconds: float = 0.0
    said: tuple[str, ...] = ()
    report: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """steps: in order, up to the first that failed. mirrored: what is read; None for a folder that was here."""

    source: str
    checkpoint: str
    out: str
    steps: tuple[Done, ...]
    mirrored: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> Verdict:
        return "fail" if any(step.status == "failed" for step in self.steps) else "pass"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict, "source": self.source, "checkpoint": self.checkpoint, "out": self.out,
            "mirrored": self.mirrored, "steps": [asdict(step) for step in self.steps],
        }  # fmt: skip


def release(
    setting: Setting, wait: float = 0.0, progress: ProgressFactory = no_progress, steps: Sequence[Step] = STEPS
) -> ReleaseReport:
    """Take ``setting.source`` through all steps. wait: seconds for which it is waited for.

    Errors: those of ``await_publication`` and ``mirror``; a step that fails is no error but the report's end.
    """
    if setting.out.exists() and not setting.out.is_dir():
        raise UsageError(f"--out {setting.out}: it is no folder; give another name.")
    (setting.out / "steps").mkdir(parents=True, exist_ok=True)
    with progress("waiting for the publication") as bar:
        source = await_publication(setting.source, wait, POLL_SECONDS, bar.note)
    if Path(setting.source).exists():
        kept, at = None, setting
    else:
        with progress("mirroring", None, "B") as bar:
            kept = mirror(source, setting.out / "mirror", bar)
        at = replace(setting, checkpoint=str(kept.folder))
    state, done = _content(source, kept), list[Done]()
    for step in steps:
        state = hashlib.sha256(f"{state}\n{step.call(at)}".encode()).hexdigest()  # a changed step changes all behind it
        done.append(_run(step, at, state, progress))
        report = ReleaseReport(setting.source, at.checkpoint, str(setting.out), tuple(done), _mirrored_json(kept))
        write_json(setting.out / "release.json", report.to_json())
        if done[-1].status == "failed":
            break
    return report


def _content(source: Source, kept: Mirrored | None) -> str:
    """Text that changes with the checkpoint's content, or with this package."""
    files = (
        kept.files
        if kept is not None
        else {name: f"{size} {source.stamp(name)}" for name, size in source.files().items()}
    )
    return json.dumps([__version__, dict(sorted(files.items()))])


def _mirrored_json(kept: Mirrored | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    return {
        "folder": str(kept.folder), "files": dict(kept.files), "verified": list(kept.verified),
        "left_out": list(kept.left),
    }  # fmt: skip


def _run(step: Step, setting: Setting, state: str, progress: ProgressFactory) -> Done:
    call = step.call(setting)
    if call is None:
        return Done(step.name, step.title, "left out")
    path = setting.out / "steps" / f"{step.name}.json"
    if _passed_before(path, state) and (step.makes is None or step.makes(setting).exists()):
        return Done(step.name, step.title, "taken", report=str(path))
    if step.makes is not None and step.makes(setting).exists():
        shutil.rmtree(step.makes(setting))
    began = time.monotonic()
    with progress(f"dayzero {step.name}"):
        ended = subprocess.run(
            [sys.executable, "-m", "dayzero", call[0], "--json", *call[1:]],
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    report = _parsed(ended.stdout)
    write_json(path, {"state": state, "exit_code": ended.returncode, "call": list(call), "report": report})
    said = () if ended.returncode == 0 else _said(report, ended.stderr)
    status = "passed" if ended.returncode == 0 else "failed"
    return Done(step.name, step.title, status, time.monotonic() - began, said, str(path))


def _passed_before(path: Path, state: str) -> bool:
    try:
        held = json.loads(path.read_text("utf-8"))
        return bool(held["state"] == state and held["exit_code"] == 0)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"error": {"message": text.decode("utf-8", "replace")[-2000:]}}


def _said(report: Any, stderr: bytes) -> tuple[str, ...]:
    """The claims that failed with their remedies, or the error, or the last line of stderr."""
    found = report.get("findings", ()) if isinstance(report, dict) else ()
    failed = [f for f in found if f.get("verdict") == "fail"]
    if failed:
        return tuple(
            f"{f['layer']}: {f['claim']}" + (f"; {f['remedy']}" if f["remedy"] else "") for f in failed[:MOST_FAILS]
        )
    error = report.get("error") if isinstance(report, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return (str(error["message"]),)
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return (lines[-1],) if lines else ("it ended without a word",)
