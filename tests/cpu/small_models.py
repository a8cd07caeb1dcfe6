"""Small checkpoints by family name: written by a library where it has the family, else twins of published configs."""

from __future__ import annotations

from pathlib import Path

from tiny_configs import FAMILIES, write_tiny

from dayzero.rehearse.twin import write_twin

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
TWINS = {"kimi_k3": "kimi_k3", "kimi_k31": "kimi_k3_1", "qwen3_5_vl": "qwen3_5_35b_a3b"}  # no library has the first two
NAMES = (*FAMILIES, *TWINS)


def write_small(name: str, folder: Path) -> Path:
    """Where the checkpoint is: ``folder``, which exists and is empty, or a new folder in it."""
    if name in FAMILIES:
        write_tiny(name, folder)
        return folder
    source = folder / "config"
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / f"{TWINS[name]}.json").read_bytes())
    write_twin(str(source), str(folder / "twin"))
    return folder / "twin"
