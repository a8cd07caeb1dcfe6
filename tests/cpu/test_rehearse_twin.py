"""Twins of every family: the real names and formats, seeded, whole, and small."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from dayzero.blocks.open import open_model
from dayzero.checkpoint.coverage import cover
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.source import open_source
from dayzero.models.blueprint import blueprint, require_recipe
from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
FAMILIES = sorted(p.stem for p in CONFIGS.glob("*.json"))


def twin(tmp_path: Path, name: str, **options: object) -> Path:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    out = tmp_path / f"twin{len(list(tmp_path.iterdir()))}"
    write_twin(str(tmp_path / "config.json"), str(out), TwinOptions(**options))  # type: ignore[arg-type]
    return out


def digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_twin_is_complete_and_keeps_the_formats(tmp_path: Path, name: str) -> None:
    out = twin(tmp_path, name)
    config = json.loads((out / "config.json").read_text())
    plan = blueprint(config, require_recipe(config))
    found = cover(plan.expansion, read_index(open_source(str(out))).entries, plan.quant)
    assert found.complete and not found.ignored
    assert all(c.why for c in found.contradictions)
    real = json.loads((CONFIGS / f"{name}.json").read_text())
    real_plan = blueprint(real, require_recipe(real))
    assert real_plan.quant.method == plan.quant.method
    assert (len(found.formats) > 1) == (plan.quant.method != "none" or "f32" in found.formats)
    assert sum(f.stat().st_size for f in out.iterdir()) < 16 << 20


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    same = {digest(twin(tmp_path, "qwen3_8b", seed=3)) for _ in range(2)}
    assert len(same) == 1
    assert digest(twin(tmp_path, "qwen3_8b", seed=4)) not in same


def test_values_do_not_depend_on_the_sharding(tmp_path: Path) -> None:
    one, many = twin(tmp_path, "qwen3_8b", num_shards=1), twin(tmp_path, "qwen3_8b", num_shards=7)
    assert len(list(many.glob("*.safetensors"))) == 7
    a, b = (open_model(str(f)).loader.load("layers.1") for f in (one, many))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_padded_tensors_are_padded_in_the_twin(tmp_path: Path) -> None:
    out = twin(tmp_path, "kimi_k3")
    source = open_source(str(out))
    name, entry = next((n, e) for n, e in read_index(source).entries.items() if n.endswith("A_log"))
    values = torch.frombuffer(bytearray(source.read(entry.file, entry.start, entry.nbytes)), dtype=torch.float32)
    heads = json.loads((out / "config.json").read_text())["text_config"]["linear_attn_config"]["num_heads"]
    assert values.numel() > heads, name
    assert (values[:heads] != 0).all() and (values[heads:] == 0).all()


def test_a_copied_tokenizer_keeps_the_vocabulary(tmp_path: Path) -> None:
    first = twin(tmp_path, "qwen3_8b")
    (first / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    out = tmp_path / "second"
    write_twin(str(first), str(out))
    vocab = [json.loads((f / "config.json").read_text())["vocab_size"] for f in (first, out)]
    assert vocab[0] == vocab[1]
    assert (out / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_the_stand_in_tokenizer_round_trips_and_ends_turns(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    out = twin(tmp_path, "smollm2_135m")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in ("plain", "naïve 日本語 🙂\n\ttabs", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    stop = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.encode("<|end|>").ids == stop[:1]


def test_a_checkpoint_without_an_optional_tensor_is_planned(tmp_path: Path) -> None:
    """An index whose key norm has no bias: the parameter is filled with zeros, and no rank reads it."""
    from safetensors.torch import load_file, save_file

    from dayzero.planner.plan_report import PlanOptions
    from dayzero.planner.planner import plan_source

    out = twin(tmp_path, "kimi_k3_1", num_shards=1)
    whole = plan_source(str(out), PlanOptions("cpu"))
    shard = out / "model.safetensors"
    tensors = load_file(shard)
    biases = [name for name in tensors if name.endswith("k_norm.bias")]
    lost_bytes = sum(tensors.pop(name).nbytes for name in biases)
    save_file(tensors, shard, metadata={"format": "pt"})
    without = plan_source(str(out), PlanOptions("cpu"))
    assert biases and without.proof is not None and without.proof.holds
    assert without.weight_bytes == whole.weight_bytes - lost_bytes
