"""Sources that mutations are made in: twins of the faults' stand, a model that real clients can talk to, and others."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cpu.faults.stand import TWINS, Stand

SERVE = ("--dtype", "float32", "--threads", "1", "--pool-bytes", "64MiB", "--max-model-len", "2048")


def _small(folder: Path, twins: Stand) -> None:
    from tests.clients.small_model import write_model

    write_model(folder)
    shutil.rmtree(folder.with_name(f"{folder.name}-source"))


def _published(folder: Path, twins: Stand) -> None:
    """A download from a hub: it left the SHA-256 that the publisher states beside the files."""
    shutil.copytree(twins.twin("latent"), folder)
    told = folder / ".cache" / "huggingface" / "download"
    told.mkdir(parents=True)
    for shard in folder.glob("*.safetensors"):
        digest = hashlib.sha256(shard.read_bytes()).hexdigest()
        (told / f"{shard.name}.metadata").write_text(f"0123456789abcdef\n{digest}\n1700000000.0\n")


MADE: Mapping[str, Callable[[Path, Stand], None]] = {"small": _small, "published": _published}
NAMES = (*TWINS, *MADE)


class Bases:
    """Folders below ``root``, made when they are first asked for and never changed."""

    def __init__(self, root: Path) -> None:
        self._root, self._twins = root / "bases", Stand(root / "stand")

    def source(self, name: str) -> Path:
        if name in TWINS:
            return self._twins.twin(name)
        folder = self._root / name
        if not folder.exists():
            self._root.mkdir(parents=True, exist_ok=True)
            MADE[name](folder, self._twins)
        return folder
