"""Files that are there whole or not at all. Paper."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside ``path``, then rename: whoever reads it sees the old content or the new. Errors: OSError."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:  # who may read it is left to the umask
            file.write(data)
        os.replace(partial, path)
    finally:  # an interrupt too must leave no second file
        partial.unlink(missing_ok=True)
