"""Where a checkpoint's bytes come from: a folder, an object store, the hub. Range reads only, never a whole shard.

``open_source`` picks the kind from the text a user typed. Remote kinds live in ``remote`` and are imported on use, so
that a local inspection needs no client library.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, TypeVar

from dayzero.checkpoint.files import PARTIAL, is_bookkeeping, is_unfinished
from dayzero.checkpoint.ranges import in_order, merge_extents, merge_ranges
from dayzero.errors import CheckpointError, UsageError
from dayzero.units import MIB

Bytes = TypeVar("Bytes", bytes, memoryview)

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"})
MAX_DEPTH = 4  # folders below the checkpoint's own; deeper is not part of a checkpoint, and ends loops of links
MAX_TEXT_BYTES = 256 * MIB  # the largest tokenizer has a tenth of it
CONFIG = "config.json"
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class Source(ABC):
    """A checkpoint's files, by name relative to its root ('/' between parts).

    name: what the user typed, for messages. config_only: a lone config, without shards. bytes_read, num_reads:
    what was asked of the medium so far, merged reads counted once; safe to read from any thread. parallel_reads: how
    many reads are worth having in flight. merge_gap_bytes: two ranges closer than this are cheaper as one read.
    not_files: names with a file's ending that are listed but hold nothing to read, and what they are instead.
    unfinished: files that a mirror still writes, or broke off writing, known once ``files`` was asked; they are no part
    of the checkpoint, nor is what a mirror writes down of its work (``checkpoint/files``).
    """

    parallel_reads = 1
    merge_gap_bytes = 64 * 1024
    config_only = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = 0
        self.num_reads = 0
        self.not_files: dict[str, str] = {}
        self.unfinished: tuple[str, ...] = ()
        self._sizes: dict[str, int] | None = None
        self._lock = Lock()

    @abstractmethod
    def _list(self) -> dict[str, int]:
        """File name -> size in bytes, read from the medium."""

    @abstractmethod
    def _fetch(self, file: str, start: int, length: int) -> bytes:
        """Bytes [start, start+length) of a listed file; fewer when the file has shrunk. FileNotFoundError when gone."""

    @abstractmethod
    def stamp(self, file: str) -> str:
        """Text that changes when the file's content changes: modification time, entity tag or content id."""

    def path(self, file: str) -> Path | None:
        """Path on this machine, None for a remote source."""
        return None

    def hashes(self) -> dict[str, str]:
        """File -> SHA-256 in hex, for the files whose publisher states it; empty when the source knows none."""
        return {}

    def files(self) -> dict[str, int]:
        """File name -> size in bytes, listed once. Callers must not change it."""
        if self._sizes is None:
            listed = self._list()
            self.unfinished = tuple(sorted(filter(is_unfinished, listed)))
            self._sizes = {
                file: size for file, size in listed.items() if not is_unfinished(file) and not is_bookkeeping(file)
            }
        return self._sizes

    def exists(self, file: str) -> bool:
        return file in self.files()

    def size(self, file: str) -> int:
        """Size in bytes as listed. CheckpointError when there is no such file."""
        size = self.files().get(file)
        if size is None:
            if file in self.not_files:
                raise CheckpointError(f"{file} of {self.name} is {self.not_files[file]}; download the file again.")
            if f"{file}{PARTIAL}" in self.unfinished:
                raise CheckpointError(
                    f"{self.name} has no file {file} yet, only {file}{PARTIAL}: let the mirror that writes it end, or "
                    "run it again."
                )
            raise CheckpointError(f"{self.name} has no file {file}; check the name, or download the file again.")
        return size

    def read(self, file: str, start: int, length: int) -> bytes:
        """Exactly the bytes [start, start+length) of a file.

        CheckpointError naming file and offset when the range lies outside the file, the file has gone since it was
        listed, or it has become shorter. Nothing is allocated for a range that lies outside the file.
        """
        self._check_range(file, start, length)
        return self._counted(file, start, length, partial(self._fetch, file, start, length)) if length else b""

    def read_into(self, file: str, start: int, into: memoryview) -> None:
        """Exactly ``len(into)`` bytes of a file from ``start`` on, written to ``into`` (of bytes). Errors: as ``read``;
        what ``into`` holds then is not said."""
        self._check_range(file, start, len(into))
        if len(into):
            self._counted(file, start, len(into), partial(self._fetch_into, file, start, into))

    def _fetch_into(self, file: str, start: int, into: memoryview) -> memoryview:
        """As ``_fetch``: the part of ``into`` that was filled."""
        data = self._fetch(file, start, len(into))
        into[: len(data)] = data
        return into[: len(data)]

    def _counted(self, file: str, start: int, length: int, fetch: Callable[[], Bytes]) -> Bytes:
        try:
            data = fetch()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{file} of {self.name} disappeared while it was being read (at byte {start}); "
                "wait until the download is complete and run again."
            ) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{file} of {self.name} cannot be read at byte {start}: {reason}.") from error
        with self._lock:
            self.bytes_read += len(data)
            self.num_reads += 1
        if len(data) != length:
            end = (
                f"ends at byte {start + len(data)}, {length - len(data)} bytes early" if data else f"lacks byte {start}"
            )
            raise CheckpointError(
                f"{file} of {self.name} {end}: it became shorter while it was being read; download it again."
            )
        return data

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of each (start, length), in the order asked. Ranges that lie close together become one read."""
        for start, length in ranges:
            self._check_range(file, start, length)
        spans = merge_ranges(ranges, self.merge_gap_bytes)
        results = [b""] * len(ranges)
        reads = in_order([partial(self.read, file, start, end - start) for start, end, _ in spans], self.parallel_reads)
        for (first, end, members), data in zip(spans, reads, strict=True):
            for member in members:
                start, length = ranges[member]
                whole = start == first and length == end - first
                results[member] = data if whole else data[start - first : start - first + length]
        return results

    def text(self, file: str) -> str:
        """The whole of a small file as UTF-8. CheckpointError when it is not UTF-8, or above MAX_TEXT_BYTES."""
        if self.size(file) > MAX_TEXT_BYTES:
            raise CheckpointError(f"{file} of {self.name} has {self.size(file)} bytes, too many for a text file.")
        data = self.read(file, 0, self.size(file))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} of {self.name} is not UTF-8 text (byte {error.start}).") from error

    def _check_range(self, file: str, start: int, length: int) -> None:
        size = self.size(file)
        if start < 0 or length < 0 or start + length > size:
            raise CheckpointError(
                f"{file} of {self.name} has {size} bytes, but bytes {start} to {start + length} are needed; "
                "it is cut short or its header is wrong: download it again."
            )


class LocalSource(Source):
    """A folder, or one config. Links are followed, so a hub cache snapshot is read like any folder.

    only: name of the one file that counts; it is the source's config.json, whatever its name.
    """

    def __init__(self, folder: Path, *, name: str | None = None, only: str | None = None) -> None:
        super().__init__(name or str(folder))
        self.folder = folder
        self.config_only = only is not None
        self._only = only

    def _list(self) -> dict[str, int]:
        if self._only is not None:
            return {CONFIG: os.stat(self.path(CONFIG)).st_size}
        top = _list_folder(self.folder, 0, self.not_files)
        # A mistyped path may be someone's home: look below only where a checkpoint is.
        return _list_folder(self.folder, MAX_DEPTH, self.not_files) if any(is_marker(file) for file in top) else top

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        with open(self.path(file), "rb", buffering=0) as handle:
            data = os.pread(handle.fileno(), length, start)
            if len(data) == length or not data:
                return data
            pieces, got = [data], len(data)
            while got < length and (data := os.pread(handle.fileno(), length - got, start + got)):
                pieces.append(data)
                got += len(data)
            return b"".join(pieces)

    def _fetch_into(self, file: str, start: int, into: memoryview) -> memoryview:
        with open(self.path(file), "rb", buffering=0) as handle:
            got = 0
            while got < len(into) and (more := os.preadv(handle.fileno(), [into[got:]], start + got)):
                got += more
        return into[:got]

    def stamp(self, file: str) -> str:
        try:
            return f"mtime_ns:{os.stat(self.path(file)).st_mtime_ns}"
        except OSError as error:
            raise CheckpointError(f"{file} of {self.name} disappeared while it was being read.") from error

    def path(self, file: str) -> Path:
        return self.folder / (file if self._only is None else self._only)

    def hashes(self) -> dict[str, str]:
        """What a hub download left beside the files: a cache blob is named by its SHA-256, and a plain download
        keeps it in ``.cache/huggingface/download/<file>.metadata`` (second line)."""
        found = {}
        for file in self.files():
            target = self.path(file)
            if target.is_symlink():
                blob = PurePosixPath(os.readlink(target))
                if blob.parent.name == "blobs" and SHA256_HEX.fullmatch(blob.name):
                    found[file] = blob.name
                continue
            record = self.folder / ".cache" / "huggingface" / "download" / f"{target.relative_to(self.folder)}.metadata"
            if record.is_file():
                lines = record.read_text("utf-8", errors="replace").split()
                if len(lines) > 1 and SHA256_HEX.fullmatch(lines[1]):
                    found[file] = lines[1]
        return found


def open_source(where: str, *, store_options: Mapping[str, Any] | None = None) -> Source:
    """The source a user named: a folder, a .json file that is a config alone, ``s3://bucket/prefix``, a hub id
    ``org/name[@revision]``, or ``seeded:`` before any of these, for a config whose weights are made.

    store_options: arguments of the object store's client (endpoint, keys, region, client_options); what is absent the
    client takes from its own surroundings. UsageError when ``where`` is no checkpoint, or one whose weights are only
    pickles, which nothing here reads; MachineError when a package or the network is missing.
    """
    if where.startswith("seeded:"):
        from dayzero.checkpoint.seeded_source import SeededSource

        return SeededSource(where)
    if where.startswith("s3://"):
        from dayzero.checkpoint.remote import StoreSource

        return checked(StoreSource(where, store_options or {}))
    if "://" in where:
        raise UsageError(f"{where} is no source dayzero can read; give a folder, s3://bucket/prefix or a hub id.")
    try:
        path = Path(where).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home; a zero byte in the path
        raise UsageError(f"{where[:80]!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if is_folder:
        return checked(LocalSource(path, name=where))
    if is_file:
        return _open_file(path, where)
    match = HUB_ID.fullmatch(where)
    if match and where.count("/") - (match["revision"] or "").count("/") == 1:
        from dayzero.checkpoint.remote import HubSource

        return checked(HubSource(match["repo"], match["revision"]))
    raise UsageError(
        f"{where} does not exist; expected a folder with config.json and *.safetensors, a config (.json), "
        "s3://bucket/prefix, or a hub id such as org/name."
    )


def _open_file(path: Path, where: str) -> Source:
    if path.name != CONFIG and is_marker(path.name):
        raise UsageError(f"{where} is one file; give the folder that holds it and its config.json: {path.parent}.")
    if path.suffix == ".json":
        return LocalSource(path.parent, name=where, only=path.name)
    sentence = _other_weights(where, [path.name])
    raise UsageError(sentence or f"{where} is neither a folder nor a config (.json); give the checkpoint's folder.")


def checked(source: Source) -> Source:
    """The source itself, or UsageError when its files are not those of a checkpoint dayzero reads."""
    files = [file for file in source.files() if "/" not in file]
    if any(is_marker(f) and f != CONFIG for f in files):
        return source
    sentence = _other_weights(source.name, files)
    if sentence:
        raise UsageError(sentence)
    if CONFIG not in files:
        raise UsageError(
            f"{source.name} is no checkpoint: expected config.json, *.safetensors or model.safetensors.index.json, "
            f"found {', '.join((sorted(files) or source.unfinished)[:5]) or 'no files'}."
        )
    return source


def is_marker(file: str) -> bool:
    """Whether a file at the top of a folder shows that the folder is a checkpoint."""
    return file == CONFIG or file.endswith((".safetensors", ".safetensors.index.json"))


def _is_pickle(file: str) -> bool:
    return file.endswith(PICKLE_SUFFIXES) and file not in NOT_WEIGHTS


def _other_weights(name: str, files: Sequence[str]) -> str | None:
    """The sentence for weights in a form that is not read, None when there are none."""
    for file in sorted(files):
        if _is_pickle(file):
            return (
                f"{name} holds its weights as a pickle ({file}), which can run code and is never loaded; "
                "convert it to safetensors, or give its config.json alone."
            )
        if file.endswith(".gguf"):
            return f"{name} holds its weights as GGUF ({file}), which is not read; give the safetensors release."
    return None


def _list_folder(root: Path, depth: int, not_files: dict[str, str], prefix: str = "") -> dict[str, int]:
    """Regular files below root, hidden folders left out; links are followed.

    What stands under a marker's name and is no regular file is added to ``not_files``.
    """
    found: dict[str, int] = {}
    try:
        with os.scandir(root) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if prefix:
            return found
        raise CheckpointError(f"{root} cannot be listed: {error.strerror or error}.") from error
    for entry in ordered:
        try:
            info = entry.stat()
        except OSError as error:
            if is_marker(entry.name):
                looped = error.errno == errno.ELOOP
                not_files[prefix + entry.name] = "a link that leads to itself" if looped else "a link to nothing"
            continue
        if stat.S_ISREG(info.st_mode):
            found[prefix + entry.name] = info.st_size
            continue
        if is_marker(entry.name):
            not_files[prefix + entry.name] = "a folder" if stat.S_ISDIR(info.st_mode) else "a device or a pipe"
        if stat.S_ISDIR(info.st_mode) and depth > 0 and not entry.name.startswith("."):
            found |= _list_folder(Path(entry.path), depth - 1, not_files, f"{prefix}{entry.name}/")
    return found


def read_together(source: Source, extents: Sequence[tuple[str, int, int]]) -> list[memoryview]:
    """Bytes of each (file, start, length), in the order asked; those that touch in a file come with one read of
    exactly their bytes, so that what is kept of it is what was asked for. Errors: as ``Source.read``."""
    results = [memoryview(b"")] * len(extents)
    reads = merge_extents(extents, 0)
    calls = [partial(source.read, file, start, end - start) for file, start, end, _ in reads]
    for (_, first, _, places), data in zip(reads, in_order(calls, source.parallel_reads), strict=True):
        for place in places:
            _, start, length = extents[place]
            results[place] = memoryview(data)[start - first : start - first + length]
    return results
