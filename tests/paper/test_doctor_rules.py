"""Which layer is at fault: by planted records of every layer, and by machines that lack something."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from dayzero.acceptance.accept.registry import NAMES, parse_stages
from dayzero.acceptance.doctor.diagnosis import Placed, Target, diagnose, next_command
from dayzero.acceptance.doctor.machine import Look, ask_torch, look_here, machine_findings, numbers_of
from dayzero.acceptance.doctor.record import diagnose_record, diagnosis_of, is_record
from dayzero.acceptance.doctor.rules import BY_NAME, GATES, LINKS, ORDER, STAGES, gate_of
from dayzero.acceptance.doctor.show import show
from dayzero.cli import build_app, main
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.finding import LAYERS, Finding, worst
from tests.paper.accept_records import finding, record, stage

# (stage, kind, layer) of failing findings -> the layer at fault, its gate, how many it explains, other causes' gates.
# Each is what a run leaves behind when the first one is broken.
BROKEN: dict[str, tuple[list[tuple[str, str, str]], str, str, int, list[str]]] = {
    "a shard cut short": (
        [("weights", "integrity.header", "weights"), ("weights", "tensors.missing", "weights"),
         ("numerics", "numerics.module", "operator"), ("functional", "greedy.turn", "cache"),
         ("long_context", "long.needle", "cache")],
        "weights", "files", 4, []),
    "a lost shard held the head": (
        [("weights", "integrity.files", "weights"), ("weights", "tie.head_missing", "config"),
         ("weights", "config.unread", "config")],
        "weights", "files", 1, ["config"]),
    "a wrong scale": (
        [("weights", "quantization.scale", "weights"), ("numerics", "align.module", "operator"),
         ("long_context", "long.needle.answered", "cache")],
        "weights", "tensors", 2, []),
    "NaN in the weights": (
        [("weights", "weights.not_finite", "weights"), ("equalities", "equal.chunking", "cache"),
         ("equalities", "equal.load", "scheduler")],
        "weights", "tensors", 2, []),
    "a key that nobody read": (
        [("weights", "config.unread", "config"), ("weights", "tensors.misfit", "weights"),
         ("numerics", "align.module", "operator")],
        "config", "config", 2, []),
    "another template": (
        [("functional", "chat.template", "tokenizer+template"), ("functional", "tools.round", "server"),
         ("contract", "chat.completion", "server")],
        "tokenizer+template", "tokenizer", 2, []),
    "a rope of the other style": (
        [("numerics", "align.module", "operator"), ("long_context", "long.needle", "cache"),
         ("functional", "greedy.turn", "scheduler")],
        "operator", "operators", 2, []),
    "a kernel that is not built": (
        [("numerics", "numerics.ran", "compiler"), ("performance", "performance.roofline", "operator"),
         ("contract", "contract.ran", "server")],
        "compiler", "kernels", 2, []),
    "pages that are mixed up": (
        [("equalities", "equal.prefix", "cache"), ("equalities", "equal.load", "scheduler"),
         ("contract", "contract.stream", "server")],
        "cache", "cache", 2, []),
    "a row of another request": (
        [("robustness", "robust.storm", "scheduler"), ("contract", "contract.stream", "server")],
        "scheduler", "scheduler", 1, []),
    "ranks that disagree": (
        [("equalities", "equal.ranks", "parallel"), ("functional", "functional.ran", "server")],
        "parallel", "ranks", 1, []),
    "an API of its own": ([("contract", "chat.completion.chunk", "server")], "server", "server", 0, []),
    "too little memory": (
        [("numerics", "numerics.ran", "hardware"), ("functional", "functional.ran", "server")],
        "hardware", "machine", 1, []),
    # what does not follow stands on its own
    "a wrong scale and a broken stream": (
        [("weights", "quantization.scale", "weights"), ("contract", "chat.completion.chunk", "server")],
        "weights", "tensors", 0, ["server"]),
    "wrong numbers break no equality": (
        [("weights", "quantization.scale", "weights"), ("equalities", "equal.prefix", "cache")],
        "weights", "tensors", 0, ["cache"]),
    "a later stage explains no earlier one": (
        [("robustness", "robust.memory", "hardware"), ("numerics", "align.module", "operator")],
        "hardware", "machine", 0, ["operators"]),
    "wrong numbers do not slow anything": (
        [("weights", "quantization.scale", "weights"), ("performance", "performance.roofline", "operator")],
        "weights", "tensors", 0, ["operators"]),
}  # fmt: skip


def planted(fails: list[tuple[str, str, str]], **more: Any) -> dict[str, Any]:
    """A record of all stages: each has a pass, and its share of the failures."""
    of_stage = {name: [finding("pass", f"{name}.fine", "server")] for name in NAMES}
    for name, kind, layer in fails:
        of_stage[name].append(finding("fail", kind, layer, evidence=[f"evidence of {kind}"], measured="so much"))
    return record(*(stage(name, found) for name, found in of_stage.items()), **more)


def shown(found: Any, **flags: bool) -> str:
    out = io.StringIO()
    show(found, Console(stdout=out, **flags))
    return out.getvalue()


@pytest.mark.parametrize("name", BROKEN)
def test_the_layer_at_fault(name: str) -> None:
    fails, layer, gate, num_explained, others = BROKEN[name]
    found = diagnosis_of(planted(fails), "runs/a")
    assert (found.layer, found.causes[0].gate.name, found.verdict) == (layer, gate, "fail")
    assert [cause.gate.name for cause in found.causes[1:]] == others
    assert sum(len(cause.explained) for cause in found.causes) == num_explained
    # every failure is told of exactly once, whatever it is put down to
    told = [p for cause in found.causes for p in (*cause.found, *(one.placed for one in cause.explained))]
    assert sorted((p.stage, p.finding.kind) for p in told) == sorted((stage, kind) for stage, kind, _ in fails)
    assert found.causes[0].first.finding.evidence == (f"evidence of {found.causes[0].first.finding.kind}",)
    text = shown(found)
    assert text.startswith(f"fail: runs/a: {layer} is at fault") and found.causes[0].command in text
    assert f"evidence: evidence of {found.causes[0].first.finding.kind}" in text
    assert json.loads(json.dumps(as_json(found)))["layer"] == layer


def as_json(found: Any) -> Any:
    out = io.StringIO()
    Console(json_mode=True, stdout=out).emit_json(found)
    return json.loads(out.getvalue())


def test_every_layer_is_planted_and_every_gate_can_be_the_first() -> None:
    assert {one[1] for one in BROKEN.values()} == set(LAYERS)
    assert {one[2] for one in BROKEN.values()} == set(BY_NAME)


def test_the_order_of_findings_does_not_matter() -> None:
    for fails, *_ in BROKEN.values():
        placed = [
            Placed(stage, Finding(layer=layer, kind=kind, verdict="fail", claim=kind)) for stage, kind, layer in fails
        ]
        one, other = (diagnose(Target("x"), some) for some in (placed, placed[::-1]))
        assert [cause.gate for cause in one.causes] == [cause.gate for cause in other.causes]


def test_nothing_fails() -> None:
    found = diagnosis_of(planted([]), "runs/a")
    assert found.layer is None and found.verdict == "pass" and "no layer is found at fault" in shown(found)


def test_earlier_notes_are_suspects() -> None:
    parts = [
        stage("weights", [finding("note", "config.defaulted", "config", claim="eps is absent")]),
        stage("numerics", [finding("fail", "align.module", "operator"), finding("note", "x.y", "server")]),
    ]
    found = diagnosis_of(record(*parts), "runs/a")
    assert [one.finding.claim for one in found.suspects] == ["eps is absent"] and "eps is absent" in shown(found)


def test_a_changed_record_is_doubted() -> None:
    content = planted([]) | {"seed": 9}
    found = diagnosis_of(content, "runs/a")
    assert found.verdict == "note" and "doubtful: the record was changed" in shown(found)


def test_the_rules_are_whole() -> None:
    """Every layer has a gate that takes whatever kind; links name gates and stages that are there, and lead onward."""
    for layer in LAYERS:
        assert gate_of(layer, "never.heard.of").layer == layer
    assert gate_of("weights", "integrity.header").name == "files" != gate_of("weights", "tensors.missing").name
    for link in LINKS:
        assert link.why and link.stages <= set(STAGES) and link.effects
        assert all(ORDER[link.cause] < ORDER[effect] for effect in link.effects), link
    assert set(NAMES) < set(STAGES)


@cache
def whole_app() -> Any:
    return typer.main.get_command(build_app())


@pytest.mark.parametrize("where", ["numerics", "machine", "plan", "server", "a stage of tomorrow"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize(
    "target",
    [Target("r", "a folder/x"), Target("r", "seeded:c.json"), Target("r", url="http://127.0.0.1:1"), Target("r"),
     Target("r", "m", recipe="my recipe.py")],
    ids=["source", "seeded", "url", "nothing", "recipe"],
)  # fmt: skip
def test_the_next_command_is_one_that_exists(gate: Any, target: Target, where: str) -> None:
    """Every command that is named can be called as it is written: its name, its options, its arguments."""
    kind = (gate.kinds or ("some.kind",))[0]
    first = Placed(where, Finding(kind, gate.layer, "fail", "claim"))
    assert first.gate is gate
    command, why = next_command(target, first)
    assert why and "{" not in command
    program, name, *rest = shlex.split(command)
    assert program == "dayzero"
    before, options = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    app = whole_app()
    one = app.commands[name]
    one.make_context(name, before, resilient_parsing=False).close()
    if "--stages" in before:
        assert parse_stages(before[before.index("--stages") + 1])
    if options:
        served = app.commands["serve"]
        served.make_context("serve", ["source", *options]).close()
    if target.source and name != "doctor":
        assert target.source.removeprefix("seeded:") in command.replace("'", "")
    if target.recipe and name != "doctor":
        assert "--recipe 'my recipe.py'" in command


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_record_is_found_by_folder_and_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text(json.dumps(planted(BROKEN["a wrong scale"][0])))
    assert is_record(tmp_path) and is_record(tmp_path / "record.json") and not is_record(tmp_path / "config.json")
    for target in (tmp_path, tmp_path / "record.json"):
        assert main(["doctor", str(target)]) == 1
        out = capsys.readouterr().out
        assert "weights is at fault" in out and "dayzero inspect models/nova-small --all" in out
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["layer"], told["gate"], told["verdict"]) == ("weights", "tensors", "fail")
    assert main(["doctor", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().out == "at fault: weights; next: dayzero inspect models/nova-small --all\n"


SPOILT: Mapping[str, Any] = {
    "no JSON": "{",
    "a list": "[]",
    "no stages": {"stages": None},
    "stages of numbers": {"stages": [1]},
    "findings of words": {"stages": [{"name": "weights", "findings": ["x"]}]},
    "a layer that is none": {"stages": [{"name": "weights", "findings": [finding() | {"layer": "moon"}]}]},
    "a verdict that is none": {"stages": [{"name": "weights", "findings": [finding() | {"verdict": "maybe"}]}]},
    "a key too many": {"stages": [{"name": "weights", "findings": [finding() | {"more": 1}]}]},
    "a kind that is no word": {"stages": [{"name": "weights", "findings": [finding("fail") | {"kind": 7}]}]},
    "no subject": {"subject": 3},
    "another schema": {"schema": 99},
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_record_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = SPOILT[name]
    text = change if isinstance(change, str) else json.dumps(planted([]) | change)
    (tmp_path / "record.json").write_text(text)
    assert main(["doctor", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and "Traceback" not in said.err


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        diagnose_record(tmp_path / "record.json")


# --- machines --------------------------------------------------------------------------------------------------------

GIB = 2**30
GPU = {"name": "a GPU", "capability": [9, 0], "free": 70 * GIB, "total": 80 * GIB}
TORCH = {"torch": "2.13.0", "cuda_build": None, "available": False, "triton": None, "product": 64.0**3}
FIT = Look((3, 11, 7), (("torch", "2.11", "2.13.0+cpu"),), TORCH, compiler="/usr/bin/c++", available_bytes=16 * GIB,
           disks=(("logs", "logs", 90 * GIB),))  # fmt: skip
WITH_GPU = TORCH | {
    "available": True,
    "triton": "3.6.0",
    "archs": ["sm_80", "sm_90"],
    "devices": [GPU],
    "cuda_build": "13.0",
}
LACKS: dict[str, tuple[Look, str, str, str]] = {
    "torch does not import": (replace(FIT, torch=None, torch_problem="no libx.so"), "torch", "hardware", "libx"),
    "a device that computes wrongly": (replace(FIT, torch=TORCH | {"product": 7.0}), "torch", "hardware", "7.0"),
    "a build for CPUs beside a driver": (replace(FIT, driver="580.1"), "device", "hardware", "CPUs alone"),
    "a driver that is too old": (
        replace(FIT, driver="450.1", torch=TORCH | {"cuda_build": "13.0"}), "device", "hardware", "CUDA 13.0"),
    "a GPU that torch is not built for": (
        replace(FIT, torch=WITH_GPU | {"archs": ["sm_100"]}), "device", "hardware", "a GPU"),
    "no memory": (replace(FIT, available_bytes=100), "memory", "hardware", "100 B"),
    "a full disk": (replace(FIT, disks=(("logs", "logs", 5),)), "disk", "hardware", "5 B"),
    "a disk that is not ours": (replace(FIT, disks=(("logs", "logs", -1),)), "disk", "hardware", "not writable"),
    "a package that is missing": (replace(FIT, packages=(("jinja2", "3", None),)), "packages", "hardware", "jinja2"),
    "a package that is old": (replace(FIT, packages=(("jinja2", "3.1", "3.0.9"),)), "packages", "hardware", "3.0.9"),
}  # fmt: skip
MISSES: dict[str, tuple[Look, str]] = {
    "little memory": (replace(FIT, available_bytes=GIB), "memory"),
    "a disk that is nearly full": (replace(FIT, disks=(("logs", "logs", GIB),)), "disk"),
    "no compiler": (replace(FIT, compiler=None), "compiler"),
    "a port that is taken": (replace(FIT, port=(8000, False)), "port"),
    "few files": (replace(FIT, open_files=256), "files"),
    "a GPU without Triton": (replace(FIT, torch=WITH_GPU | {"triton": None}), "triton"),
}


def test_a_machine_that_is_fit() -> None:
    for look in (FIT, replace(FIT, torch=WITH_GPU, driver="580.1")):
        assert worst(machine_findings(look)) == "pass"


@pytest.mark.parametrize("name", LACKS)
def test_what_a_machine_lacks(name: str) -> None:
    look, kind, layer, said = LACKS[name]
    bad = [one for one in machine_findings(look) if one.verdict == "fail"]
    assert [(one.kind, one.layer) for one in bad] == [(f"machine.{kind}", layer)]
    assert said in f"{bad[0].measured} {bad[0].evidence}" and bad[0].remedy
    found = diagnose(Target("here"), [Placed("machine", one) for one in machine_findings(look)])
    assert found.layer == layer and "hardware is at fault" in shown(found)


@pytest.mark.parametrize("name", MISSES)
def test_what_a_machine_could_do_better_with(name: str) -> None:
    look, kind = MISSES[name]
    told = [one for one in machine_findings(look) if one.verdict == "note"]
    assert [one.kind for one in told] == [f"machine.{kind}"] and told[0].remedy
    assert worst(machine_findings(look)) == "note"


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ([9, 0], ["sm_90"], True),
        ([9, 0], ["sm_90a"], True),
        ([8, 9], ["sm_80", "sm_86"], True),
        ([10, 3], ["sm_100"], True),
        ([12, 0], ["compute_90"], True),
        ([8, 0], ["sm_86"], False),
        ([12, 0], ["sm_90"], False),
        ([7, 0], ["compute_75"], False),
    ],
)
def test_which_gpus_a_build_runs_on(capability: list[int], archs: list[str], fits: bool) -> None:
    look = replace(FIT, torch=WITH_GPU | {"archs": archs, "devices": [GPU | {"capability": capability}]})
    assert (worst(machine_findings(look)) == "pass") is fits


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import not_a_module_at_all", "No module named"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "signal 4"),
        ("raise SystemExit(3)", "ended with 3"),
        ("print('hello')", "said nothing"),
        ("import time; time.sleep(60)", "after 1 s"),
    ],
)
def test_a_torch_that_ends_the_process_is_told_of(program: str, said: str) -> None:
    """The process that asks is another one: whatever a build does to it, doctor goes on."""
    facts, problem = ask_torch(program, 1.0 if "sleep" in program else 60.0)
    assert facts is None and said in problem


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr("dayzero.acceptance.doctor.machine.PROBE", "never run here")
    monkeypatch.setattr(
        "dayzero.acceptance.doctor.machine.ask_torch", lambda: ({"devices": [{"free": 7}], "torch": "2"}, "")
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        look = look_here([("logs", tmp_path / "not" / "there" / "yet")], taken.getsockname()[1])
    assert look.python == tuple(sys.version_info[:3]) and look.free_devices == (7,)
    assert look.port[1] is False and look.available_bytes > 2**20 and look.open_files > 0
    assert [(what, free > 0) for what, _, free in look.disks] == [("logs", True)]
    assert {"torch", "jinja2"} <= {name for name, _, _ in look.packages} and "matplotlib" not in str(look.packages)
    assert all(have for _, _, have in look.packages)


def test_versions_are_compared_as_numbers() -> None:
    assert numbers_of("2.13.0+cpu") == (2, 13, 0) > numbers_of("2.9.1") and numbers_of("3.0rc1")[:2] == (3, 0)
