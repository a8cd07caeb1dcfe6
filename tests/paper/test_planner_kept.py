"""How ranks keep weights, on paper: what an operator takes as it is stored has those bytes, all else is decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dayzero.checkpoint.formats import stored_bytes
from dayzero.checkpoint.rules import Fuse, expand
from dayzero.console import Console
from dayzero.decl import BF16, F32, FP8_BLOCK, MXFP4_INTERLEAVED, Format, ParamDecl
from dayzero.ops.catalog import CATALOG, Line
from dayzero.planner.kept import as_kept, expert_form, expert_lines, stored_forms
from dayzero.planner.placement import PaperModel, read_model
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.plan_show import show_plan
from tests.paper.test_planner_plan import CONFIGS, plan

EXPERTS = "layers.3.channel.experts"


def model_of(name: str) -> PaperModel:
    return read_model(str(CONFIGS / f"{name}.json"), None)


def experts_of(model: PaperModel, name: str = "") -> list[ParamDecl]:
    return [decl for decl in model.decls if ".channel.experts." in decl.name and name in decl.name]


@pytest.mark.parametrize("options", [{}, {"expert_inputs": "fp8_128"}])
def test_experts_in_8_bits_count_as_stored_where_they_are_taken_so(tmp_path: Path, options: dict[str, str]) -> None:
    report = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=8, ep=8, **options))  # type: ignore[arg-type]
    model = model_of("deepseek_v32")
    stacks = experts_of(model)
    assert {model.by_param[decl.name] for decl in stacks} == {FP8_BLOCK}
    assert report.chosen is not None and report.expert_form == "in 8 bits as stored"
    stored = sum(stored_bytes(FP8_BLOCK, decl.shape) for decl in stacks)
    assert {rank.experts for rank in report.chosen.ranks} == {stored // 8}
    assert report.to_json()["expert_form"] == "in 8 bits as stored"
    form = "experts in w8a8" if options else "experts in w8"
    assert dict(report.measured)[form].startswith("tiles of 16 rows")


def test_where_a_variant_takes_them_decoded_they_count_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the floors stay those of stored bytes: nothing is faster than these."""
    asked = {"tp": 8, "ep": 8}
    decoded = plan(tmp_path, "deepseek_v32", PlanOptions("cpux8", **asked))  # type: ignore[arg-type]
    layout = decoded.layouts[0]
    elements = sum(decl.numel for decl in experts_of(model_of("deepseek_v32")))
    assert decoded.expert_form == "decoded" and {rank.experts for rank in layout.ranks} == {2 * elements // 8}
    stored = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", **asked))  # type: ignore[arg-type]
    assert decoded.weight_bytes == stored.weight_bytes
    assert all(rank.weights > rank.experts for rank in layout.ranks)
    show_plan(stored, Console())
    assert "a rank, in 8 bits as stored" in capsys.readouterr().out


def test_a_plan_tells_how_many_linear_weights_stay_as_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that are in 8 bits but W_KV, which is taken apart, and experts, which have a line of their own."""
    stored = [name for name, fmt in model_of("deepseek_v32").by_param.items() if fmt == FP8_BLOCK]
    number = sum(not name.endswith("kv_b") and ".experts." not in name for name in stored)
    for inputs in ("bf16", "fp8_128"):
        report = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=8, linear_inputs=inputs))
        assert report.linear_form == f"{number} weights in 8 bits as stored, inputs {inputs}"
        assert report.to_json()["linear_form"] == report.linear_form
        show_plan(report, Console())
        assert f"linear layers: {report.linear_form}" in capsys.readouterr().out
    asked = PlanOptions("h200x8", tp=8, bindings={"linear.matmul@layers.3.mixer.o": "torch_cuda"})
    assert plan(tmp_path, "deepseek_v32", asked).linear_form.startswith(f"{number - 1} weights")
    decoded = plan(tmp_path, "deepseek_v32", PlanOptions("cpux8", tp=8))
    assert decoded.linear_form == "" and decoded.to_json()["linear_form"] is None


@pytest.mark.parametrize("rows, form", [(128, FP8_BLOCK), (140, BF16)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_of_several_tensors_stays_as_stored_where_all_of_them_can(
    rows: int, form: Format, turned: bool
) -> None:
    """As a loader keeps it: the first tensor's rows begin with a block whatever the second one's do."""
    decl = ParamDecl("w", (2 * rows, 130))
    groups = expand([decl], [Fuse(("x.weight", "y.weight"), "w")]).groups[:: -1 if turned else 1]
    model = PaperModel(None, groups, [FP8_BLOCK] * 2, 0, {"w": FP8_BLOCK}, [decl])  # type: ignore[arg-type]
    assert stored_forms(model) == ({"w": "fp8_block"} if form == FP8_BLOCK else {})
    takes = Line("linear.matmul", "x", "any", (), "nowhere", packed=("fp8_block",))
    assert as_kept(model, {"w": takes}).formats == [form, form]
    assert as_kept(model, {}).formats == [BF16, BF16]
    exact = [replace(group, targets=(replace(group.targets[0], decl=replace(decl, keep="f32")),)) for group in groups]
    assert as_kept(replace(model, groups=exact), {}).formats == [F32, F32]


def test_layers_beside_the_plain_forward_stay_as_they_are_stored() -> None:
    model = read_model(str(CONFIGS / "deepseek_v32.json"), None, drafts=True)
    kept = as_kept(model, {})
    extra = {name: fmt for name, fmt in model.by_param.items() if name.startswith("extra.")}
    assert FP8_BLOCK in extra.values() and extra.items() <= kept.by_param.items()
    assert FP8_BLOCK not in {fmt for name, fmt in kept.by_param.items() if name not in extra}


def test_formats_are_those_of_what_a_rank_holds() -> None:
    model = model_of("deepseek_v32")
    spec = model.paper.spec
    bound = {"moe.experts": "triton", f"moe.experts@{EXPERTS}": "torch_cpu"}
    lines = expert_lines(spec, bound, CATALOG)
    kept = as_kept(model, lines)
    assert kept.by_param[f"{EXPERTS}.gate"] == BF16
    assert kept.by_param["layers.4.channel.experts.down"] == FP8_BLOCK
    assert expert_form(spec, kept.by_param) == "decoded, in 8 bits as stored"
    assert model.by_param["layers.4.mixer.o"] == FP8_BLOCK and kept.by_param["layers.4.mixer.o"] == BF16
    plain = {name: fmt for name, fmt in model.by_param.items() if not fmt.quantized}
    assert plain and all(kept.by_param[name] == fmt for name, fmt in plain.items())
    assert F32 not in {kept.by_param[decl.name] for decl in experts_of(model)}


def test_a_gate_that_is_stored_otherwise_than_what_it_gates_is_decoded_and_so_is_that() -> None:
    model = model_of("deepseek_v32")
    formats = [
        BF16 if any(target.decl.name == f"{EXPERTS}.up" for target in group.targets) else fmt
        for group, fmt in zip(model.groups, model.formats, strict=True)
    ]
    kept = as_kept(replace(model, formats=formats), expert_lines(model.paper.spec, {"moe.experts": "triton"}, CATALOG))
    assert [kept.by_param[f"{EXPERTS}.{name}"] for name in ("gate", "up", "down")] == [BF16, BF16, FP8_BLOCK]
    assert kept.by_param["layers.4.channel.experts.gate"] == FP8_BLOCK


def test_four_bits_that_are_cut_row_by_row_stay_packed() -> None:
    model = model_of("gpt_oss_20b")
    lines = expert_lines(model.paper.spec, {"moe.experts": "torch_cpu"}, CATALOG)
    kept = as_kept(model, lines)
    assert {kept.by_param[decl.name] for decl in experts_of(model, ".gate") if "bias" not in decl.name} == {
        MXFP4_INTERLEAVED
    }
    assert expert_form(model.paper.spec, as_kept(model, {}).by_param) == "decoded"


def test_a_model_without_experts_has_no_form_of_them(tmp_path: Path) -> None:
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h200"))
    assert report.expert_form == "" and report.to_json()["expert_form"] is None
