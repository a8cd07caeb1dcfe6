"""JSON files that are there whole or not at all. Paper."""

from __future__ import annotations

import json
from pathlib import Path

from dayzero.checkpoint.files import write_whole
from dayzero.console import plain


def write_json(path: Path, value: object) -> None:
    """``value`` as ``console.plain`` has it, indented. Written whole or not at all."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    # half a surrogate pair, as a file name may hold, becomes the JSON escape for it
    write_whole(path, text.encode("utf-8", "backslashreplace") + b"\n")
