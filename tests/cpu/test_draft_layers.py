"""Draft layers in a twin: loaded by who asks for them, by nobody else."""

from __future__ import annotations

from math import prod

import pytest
import torch
from small_models import CONFIGS

from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.stack import Stack
from dayzero.checkpoint.formats import DTYPE_BITS
from dayzero.rehearse.twin import write_twin


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_5_2", "qwen3_5_35b_a3b"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_bytes((CONFIGS / f"{request.param}.json").read_bytes())
    write_twin(str(folder / "config.json"), str(folder / "twin"))
    return open_model(str(folder / "twin"), dtype=torch.bfloat16)


def test_every_parameter_of_a_draft_layer_is_there_for_who_asks(model: LoadedModel) -> None:
    assert model.coverage.extra and model.spec.extra is not None
    names = {"join", "embed_norm", "hidden_norm", "final_norm"}
    loaded = {n: v for n, v in model.loader.load("extra").items() if n.rpartition(".")[2] not in ("embed", "head")}
    decls = {d.name: d for d in model.spec.extra.params()}
    assert set(loaded) == set(decls) and names <= {n.rpartition(".")[2] for n in loaded}
    for name, value in loaded.items():
        assert tuple(value.shape) == decls[name].shape and bool(value.float().std() > 0), name
        assert value.dtype == (torch.float32 if decls[name].keep == "f32" else torch.bfloat16), name


def test_copies_are_copies(model: LoadedModel) -> None:
    assert model.spec.extra is not None
    for decl in model.spec.extra.copies():
        word = decl.name.rpartition(".")[2]
        assert torch.equal(model.loader.load(decl.name)[decl.name], model.loader.load(word)[word])


def test_a_stack_reads_none_of_it(model: LoadedModel) -> None:
    fresh = open_model(model.source.name, dtype=torch.bfloat16)
    asked: list[str] = []

    def load(prefix: str) -> dict[str, torch.Tensor]:
        asked.append(prefix)
        return fresh.loader.load(prefix)

    assert list(Stack(fresh.spec, load).load_all()) and asked
    assert not any(prefix.startswith("extra") for prefix in asked)
    size = {n: prod(e.shape) * DTYPE_BITS[e.dtype] // 8 for n, e in fresh.index.entries.items()}
    assert 0 < fresh.loader.bytes_read <= sum(size[n] for n in fresh.coverage.used)
