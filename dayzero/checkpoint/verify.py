"""SHA-256 of every file against what the publisher states: streaming, and resumable after an interruption."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dayzero.checkpoint.files import write_whole
from dayzero.checkpoint.ranges import in_order
from dayzero.checkpoint.source import SHA256_HEX, Source
from dayzero.errors import CheckpointError, UsageError
from dayzero.finding import Finding, Verdict
from dayzero.units import MIB

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

READ_BYTES = 16 * MIB
STATE_VERSION = 1
SUM_LINE = re.compile(r"(?P<escaped>\\?)(?P<hex>[0-9a-fA-F]{64}) [ *](?P<file>.+)")
SUM_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


def verify_hashes(
    source: Source,
    expected: Mapping[str, str],
    state_path: Path | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Findings for each file that differs, is missing or has no expected value, and one for those that agree.

    expected: file -> SHA-256 in hex, e.g. from ``load_manifest`` or ``source.hashes()``. state_path: a file that
    remembers finished files by size, stamp and digest, rewritten whole after each; an interrupted run that is started
    again reads only the rest. The digest is remembered, not the verdict, so other expected values need no reading.
    """
    wanted = {file: expected[file].lower() for file in sorted(expected)}
    present = [file for file in wanted if file in source.files()]
    digests, findings = file_digests(source, present, state_path, progress)
    return findings + compare_hashes(source, wanted, digests)


def file_digests(
    source: Source, files: Sequence[str], state_path: Path | None = None, progress: Progress | None = None
) -> tuple[dict[str, str], list[Finding]]:
    """(file -> SHA-256 in hex, findings for files that cannot be read) of files that are there; state_path as above."""
    sizes = source.files()
    state, findings = _load_state(state_path, source.name)
    total_bytes = sum(sizes[file] for file in files)
    base_bytes = 0
    digests: dict[str, str] = {}
    for file in files:
        known = state.get(file)
        try:
            mark = {"size": sizes[file], "stamp": source.stamp(file)}
            if known is not None and all(known.get(key) == value for key, value in mark.items()):
                digests[file] = known["sha256"]
            else:
                report = None if progress is None else _shifted(progress, base_bytes, total_bytes)
                digests[file] = sha256(source, file, report)
                if source.stamp(file) != mark["stamp"]:
                    raise CheckpointError(f"{file} of {source.name} changed while it was being read; run again.")
                state[file] = {**mark, "sha256": digests[file]}
                _save_state(state_path, source.name, state)
        except CheckpointError as error:
            digests.pop(file, None)
            findings.append(_finding("unreadable", "fail", str(error), [file], remedy="run again once it is complete"))
        base_bytes += sizes[file]
        if progress is not None:
            progress(base_bytes, total_bytes)
    return digests, findings


def sha256(source: Source, file: str, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 in hex of a whole file, read in order in pieces of READ_BYTES. progress: bytes of the file done."""
    digest = hashlib.sha256()
    done = 0
    for piece in _pieces(source, file):
        digest.update(piece)
        done += len(piece)
        if progress is not None:
            progress(done)
    return digest.hexdigest()


def load_manifest(path: Path) -> dict[str, str]:
    """File -> SHA-256 from a file of ``<hex>  <file>`` lines (as sha256sum writes) or a JSON object {file: hex}.

    UsageError naming the line or key that is neither.
    """
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the manifest {path} is not UTF-8 text.") from error
    except OSError as error:
        raise UsageError(f"the manifest {path} cannot be read: {error.strerror or error}.") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, name: str) -> dict[str, str]:
    """``load_manifest`` on text. name: the manifest's name in messages."""
    pairs = _json_pairs(text, name) if text.lstrip().startswith("{") else _sum_pairs(text, name)
    found: dict[str, str] = {}
    for file, digest in pairs:
        file = file.removeprefix("./")
        if found.setdefault(file, digest) != digest:
            raise UsageError(f"the manifest {name} gives two different hashes for {file}.")
    if not found:
        raise UsageError(f"the manifest {name} holds no hashes; expected lines '<sha256>  <file>' or a JSON object.")
    return found


def _sum_pairs(text: str, name: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        match = SUM_LINE.fullmatch(line)
        if match is None:
            raise UsageError(f"line {number} of the manifest {name} is not '<sha256>  <file>': {line[:80]!r}.")
        file = match["file"]
        if match["escaped"]:
            file = re.sub(r"\\[\\nr]", lambda m: SUM_ESCAPES[m[0]], file)
        yield file, match["hex"].lower()


def _json_pairs(text: str, name: str) -> Iterator[tuple[str, str]]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the manifest {name} is not JSON: {str(error)[:120]}.") from error
    for file, value in pairs:
        digest = value.lower().removeprefix("sha256:") if isinstance(value, str) else ""
        if not SHA256_HEX.fullmatch(digest):
            raise UsageError(f"the manifest {name} gives no SHA-256 in hex for {file}: {value!r:.80}.")
        yield file, digest


def _pieces(source: Source, file: str) -> Iterator[bytes]:
    size = source.size(file)
    starts = range(0, size, READ_BYTES)
    calls = (partial(source.read, file, start, min(READ_BYTES, size - start)) for start in starts)
    # One read ahead even on a local disk: the next piece arrives while this one is hashed.
    return in_order(calls, max(2, source.parallel_reads) if size > READ_BYTES else 1)


def _shifted(progress: Progress, base_bytes: int, total_bytes: int) -> Callable[[int], None]:
    return lambda done: progress(base_bytes + done, total_bytes)


def compare_hashes(source: Source, wanted: Mapping[str, str], digests: Mapping[str, str]) -> list[Finding]:
    """Findings on ``digests``, file -> SHA-256, against ``wanted``, which has all of these files."""
    files = source.files()
    findings = []
    for file, digest in digests.items():
        if digest != wanted[file]:
            claim = f"{file} does not have the stated SHA-256"
            remedy = "download the file again; if it stays so, ask the publisher"
            more = {"measured": digest, "bound": wanted[file]}
            findings.append(_finding("mismatch", "fail", claim, [file], remedy=remedy, **more))
    missing = [file for file in wanted if file not in files]
    if missing:
        claim = f"{len(missing)} file(s) with a stated SHA-256 are not in {source.name}"
        findings.append(_finding("missing", "fail", claim, missing, measured=len(missing), remedy="download them"))
    unstated = [file for file in sorted(files) if file not in wanted]
    if unstated:
        claim = f"{len(unstated)} file(s) have no stated SHA-256 and were not checked"
        findings.append(_finding("unlisted", "note", claim, unstated, measured=len(unstated)))
    agree = [file for file, digest in digests.items() if digest == wanted[file]]
    if agree and len(agree) == len(wanted):
        claim = f"all {len(agree)} file(s) with a stated SHA-256 have it"
        findings.append(_finding("verified", "pass", claim, agree, measured=len(agree), bound=len(wanted)))
    return findings


def _finding(kind: str, verdict: Verdict, claim: str, evidence: list[str], **more: Any) -> Finding:
    return Finding(f"hash.{kind}", "weights", verdict, claim, evidence=tuple(evidence), **more)


def _load_state(path: Path | None, name: str) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """What an earlier run remembered of this source, and a note when there is a file that cannot be used."""
    if path is None:
        return {}, []
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        raise UsageError(f"the state file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.get("version") == STATE_VERSION and content.get("source") == name:
        files = content.get("files")
        if isinstance(files, dict) and all(_is_record(record) for record in files.values()):
            return files, []
    claim = f"the state file {path} is damaged or of another source; all files were read again"
    return {}, [_finding("state", "note", claim, [str(path)])]


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    digest = record.get("sha256")
    return isinstance(digest, str) and SHA256_HEX.fullmatch(digest) is not None


def _save_state(path: Path | None, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    if path is None:
        return
    content = {"version": STATE_VERSION, "source": name, "files": files}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise UsageError(f"the state file {path} cannot be written: {error.strerror or error}.") from error
