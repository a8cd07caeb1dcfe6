"""The operators' table: figures are held to goals, what ends its process ends nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dayzero.ops.bench.__main__ import run
from dayzero.ops.bench.apart import run_apart
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.goals import Goal, table
from dayzero.ops.bench.timing import Time

FOUND: dict[str, Any] = {
    "right": True,
    "seconds": 5.1e-6,
    "share": 0.9,
    "peers": {"fla": {"seconds": 1e-5, "ratio": 2.0}},
}
CHILD = """
import json, os, sys
given = dict.fromkeys(("out", "limit")); names = []
alone = "--alone" in sys.argv
for word in sys.argv[1:]:
    if word == "--alone": continue
    key, value = word[2:].split("=", 1)
    names.append(value) if key == "named" else given.update({key: value})
made = []
def write(whole):
    open(given["out"], "w").write(json.dumps({"ceilings": {"copy": 1.0}, "entries": made, "whole": whole}))
for name in names:
    if "dies" in name or ("peer" in name and not alone): os._exit(1)
    if "faults" in name: os.abort()
    made.append({"name": name, "right": "wrong" not in name}); write(False)
write(True); sys.exit(1)
"""


@pytest.mark.parametrize(
    ("goal", "said", "word"),
    [
        (Goal("us", 5.2), "5.2 us", "met"),
        (Goal("us", 5.0), "5 us", "2.0% short"),
        (Goal("floor", 0.9), "90% of floor", "met"),
        (Goal("floor", 1.0), "100% of floor", "10.0% short"),
        (Goal("fla", 1.5), "1.50 x fla", "met"),
        (Goal("fla", 4.0), "4.00 x fla", "50.0% short"),
        (Goal("other", 1.0), "1.00 x other", "no other here"),
    ],
)
def test_a_goal_is_met_or_short(goal: Goal, said: str, word: str) -> None:
    assert (str(goal), goal.word(FOUND)) == (said, word)


def test_the_table_has_a_line_for_all_that_is_asked() -> None:
    asked = {"a": Goal("us", 5.0), "b": None, "c": Goal("floor", 0.85)}
    lines = table({"a": FOUND, "c": {"right": False, "failed": "ended its process: -6"}}, asked).splitlines()
    assert lines[2] == "| a | 5.1 | 90.0% | fla 10.0 us (x2.00) | 5 us | 2.0% short |"
    assert lines[3:] == ["| b | | | |  | not run |", "| c | | | | 85% of floor | ended its process: -6 |"]


def test_what_ends_its_process_ends_nothing_else(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    names = ["one", "dies", "two", "faults", "its peer dies with it", "wrong", "its peer only", "dies too"]
    found = run_apart(names, 60, (sys.executable, str(child)))
    assert {name: one["right"] for name, one in found["entries"].items()} == {
        "one": True, "dies": False, "two": True, "faults": False, "its peer dies with it": False, "wrong": False,
        "its peer only": True, "dies too": False,
    }  # fmt: skip
    assert found["entries"]["faults"]["failed"] == "ended its process: -6, alone: -6"
    assert "failed" not in found["entries"]["wrong"]
    assert found["ceilings"] == {"copy": 1.0}


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    assert run_apart(["one"], 0, (str(tmp_path / "nothing"),))["entries"] == {}


def test_an_entry_gives_what_the_table_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny entry on this processor; only the clock is not real."""
    times = {"": Time(2e-6, 1e-7), "slow": Time(6e-6, 1e-7)}
    monkeypatch.setattr("dayzero.ops.bench.__main__.measured", lambda sides: {name: times[name] for name in sides})
    prepared = Prepared([int], lambda: {"out": (0.0, 1.0)}, num_bytes=1000, peers={"slow": [int]})
    found = run(Entry("moe.route", "triton", "T=1", lambda: prepared), {"copy": 1e9})
    alone = run(Entry("moe.route", "triton", "T=1", lambda: prepared), {"copy": 1e9}, alone=True)
    assert (alone["seconds"], alone["peers"]) == (2e-6, {})
    line = table({found["name"]: found}, {"moe.route/triton T=1": Goal("slow", 2.0)}).splitlines()[2]
    assert line == "| moe.route/triton T=1 | 2.0 | 50.0% | slow 6.0 us (x3.00) | 2.00 x slow | met |"
