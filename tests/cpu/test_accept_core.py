"""Stage 1 of an acceptance on small checkpoints, sound and damaged; and the command as it is typed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from align_support import write_recipe
from safetensors.torch import load_file, save_file

from dayzero.acceptance.accept.digest import verify_digest
from dayzero.acceptance.accept.protocol import package_facts, source_facts, stamps_of, subject_facts
from dayzero.acceptance.accept.stage import Context, Profile, StageResult, Subject
from dayzero.acceptance.stages import weight_hashes, weight_values
from dayzero.acceptance.stages.weight_hashes import affordable
from dayzero.acceptance.stages.weight_values import _spread
from dayzero.acceptance.stages.weights import CHECKS, STAGE
from dayzero.checkpoint import verify
from dayzero.checkpoint.source import open_source
from dayzero.cli import main
from dayzero.commands.accept import check_serve_options
from dayzero.errors import UsageError
from dayzero.finding import Finding
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.paper.test_accept_digest import sample

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
HEAD, NORM, MATRIX = "lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"


class NoServices:
    own = True

    def shared(self) -> Any:
        raise AssertionError("no server is needed for weights")

    private = shared


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("twins")

    def made(name: str) -> Path:
        if not (folder / name).exists():
            write_twin(str(CONFIGS / f"{name}.json"), str(folder / name), TwinOptions(num_shards=2))
        return folder / name

    return made


@pytest.fixture
def plain(twins: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(twins("qwen3_8b"), tmp_path / "checkpoint"))


def run(source: str | Path, tmp_path: Path, profile: Profile = "quick") -> StageResult:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return STAGE.run(Context(Subject(str(source)), NoServices(), work, profile))  # type: ignore[arg-type]


def verdicts(result: StageResult) -> dict[str, str]:
    return {found.kind: found.verdict for found in result.findings}


def failed(result: StageResult) -> set[str]:
    return {found.kind for found in result.findings if found.verdict == "fail"}


def of_kind(result: StageResult, kind: str) -> Finding:
    return next(found for found in result.findings if found.kind == kind)


def edit(folder: Path, file: str, **changes: Any) -> None:
    content = json.loads((folder / file).read_text())
    content = {key: value for key, value in (content | changes).items() if value is not ...}
    (folder / file).write_text(json.dumps(content))


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    value = change(tensors.pop(name))
    save_file(tensors if value is None else {**tensors, name: value.contiguous()}, shard)


# --- sound checkpoints -----------------------------------------------------------------------------------------------


def test_a_sound_checkpoint_passes_every_check(plain: Path, tmp_path: Path) -> None:
    result = run(plain, tmp_path)
    assert not failed(result) and set(verdicts(result).values()) <= {"pass", "not applicable"}
    passed = [found for found in result.findings if found.verdict == "pass"]
    assert len(passed) >= 24 and all(found.measured is not None for found in passed)
    assert {found.kind for found in result.findings if found.verdict != "pass"} == {
        "quantization.scale", "quantization.shape", "quantization.unread", "hash.verified"
    }  # fmt: skip
    assert len({found.claim for found in result.findings}) == len(result.findings)
    hashes = result.facts["sha256"]
    assert set(hashes) == {path.name for path in plain.iterdir()}
    for name, value in hashes.items():
        assert value == hashlib.sha256((plain / name).read_bytes()).hexdigest()
    parameters = result.facts["parameters"]["total"]
    assert parameters == sum(t.numel() for s in plain.glob("*.safetensors") for t in load_file(s).values())
    (figure,) = result.figures
    assert figure.data["x"] == list(range(json.loads((plain / "config.json").read_text())["num_hidden_layers"]))
    o_proj, rest = ({n: t for s in plain.glob("*.safetensors") for n, t in load_file(s).items()}, [])
    for name, value in o_proj.items():
        if name.startswith("model.layers.1.mlp.") and value.dim() == 2:
            rest.append(value.double().flatten())
    mean = torch.cat(rest).square().mean().sqrt()
    assert figure.data["series"]["channel"][1] == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize("name", ["gpt_oss_20b", "deepseek_v32"])
def test_quantised_checkpoints_are_checked_as_such(twins: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    result = run(twins(name), tmp_path)
    assert not failed(result)
    assert all(verdicts(result)[kind] == "pass" for kind in ("quantization.scale", "quantization.shape"))
    values = result.facts["values"]
    assert values["share"] == 1 and values["parameters"] > 50


def test_a_config_alone_says_why_the_rest_is_not_checked(tmp_path: Path) -> None:
    result = run(CONFIGS / "qwen3_8b.json", tmp_path)
    got = verdicts(result)
    assert got["weights.absent"] == "note" and got["config.unread"] == "pass" and not failed(result)
    for kind in ("tensors.missing", "weights.not_finite", "hash.recorded", "tokenizer.file", "chat.template"):
        assert got[kind] == "not applicable", kind
    seeded = verdicts(run(f"seeded:{CONFIGS / 'qwen3_8b.json'}", tmp_path))
    assert "weights.absent" not in seeded and seeded["integrity.files"] == "not applicable"


def test_a_paper_twin_has_no_values(tmp_path: Path) -> None:
    write_twin(str(CONFIGS / "smollm2_135m.json"), str(tmp_path / "paper"), TwinOptions(paper=True))
    got = verdicts(run(tmp_path / "paper", tmp_path))
    assert got["weights.constant"] == "not applicable" and got["tensors.missing"] == "pass"


# --- each check can fail ---------------------------------------------------------------------------------------------


def scaled_norm(value: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(value.shape, generator=draw) * 0.02).to(value.dtype)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights.not_finite": lambda f: edit_tensor(f, MATRIX, lambda t: t.index_fill(0, torch.tensor([3]), float("nan"))),
    "weights.constant": lambda f: edit_tensor(f, MATRIX, torch.zeros_like),
    "tensors.missing": lambda f: edit_tensor(f, MATRIX, lambda t: None),
    "tensors.unknown": lambda f: edit(f, "config.json", qk_norm=True) or _add_tensor(f),
    "tensors.misfit": lambda f: edit_tensor(f, MATRIX, lambda t: t[:-1]),
    "tie.head_missing": lambda f: edit_tensor(f, HEAD, lambda t: None),
    "tie.contradiction": lambda f: edit(f, "config.json", tie_word_embeddings=True),
    "config.unread": lambda f: edit(f, "config.json", attention_scale_boost=2.0),
    "config.value": lambda f: edit(f, "config.json", num_key_value_heads=3),
    "config.repeated": lambda f: _text(f, "config.json", '"hidden_size"', '"vocab_size": 7, "hidden_size"'),
    "config.layer_count": lambda f: edit(f, "config.json", num_hidden_layers=9, max_window_layers=9),
    "family.unknown": lambda f: edit(f, "config.json", architectures=["NovaForCausalLM"], model_type="nova"),
    "quantization.contradiction": lambda f: edit(
        f, "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "tokenizer.file": lambda f: (f / "tokenizer.json").write_text("{"),
    "tokenizer.out_of_range": lambda f: _text(f, "tokenizer.json", '"id": 256', '"id": 999999'),
    "chat.template": lambda f: (f / "chat_template.jinja").write_bytes(b"\xff\xfe{{"),
    "stop_ids.out_of_range": lambda f: edit(f, "generation_config.json", eos_token_id=999_999),
    "stop_ids.no_id": lambda f: edit(f, "generation_config.json", eos_token_id="</s>"),
    "integrity.truncated": lambda f: _cut(next(f.glob("model-00002*.safetensors"))),
}


def _text(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    compact = text.replace('": ', '":') if old not in text else text
    assert old in compact, (file, old)
    (folder / file).write_text(compact.replace(old, new, 1))


def _cut(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 100)


def _add_tensor(folder: Path) -> None:
    shard = next(folder.glob("model-00001*.safetensors"))
    tensors = load_file(shard)
    save_file({**tensors, "model.layers.0.self_attn.sink.weight": torch.ones(4)}, shard)


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_fails_its_check(plain: Path, tmp_path: Path, kind: str) -> None:
    DAMAGE[kind](plain)
    result = run(plain, tmp_path)
    assert any(name == kind or name.startswith(kind) for name in failed(result)), sorted(failed(result))
    found = next(f for f in result.findings if f.verdict == "fail" and f.kind.startswith(kind))
    assert found.remedy or found.kind.startswith("chat")
    assert len({(f.kind, f.claim) for f in result.findings}) == len(result.findings)


def test_norms_of_the_other_convention_fail(plain: Path, tmp_path: Path) -> None:
    norms = [n for s in plain.glob("*.safetensors") for n, t in load_file(s).items() if "norm" in n and t.dim() == 1]
    for name in norms:
        edit_tensor(plain, name, scaled_norm)
    assert "weights.norm_mean" in failed(run(plain, tmp_path))


def test_a_spoilt_scale_fails(twins: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(twins("deepseek_v32"), tmp_path / "checkpoint"))
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in names if name.endswith("o_proj.weight_scale_inv"))
    edit_tensor(folder, name, lambda t: t.fill_(float("nan")))
    assert "quantization.scale" in failed(run(folder, tmp_path))


def test_a_size_that_the_format_cannot_hold_is_the_configs_fault(twins: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(twins("gpt_oss_20b"), tmp_path / "checkpoint"))
    edit(folder, "config.json", intermediate_size=162)
    found = of_kind(run(folder, tmp_path), "quantization.shape")
    assert (found.kind, found.layer, found.verdict) == ("quantization.shape", "config", "fail")
    assert "multiple of 32, not 162" in found.evidence[0]


GATE = "layers.{i}.channel.gate"
WITHOUT = 'RULES = tuple(r for r in RULES if "channel.gate" not in str(r))\n'
RECIPES: dict[str, tuple[str, set[str]]] = {
    "one rule less": (WITHOUT, {"recipe.without_rule"}),
    "one tensor read twice": (
        WITHOUT + f'RULES += (Rule("model.layers.{{i}}.mlp.up_proj.weight", "{GATE}"),)', {"recipe.used_twice"}),
    "one parameter filled twice": (
        f'RULES += (Rule("model.layers.{{i}}.mlp.more_proj.weight", "{GATE}"),)', {"recipe.filled_twice"}),
    "a rule that is none": ('RULES += (Rule("model.x.{i}.weight", "layers.{j}.channel.gate"),)', {"recipe.rules"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_wrong_fails(name: str, twins: Callable[[str], Path], tmp_path: Path) -> None:
    change, expected = RECIPES[name]
    subject = Subject(str(twins("smollm2_135m")), recipe=write_recipe(tmp_path / "recipe.py", change))
    result = STAGE.run(Context(subject, NoServices(), tmp_path))  # type: ignore[arg-type]
    found = {f.kind: f for f in result.findings if f.kind.startswith("recipe.") and f.verdict == "fail"}
    assert set(found) == expected and all((f.layer, bool(f.remedy)) == ("weights", True) for f in found.values())


def test_a_single_dead_expert_fails(twins: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(twins("qwen3_30b_a3b"), tmp_path / "checkpoint"))
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in names if "experts.5.down_proj" in name)
    edit_tensor(folder, name, torch.zeros_like)
    result = run(folder, tmp_path)
    assert failed(result) == {"weights.constant"}
    assert "5" in of_kind(result, "weights.constant").claim


def test_values_that_cannot_be_loaded_fail_though_inspection_passed(plain: Path, tmp_path: Path) -> None:
    """A tied copy that differs beyond what inspection samples is only seen by who loads it."""

    def refuse(*args: object, **more: object) -> Any:
        raise UsageError("the tensor cannot be decoded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_values, "open_model", refuse)
        assert failed(run(plain, tmp_path)) == {"weights.loaded"}
        edit(plain, "config.json", new_key=1)
        assert verdicts(run(plain, tmp_path))["weights.not_finite"] == "not applicable"


# --- hashes ----------------------------------------------------------------------------------------------------------


def state_hashes(folder: Path, **other: str) -> None:
    """What a download by the hub's client leaves beside the files."""
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for path in folder.glob("*.safetensors"):
        value = other.get(path.stem, hashlib.sha256(path.read_bytes()).hexdigest())
        (records / f"{path.name}.metadata").write_text(f"commit\n{value}\n1.0\n")


def test_hashes_are_held_against_the_publishers(plain: Path, tmp_path: Path) -> None:
    state_hashes(plain)
    result = run(plain, tmp_path)
    assert of_kind(result, "hash.verified").verdict == "pass" and not failed(result)
    shard = next(plain.glob("model-00001*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x11\x3c")
    result = run(plain, tmp_path)
    assert "hash.mismatch" in failed(result)
    assert of_kind(result, "hash.mismatch").evidence == (shard.name,)


def test_quick_hashes_what_it_can_afford_and_says_so(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_hashes(plain)
    sizes = sorted(path.stat().st_size for path in plain.iterdir() if path.is_file())
    monkeypatch.setattr(weight_hashes, "QUICK_BYTES", sum(sizes[:-1]))
    result = run(plain, tmp_path)
    found = of_kind(result, "hash.recorded")
    assert found.verdict == "note" and len(found.evidence) == 1 and "release-day" in found.remedy
    assert of_kind(result, "hash.verified").verdict == "pass"
    assert of_kind(run(plain, tmp_path, "release-day"), "hash.recorded").verdict == "pass"


def test_a_file_that_changes_while_it_is_read_is_not_in_the_record(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = verify.sha256

    def changing(source: Any, file: str, *given: Any) -> str:
        if file == "config.json":
            edit(plain, file, again=True)
        return read(source, file, *given)

    monkeypatch.setattr(verify, "sha256", changing)
    result = run(plain, tmp_path)
    found = of_kind(result, "hash.recorded")
    assert (found.kind, found.layer, found.verdict) == ("hash.recorded", "weights", "fail") and found.remedy
    assert "while it was being read" in of_kind(result, "hash.unreadable").claim
    assert "config.json" not in result.facts["sha256"]


def test_files_are_chosen_by_size() -> None:
    sizes = {"a": 5, "b": 1, "c": 3, "d": 3}
    assert affordable(sizes, None) == ["b", "c", "d", "a"]
    assert affordable(sizes, 7) == ["b", "c", "d"] and affordable(sizes, 6) == ["b", "c"] and affordable(sizes, 0) == []


def test_quick_reads_a_share_of_the_values_and_says_so(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_values, "QUICK_BYTES", 200_000)
    result = run(plain, tmp_path)
    assert of_kind(result, "weights.read").verdict == "note"
    assert result.facts["values"]["bytes"] < 0.6 * result.facts["tensor_bytes"]
    assert "weights.read" not in verdicts(run(plain, tmp_path, "release-day"))


def test_a_share_is_spread_with_both_ends() -> None:
    assert _spread(list(range(10)), 1.0) == list(range(10))
    assert _spread(list(range(10)), 0.4) == [0, 3, 6, 9]
    assert _spread(list(range(10)), 0.01) == [0, 9]
    assert _spread([7], 0.01) == [7] and _spread([], 1.0) == []


def test_checks_have_kinds_and_claims_of_their_own() -> None:
    assert len({check.kinds[0] for check in CHECKS}) == len({check.claim for check in CHECKS}) == len(CHECKS)


# --- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, key",
    [
        ("config.json", "config_sha256"), ("tokenizer.json", "tokenizer_sha256"),
        ("chat_template.jinja", "template_sha256"),
    ],
)  # fmt: skip
def test_hashes_of_the_subject_follow_its_files(plain: Path, file: str, key: str) -> None:
    before, stamps = source_facts(open_source(str(plain))), stamps_of(open_source(str(plain)))
    if not (plain / file).exists():
        (plain / file).write_text("{{ messages }}")
    else:
        (plain / file).write_text((plain / file).read_text() + "\n")
    after = source_facts(open_source(str(plain)))
    changed = {name for name in before if before[name] != after[name]} - {"files", "bytes"}
    assert changed == {key} and stamps_of(open_source(str(plain))) != stamps


def test_the_hash_of_headers_follows_names_and_shapes(plain: Path) -> None:
    before = source_facts(open_source(str(plain)))
    edit_tensor(plain, MATRIX, lambda t: t + 1)
    assert source_facts(open_source(str(plain)))["headers_sha256"] == before["headers_sha256"]
    edit_tensor(plain, MATRIX, lambda t: t[:-1])
    assert source_facts(open_source(str(plain)))["headers_sha256"] != before["headers_sha256"]


def test_files_that_options_name_are_hashed(plain: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ x }}")
    for options in (("--chat-template", str(template)), (f"--chat-template={template}",)):
        facts = subject_facts(Subject(str(plain), serve=options))
        assert facts["serve_files_sha256"] == {str(template): hashlib.sha256(b"{{ x }}").hexdigest()}


def test_a_package_in_a_checkout_tells_its_commit(tmp_path: Path) -> None:
    package = tmp_path / "tree" / "dayzero"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    assert package_facts(package)["commit"] is None
    environment = {
        **os.environ,
        **{f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(package.parent), *arguments], check=True, env=environment)
    clean = package_facts(package)
    assert len(clean["commit"]) == 40 and clean["changed"] is False
    (package / "a.py").write_text("x = 2\n")
    dirty = package_facts(package)
    assert dirty["changed"] is True and dirty["commit"] == clean["commit"]
    assert dirty["code_sha256"] != clean["code_sha256"]


# --- the command -----------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["accept", *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "give a SOURCE to judge"),
        (["nova", "--profile", "slow"], "--profile slow: give quick, release-day or long"),
        (["nova", "--stages", "numbers"], "there is no stage 'numbers'"),
        (["http://127.0.0.1:1"], "give it with --url"),
        (["--url", "127.0.0.1"], "give an address such as"),
        (["--url", "http://192.0.2.1:8000"], "needs --allow-remote"),
        (["nova", "--url", "http://127.0.0.1:1", "--", "--threads", "2"], "runs with its own already"),
        (["nova", "--model", "x"], "--model and --allow-remote"),
        (["nova", "--", "--port", "80"], "decides this itself"),
        (["nova", "extra"], "options for servers come behind --"),
        (["nova", "--", "--no-such"], "behind --: No such option"),
        (["nova", "--", "--threads", "many"], "behind --: Invalid value"),
        (["nova"], "does not exist"),
        (["nova", "--baseline", "none.json"], "does not exist"),
        (["nova", "--compare", "a", "b"], "leave SOURCE and --url out"),
        (["--compare", "a", "b"], "does not exist"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, *arguments)
    assert code == 2 and words in text and text.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_baseline_that_was_changed_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = sample()
    record["stages"][1]["findings"][0]["measured"] = 0.001
    (tmp_path / "record.json").write_text(json.dumps(record))
    code, text = said(capsys, "nova", "--baseline", "record.json")
    assert code == 2 and "its digest does not fit" in text


def test_options_of_servers_are_checked_before_anything_runs() -> None:
    check_serve_options(("--threads", "4", "--pool-bytes=1GiB", "--no-prefix-cache"))
    for options in (("--host=0.0.0.0",), ("--api-key", "x"), ("--help",), ("threads", "4")):
        with pytest.raises(UsageError):
            check_serve_options(options)


def test_the_record_must_not_lie_in_the_checkpoint(
    capsys: pytest.CaptureFixture[str], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plain)
    code, text = said(capsys, ".", "--stages", "weights")
    assert code == 2 and "lies in the checkpoint's own folder" in text


def test_the_command_gives_a_record_resumes_it_and_compares(plain: Path, tmp_path: Path) -> None:
    def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dayzero", "accept", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)

    first = run_command("checkpoint", "--stages", "weights", "--json", "--out", "a")
    assert first.returncode == 0 and "1/1 weights: pass" in first.stderr, first.stderr
    record = json.loads(first.stdout)
    assert verify_digest(record) and record["protocol"]["left_out"] and not record["complete"]
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {"record.json", "junit.xml", "index.html", "stages"}
    again = run_command("checkpoint", "--stages", "weights", "--out", "a")
    assert "taken from the run of" in again.stderr and again.stdout.startswith("pass: checkpoint, profile quick")
    edit(plain, "config.json", new_key=1)
    third = run_command("checkpoint", "--stages", "weights", "--out", "b")
    assert third.returncode == 1 and "new_key = 1" in third.stdout
    compared = run_command("--compare", "a", "b", "--json", "--out", "c")
    assert compared.returncode == 1, compared.stderr
    done = json.loads(compared.stdout)
    assert done["counts"]["broken"] >= 1 and [d["what"] for d in done["differences"]] == ["subject"]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text()) == done
