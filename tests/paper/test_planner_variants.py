"""Operators of a plan: what each runs on a device, what stays a reference, what stored measurements decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dayzero.arch.spec import ModelSpec
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.hardware import HARDWARE, record_named
from dayzero.models.blueprint import blueprint, require_recipe
from dayzero.ops.experts_tables import TABLES
from dayzero.ops.tiles import CROSSOVER, crossover_of
from dayzero.planner.bindings import decide
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.plan_show import show_plan
from dayzero.planner.variants import by_contract, reference_findings
from tests.paper.test_planner_plan import CONFIGS, plan


def test_every_use_is_listed_once_with_its_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(tmp_path, "gpt_oss_20b", PlanOptions("h200"))
    assert set(report.operators["moe.experts"]) == {"cuda"} and len(report.operators["moe.experts"]["cuda"]) == 24
    assert report.to_json()["operators"]["moe.experts"] == {"cuda": 24}
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


COMPOSED = {
    "attention.norm_rope_write", "cache.write_latent", "latent.attend", "linear.matmul_add", "linear.matmul_glu",
    "moe.matmul_route", "residual.add_norm", "residual.attn_mix_norm",
}  # fmt: skip


def _called(spec: ModelSpec, hardware: str, dtype: str) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """(contract -> variant -> sites, what the note about references names)."""
    uses, record = tuple(spec.contracts()), HARDWARE[hardware]
    bindings = decide(uses, record, dtype, {})
    notes = reference_findings(bindings, uses, record)
    return by_contract(bindings, uses), [text for note in notes for text in note.evidence]


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k3"])
def test_where_parts_do_the_work_the_operators_of_all_at_once_are_not_named(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    spec = blueprint(config, require_recipe(config)).spec
    declared = {(use.contract, use.site) for use in spec.contracts() if use.contract not in COMPOSED}
    assert COMPOSED & {use.contract for use in spec.contracts()} == {u.contract for u in spec.contracts() if u.parts}
    for hardware, dtype in (("cpu", "bf16"), ("mi355x", "bf16")):
        found, named = _called(spec, hardware, dtype)
        assert not COMPOSED & found.keys() and not [t for t in named if t.partition(":")[0] in COMPOSED]
        listed = [(contract, site) for contract, by in found.items() for sites in by.values() for site in sites]
        assert set(listed) == declared and len(listed) == len(declared)
    found, named = _called(spec, "h200", "f32")
    assert not [text for text in named if text.partition(":")[0] in COMPOSED]
    assert "linear.matmul_glu" not in found and "linear.matmul" in found


def test_parts_that_an_operator_stands_for_are_not_listed(tmp_path: Path) -> None:
    found = plan(tmp_path, "qwen3_8b", PlanOptions("h200")).operators
    assert found.keys() & {"rope.apply", "cache.write", "activation.glu", "residual.add"} == set()
    assert found["norm.rms"] == {"triton": ["layers.0.mixer_norm"]}  # behind no sum
    assert (
        len(found["residual.add_norm"]["triton"]) == 2 * 36 and len(found["attention.norm_rope_write"]["triton"]) == 36
    )
    assert len(found["linear.matmul"]["few_rows"]) == 36 * 5 and len(found["linear.matmul_glu"]["few_rows"]) == 36
    asked = {"residual.add@layers.3.add": "reference"}
    found = plan(tmp_path, "qwen3_8b", PlanOptions("h200", bindings=asked)).operators
    assert found["residual.add"] == {"reference": ["layers.3.add"]}
    found = plan(tmp_path, "deepseek_v3", PlanOptions("h200")).operators
    assert len(found["rope.apply"]["triton"]) == 61 == len(found["cache.write_latent"]["triton"])  # of queries
    assert found["latent.attend"] == {"cuda": [f"layers.{i}.mixer.attention" for i in range(61)]}
    assert found.keys() & {"attention.paged", "latent.queries", "latent.values"} == set()
    assert found["linear.matmul_f32"] == {"few_rows": ["head"]} and "moe.route" not in found
    assert not [site for site in found["linear.matmul"]["few_rows"] if site.endswith("shared.down")]


def test_what_is_asked_for_is_planned(tmp_path: Path) -> None:
    asked = {"norm.rms": "reference"}
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h200", bindings=asked))
    assert set(report.operators["norm.rms"]) == {"reference"} and report.verdict == "note"
    assert "residual.add" in report.operators and "residual.add_norm" not in report.operators
    with pytest.raises(UsageError, match="norm.rms has no variant 'swift'"):
        plan(tmp_path, "qwen3_8b", PlanOptions("h200", bindings={"norm.rms": "swift"}))
    with pytest.raises(UsageError, match="--expert-inputs fp4: it must be one of bf16, fp8_128"):
        plan(tmp_path, "gpt_oss_20b", PlanOptions("h200", expert_inputs="fp4"))


def test_tables_are_kept_by_words_of_hardware() -> None:
    assert {*TABLES, *CROSSOVER} <= HARDWARE.keys()
    assert record_named("NVIDIA H200") == "h200" and record_named("NVIDIA H100 80GB HBM3") == "h100"
    assert record_named("Tesla T4") is None
    assert crossover_of("cpu", "latent") == 2.0 and crossover_of("nothing", "latent") == 0.0
