"""A copy of a checkpoint on this machine: waited for, fetched with resume, each file whole and verified or not there.

Beside the files stands STATE, which remembers what is done; a file that is under way has the ending PARTIAL. Weights in
other formats, and pickles, are left out: nothing here reads them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dayzero.checkpoint.files import BOOKS, PARTIAL, write_whole
from dayzero.checkpoint.ranges import in_order
from dayzero.checkpoint.source import CONFIG, PICKLE_SUFFIXES, Source, open_source
from dayzero.console import Bar
from dayzero.errors import CheckpointError, MachineError, UsageError, UserError
from dayzero.units import MIB, bytes_text

STATE = f"{BOOKS}mirror.json"
PIECE_BYTES = 16 * MIB
OTHER_WEIGHTS = (*PICKLE_SUFFIXES, ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".tflite", ".npz")
SHARDS = ".safetensors"
NUMBERED = re.compile(r"-(?P<number>\d+)-of-(?P<of>\d+)\.safetensors$")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Mirrored:
    """files: name -> SHA-256 in hex. verified: those that the publisher's own hash confirmed. left: files that were
    left out. fetched: bytes that came over in this run; the rest was there."""

    folder: Path
    files: Mapping[str, str]
    verified: tuple[str, ...]
    left: tuple[str, ...]
    fetched: int


def why_unpublished(source: Source) -> str | None:
    """What a checkpoint still lacks, one sentence; None when config and all shards are listed."""
    files = source.files()
    if CONFIG not in files:
        return f"{source.name} has no {CONFIG} yet"
    if INDEX in files:
        try:
            named = set(json.loads(source.text(INDEX))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError):
            return f"{INDEX} of {source.name} is not complete yet"
        missing = sorted(str(name) for name in named if name not in files)
        return f"{source.name} lacks {len(missing)} of {len(named)} shards, e.g. {missing[0]}" if missing else None
    shards = [name for name in files if name.endswith(SHARDS)]
    counted = [found for name in shards if (found := NUMBERED.search(name)) and int(found["of"]) > 1]
    if counted and len(counted) < int(counted[0]["of"]):
        return f"{source.name} has {len(counted)} of {int(counted[0]['of'])} shards"
    if counted:
        return f"{source.name} has no {INDEX} yet"
    return None if shards else f"{source.name} has no {SHARDS} yet"


def await_publication(
    where: str, seconds: float, every: float, note: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Source:
    """The source once it is published whole. note: told why it is still waited for. UsageError when it is not within
    ``seconds``, with the last reason; 0 asks once."""
    ends = time.monotonic() + seconds
    while True:
        try:
            source = open_source(where)
            why = why_unpublished(source)
            if why is None:
                return source
        except UserError as error:  # not there yet, or a network that comes and goes
            why = str(error)
            if time.monotonic() >= ends:
                raise
        if time.monotonic() >= ends:
            raise UsageError(f"{why}; it is not published whole. --wait SECONDS waits for it.")
        note(why)
        sleep(min(every, max(0.0, ends - time.monotonic())))


def mirror(source: Source, folder: Path, bar: Bar) -> Mirrored:
    """Copy ``source`` into ``folder``, which may hold an earlier run's part of it. bar: counts bytes.

    Errors: CheckpointError for a file that changes while it is read, or whose hash is not the publisher's;
    MachineError when the disk lacks the room; UsageError when another run writes there, or it mirrors another source.
    """
    wanted = {name: size for name, size in source.files().items() if not name.endswith(OTHER_WEIGHTS)}
    left = tuple(sorted({*source.files(), *source.unfinished} - set(wanted)))
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for name in wanted:
            _check_name(source, name)
        state = _State(folder, source.name)
        state.drop_all_but(wanted)
        stamps = {name: source.stamp(name) for name in wanted}
        todo = [name for name in sorted(wanted, key=lambda n: (wanted[n], n)) if not state.has(name, stamps[name])]
        _check_room(folder, sum(wanted[name] for name in todo))
        bar.reach(float(sum(wanted.values()) - sum(wanted[name] for name in todo)), float(sum(wanted.values())))
        expected, fetched = source.hashes(), 0
        for name in todo:
            bar.note(name)
            fetched += _fetch(source, name, folder, expected.get(name), state, bar)
        digests = {name: state.done[name]["sha256"] for name in wanted}
    verified = tuple(name for name in wanted if expected.get(name, "").lower() == digests[name])
    return Mirrored(folder, digests, verified, left, fetched)


class _State:
    """What is done, by file: size, stamp at the source, SHA-256. Written whole after each file."""

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._path = folder, folder / STATE
        self._source = source
        self.done: dict[str, dict[str, Any]] = {}
        self.begun: dict[str, str] = {}  # file -> stamp of the part that is there
        of = source
        try:
            held = json.loads(self._path.read_text("utf-8"))
            of, self.done, self.begun = held["source"], dict(held["done"]), dict(held["begun"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # a new mirror, or a damaged state: everything is fetched again
        if of != source:
            raise UsageError(f"{folder} is a mirror of {of}, not of {source}; give another folder.")

    def has(self, name: str, stamp: str) -> bool:
        known = self.done.get(name)
        path = self._folder / name
        if known is None or not path.is_file():
            return False
        return known.get("stamp") == stamp and known.get("size") == path.stat().st_size and "sha256" in known

    def drop_all_but(self, wanted: Mapping[str, int]) -> None:
        """Remove what an earlier run mirrored and the source has no more: old shards beside new ones are no model."""
        for name in [name for name in (*self.done, *self.begun) if name not in wanted]:
            self.done.pop(name, None)
            self.begun.pop(name, None)
            if ".." not in PurePosixPath(name).parts:
                for path in (self._folder / name, self._folder / f"{name}{PARTIAL}"):
                    path.unlink(missing_ok=True)
            self.save()

    def save(self) -> None:
        text = json.dumps({"source": self._source, "done": self.done, "begun": self.begun}, indent=1)
        write_whole(self._path, text.encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / f"{STATE}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{folder} is being written by another run; wait for it.") from error
        yield


def _check_room(folder: Path, needed: int) -> None:
    parts = sum(path.stat().st_size for path in folder.rglob(f"*{PARTIAL}"))
    free = shutil.disk_usage(folder).free + parts
    if needed > free:
        raise MachineError(
            f"{folder}: {bytes_text(needed)} are still to come, but {bytes_text(free)} are free; give another folder."
        )


def _check_name(source: Source, name: str) -> None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"{source.name} lists a file {name!r}, which lies outside of it; nothing was written.")


def _fetch(source: Source, name: str, folder: Path, expected: str | None, state: _State, bar: Bar) -> int:
    """Bytes that came over."""
    path, size, stamp = folder / name, source.size(name), source.stamp(name)
    part = path.with_name(path.name + PARTIAL)
    part.parent.mkdir(parents=True, exist_ok=True)
    if state.begun.get(name) != stamp:
        part.unlink(missing_ok=True)
        state.begun[name] = stamp
        state.save()
    digest, there = _digest_of(part, size)
    bar.advance(there)
    starts = range(there, size, PIECE_BYTES)
    calls = [partial(source.read, name, start, min(PIECE_BYTES, size - start)) for start in starts]
    with open(part, "ab") as out:
        for data in in_order(calls, source.parallel_reads):
            out.write(data)
            digest.update(data)
            bar.advance(len(data))
        out.flush()
        os.fsync(out.fileno())
    found = digest.hexdigest()
    if source.stamp(name) != stamp:
        raise CheckpointError(f"{name} of {source.name} changed while it was being fetched; run again.")
    if expected is not None and found != expected.lower():
        part.unlink()
        raise CheckpointError(
            f"{name} of {source.name} came over as {found[:12]}…, but its publisher says {expected[:12].lower()}…; "
            "run again, and tell the publisher when it stays so."
        )
    os.replace(part, path)
    state.begun.pop(name, None)
    state.done[name] = {"size": size, "stamp": stamp, "sha256": found}
    state.save()
    return size - there


def _digest_of(part: Path, size: int) -> tuple[Any, int]:
    """(running SHA-256, bytes) of what an earlier run left; a part that is too long counts as nothing."""
    digest, there = hashlib.sha256(), 0
    if part.exists():
        if part.stat().st_size > size:
            part.unlink()
        else:
            with open(part, "rb") as held:
                while data := held.read(PIECE_BYTES):
                    digest.update(data)
                    there += len(data)
    return digest, there
