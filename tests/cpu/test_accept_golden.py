"""``dayzero accept`` on a real model keeps the shape of its record: names of findings, verdicts, keys of the protocol.

The golden shape lies in ``tests/data``. To renew it, after a change that is meant to change it:

    python tests/cpu/test_accept_golden.py [FOLDER [NAME]]

FOLDER: a checkpoint, the demonstration's where none is given. NAME: of the golden file. The difference that git then
shows is what to read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
SEED = 0
# Verdicts that hang on the machine and its load: each of these is right, and the shape says that one of them came.
EITHER = {
    "performance.roofline": ("note", "pass"),
    "performance.prefix.ttft": ("not applicable", "pass"),
    "long.limit.longest": ("not applicable", "pass"),
    "long.memory": ("not applicable", "pass"),
    "robust.sizes.memory": ("note", "pass"),
    "functional.greedy": ("note", "pass"),  # near ties of bfloat16 logits turn over with the batch
    "contract.many.same": ("note", "pass"),
}
# How many there are of these, or whether there are any, is a matter of time: a slow machine leaves lengths out.
TIMED = ("long.threshold", "long.needle", "performance.roofline")


def accepted(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    """The record of a quick run of all stages."""
    command = [sys.executable, "-m", "dayzero", "accept", str(folder), "--out", str(out), "--seed", str(SEED), "-q"]
    done = subprocess.run([*command, *options], env=dict(os.environ), capture_output=True, text=True, check=False)
    assert (out / "record.json").exists(), f"{done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    record: dict[str, Any] = json.loads((out / "record.json").read_text())
    return record


def shape_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What another machine must come to as well."""
    stages = {}
    for stage in record["stages"]:
        kinds: dict[str, list[str]] = {}
        for found in stage["findings"]:
            if not found["kind"].startswith(TIMED) or found["verdict"] == "fail":
                kinds.setdefault(found["kind"], []).append(_verdict(found["kind"], found["verdict"]))
        stages[stage["name"]] = {
            "findings": {kind: sorted(verdicts) for kind, verdicts in sorted(kinds.items())},
            "figures": sorted({figure["kind"] for figure in stage["figures"]}),
            "facts": sorted(stage["facts"]),
            "samples": sorted(stage["samples"]),
        }
    protocol = {key: sorted(value) if isinstance(value, dict) else None for key, value in record["protocol"].items()}
    return {"schema": record["schema"], "record": sorted(record), "protocol": protocol, "stages": stages}


def _verdict(kind: str, verdict: str) -> str:
    allowed = next((either for name, either in EITHER.items() if kind.startswith(name)), ())
    return " or ".join(allowed) if verdict in allowed else verdict


def golden(name: str) -> Path:
    return DATA / f"accept-{name}.json"


def written(shape: Mapping[str, Any]) -> str:
    return json.dumps(shape, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def check_shape(folder: Path, name: str, out: Path) -> dict[str, Any]:
    """Accept ``folder`` and hold its record's shape to the golden file of that name."""
    record = accepted(folder, out)
    found, wanted = shape_of(record), json.loads(golden(name).read_text())
    told = [
        (stage["name"], f["kind"], f["measured"], f["bound"])
        for stage in record["stages"] for f in stage["findings"] if f["verdict"] == "fail"
    ]  # fmt: skip
    assert found == wanted, f"renew it where this is meant (see the top of this file); failed: {told}"
    return record


@pytest.mark.slow
def test_the_record_of_a_real_model_keeps_its_shape(demo_model: Path, tmp_path: Path) -> None:
    record = check_shape(demo_model, "smollm2", tmp_path / "out")
    assert len(record["stages"]) == 8 and record["complete"] and record["counts"]["fail"] == 0
    assert sum(record["counts"].values()) >= 40


def test_a_shape_tells_what_matters_and_no_figures() -> None:
    stage = {
        "name": "x", "figures": [], "facts": {"b": 1, "a": 2}, "samples": {},
        "findings": [
            {"kind": "x.a", "verdict": "pass", "measured": 1}, {"kind": "long.memory.peak", "verdict": "pass"},
        ],
    }  # fmt: skip
    record = {"schema": 1, "protocol": {"machine": {"cpu": "y"}, "seed": 0}, "stages": [stage]}
    shape = shape_of(record)
    assert shape["stages"]["x"]["facts"] == ["a", "b"] and shape["protocol"] == {"machine": ["cpu"], "seed": None}
    assert shape_of({**record, "protocol": {"machine": {"cpu": "z"}, "seed": 5}}) == shape
    stage["findings"][0]["measured"] = 2  # type: ignore[index]
    stage["findings"][1]["verdict"] = "not applicable"  # type: ignore[index]
    assert shape_of(record) == shape
    stage["findings"][0]["verdict"] = "fail"  # type: ignore[index]
    assert shape_of(record) != shape


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
