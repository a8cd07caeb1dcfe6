"""Running the steps: each a process of its own, its report kept, stopped at the first gate that does not hold."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.protocol import package_facts
from dayzero.acceptance.files import write_json
from dayzero.acceptance.release.steps import STEPS, Setting, Step
from dayzero.checkpoint.mirror import Mirrored, await_publication, mirror
from dayzero.checkpoint.source import Source
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import UsageError
from dayzero.finding import Verdict

POLL_SECONDS = 20.0
ENDING_SECONDS = 90.0  # for a command that was interrupted, and the servers that it ends
MOST_FAILS = 5
RECORD = "release.json"


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
    _take(setting)
    with progress("waiting for the publication") as bar:
        source = await_publication(setting.source, wait, POLL_SECONDS, bar.note)
    if Path(setting.source).exists():
        kept, at = None, setting
    else:
        with progress("mirroring", None, "B") as bar:
            kept = mirror(source, setting.out / "mirror", bar)
        at = replace(setting, checkpoint=str(kept.folder))
    state, done = _content(source, kept, setting), list[Done]()
    for step in steps:
        state = hashlib.sha256(f"{state}\n{step.call(at)}".encode()).hexdigest()  # a changed step changes all behind it
        done.append(_run(step, at, state, progress))
        report = ReleaseReport(setting.source, at.checkpoint, str(setting.out), tuple(done), _mirrored_json(kept))
        write_json(setting.out / RECORD, report.to_json())
        if done[-1].status == "failed":
            break
    return report


def _take(setting: Setting) -> None:
    """Make the folder this pipeline's own, or see that it is: a step may remove what it made there before."""
    out, record = setting.out, setting.out / RECORD
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: it is no folder; give another name.")
    if not record.exists():
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"--out {out}: it holds other things; give a new folder, or the one of an earlier run.")
        (out / "steps").mkdir(parents=True, exist_ok=True)
        write_json(record, {"source": setting.source, "steps": []})
    try:
        held = json.loads(record.read_text("utf-8"))["source"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{record} is damaged; give a new folder, or remove this one.") from error
    if held != setting.source:
        raise UsageError(f"--out {out}: it is a run of {held}, not of {setting.source}; give another folder.")


def _content(source: Source, kept: Mirrored | None, setting: Setting) -> str:
    """Text that changes with the checkpoint's content, the recipe's, or with this package."""
    files = (
        kept.files
        if kept is not None
        else {name: f"{size} {source.stamp(name)}" for name, size in source.files().items()}
    )
    recipe = None if setting.recipe is None else Path(setting.recipe)
    held = (
        hashlib.sha256(recipe.read_bytes()).hexdigest() if recipe is not None and recipe.is_file() else setting.recipe
    )
    return json.dumps([package_facts()["code_sha256"], held, dict(sorted(files.items()))])


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
        code, out, errors = run_command([sys.executable, "-m", "dayzero", call[0], "--json", *call[1:]])
    report = _parsed(out)
    write_json(path, {"state": state, "exit_code": code, "call": list(call), "report": report})
    said = () if code == 0 else _said(report, errors)
    status = "passed" if code == 0 else "failed"
    return Done(step.name, step.title, status, time.monotonic() - began, said, str(path))


def run_command(command: Sequence[str]) -> tuple[int, bytes, bytes]:
    """(exit code, stdout, stderr). An interrupt is passed on, and its end waited for: what it started itself, such as a
    server, is its own to end."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, errors = child.communicate()
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.communicate(timeout=ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
    return child.returncode, out, errors


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
