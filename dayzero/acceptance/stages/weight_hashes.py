"""SHA-256 of a checkpoint's files: held against what the publisher states, recorded where nobody states any."""

from __future__ import annotations

from collections.abc import Mapping

from dayzero.acceptance.accept.stage import Context, StageResult
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.verify import compare_hashes, file_digests
from dayzero.finding import Finding
from dayzero.units import GIB, bytes_text, counted

QUICK_BYTES = 4 * GIB  # what ``quick`` reads for hashes; the other profiles read all
STATE = "hashes.json"
REMEDY = "run with --profile release-day, which reads all files"


def hash_files(where: str, shards: Mapping[str, int], context: Context) -> StageResult:
    """Findings, and in the facts ``sha256``: file -> hex. shards: file -> bytes. Files that are done are remembered in
    the stage's folder. Errors: those of opening the source."""
    source = open_source(where)
    if source.config_only:
        return StageResult((_skipped("hash.recorded", "the source is a config alone"),))
    chosen = affordable(source.files(), None if context.profile != "quick" else QUICK_BYTES)
    size = sum(source.files()[file] for file in chosen)
    with context.progress("SHA-256 of the files", size, "B") as bar:
        digests, unreadable = file_digests(source, chosen, context.folder / STATE, bar.reach)
    findings = [*unreadable, _recorded(source, chosen, digests, size), *_published(source, digests)]
    return StageResult(tuple(findings), facts={"sha256": digests, "num_shards": len(shards)})


def affordable(files: Mapping[str, int], most_bytes: int | None) -> list[str]:
    """Files by size, the smallest first, until they come to most_bytes; None: all of them."""
    chosen, left = [], most_bytes
    for file in sorted(files, key=lambda file: (files[file], file)):
        if left is not None:
            if files[file] > left:
                break
            left -= files[file]
        chosen.append(file)
    return chosen


def _recorded(source: Source, chosen: list[str], digests: Mapping[str, str], size: int) -> Finding:
    total = len(source.files())
    measured = f"{len(digests)} of {counted(total, 'file')}, {bytes_text(size)}"
    claim = "the SHA-256 of every file is in the record"
    if len(digests) < len(chosen):
        return Finding("hash.recorded", "weights", "fail", claim, measured, total, remedy="mend the unreadable files")
    if len(chosen) < total:
        left = tuple(file for file in source.files() if file not in digests)
        return Finding("hash.recorded", "weights", "note", claim, measured, total, left, REMEDY)
    return Finding("hash.recorded", "weights", "pass", claim, measured, total)


def _published(source: Source, digests: Mapping[str, str]) -> list[Finding]:
    stated = {file: value.lower() for file, value in source.hashes().items()}
    if not stated:
        return [_skipped("hash.verified", f"{source.name} states no SHA-256 of its files")]
    wanted = {file: value for file, value in stated.items() if file in digests or file not in source.files()}
    if not wanted:
        return [_skipped("hash.verified", "no file that has a stated SHA-256 was read within this profile")]
    of_stated = {file: value for file, value in digests.items() if file in wanted}
    # Files without a stated one are listed in the record with the one measured; that is no finding here.
    return [f for f in compare_hashes(source, wanted, of_stated) if f.kind != "hash.unlisted"]


def _skipped(kind: str, why: str) -> Finding:
    return Finding(kind, "weights", "not applicable", "the files have the SHA-256 that the publisher states", why)
