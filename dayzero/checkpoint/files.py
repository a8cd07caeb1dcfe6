"""Files that are there whole or not at all. Paper."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside ``path``, then rename: whoever reads it sees the old content or the new. Errors: OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        finally:  # an interrupt too must leave no second file
            Path(file.name).unlink(missing_ok=True)
