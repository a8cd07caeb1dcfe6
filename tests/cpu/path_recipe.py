"""For tests of recipes given by path: a twin of one, and its plain forward over the stored tensors alone."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.cpu.cli_support import run_json


def make_twin(config: Path, recipe: Path, out: Path) -> Path:
    """``dayzero twin CONFIG OUT --recipe RECIPE``: the folder."""
    code, said = run_json("twin", str(config), str(out), "--recipe", str(recipe))
    assert code == 0, said
    return out


def plain_forward(oracle: Path, twin: Path) -> Callable[[list[int]], Tensor]:
    """tokens -> logits [T, V], from the oracle file and the stored tensors alone."""
    spec = importlib.util.spec_from_file_location(f"{oracle.parent.name}_oracle", oracle)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = {name: value.float() for file in twin.glob("*.safetensors") for name, value in load_file(file).items()}
    config = json.loads((twin / "config.json").read_text())

    class Reader:
        def tensor(self, name: str) -> Tensor:
            return tensors[name]

    return lambda tokens: module.forward(Reader(), config, tokens, lambda name, value: None)
