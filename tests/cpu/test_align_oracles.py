"""The oracle's process: lean reading, every tensor exactly once, every family's twin against the publisher's code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from align_support import CONFIG, LAYERS, ORACLES, script, write_dense
from safetensors.torch import load_file, save_file

from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.acceptance.oracle import choose, places
from dayzero.acceptance.trace import Trace
from dayzero.blocks.open import open_model
from dayzero.models.recipe import Oracle
from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIGS = Path(__file__).parent.parent / "paper" / "configs"


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ORACLES))
    return script("pieces")


def test_pieces_are_the_same_bytes_through_the_same_decoder(pieces: Any, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=draw, dtype=torch.int32).to(torch.uint8)

    save_file(
        {
            "e.gate_up_proj_blocks": codes(3, 6, 2, 16),
            "e.gate_up_proj_scales": torch.randint(120, 130, (3, 6, 2), generator=draw).to(torch.uint8),
            "e.plain": torch.randn(3, 5, 4, generator=draw).to(torch.bfloat16),
            "w.weight": torch.randn(9, 4, generator=draw).to(torch.float16),
            "q.weight": torch.randn(130, 70, generator=draw).to(torch.float8_e4m3fn),
            "q.weight_scale_inv": torch.rand(2, 1, generator=draw),
        },
        tmp_path / "model.safetensors",
    )
    reader = script("decode").open_checkpoint(tmp_path)
    held = pieces.logical_names(reader)
    assert set(held) == {"e.gate_up_proj", "e.plain", "w.weight", "q.weight"}
    assert held["q.weight"] == ("q.weight", "q.weight_scale_inv")
    for name in ("e.gate_up_proj", "e.plain"):
        assert pieces.can_slice(reader, name, held[name], 3)
        for expert in range(3):
            assert torch.equal(pieces.slice_tensor(reader, name, held[name], expert), reader.tensor(name)[expert])
    assert pieces.is_plain(reader, "w.weight", held["w.weight"])
    assert not pieces.is_plain(reader, "q.weight", held["q.weight"])
    wanted = torch.tensor([7, 0, 8])
    assert torch.equal(pieces.gather_rows(reader, "w.weight", wanted), reader.tensor("w.weight")[wanted])
    assert torch.equal(pieces.rows(reader, "w.weight", 2, 9), reader.tensor("w.weight")[2:9])
    assert sorted(reader.names()) == sorted(load_file(tmp_path / "model.safetensors")), "no alias stays behind"


def run_library(folder: Path, tokens: list[int], **changes: str) -> subprocess.CompletedProcess[str]:
    """``transformers_forward.py`` on a dense folder; its trace is ``folder/out``."""
    layer = {"layer": "model.layers.{i}", "mixer": "model.layers.{i}.self_attn", "channel": "model.layers.{i}.mlp"}
    layer |= {k: v for k, v in changes.items() if k in layer}
    layers = [{k: v.replace("{i}", str(i)) for k, v in layer.items()} for i in range(LAYERS)]
    paths = {"embed": "model.embed_tokens", "layers": layers, "final_norm": "model.norm", "head": "lm_head"}
    (folder / "map").write_text(json.dumps(paths))
    (folder / "ids").write_text(json.dumps(tokens))
    command = [sys.executable, str(ORACLES / "transformers_forward.py"), "--model", str(folder), "--map"]
    command += [str(folder / "map"), "--tokens", str(folder / "ids"), "--out", str(folder / "out"), "--threads", "1"]
    command += ["--class", changes.get("class_name", "LlamaForCausalLM")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_a_parameter_without_a_source_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write_dense(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    done = run_library(folder, [3, 4])
    assert done.returncode == 1 and "model.layers.1.mlp.up_proj.weight" in done.stderr.splitlines()[-1]


def test_what_the_library_leaves_over_is_told_and_a_tied_head_is_filled(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write_dense(tmp_path / "m", {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.extra": torch.zeros(2)}, folder / "model.safetensors")
    done = run_library(folder, [3, 4, 3])
    assert done.returncode == 0, done.stderr
    trace = Trace(folder / "out")
    assert trace.meta["unused"] == ["model.layers.0.self_attn.extra"]
    logits = trace.get("final_norm") @ tensors["model.embed_tokens.weight"].float().T
    torch.testing.assert_close(trace.get("logits"), logits, rtol=1e-5, atol=1e-5)  # float32 sums of 40 terms
    assert [json.loads(line)["done"] for line in done.stdout.splitlines()] == [1, 2, 3]


@pytest.mark.slow
def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run_library(write_dense(tmp_path / "m"), [3, 4], mixer="model.layers.{i}.attention")
    assert done.returncode == 1 and "attention" in done.stderr.splitlines()[-1]


def test_places_follow_the_spec(tmp_path: Path) -> None:
    model = open_model(str(write_dense(tmp_path / "m")))
    modules = Oracle("X", mixer_of_kind={"attention": "at.{i}"}, router="router.{i}", index="index.{i}")
    made = places(modules, model.spec)
    assert made["layers"][2]["mixer"] == "at.2" and made["layers"][2]["layer"] == "model.layers.2"
    assert made["layers"][0]["router"] is None and made["layers"][0]["index"] is None, "a dense layer has neither"
    assert choose(model.recipe, None, False, CONFIG).what == "LlamaForCausalLM"
    assert choose(model.recipe, "transformers", False, CONFIG).kind == "library"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3", "deepseek_v32", "glm_5_2", "gpt_oss_20b", "kimi_linear_48b_a3b", "qwen3_30b_a3b", "qwen3_8b",
        "qwen3_5_27b_text", "qwen3_5_35b_a3b", "smollm2_135m",
    ],
)  # fmt: skip
def test_a_twin_of_every_family_aligns(name: str, tmp_path: Path) -> None:
    """Real names, formats (fp8 blocks, mxfp4) and traits; both sides decode for themselves."""
    pytest.importorskip("transformers")
    (tmp_path / "config").mkdir()
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config" / "config.json")
    write_twin(str(tmp_path / "config" / "config.json"), str(tmp_path / "twin"), TwinOptions())
    report = align_source(str(tmp_path / "twin"), AlignOptions(threads=1))
    assert report.verdict != "fail", [f for f in report.findings if f.verdict == "fail"]
    assert report.aligned == "twin only" and report.first_diverging is None
    # A library's forward is given no images: that a vision tower was not compared is a note.
    told = [f for f in report.findings if f.kind.startswith("align.") and f.kind != "align.vision"]
    assert all(f.verdict == "pass" for f in told)
    assert not [c for c in report.choices if c.choice.differing]
