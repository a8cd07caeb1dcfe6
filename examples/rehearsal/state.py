"""A training state on disk: masters in float32, both moments of AdamW in bfloat16, in pieces of at most 15 MB.

Saving rounds the moments of the running optimiser too, so a run that was stopped here and resumed goes on bit for bit
as the one that was not.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PIECE_BYTES = 15_000_000
FILE = "state.json"


@dataclass
class State:
    step: int
    config: dict[str, Any]
    masters: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    steps: dict[str, int]  # of the optimiser, by parameter: the tower is not in every batch


def of(step: int, config: dict[str, Any], masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> State:
    """The state of a run, whose optimiser's moments are rounded to bfloat16 in place."""
    out = State(step, config, masters, {}, {}, {})
    for name, value in masters.items():
        kept = optimizer.state.get(value)
        if not kept:
            continue
        out.steps[name] = int(kept["step"])
        for key, into in (("exp_avg", out.first), ("exp_avg_sq", out.second)):
            kept[key].copy_(kept[key].bfloat16())
            into[name] = kept[key]
    return out


def save(folder: Path, state: State) -> None:
    """Pieces first, then state.json that names them, so that a stop between leaves the old state whole."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"master.{name}": value.detach().float() for name, value in state.masters.items()}
    named |= {f"first.{name}": value.bfloat16() for name, value in state.first.items()}
    named |= {f"second.{name}": value.bfloat16() for name, value in state.second.items()}
    pieces: list[dict[str, Tensor]] = [{}]
    room = PIECE_BYTES
    for name, value in named.items():
        size = value.numel() * value.element_size()
        if size > room:
            pieces.append({})
            room = PIECE_BYTES
        pieces[-1][name] = value.cpu().contiguous()
        room -= size
    files = [f"state-{state.step}-{number}.safetensors" for number in range(len(pieces))]
    for file, piece in zip(files, pieces, strict=True):
        save_file(piece, folder / file)
    partial = folder / f"{FILE}.partial"
    head = {"step": state.step, "files": files, "steps": state.steps, "config": state.config}
    partial.write_text(json.dumps(head) + "\n", encoding="utf-8")
    os.replace(partial, folder / FILE)
    for old in folder.glob("state-*.safetensors"):
        if old.name not in files:
            old.unlink()


def load(folder: Path) -> State:
    head = json.loads((folder / FILE).read_text(encoding="utf-8"))
    out = State(head["step"], head["config"], {}, {}, {}, head["steps"])
    for file in head["files"]:
        for name, value in load_file(folder / file).items():
            kind, _, inner = name.partition(".")
            {"master": out.masters, "first": out.first, "second": out.second}[kind][inner] = value.float()
    return out


def resume(found: State, masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Put a saved state into a new run's masters and optimiser, in place; the step to go on with.

    ValueError when it is of a model of other sizes.
    """
    if {n: v.shape for n, v in found.masters.items()} != {n: v.shape for n, v in masters.items()}:
        raise ValueError("the saved state is of a model of other sizes")
    fused = bool(optimizer.defaults.get("fused"))
    for name, value in masters.items():
        with torch.no_grad():
            value.copy_(found.masters[name])
        if name in found.first:
            optimizer.state[value] = {
                "step": torch.tensor(float(found.steps[name]), device=value.device if fused else "cpu"),
                "exp_avg": found.first[name].to(value.device),
                "exp_avg_sq": found.second[name].to(value.device),
            }
    return found.step
