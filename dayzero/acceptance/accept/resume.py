"""What an acceptance keeps of each stage, so that a run that is started again does only the rest. Paper.

    OUT/subject.json         whose record this is
    OUT/stages/NAME.json     a finished stage: findings, figures, facts, samples, and what it was made of
    OUT/stages/NAME/         the stage's own folder, and NAME.begun.json, what a run that has begun in it is made of

A finished stage is taken when all it was made of is the same: the subject with size and stamp of every file, profile,
seed, options, the package's files, library versions, the machine. Its file carries a checksum: a damaged one, or one
that was edited, is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.digest import sha256_of
from dayzero.acceptance.accept.record import findings_of
from dayzero.acceptance.accept.stage import Subject
from dayzero.acceptance.files import write_json
from dayzero.console import plain
from dayzero.errors import MachineError, UsageError

SCHEMA = 1
SUBJECT = "subject.json"
STAGES = "stages"
LOCK = ".lock"
MOST_NAMED = 4


@dataclass(frozen=True)
class Taken:
    """A look for a finished stage. content: its file's, None when it must run. why: what to say about it."""

    content: dict[str, Any] | None
    why: str = ""


class Kept:
    """The folder of one acceptance. Open it with ``opened``: one run at a time writes there."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self._named = folder, named(subject)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, made where it is not there, and locked for the time of the context.

        UsageError when it holds something else, or the record of another subject; MachineError while another run
        writes there.
        """
        self._check()
        (self.folder / STAGES).mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MachineError(
                    f"another acceptance is writing to {self.folder}; wait for it, or give another folder with --out."
                ) from error
            write_json(self.folder / SUBJECT, self._named)
            yield

    def _check(self) -> None:
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file; give the name of a folder.")
        if not folder.parent.is_dir():
            raise UsageError(f"--out {folder}: its parent folder does not exist; make it first.")
        if not folder.exists() or not any(path.name != LOCK for path in folder.iterdir()):
            return
        before = _object(folder / SUBJECT)
        if before is None:
            raise UsageError(
                f"--out {folder} is not empty and holds no acceptance (no sound {SUBJECT}); give another folder."
            )
        other = [f"{key} {before.get(key)}" for key in self._named if before.get(key) != self._named[key]]
        if other:
            raise UsageError(
                f"--out {folder} holds the acceptance of another subject ({', '.join(other)}); give another folder, or "
                "remove that one first."
            )

    def work_folder(self, name: str, made_of: Mapping[str, Any]) -> Path:
        """The stage's own folder: as an interrupted run made of the same left it, else empty."""
        folder, begun = self._path(name).with_suffix(""), self.folder / STAGES / f"{name}.begun.json"
        mark = {"fingerprint": sha256_of(made_of)}
        if _object(begun) != mark and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        write_json(begun, mark)
        return folder

    def look(self, name: str, made_of: Mapping[str, Any]) -> Taken:
        """A finished stage made of the same, or why there is none."""
        path = self._path(name)
        if not path.exists():
            return Taken(None)
        content = _object(path)
        if content is None or not _sound(content, name):
            return Taken(None, f"{path} is damaged: the stage runs anew")
        differing = differences(content["made_of"], plain(made_of))
        if differing:
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            return Taken(None, f"runs anew, as {', '.join(differing[:MOST_NAMED])}{more} changed")
        return Taken(content, f"taken from the run of {content['began']}")

    def keep(
        self, name: str, made_of: Mapping[str, Any], content: Mapping[str, Any], done: bool = True
    ) -> dict[str, Any]:
        """Write a finished stage, whole or not at all; returns the content as a later ``look`` would give it. done:
        False of a stage that did not come to its end; it is not written."""
        whole = plain({**content, "schema": SCHEMA, "name": name, "made_of": made_of})
        whole["checksum"] = sha256_of(whole)
        if done:
            write_json(self._path(name), whole)
        return json.loads(json.dumps(whole))  # as it is read back: a fresh record and a resumed one are the same

    def _path(self, name: str) -> Path:
        return self.folder / STAGES / f"{name}.json"


def named(subject: Subject) -> dict[str, Any]:
    """Whose record a folder holds, as kept in it: local sources by their full path, no keys."""
    source = subject.source
    try:
        where = str(Path(source).resolve()) if source is not None and Path(source).exists() else source
    except (OSError, ValueError):
        where = source
    return {"source": where, "url": subject.url, "model": subject.model}


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Dotted names of what is not the same in two JSON objects; values in place where they are short."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        found = [differences(before.get(key), now.get(key), f"{path}.{key}" if path else key) for key in keys]
        return [name for names in found for name in names]
    if before == now and type(before) is type(now):
        return []
    short = all(len(str(value)) <= 40 for value in (before, now)) and not path.endswith("sha256")
    return [f"{path} ({before} before, {now} now)" if short else path]


def _sound(content: Mapping[str, Any], name: str) -> bool:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    if content.get("checksum") != sha256_of(rest) or content.get("schema") != SCHEMA or content.get("name") != name:
        return False
    try:
        return bool(findings_of(content["findings"]))
    except (KeyError, TypeError, AssertionError):
        return False


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
