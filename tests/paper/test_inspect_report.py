"""The report as an interface: docs/inspect.md names every key and kind; tokenizers, stop ids, unknown families."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dayzero
from dayzero.console import Console, plain
from dayzero.errors import UsageError
from dayzero.planner.inspect import inspect_source
from dayzero.planner.layer_text import map_text, numbers_text
from dayzero.planner.show import show_report
from tests.paper.inspect_checkpoints import config_of, table_of, write_folder
from tests.paper.test_inspect_findings import fails, said, small_dense, small_moe

ROOT = Path(dayzero.__file__).parent.parent
DOC = (ROOT / "docs" / "inspect.md").read_text()
FREE = {"files", "sampling", "stop_id_sources", "nearest", "config.defaulted", "config.ignored", "config.effective",
        "config.stand_ins",
        "tensors.misfit", "tensors.narrowed", "tensors.roots", "tensors.aliases", "tensors.filled",
        "quantization.formats", "quantization.facts", "quantization.ignored"}  # fmt: skip


def documented(section: str) -> set[str]:
    body = DOC.split(f"<!-- {section} -->")[1].split(f"<!-- /{section} -->")[0]
    return {name for line in body.splitlines() for name in re.findall(r"^\| `([^`]+)`", line)}


def names_of(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, item in value.items():
        path = f"{prefix}{key}"
        if isinstance(item, dict) and path not in FREE:
            yield from names_of(item, f"{path}.")
        else:
            yield path


@pytest.mark.parametrize(
    "make", [small_dense, small_moe, lambda: config_of("kimi_k3"), lambda: small_dense(architectures=["X"])]
)
def test_documentation_and_json_name_the_same_keys(make: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make()))
    report = inspect_source(str(tmp_path)).to_json()
    assert set(names_of(plain(report))) == documented("names")


def test_documentation_and_sources_name_the_same_kinds() -> None:
    kinds = set()
    word = re.compile(
        r'"((?:config|family|recipe|tensors|tie|quantization|operators|tokenizer|chat|stop_ids|weights)\.[a-z_]+)"'
    )
    for path in (ROOT / "dayzero" / "planner").glob("*.py"):
        if path.name in ("planner.py", "plan_show.py", "budget.py", "floors.py", "detect.py"):
            continue
        kinds |= set(word.findall(path.read_text()))
    kinds = {k for k in kinds if k not in ("config.json", "tokenizer.json", "tokenizer.model")}
    kinds |= {f"operators.{w}" for w in ("extend", "build")}
    listed = {k for k in documented("kinds") if not k.endswith("*")}
    assert kinds == listed


def test_the_large_release_on_paper(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("kimi_k3")))
    report = inspect_source(str(tmp_path / "config.json"))
    assert report.verdict == "note"
    assert report.cache["per_token_bytes"] == {"bf16": 27_648, "fp8": 15_744}
    assert round(report.parameters["total"] / 1e9, 1) == 2779.9
    assert round(report.parameters["active"] / 1e9, 1) == 104.2
    assert report.layers[0]["mixer"].startswith("delta")
    assert report.layers[92]["mixer"] == report.layers[3]["mixer"]
    assert report.modality == "text+image"
    assert {e["contract"] for e in report.operators["reuse"]} >= {"residual.attn_mix", "recurrence.paged"}
    assert report.quantization["method"] == "compressed-tensors"


def test_effective_values_of_a_family_with_two_ropes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v32")))
    effective = inspect_source(str(tmp_path)).config["effective"]
    ropes = {r["module"]: r for r in effective["rope"]}
    assert (ropes["attention"]["style"], ropes["index"]["style"]) == ("interleaved", "half")
    assert ropes["attention"]["inv_freq"]["count"] == 32
    assert ropes["attention"]["scaling"]["factor"] == 40
    m = 0.1 * 3.6888794541139363 + 1
    assert effective["attention"][0]["softmax_scale"] == pytest.approx(192**-0.5 * m * m)
    assert effective["index"][0]["top_k"] == 2048
    assert effective["routers"][0]["bias"] == "select"
    assert effective["routers"][0]["scale"] == 2.5
    plain(effective)


def test_windows_by_layer_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gpt_oss_20b")))
    report = inspect_source(str(tmp_path))
    windows = {a["window"]: a["layers"] for a in report.config["effective"]["attention"]}
    assert set(windows) == {128, None}
    assert report.config["effective"]["activations"][0]["limit"] == 7.0


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}},
    "added_tokens": [{"id": 3, "content": "<|endoftext|>"}, {"id": 4, "content": "<|im_end|>"},
                     {"id": 5, "content": "<|im_start|>"}],
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def test_stop_ids_are_united_with_their_origin(tmp_path: Path) -> None:
    extra = {
        "tokenizer.json": TOKENIZER, "generation_config.json": {"eos_token_id": [3, 7], "temperature": 0.6, "top_k": 1},
        "tokenizer_config.json": {"eos_token": {"content": "<|endoftext|>"}, "tokenizer_class": "X"},
        "chat_template.jinja": TEMPLATE,
    }  # fmt: skip
    config = small_dense(eos_token_id=3)
    report = inspect_source(str(write_folder(tmp_path, config, table_of(config), extra=extra)))
    assert report.stop_ids == [3, 4, 7]
    assert report.stop_id_sources == {
        "3": ["config.json", "generation_config.json", "tokenizer_config.json eos_token"],
        "4": ["chat template"],
        "7": ["generation_config.json"],
    }
    note = next(f for f in report.findings if f.kind == "stop_ids.differ")
    assert note.measured == [3, 4, 7]
    assert report.sampling == {"temperature": 0.6, "top_k": 1}
    assert report.tokenizer["kind"] == "tokenizer.json (BPE)"
    assert report.tokenizer["size"] == 6
    assert report.chat == {"kind": "template", "templates": ["chat_template.jinja"], "encoders": []}
    assert not fails(report)


def test_ids_beyond_the_vocabulary_fail(tmp_path: Path) -> None:
    config = small_dense(eos_token_id=[2, 128])
    big = {**TOKENIZER, "added_tokens": [{"id": 200, "content": "<x>"}]}
    found = fails(inspect_source(str(write_folder(tmp_path, config, table_of(config), extra={"tokenizer.json": big}))))
    assert "128: config.json" in said(found["stop_ids.out_of_range"])
    assert found["tokenizer.out_of_range"].measured == 200


@pytest.mark.parametrize(
    ("extra", "kind", "where"),
    [({}, "none", "templates"), ({"tokenizer_config.json": {"chat_template": "{{ x }}"}}, "template", "templates"),
     ({"encoding/encoding_nova.py": "raise SystemExit"}, "encoder", "encoders"),
     ({"encoding_nova.py": "x", "chat_template.jinja": "{{ x }}"}, "encoder", "encoders")],
)  # fmt: skip
def test_chat_kinds(extra: dict[str, Any], kind: str, where: str, tmp_path: Path) -> None:
    config = small_dense()
    report = inspect_source(str(write_folder(tmp_path, config, table_of(config), extra=extra)))
    assert report.chat["kind"] == kind
    assert bool(report.chat[where]) == (kind != "none")
    assert any(f.kind == "chat.absent" for f in report.findings) == (kind == "none")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model": 5}', '{"added_tokens": [{"id": "x"}]}', "[" * 9999, "\ud800"]
)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_tokenizer_files_are_findings(text: str, file: str, tmp_path: Path) -> None:
    config = small_dense()
    write_folder(tmp_path, config, table_of(config))
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    report = inspect_source(str(tmp_path))
    odd = file == "tokenizer.json" or not text.startswith("{") or text == "{"
    assert ("tokenizer.file" in fails(report)) == odd
    plain(report)


def test_an_unknown_family_is_compared_with_the_nearest(tmp_path: Path) -> None:
    config = small_moe(
        architectures=["NovaForCausalLM"], model_type="nova", hc_mult=4, engram_layers=[1], flux_ratio=0.5
    )
    table = table_of(small_moe())
    table["model.layers.1.hc_attn_fn"] = ("F32", (4, 256), None)
    report = inspect_source(str(write_folder(tmp_path, config, table)))
    assert report.verdict == "fail"
    assert report.family is None
    near = report.nearest
    assert near is not None
    assert near["family"] == "deepseek_v3"
    assert set(near["config"]["only_here"]) == {"hc_mult", "engram_layers", "flux_ratio"}
    assert near["tensors"]["only_here"] == ["model.layers.#.hc_attn_fn"]
    assert near["tensors"]["only_there"] == []
    assert any(kind["unknown_tensors"] == ["model.layers.#.hc_attn_fn"] for kind in near["layer_kinds"])
    reuse = {e["contract"] for e in report.operators["reuse"]}
    build = {e["contract"] or e["about"] for e in report.operators["build"]}
    assert {"residual.streams_enter", "latent.queries", "moe.route"} <= reuse
    assert "embed.ngram" in build
    assert any("flux_ratio" in b for b in build)
    assert "publisher's own code" in fails(report)["family.unknown"].remedy
    assert report.tensors["unknown"] == ["model.layers.1.hc_attn_fn"]
    assert report.tensors["missing"] == []


def test_a_known_name_with_other_traits_is_not_taken(tmp_path: Path) -> None:
    config = config_of("kimi_k3", text_config__attn_res_block_size=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_source(str(tmp_path))
    assert report.family is None
    assert "attn_res_block_size" in report.why


def test_hashes(tmp_path: Path) -> None:
    import hashlib

    config = small_dense()
    folder = write_folder(tmp_path / "m", config, table_of(config))
    with pytest.raises(UsageError, match="manifest"):
        inspect_source(str(folder), verify_hash=True)
    right = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
    manifest = tmp_path / "sums.json"
    manifest.write_text(json.dumps(right))
    state = tmp_path / "state"
    report = inspect_source(str(folder), hash_manifest=str(manifest), state_folder=state)
    assert any(f.kind == "hash.verified" for f in report.findings)
    assert len(list(state.iterdir())) == 1
    manifest.write_text(json.dumps({**right, "config.json": "0" * 64}))
    report = inspect_source(str(folder), hash_manifest=str(manifest), verify_hash=True, state_folder=state)
    assert "config.json" in said(fails(report)["hash.mismatch"])


def test_layers_in_words() -> None:
    assert numbers_text([0, 1, 2, 7]) == "0–2, 7"
    assert numbers_text(range(0, 90, 3)) == "0, 3, … 87"
    assert numbers_text([]) == ""
    layers = [{"mixer": "a", "channel": "x", "residual": "plain"}] * 3 + [
        {"mixer": "b", "channel": "x", "residual": "plain"}
    ]
    assert map_text(layers) == "0–2 a / x; 3 b / x"


@pytest.mark.parametrize(
    "make", [small_moe, lambda: config_of("kimi_k3"), lambda: small_dense(architectures=["X"], odd=1)]
)
def test_the_report_is_shown(make: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make()))
    report = inspect_source(str(tmp_path))
    out = io.StringIO()
    show_report(report, Console(stdout=out, stderr=io.StringIO()))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"{report.verdict}: ")
    assert f"verdict: {report.verdict}" in lines[-1]
    assert len(lines) < 120


def test_inspecting_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_moe()))
    code = (
        "import sys; from dayzero.planner.inspect import inspect_source; import dayzero.planner.show; "
        "inspect_source(sys.argv[1]); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["False", "False"]
