"""Where compiled kernels are kept between runs: a folder of this user's own, which nobody else can write to."""

from __future__ import annotations

import os
from pathlib import Path


def own_folder(word: str, given: Path | None = None) -> Path | None:
    """``given``, or ``word`` in the user's cache; made if need be. None when there is no such folder, or when it is not
    this user's own: from a shared one others could plant code."""
    try:
        folder = given or Path.home() / ".cache" / "dayzero" / word
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder if ours and os.access(folder, os.W_OK) else None
