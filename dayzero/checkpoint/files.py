"""Files that are there whole or not at all. Paper."""

from __future__ import annotations

import os
import secrets
from pathlib import Path, PurePosixPath

PARTIAL = ".partial"  # ending of a file that is being written; what breaks off leaves it
BOOKS = ".dayzero-"  # beginning of files in which this package keeps what it has done in a folder


def is_unfinished(name: str) -> bool:
    """Whether a file, by its name, is one that somebody writes or broke off writing: no part of what it lies among."""
    return name.endswith(PARTIAL)


def is_bookkeeping(name: str) -> bool:
    """Whether a file, by its path with '/' between parts, is this package's own record of its work there."""
    return PurePosixPath(name).name.startswith(BOOKS)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside ``path``, then rename: whoever reads it sees the old content or the new. Errors: OSError."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:  # who may read it is left to the umask
            file.write(data)
        os.replace(partial, path)
    finally:  # an interrupt too must leave no second file
        partial.unlink(missing_ok=True)
