"""The query of attention residuals that weighs a single source may be zero in a sound checkpoint; no other one may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dayzero.blocks.open import open_model
from dayzero.blocks.stack import Stack
from dayzero.rehearse.twin import write_twin
from tests.cpu.small_models import CONFIGS

NAME = "layers.{}.self_attention_res_proj.weight"


def with_zeros(folder: Path, layer: int) -> str:
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_bytes((CONFIGS / "kimi_k3.json").read_bytes())
    write_twin(str(folder / "config"), str(folder / "twin"))
    found = 0
    for shard in (folder / "twin").glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [n for n in tensors if n.endswith(NAME.format(layer))]:
            tensors[name] = torch.zeros_like(tensors[name])
            found += 1
        save_file(tensors, shard, metadata={"format": "pt"})
    assert found == 1
    return str(folder / "twin")


@pytest.mark.parametrize(("layer", "told"), [(0, []), (1, ["layers.1.mixer_mix_proj"])])
def test_only_where_it_weighs_several_sources(layer: int, told: list[str], tmp_path: Path) -> None:
    model = open_model(with_zeros(tmp_path, layer))
    list(Stack(model.spec, model.loader.load).load_all())
    assert [f.evidence[0] for f in model.loader.findings if f.kind == "weights.constant"] == told
