"""Operators of a plan: what each runs on a device, what stays a reference, what stored measurements decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.hardware import HARDWARE, record_named
from dayzero.ops.experts_tables import TABLES
from dayzero.ops.tiles import CROSSOVER, crossover_of
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.plan_show import show_plan
from tests.paper.test_planner_plan import plan


def test_every_use_is_listed_once_with_its_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(tmp_path, "gpt_oss_20b", PlanOptions("h200"))
    assert set(report.operators["moe.experts"]) == {"triton"} and len(report.operators["moe.experts"]["triton"]) == 24
    assert report.to_json()["operators"]["moe.experts"] == {"triton": 24}
    assert dict(report.measured)["experts in w4"].startswith("tiles of 16 rows; of 32 from 8 rows an expert")
    show_plan(report, Console())
    told = capsys.readouterr().out
    assert "operators, triton:" in told and "experts in w4: tiles of 16 rows" in told


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [
        ("qwen3_30b_a3b", {}, "experts in bf16"),
        ("kimi_k3", {"expert_inputs": "fp8_128"}, "experts in w4a8"),
        ("deepseek_v32", {}, "listed attention, latent"),
    ],
)
def test_tables_are_those_of_the_forms_in_use(tmp_path: Path, name: str, options: dict[str, str], form: str) -> None:
    assert form in dict(plan(tmp_path, name, PlanOptions("h200x8", **options)).measured)  # type: ignore[arg-type]
    other = dict(plan(tmp_path, name, PlanOptions("h100x8", **options)).measured)  # type: ignore[arg-type]
    assert other[form].endswith("(measured on h200, not on h100)")


def test_a_device_that_runs_references_is_told_so(tmp_path: Path) -> None:
    notes = [f for f in plan(tmp_path, "qwen3_8b", PlanOptions("mi355x")).findings if f.kind == "plan.operators"]
    assert len(notes) == 1 and notes[0].verdict == "note" and "mi355x" in notes[0].claim
    assert any(text.startswith("norm.rms: 145 sites, first layers.0.") for text in notes[0].evidence)
    for hardware in ("h200", "cpu"):
        assert "plan.operators" not in {f.kind for f in plan(tmp_path, "qwen3_8b", PlanOptions(hardware)).findings}


def test_what_is_asked_for_is_planned(tmp_path: Path) -> None:
    asked = {"norm.rms": "reference"}
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h200", bindings=asked))
    assert set(report.operators["norm.rms"]) == {"reference"} and report.verdict == "note"
    with pytest.raises(UsageError, match="norm.rms has no variant 'swift'"):
        plan(tmp_path, "qwen3_8b", PlanOptions("h200", bindings={"norm.rms": "swift"}))
    with pytest.raises(UsageError, match="--expert-inputs fp4: it must be one of bf16, fp8_128"):
        plan(tmp_path, "gpt_oss_20b", PlanOptions("h200", expert_inputs="fp4"))


def test_tables_are_kept_by_words_of_hardware() -> None:
    assert {*TABLES, *CROSSOVER} <= HARDWARE.keys()
    assert record_named("NVIDIA H200") == "h200" and record_named("NVIDIA H100 80GB HBM3") == "h100"
    assert record_named("Tesla T4") is None
    assert crossover_of("cpu", "latent") == 2.0 and crossover_of("nothing", "latent") == 0.0
