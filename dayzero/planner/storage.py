"""Findings about the files as files: the index's own, weights that are not there yet, unfinished copies, holes."""

from __future__ import annotations

import os

from dayzero.checkpoint.index import Index
from dayzero.checkpoint.source import Source
from dayzero.finding import Finding
from dayzero.units import MIB, bytes_text, counted

HOLE_SHARE = 0.5  # a file with less than this share of its bytes on disk is mostly holes


def storage_findings(source: Source, index: Index) -> list[Finding]:
    """Problems that the index met, and notes on weights that are absent or only pretended."""
    out = [p for p in index.problems if p.kind != "integrity.no_weights"]
    if not index.files and not any(p.verdict == "fail" for p in out):
        out.append(
            Finding(
                "weights.absent", "weights", "note",
                f"{source.name} holds no weights yet; only what the config tells was checked",
                measured="0 shards", remedy="inspect again once the shards are there",
            )
        )  # fmt: skip
    if source.unfinished:
        out.append(
            Finding(
                "integrity.unfinished", "weights", "note",
                f"{source.name} holds files that are still being written, or broke off; they are not read",
                measured=counted(len(source.unfinished), "file"), evidence=source.unfinished,
                remedy="let the mirror that writes them end, or run it again; remove them when nothing does",
            )
        )  # fmt: skip
    holes = [
        f"{file}: {bytes_text(got)} of {bytes_text(index.files[file])} on disk"
        for file, got in sparse_files(source, index).items()
    ]
    if holes:
        out.append(
            Finding(
                "integrity.sparse", "weights", "note",
                f"{len(holes)} file(s) are mostly holes: a paper twin, or a download that has only reserved its space",
                measured=len(holes), evidence=tuple(holes),
                remedy="if this should be the real checkpoint, wait for the download and verify it with --hash",
            )
        )  # fmt: skip
    return out


def sparse_files(source: Source, index: Index) -> dict[str, int]:
    """Local shards whose bytes are mostly not on disk -> bytes that are."""
    out = {}
    for file, size in index.files.items():
        path = source.path(file)
        if path is None or size < MIB:
            continue
        try:
            info = os.stat(path)
        except OSError:
            continue
        on_disk = info.st_blocks * 512 if hasattr(info, "st_blocks") else size
        if on_disk < HOLE_SHARE * size:
            out[file] = on_disk
    return out
