"""Rules of the recipes against headers: complete sets pass, alternatives are chosen, what may lack is filled."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from model_configs import NAMES, config_of, opened

from dayzero.checkpoint.coverage import Coverage, cover, expected_parts
from dayzero.checkpoint.rules import Beside, Either, Optional, Rule, Split, expand
from dayzero.decl import BF16, ParamDecl
from dayzero.rehearse.shrink import shrink


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]


def small(name):
    """The recipe's twin of a real config."""
    config = config_of(name)
    return opened(shrink(config, opened(config).recipe.twin, keep_vocab=False, changes={}))


def headers(got):
    parts = expected_parts(got.expansion, got.quant, BF16)
    return {part.name: Entry(part.dtype[0], shape) for _, part, shape in parts if not part.optional}


def covered(got, entries) -> Coverage:
    return cover(got.expansion, entries, got.quant)


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_set_is_covered_without_a_rest(name):
    got = small(name)
    entries = headers(got)
    out = covered(got, entries)
    assert out.complete and not out.narrowed and not out.filled and not out.roots
    assert [c for c in out.contradictions if c.why is None] == []
    assert out.used == set(entries)


def test_k3_acknowledges_what_its_ignore_list_forgot():
    got = small("kimi_k3")
    names = {c.name.rsplit(".", 2)[-2] for c in covered(got, headers(got)).contradictions}
    assert names == {"routed_expert_down_proj", "routed_expert_up_proj"}


def test_k3_rates_in_bf16_are_reported_as_damage():
    got = small("kimi_k3")
    entries = headers(got)
    hurt = "language_model.model.layers.0.self_attn.A_log"
    entries[hurt] = Entry("BF16", entries[hurt].shape)
    assert list(covered(got, entries).narrowed) == [hurt]


@pytest.mark.parametrize("with_bias", [True, False])
def test_k3_1_with_and_without_a_bias_in_the_key_norm(with_bias):
    got = small("kimi_k3_1")
    entries = headers(got)
    biases = [n for n in entries if n.endswith("indexer.k_norm.bias")]
    assert len(biases) == 3
    if not with_bias:
        entries = {n: e for n, e in entries.items() if n not in biases}
    out = covered(got, entries)
    assert out.complete
    filled = {decl.name: rule.fill for decl, rule in out.filled.items()}
    assert filled == ({} if with_bias else {f"layers.{i}.mixer.index.k_norm_bias": 0.0 for i in (3, 7, 8)})
    assert len(out.groups) == len(out.sources)


def _per_expert(entries):
    """The same checkpoint with one tensor for each expert, as FP8 releases and a library's own files have it."""
    out = {}
    for name, entry in entries.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = entry
            continue
        head, kind = name.rsplit(".", 1)
        num, rows, cols = entry.shape
        halves = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for e in range(num):
            for half in halves:
                out[f"{head}.{e}.{half}.weight"] = Entry(entry.dtype, (rows // len(halves), cols))
    return out


def test_fused_and_single_experts_are_both_understood():
    got = small("qwen3_5_35b_a3b")
    fused = headers(got)
    single = _per_expert(fused)
    assert len(single) > len(fused)
    for entries in (fused, single):
        out = covered(got, entries)
        assert out.complete and out.used == set(entries)
        filled = {t.decl.name for g in out.groups for t in g.targets}
        assert filled == {d.name for d in got.spec.params()}


def test_half_fused_half_single_is_missing_and_unknown():
    got = small("qwen3_5_35b_a3b")
    entries = headers(got)
    single = _per_expert(entries)
    mixed = {n: e for n, e in entries.items() if ".layers.0." not in n}
    mixed |= {n: e for n, e in single.items() if ".layers.0." in n}
    out = covered(got, mixed)
    assert out.unknown and out.missing
    assert all(".layers.0." in name for name in [*out.unknown, *out.missing])


def test_a_tower_that_the_config_does_not_name_is_ignored_with_its_reason():
    config = config_of("qwen3_5_35b_a3b")
    tower = {name: entry for name, entry in headers(small("qwen3_5_35b_a3b")).items() if ".visual." in name}
    assert len(tower) == 1 + 2 * (1 + 2 * 6 + 3)  # two blocks of six, each with a bias
    del config["vision_config"]
    got = opened(shrink(config, opened(config).recipe.twin, keep_vocab=False, changes={}))
    seen = covered(got, headers(got) | tower)
    assert seen.complete and set(seen.ignored) == set(tower)
    assert "no vision_config" in seen.ignored["model.visual.pos_embed.weight"]


def test_kimi_linear_accepts_both_shapes_of_convolution_and_rates():
    got = small("kimi_linear_48b_a3b")
    entries = {
        name: Entry(e.dtype, (e.shape[0], e.shape[2])) if "conv1d" in name else
        Entry(e.dtype, (e.shape[2],)) if name.endswith("A_log") else e
        for name, e in headers(got).items()
    }  # fmt: skip
    assert covered(got, entries).complete


def test_gpt_oss_experts_plain_are_transposed():
    got = small("gpt_oss_20b")
    names = {n: e.shape for n, e in headers(got).items() if ".layers.0.mlp.experts." in n}
    assert names["model.layers.0.mlp.experts.gate_up_proj_blocks"] == (16, 320, 3, 16)
    plain = {part.name: s for _, part, s in expected_parts(got.expansion, None, BF16)}
    assert plain["model.layers.0.mlp.experts.gate_up_proj"] == (16, 96, 320)
    assert plain["model.layers.0.mlp.experts.down_proj"] == (16, 160, 96)


def _decls():
    return [
        ParamDecl("layers.0.mixer.q", (4, 6)), ParamDecl("layers.0.mixer.a", (4,), "scalar"),
        ParamDecl("layers.1.mixer.q", (4, 6)), ParamDecl("layers.1.mixer.b", (4,), "bias"),
    ]  # fmt: skip


def test_beside_tells_layers_of_two_kinds_apart():
    rules = (
        Beside(
            "layers.{i}.mixer.a", (Rule("l.{i}.one.q", "layers.{i}.mixer.q"), Rule("l.{i}.a", "layers.{i}.mixer.a"))
        ),
        Beside(
            "layers.{i}.mixer.b", (Split("l.{i}.two", ("layers.{i}.mixer.q",)), Rule("l.{i}.b", "layers.{i}.mixer.b"))
        ),
    )
    out = expand(_decls(), rules)
    assert sorted(g.name for g in out.groups) == ["l.0.a", "l.0.one.q", "l.1.b", "l.1.two"]
    assert out.without_rule == out.filled_twice == []


def test_an_option_that_fills_less_is_a_fault_of_the_recipe():
    full = (Rule("l.{i}.q", "layers.{i}.mixer.q"), Rule("l.{i}.a", "layers.{i}.mixer.a"))
    rules = (Either((full, full[:1])), Optional("l.{i}.b", "layers.{i}.mixer.b", 0.0, why="test"))
    assert expand(_decls(), rules).without_rule == ["layers.0.mixer.a"]
    assert expand(_decls(), (Either((full, full[::-1])), rules[1])).without_rule == []
