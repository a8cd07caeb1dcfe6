"""Small checkpoints by family name: written by a library where it has the family, else twins of published configs."""

from __future__ import annotations

from pathlib import Path

from tiny_configs import FAMILIES, write_tiny

from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
TWINS = {"kimi_k3": "kimi_k3", "kimi_k31": "kimi_k3_1", "qwen3_5_vl": "qwen3_5_35b_a3b"}  # no library has the first two
NAMES = (*FAMILIES, *TWINS)


def write_small(name: str, folder: Path, latent: int | None = None) -> Path:
    """Where the checkpoint is: ``folder``, which exists and is empty, or a new folder in it. latent: width of latent
    rows, where it has such and kernels for a GPU are to read them: a power of two."""
    if name in FAMILIES:
        narrow = latent is not None and "kv_lora_rank" in FAMILIES[name].settings
        write_tiny(name, folder, settings={"kv_lora_rank": latent} if narrow else {})
        return folder
    source = folder / "config"
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / f"{TWINS[name]}.json").read_bytes())
    narrow = latent is not None and "kv_lora_rank" in (source / "config.json").read_text()
    write_twin(str(source), str(folder / "twin"), TwinOptions(changes={"kv_lora_rank": latent} if narrow else {}))
    return folder / "twin"
