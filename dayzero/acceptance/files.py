"""Files that are there whole or not at all. Paper."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from dayzero.console import plain


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


def write_json(path: Path, value: object) -> None:
    """``value`` as ``console.plain`` has it, indented. Written whole or not at all."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    # half a surrogate pair, as a file name may hold, becomes the JSON escape for it
    write_whole(path, text.encode("utf-8", "backslashreplace") + b"\n")
