"""``dayzero accept`` on a real model keeps the shape of its record: stages, groups of checks, verdicts, keys.

The golden shape lies in ``tests/data``. A stage, a group of checks or half of one that is gone is a difference, and a
verdict that is another; checks that are new are none. To renew it, after a change that is meant to change it:

    python tests/cpu/test_accept_golden.py [FOLDER [NAME]]

FOLDER: a checkpoint, the demonstration's where none is given. NAME: of the golden file. The difference that git then
shows is what to read.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dayzero.demo import REHEARSAL

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
SEED = 0
MOST_SECONDS, SECONDS_TO_END = 30 * 60.0, 30.0
# Verdicts that hang on the machine and its load: each of these is right, and the shape says that one of them came.
EITHER = {
    "long.limit.longest": ("not applicable", "pass"),
    "long.memory": ("not applicable", "pass"),
    "functional.greedy": ("note", "pass"),  # near ties of bfloat16 logits turn over with the batch
    "functional.sampling": ("not applicable", "note", "pass"),  # what can be told of a softmax hangs on how sharp it is
    "functional.structured.schema": ("not applicable", "pass"),
    "contract.many.same": ("note", "pass"),
}
# Stages whose verdicts are speeds, patience and memory beside what else runs here: that they judge is held, not how.
TIMED_STAGES = ("performance", "robustness")
# As those, within other stages; a busy machine may leave them out as well.
LOADED = ("contract.cancel", "contract.overload", "contract.stream.flushed")
# Left out for want of time, or where a greedy answer has no place for it: another machine's answers part at near ties.
OPTIONAL = (
    "long.needle", "long.noise", "long.threshold",
    "functional.reasoning.", "functional.stop.ids", "functional.stop.string", "functional.stop.work",
    "functional.structured.finish",
)  # fmt: skip
ANY = "any verdict"


def required() -> set[str]:
    """Packages that every installation has: an accelerator's build of torch brings others, an extra brings more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"python", *(re.split(r"[^\w.-]", one)[0] for one in project["dependencies"])}


def accepted(folder: Path, out: Path, seconds: float = MOST_SECONDS) -> dict[str, Any]:
    """The record of a quick run of all stages."""
    command = [sys.executable, "-m", "dayzero", "accept", str(folder), "--out", str(out), "--seed", str(SEED), "-q"]
    log = out.with_name(out.name + ".log")
    with open(log, "wb") as said:
        # a session of its own, so that the servers it began end with it
        run = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(os.environ), start_new_session=True
        )
        try:
            run.wait(seconds)
        except subprocess.TimeoutExpired:
            done = sorted(path.stem for path in (out / "stages").glob("*.json") if ".begun" not in path.name)
            pytest.fail(f"dayzero accept {folder} was not over within {seconds:g} s; stages that were: {done}")
        finally:
            _end(run)
    assert (out / "record.json").exists(), f"{run.returncode}: {log.read_text(errors='replace')[-4000:]}"
    record: dict[str, Any] = json.loads((out / "record.json").read_text(encoding="utf-8"))
    return record


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is not None:
        return
    run.send_signal(signal.SIGINT)  # it ends its servers itself, where it still can
    try:
        run.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def shape_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What another machine must come to as well."""
    stages = {stage["name"]: _stage(stage) for stage in record["stages"]}
    protocol = {key: sorted(value) if isinstance(value, dict) else None for key, value in record["protocol"].items()}
    protocol["versions"] = sorted(required() & set(protocol.get("versions") or ()))
    protocol["extensions"] = None  # whichever are installed
    return {"schema": record["schema"], "record": sorted(record), "protocol": protocol, "stages": stages}


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, set[str]] = {}
    timed = stage["name"] in TIMED_STAGES
    for found in stage["findings"]:
        kind, verdict = found["kind"], found["verdict"]
        if timed:
            kinds[kind] = {ANY}
        elif not kind.startswith(LOADED) and (verdict == "fail" or not kind.startswith(OPTIONAL)):
            kinds.setdefault(kind, set()).add(_verdict(kind, verdict))
    shape: dict[str, Any] = {"findings": {kind: sorted(verdicts) for kind, verdicts in sorted(kinds.items())}}
    if not timed and stage["name"] != "long_context":  # which of them there are hangs on what there was time for
        shape["figures"] = sorted({figure["kind"] for figure in stage["figures"]})
        shape["samples"] = sorted(stage["samples"])
    return {**shape, "facts": sorted(stage["facts"])}


def _verdict(kind: str, verdict: str) -> str:
    allowed = next((either for name, either in EITHER.items() if kind.startswith(name)), ())
    return " or ".join(allowed) if verdict in allowed else verdict


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What of the golden shape ``wanted`` the shape ``found`` does not hold, a sentence each; empty where it holds."""
    told = [f"{key}: {found[key]} for {wanted[key]}" for key in ("schema", "record") if found[key] != wanted[key]]
    for key in sorted({*found["protocol"], *wanted["protocol"]}):
        here, there = (one["protocol"].get(key, "no such key") for one in (found, wanted))
        told += [f"protocol.{key}: {here} for {there}"] if here != there else []
    told += [f"stage {name} is new" for name in found["stages"] if name not in wanted["stages"]]
    for name, stage in wanted["stages"].items():
        if name in found["stages"]:
            told += [f"{name}: {why}" for why in _differ(found["stages"][name], stage)]
        else:
            told.append(f"stage {name} is gone")
    return told


def _differ(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    here, there = found["findings"], wanted["findings"]
    groups: dict[str, list[str]] = {}
    for kind in there:
        groups.setdefault(kind.rpartition(".")[0], []).append(kind)
    told = []
    for group, kinds in groups.items():
        gone = [kind for kind in kinds if kind not in here]
        if 2 * len(gone) > len(kinds):
            told.append(f"of the checks {group}.* {len(gone)} of {len(kinds)} are gone: {gone}")
    for kind, verdicts in here.items():
        if kind in there and verdicts != there[kind]:
            told.append(f"{kind}: {verdicts} for {there[kind]}")
        elif kind not in there and "fail" in verdicts:
            told.append(f"{kind}: {verdicts}")
    for key in ("figures", "samples", "facts"):
        gone = [one for one in wanted.get(key, ()) if one not in found.get(key, ())]
        told += [f"{key} are gone: {gone}"] if gone else []
    return told


def golden(name: str) -> Path:
    return DATA / f"accept-{name}.json"


def written(shape: Mapping[str, Any]) -> str:
    return json.dumps(shape, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def check_shape(folder: Path, name: str, out: Path) -> None:
    """Accept ``folder`` and hold its record's shape to the golden file of that name."""
    record = accepted(folder, out)
    told = differences(shape_of(record), json.loads(golden(name).read_text(encoding="utf-8")))
    failed = [
        (stage["name"], f["kind"], f["measured"], f["bound"])
        for stage in record["stages"] for f in stage["findings"] if f["verdict"] == "fail"
    ]  # fmt: skip
    assert not told, f"renew it where this is meant (see the top of this file): {told}; failed: {failed}"
    assert len(record["stages"]) == 8 and record["complete"] and sum(record["counts"].values()) >= 40
    started = sorted(path.name for path in (out / "servers").glob("server-*.log"))
    assert len(started) == 3, f"one to share, one to hurt, and that one again: {started}"


@pytest.mark.golden
def test_the_record_of_a_real_model_keeps_its_shape(demo_model: Path, tmp_path: Path) -> None:
    check_shape(demo_model, "smollm2", tmp_path / "out")


@pytest.mark.golden
def test_the_record_of_the_rehearsal_model_keeps_its_shape(tmp_path: Path) -> None:
    """It has what the other lacks: pictures, reasoning, tools, experts, a sparse index, recurrent state."""
    check_shape(REHEARSAL, "rehearsal", tmp_path / "out")


# --- the comparison itself


def test_a_shape_tells_what_matters_and_no_figures() -> None:
    stage = {
        "name": "x", "figures": [], "facts": {"b": 1, "a": 2}, "samples": {},
        "findings": [
            {"kind": "x.a", "verdict": "pass", "measured": 1}, {"kind": "long.memory.peak", "verdict": "pass"},
        ],
    }  # fmt: skip
    versions = {"torch": "1", "python": "3"}
    record = {"schema": 1, "protocol": {"machine": {"cpu": "y"}, "seed": 0, "versions": versions}, "stages": [stage]}
    shape = shape_of(record)
    assert shape["stages"]["x"]["facts"] == ["a", "b"]
    assert shape["protocol"] == {
        "machine": ["cpu"], "seed": None, "versions": ["python", "torch"], "extensions": None,
    }  # fmt: skip
    other = {"machine": {"cpu": "z"}, "seed": 5, "versions": versions | {"triton": "3"}, "extensions": {"mine": "1"}}
    assert shape_of({**record, "protocol": other}) == shape
    stage["findings"][0]["measured"] = 2  # type: ignore[index]
    stage["findings"][1]["verdict"] = "not applicable"  # type: ignore[index]
    assert shape_of(record) == shape
    stage["findings"][0]["verdict"] = "fail"  # type: ignore[index]
    assert differences(shape_of(record), shape) == ["x: x.a: ['fail'] for ['pass']"]


def recorded(shape: Mapping[str, Any]) -> dict[str, Any]:
    """A record of that shape, as a run writes one."""
    stages = []
    for name, stage in shape["stages"].items():
        findings = [
            {"kind": kind, "verdict": "pass" if one == ANY else one.split(" or ")[-1]}
            for kind, verdicts in stage["findings"].items() for one in verdicts
        ]  # fmt: skip
        figures = [{"kind": kind} for kind in stage.get("figures", ())]
        samples, facts = (dict.fromkeys(stage.get(key, ()), 1) for key in ("samples", "facts"))
        stages.append({"name": name, "findings": findings, "figures": figures, "samples": samples, "facts": facts})
    protocol = {key: 1 if keys is None else dict.fromkeys(keys, 1) for key, keys in shape["protocol"].items()}
    keys = dict.fromkeys(shape["record"], 1)
    return {**keys, "schema": shape["schema"], "protocol": protocol, "stages": stages}


def _keep(stage: str, keep: Callable[[str], bool]) -> Callable[[dict[str, Any]], None]:
    def doctor(record: dict[str, Any]) -> None:
        one = next(s for s in record["stages"] if s["name"] == stage)
        one["findings"] = [f for f in one["findings"] if keep(f["kind"])]

    return doctor


def _turn(kind: str, verdict: str) -> Callable[[dict[str, Any]], None]:
    """The finding is of that verdict; a check that this machine did not come to joins its stage."""

    def doctor(record: dict[str, Any]) -> None:
        found = [f for s in record["stages"] for f in s["findings"] if f["kind"] == kind]
        for one in found:
            one["verdict"] = verdict
        if not found:
            start = kind.partition(".")[0]
            stage = next(s for s in record["stages"] if s["name"].startswith(start))
            stage["findings"].append({"kind": kind, "verdict": verdict})

    return doctor


def _drop_stage(record: dict[str, Any]) -> None:
    record["stages"] = [s for s in record["stages"] if s["name"] != "robustness"]


def _drop_fact(record: dict[str, Any]) -> None:
    del next(s for s in record["stages"] if s["name"] == "equalities")["facts"]["engines"]


def _drop_key(record: dict[str, Any]) -> None:
    del record["protocol"]["subject"]["config_sha256"]


BAD = {
    "a stage": (_drop_stage, "stage robustness is gone"),
    "a group": (_keep("contract", lambda kind: not kind.startswith("contract.http.")), "contract.http"),
    "a group of a timed stage": (_keep("robustness", lambda kind: "robust.drain." not in kind), "robust.drain"),
    "most of a group": (_keep("numerics", lambda kind: "real.kl.m" not in kind), "2 of 3 are gone"),
    "all of a stage's checks": (_keep("functional", lambda kind: False), "functional.usage"),
    "a fail": (_turn("contract.models.one", "fail"), "contract.models.one: ['fail']"),
    "a fail of what may be left out": (_turn("functional.stop.string-chat", "fail"), "functional.stop.string-chat"),
    "a fail where notes are right": (_turn("functional.sampling.seed", "fail"), "functional.sampling.seed"),
    "a fail of a new check": (_turn("contract.new", "fail"), "contract.new"),
    "no longer applicable": (_turn("numerics.real.kl.max", "not applicable"), "numerics.real.kl.max"),
    "a fact": (_drop_fact, "engines"),
    "a key of the protocol": (_drop_key, "protocol.subject"),
}  # fmt: skip
GOOD = {
    "nothing": lambda record: None,
    "speed": _turn("performance.together", "fail"),
    "patience": _turn("robust.drain.exit", "fail"),
    "a stream under load": _turn("contract.stream.flushed", "fail"),
    "a sharp softmax": _turn("functional.sampling.top-k", "not applicable"),
    "no place for a stop string": _turn("functional.stop.string-chat", "not applicable"),
    "a new check": _turn("contract.new", "pass"),
    "one of a group": _keep("robustness", lambda kind: kind != "robust.storm.cut"),
}


@pytest.mark.parametrize("name", sorted(path.stem.removeprefix("accept-") for path in DATA.glob("accept-*.json")))
def test_what_is_lost_from_a_record_is_told(name: str) -> None:
    wanted = json.loads(golden(name).read_text(encoding="utf-8"))
    assert shape_of(recorded(wanted)) == wanted and not [
        kind
        for stage in wanted["stages"].values()
        for kind, verdicts in stage["findings"].items()
        if "fail" in verdicts
    ]
    for what, (doctor, said) in BAD.items():
        record = copy.deepcopy(recorded(wanted))
        doctor(record)
        told = differences(shape_of(record), wanted)
        assert any(said in one for one in told), (what, told)
    for what, change in GOOD.items():
        record = copy.deepcopy(recorded(wanted))
        change(record)
        assert differences(shape_of(record), wanted) == [], what


def test_a_run_that_does_not_end_is_told(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="was not over within 0.2 s; stages that were: \\[\\]"):
        accepted(REHEARSAL, tmp_path / "out", 0.2)


def main() -> None:
    """Renew a golden file."""
    from dayzero.console import no_progress
    from dayzero.demo import demo_folder

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_folder(no_progress)
    path = golden(sys.argv[2] if len(sys.argv) > 2 else "smollm2")
    with tempfile.TemporaryDirectory() as out:
        path.write_text(written(shape_of(accepted(folder, Path(out) / "out"))), "utf-8")
    print(f"{path}: renewed")


if __name__ == "__main__":
    main()
