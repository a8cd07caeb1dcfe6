"""Draft layers (multi-token prediction): claimed to the last tensor, counted apart, planned for when asked."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from model_configs import config_of, opened, real
from test_models_rules import Entry, covered, headers, small

from dayzero.arch.cost import extra_params, total_params
from dayzero.checkpoint.coverage import expected_parts
from dayzero.console import Console
from dayzero.decl import BF16
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions, PlanReport
from dayzero.planner.plan_show import show_plan
from dayzero.planner.planner import plan_source
from dayzero.planner.show import show_report
from dayzero.rehearse.shrink import shrink

WITH_DRAFTS = ("deepseek_v3", "deepseek_v32", "glm_5", "glm_5_2", "qwen3_5_27b_text", "qwen3_5_35b_a3b")


def beside(got, part: str = "extra") -> dict[str, Entry]:
    """Headers of the draft layers, or of the copies among them."""
    asked = replace(got.expansion, groups=getattr(got.expansion, part).groups)
    parts = expected_parts(asked, got.quant, BF16)
    return {part.name: Entry(part.dtype[0], shape) for _, part, shape in parts if not part.optional}


def test_names_and_shapes_of_a_layer_behind_the_last():
    got = real("deepseek_v32")
    held, copies, layer = beside(got), beside(got, "copies"), "model.layers.61."
    assert held[layer + "eh_proj.weight"] == Entry("BF16", (7168, 14336))  # plain, whatever the config claims
    assert all(held[f"{layer}{n}.weight"].shape == (7168,) for n in ("enorm", "hnorm", "shared_head.norm"))
    assert held[layer + "self_attn.indexer.wq_b.weight"].shape == (8192, 1536), "its index is its own"
    assert held[layer + "mlp.experts.255.down_proj.weight_scale_inv"].shape == (56, 16)
    assert set(copies) == {f"{layer}{n}.weight" for n in ("embed_tokens", "shared_head.head")}
    assert {e.shape for e in copies.values()} == {(129280, 7168)}
    main = {n.replace("model.layers.60.", layer) for n in headers(got) if n.startswith("model.layers.60.")}
    own = {f"{layer}{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}
    assert set(held) == main | own


def test_the_published_size_of_a_draft_layer():
    """DeepSeek-V3 is published as 671 B and 14 B of a draft layer, copies of embedding and head among them."""
    spec = real("deepseek_v3").spec
    assert 670.5e9 < total_params(spec) < 671.5e9
    assert 13e9 < extra_params(spec) + sum(d.numel for d in spec.extra.copies()) < 14.5e9


def test_names_of_draft_layers_under_one_join():
    held = beside(real("qwen3_5_35b_a3b"))
    outside = {n for n in held if not n.startswith("mtp.layers.0.")}
    assert outside == {f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert held["mtp.fc.weight"].shape == (2048, 4096)
    assert "mtp.layers.0.self_attn.q_norm.weight" in held and not any("linear_attn" in n for n in held)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in held


def test_an_index_is_not_shared_with_a_draft_layer():
    got = real("glm_5_2")
    assert got.spec.layers[-1].mixer.index.shared
    assert "model.layers.78.self_attn.indexer.wk.weight" in beside(got)


@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_all_or_none_of_a_draft_layer(name):
    got = small(name)
    main, held, copies = headers(got), beside(got), beside(got, "copies")
    whole = covered(got, main | held | copies)
    assert whole.complete and whole.extra == {*held, *copies} and whole.used == set(main) and not whole.ignored
    assert [c for c in whole.contradictions if c.why is None] == []
    assert {t.decl.name for g in whole.extra_groups for t in g.targets} == {
        d.name for d in (*got.spec.extra.params(), *(got.spec.extra.copies() if copies else ()))
    }
    none = covered(got, main)
    assert none.complete and not none.extra and not none.extra_groups
    assert covered(got, main | held).complete
    lost = sorted(held)[3]
    assert list(covered(got, main | {n: e for n, e in held.items() if n != lost}).missing) == [lost]
    odd = sorted(held)[0].rpartition(".")[0] + ".oddity"
    assert list(covered(got, main | held | {odd: Entry("BF16", (3,))}).unknown) == [odd]


def test_a_text_model_without_drafts_has_none():
    for name in ("kimi_k3", "kimi_k3_1", "kimi_linear_48b_a3b", "qwen3_8b"):
        assert real(name).spec.extra is None and real(name).expansion.extra is None


def plan(tmp_path: Path, name: str, options: PlanOptions) -> PlanReport:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    return plan_source(str(tmp_path / "config.json"), options)


def test_a_plan_counts_them_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = PlanOptions("h200x16", tp=8, pp=2, ep=8)
    without, with_them = (plan(tmp_path, "deepseek_v32", replace(options, drafts=drafts)) for drafts in (False, True))
    spec = real("deepseek_v32").spec
    for report in (without, with_them):
        assert report.proof is not None and report.proof.holds and report.chosen is not None
        assert report.parameters[0] == total_params(spec) and report.drafts is not None
        assert report.drafts["parameters"] == extra_params(spec)
        show_plan(report, Console())
    assert with_them.proof.elements - without.proof.elements == extra_params(spec)
    assert with_them.weight_bytes == without.weight_bytes, "what a step reads is the same"
    said = capsys.readouterr().out
    assert "not counted; --drafts counts them" in said and "counted on the last stage" in said
    held = [sum(rank.weights for rank in r.chosen.ranks) for r in (without, with_them)]
    stored = sum(
        prod(e.shape) * {"BF16": 2, "F32": 4}.get(e.dtype, 1)
        for e in beside(opened(config_of("deepseek_v32"))).values()
    )
    assert with_them.drafts["bytes"] == stored
    assert held[1] - held[0] >= stored  # what no rank cuts is on each of them
    assert plan(tmp_path, "qwen3_8b", PlanOptions("h100x1")).drafts is None


def test_inspect_says_that_nothing_loads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    got = opened(config_of("qwen3_5_27b_text"))
    (tmp_path / "config.json").write_text(json.dumps(got.config))
    report = inspect_source(str(tmp_path))
    assert report.parameters["extra"] == extra_params(got.spec) > 0
    assert report.parameters["total"] == total_params(got.spec)
    show_report(report, Console())
    assert "not loaded: nothing uses them yet" in capsys.readouterr().out


def test_twins_keep_the_draft_layer():
    config = config_of("deepseek_v32")
    twin = opened(shrink(config, real("deepseek_v32").recipe.twin, keep_vocab=False, changes={}))
    assert list(twin.spec.extra.layers) == [len(twin.spec.layers)]
