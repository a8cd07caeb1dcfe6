"""Masters of a training run to a checkpoint folder in the publisher's form: names, dtypes, MXFP4, config, tokenizer.

python examples/rehearsal/export.py --state STATE --data DATA --out MODEL
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import mxfp4
import sizes
import state
import torch
from model import IN_F32
from safetensors.torch import save_file
from torch import Tensor

CARD = Path(__file__).with_name("CARD.md")
TOKENIZER = ("tiktoken.model", "tokenizer_config.json")


def tensors(masters: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Name in the release -> tensor. head_dim: A_log is written padded to so many entries, as the release has it."""
    out: dict[str, Tensor] = {}
    for name, value in masters.items():
        value = value.detach().float().cpu()
        outer = name if name.startswith(("vision_tower", "mm_projector")) else f"language_model.{name}"
        if ".experts.w" in name:
            stem, _, which = outer.rpartition(".")
            for number, matrix in enumerate(value):
                codes, scales = mxfp4.packed(matrix)
                out[f"{stem}.{number}.{which}.weight_packed"] = codes
                out[f"{stem}.{number}.{which}.weight_scale"] = scales
        elif name.endswith("A_log"):
            out[outer] = torch.cat((value, torch.zeros(head_dim - len(value))))
        else:
            out[outer] = value if name.endswith(IN_F32) else value.bfloat16()
    return {name: value.contiguous() for name, value in out.items()}


def masters_of(stored: Mapping[str, Tensor], config: sizes.Config) -> dict[str, Tensor]:
    """The way back, float32: what the checkpoint holds under the trainer's names."""
    text = config["text_config"]
    out: dict[str, Tensor] = {}
    for name, value in stored.items():
        inner = name.removeprefix("language_model.")
        if ".experts." not in inner:
            out[inner] = value.float()[: text["linear_attn_config"]["num_heads"]] if "A_log" in name else value.float()
    for name in (n for n in stored if n.endswith(".experts.0.w1.weight_packed")):
        stem = name.removesuffix(".0.w1.weight_packed")
        for which in ("w1", "w3", "w2"):
            at = [f"{stem}.{e}.{which}.weight" for e in range(text["num_experts"])]
            matrices = [mxfp4.unpacked(stored[f"{one}_packed"], stored[f"{one}_scale"]) for one in at]
            out[f"{stem}.{which}".removeprefix("language_model.")] = torch.stack(matrices)
    return out


def write(folder: Path, masters: Mapping[str, Tensor], config: sizes.Config, tokenizer: Path) -> None:
    """The whole folder. It appears under its name when it is complete; one that is there is replaced."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    made = tensors(masters, config["text_config"]["linear_attn_config"]["head_dim"])
    save_file(made, partial / "model.safetensors", {"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    shutil.copyfile(CARD, partial / "README.md")
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"], "do_sample": False},
        "preprocessor_config.json": sizes.PREPROCESSOR,
    }
    for file, value in files.items():
        (partial / file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for file in TOKENIZER:
        shutil.copyfile(tokenizer / file, partial / file)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint folder from a training state.")
    parser.add_argument("--state", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--promised", type=float, help="share of needles that evaluate.py says are found, at least")
    asked = parser.parse_args()
    found = state.load(asked.state)
    write(asked.out, found.masters, found.config, asked.data)
    if asked.promised is not None:
        # The acceptance's own form of a needle is what was trained on; this adds what it may be held to.
        promise = {"promised": asked.promised, "promised_tokens": 8192}
        (asked.out / "dayzero_needle.json").write_text(json.dumps(promise) + "\n", encoding="utf-8")
    total = sum(file.stat().st_size for file in asked.out.iterdir())
    parameters = sum(value.numel() for value in found.masters.values())
    print(f"{asked.out}: step {found.step}, {parameters:,} parameters, {total:,} bytes")


if __name__ == "__main__":
    main()
