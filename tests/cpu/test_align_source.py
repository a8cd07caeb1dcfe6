"""``align_source`` on a tiny checkpoint: two independent oracles, record and replay, planted faults, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from align_support import CONFIG, ORACLES, write_dense, write_recipe

from dayzero.acceptance.align import AlignOptions, AlignReport, align_source, show_align
from dayzero.console import Console
from dayzero.errors import CheckpointError, ModelError, UsageError

PLAIN = str(ORACLES / "plain_llama.py")


def options(**over: Any) -> AlignOptions:
    return AlignOptions(**{"threads": 1, "num_tokens": 20, **over})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("align") / "model")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> tuple[AlignReport, str]:
    """A run against the plain forward, and the trace it left."""
    trace = str(folder.parent / "plain.trace")
    return align_source(str(folder), options(oracle=PLAIN, record=trace)), trace


def failed(report: AlignReport) -> set[str]:
    return {f.kind for f in report.findings if f.verdict == "fail"}


def test_the_library_and_a_plain_forward_both_agree(folder: Path, recorded: tuple[AlignReport, str]) -> None:
    pytest.importorskip("transformers")
    library, plain = align_source(str(folder), options()), recorded[0]
    for report in (library, plain):
        assert report.verdict == "pass" and report.first_diverging is None and not report.logits.flips_beyond_noise
        assert report.aligned == "real weights" and report.num_tokens == 20
        assert len(report.sites) == 3 + 3 * CONFIG["num_hidden_layers"]
        assert all(0 < s.bound.value < 1e-4 for s in report.sites)
        assert min(report.peak_rss_bytes.values() or [0]) > 50 << 20
    assert (library.oracle["kind"], library.oracle["name"]) == ("transformers", "LlamaForCausalLM")
    assert "transformers" in library.oracle["versions"] and plain.oracle["kind"] == "plain"
    assert library.fingerprint == plain.fingerprint


def test_the_report_is_json_and_prints(recorded: tuple[AlignReport, str], capsys: pytest.CaptureFixture[str]) -> None:
    report = recorded[0]
    body = json.loads(json.dumps(report.to_json()))
    assert body["verdict"] == "pass" and body["logits"]["top1"]["<0.05"]["tokens"] >= 0
    assert {"site", "rel_l2", "worst_token", "cosine", "bound", "why", "floor"} <= set(body["sites"][0])
    assert set(body["peak_rss_bytes"]) == set(body["seconds"]) == {"ours", "oracle"}
    show_align(report, Console())
    text = capsys.readouterr().out
    assert "layers.2.channel" in text and "verdict: pass" in text and "diverges" not in text


def test_a_recorded_trace_replays_to_the_same_result(folder: Path, recorded: tuple[AlignReport, str]) -> None:
    report, trace = recorded
    again = align_source(str(folder), AlignOptions(trace=trace))
    assert [s.distance for s in again.sites] == [s.distance for s in report.sites]
    assert again.logits == report.logits and again.verdict == "pass" and again.oracle["trace"] == trace
    assert not list(folder.parent.glob("*.partial*"))


FAULTS = {
    "layers.0.channel": """
RULES = tuple(r for r in base.RULES if "channel.gate" not in str(r) and "channel.up" not in str(r)) + (
    Rule("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.channel.up"),
    Rule("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.channel.gate"))""",
    "layers.0.mixer": """
def spec(raw):
    def change(x): return replace(x, mixer=replace(x.mixer, rope=replace(x.mixer.rope, style="interleaved")))
    return change_layers(base.spec(raw), change)""",
    "layers.2.mixer": """
def spec(raw):
    def change(x): return replace(x, mixer=replace(x.mixer, window=9))
    return change_layers(base.spec(raw), change, 2)""",
    "layers.1.mixer": """
def spec(raw):
    def change(x): return replace(x, residual=replace(x.residual, norm=replace(x.residual.norm, eps=1e-3)))
    return change_layers(base.spec(raw), change, 1)""",
    "final_norm": """
def spec(raw):
    made = base.spec(raw)
    return replace(made, final_norm=replace(made.final_norm, offset=True))""",
}


@pytest.mark.parametrize("first", list(FAULTS))
def test_a_wrong_recipe_is_named_at_its_first_module(
    first: str, folder: Path, recorded: tuple[AlignReport, str], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "wrong.py", FAULTS[first])
    report = align_source(str(folder), AlignOptions(trace=recorded[1], recipe=recipe))
    assert report.verdict == "fail" and report.first_diverging == first and "align.module" in failed(report)
    found = next(f for f in report.findings if f.kind == "align.module")
    assert first in found.claim and found.remedy
    if first == "layers.2.mixer":
        at = next(s for s in report.sites if s.site == first)
        assert at.distance.first_wrong == 9 and "window of 9" in found.remedy


def test_another_checkpoints_trace_is_refused(recorded: tuple[AlignReport, str], tmp_path: Path) -> None:
    other = write_dense(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match="another checkpoint"):
        align_source(str(other), AlignOptions(trace=recorded[1]))


def test_other_tokens_than_the_traces_are_refused(folder: Path, recorded: tuple[AlignReport, str]) -> None:
    with pytest.raises(UsageError, match="other token ids"):
        align_source(str(folder), AlignOptions(trace=recorded[1], num_tokens=19))


def test_an_oracle_that_crashes_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text("def forward(reader, config, tokens, emit):\n    raise RuntimeError('no such luck')\n")
    record = tmp_path / "out.trace"
    with pytest.raises(ModelError, match="stopped: RuntimeError: no such luck. Its log is ") as caught:
        align_source(str(folder), options(oracle=str(crash), record=str(record)))
    log = Path(str(caught.value).rpartition("Its log is ")[2].rstrip("."))
    assert "Traceback" in log.read_text() and not list(tmp_path.glob("out*")), "nothing half-written"
    log.unlink()


def test_a_tensor_only_the_port_uses_is_a_finding(folder: Path, tmp_path: Path) -> None:
    """An oracle that takes another matrix in a tensor's place: values differ and the ledger names the tensor."""
    text = Path(PLAIN).read_text().replace('weight("mlp.up_proj")', 'weight("mlp.gate_proj")')
    lazy = tmp_path / "lazy.py"
    lazy.write_text(text)
    report = align_source(str(folder), options(oracle=str(lazy)))
    ledger = next(f for f in report.findings if f.kind == "align.tensors")
    assert ledger.verdict == "fail" and "model.layers.1.mlp.up_proj.weight" in ledger.evidence
    assert report.first_diverging == "layers.0.channel"


def test_a_recipe_without_an_oracle_names_the_ways_out(folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "bare.py", "ORACLE = None")
    with pytest.raises(UsageError, match=r"names no oracle for this model; give --oracle FILE\.py .* or --trace FILE"):
        align_source(str(folder), options(recipe=recipe))
    assert align_source(str(folder), options(recipe=recipe, oracle=PLAIN)).verdict == "pass"


def test_a_twin_says_so(tmp_path: Path) -> None:
    twin = write_dense(tmp_path / "twin")
    (twin / "dayzero_twin.json").write_text("{}")
    report = align_source(str(twin), AlignOptions(oracle=PLAIN, threads=1))
    assert report.aligned == "twin only" and report.num_tokens == 48
    assert next(f for f in report.findings if f.kind == "align.scope").measured == "twin only"


def test_a_tied_head_of_an_untied_model_is_refused(
    folder: Path, recorded: tuple[AlignReport, str], tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "tied.py",
        "from dayzero.arch.spec import Tie\ndef spec(raw): return replace(base.spec(raw), tie=Tie(True, 'wrong'))",
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        align_source(str(folder), AlignOptions(trace=recorded[1], recipe=recipe))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "bfloat16"}, "float32"),
        ({"trace": "x", "oracle": "y"}, "--trace"),
        ({"num_tokens": 1}, "at least 2"),
        ({"num_tokens": 999_999_999}, "beyond the model's context"),
        ({"record": "no/such/folder/x"}, "folder does not exist"),
        ({"record": "."}, "is a folder; give the name of a file"),
        ({"tokens": "a", "prompt": "b"}, "give one"),
        ({"prompt": "hello"}, "tokenizer"),
        ({"tokens": "no-such-file"}, "is no file"),
        ({"oracle": "remote"}, "--allow-remote-code"),
        ({"oracle": "remote", "allow_remote_code": True}, "auto_map"),
        ({"oracle": "nowhere.py"}, "is no file"),
        ({"oracle": "nosuch"}, r"--oracle LlamaForCausalLM, --oracle FILE\.py \(a plain forward\) or --trace FILE"),
        ({"trace": "nowhere.trace"}, "is no file"),
    ],
)
def test_wrong_calls_are_usage_errors(wrong: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=message):
        align_source(str(folder), AlignOptions(**wrong))


def test_a_look_alike_class_is_not_accepted(folder: Path) -> None:
    with pytest.raises(UsageError, match="look-alike"):
        align_source(str(folder), options(oracle="MistralForCausalLM"))


@pytest.mark.parametrize("text", ["def forward(:", "x = 1"])
def test_a_file_that_is_no_plain_forward_is_a_wrong_call(text: str, folder: Path, tmp_path: Path) -> None:
    oracle = tmp_path / "odd.py"
    oracle.write_text(text)
    with pytest.raises(UsageError, match=r"odd\.py is no plain forward .*it must define forward"):
        align_source(str(folder), options(oracle=str(oracle)))


def test_ids_from_a_file_are_read_and_checked(folder: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 6, 7, 8]")
    report = align_source(str(folder), AlignOptions(oracle=PLAIN, tokens=str(ids), threads=1))
    assert report.num_tokens == 4 and report.verdict == "pass"
    ids.write_text("[5, 1000]")
    with pytest.raises(UsageError, match="ids in"):
        align_source(str(folder), AlignOptions(oracle=PLAIN, tokens=str(ids)))
