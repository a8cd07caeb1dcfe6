"""Coverage: everything used, ignored, unknown or missing, by name; formats against claims; renamed roots; scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dayzero.checkpoint.coverage import Alike, Coverage, cover, expected_parts, stored_format
from dayzero.checkpoint.likeness import find_roots, nearest, rooted
from dayzero.checkpoint.quant_config import QuantTable, resolve
from dayzero.checkpoint.rules import Alias, Expansion, Ignore, Rule, Stored, expand
from dayzero.decl import BF16, FP8_BLOCK, MXFP4_PACK, Format, ParamDecl

EXPERTS = 12


@dataclass(frozen=True)
class Held:
    dtype: str
    shape: tuple[int, ...]


RULES = (
    Rule("model.embed.weight", "embed"),
    Rule("lm_head.weight", "head"),
    Rule("model.layers.{i}.norm.weight", "layers.{i}.norm"),
    Rule("model.layers.{i}.attn.q.weight", "layers.{i}.mixer.q"),
    Rule("model.layers.{i}.moe.gate.bias", "layers.{i}.channel.router_bias"),
    Rule("model.layers.{i}.moe.experts.{e}.up.weight", "layers.{i}.channel.experts.up[{e}]"),
    Alias("model.embed_copy.weight", "embed", why="a copy"),
    Ignore("*.inv_freq", why="recomputed"),
)


def decls() -> list[ParamDecl]:
    out = [ParamDecl("embed", (16, 32), "embed"), ParamDecl("head", (16, 32), "embed")]
    for i in range(3):
        out += [
            ParamDecl(f"layers.{i}.norm", (32,), "norm"),
            ParamDecl(f"layers.{i}.mixer.q", (64, 32)),
            ParamDecl(f"layers.{i}.channel.router_bias", (EXPERTS,), "bias", "f32", "f32"),
            ParamDecl(f"layers.{i}.channel.experts.up", (EXPERTS, 8, 32)),
        ]
    return out


def claim(ignore: list[str], fmt: str = "mxfp4-pack-quantized") -> QuantTable:
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    return resolve(
        {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"g": group}, "ignore": ignore}
    )


def complete(quant: QuantTable | None = None, rules: tuple[Any, ...] = RULES) -> tuple[Expansion, dict[str, Held]]:
    expansion = expand(decls(), rules)
    assert not expansion.without_rule
    parts = expected_parts(expansion, quant, BF16)
    return expansion, {part.name: Held(part.dtype[0], shape) for _, part, shape in parts if not part.optional}


def check_once(coverage: Coverage, held: dict[str, Held]) -> None:
    """Every stored tensor is in exactly one place of the ledger (a misfit one may be used as well)."""
    places = [set(coverage.used), set(coverage.ignored), set(coverage.unknown), set(coverage.aliases)]
    misfit_only = set(coverage.misfit) - coverage.used
    assert set(held) == set().union(*places)
    assert misfit_only <= coverage.used | set(coverage.misfit)
    assert sum(map(len, places)) == len(held)


def test_a_complete_checkpoint_leaves_nothing_over() -> None:
    expansion, held = complete()
    coverage = cover(expansion, held)
    assert coverage.complete
    assert coverage.used == set(held)
    assert coverage.formats == {"bf16": 2 + 3 + 3 + 3 * EXPERTS, "f32": 3}
    check_once(coverage, held)


def test_experts_stored_alike_read_as_the_sequence_they_stand_for() -> None:
    quant = claim(["re:.*attn.*"])
    expansion, held = complete(quant)
    coverage = cover(expansion, held, quant)
    assert coverage.complete
    assert not coverage.contradictions
    sources = coverage.sources[[g.name for g in coverage.groups].index("model.layers.1.moe.experts.{e}.up.weight")]
    assert isinstance(sources, Alike)
    assert len(sources) == EXPERTS
    for e, source in enumerate(sources):
        base = f"model.layers.1.moe.experts.{e}.up.weight"
        assert (source.name, source.format) == (base, MXFP4_PACK)
        assert source.parts == (("weight", f"{base}_packed"), ("scale", f"{base}_scale"))
    assert sources[-1] == sources[EXPERTS - 1]
    assert [s.name for s in sources[2:5]] == [sources[e].name for e in (2, 3, 4)]
    with pytest.raises(IndexError):
        sources[EXPERTS]


def test_a_lost_expert_is_named_and_the_others_are_found() -> None:
    quant = claim(["re:.*attn.*"])
    expansion, held = complete(quant)
    del held["model.layers.2.moe.experts.7.up.weight_scale"]
    coverage = cover(expansion, held, quant)
    assert list(coverage.missing) == ["model.layers.2.moe.experts.7.up.weight_scale"]
    assert not coverage.unknown, "the packed half of a broken pair is not unknown"
    del held["model.layers.2.moe.experts.7.up.weight_packed"]
    coverage = cover(expansion, held, quant)
    assert list(coverage.missing) == ["model.layers.2.moe.experts.7.up.weight"]


def test_an_extra_tensor_is_unknown_and_gets_its_nearest_match() -> None:
    expansion, held = complete()
    held["model.layers.1.attn.q_norm.weight"] = Held("BF16", (32,))
    held["model.layers.1.rope.inv_freq"] = Held("F32", (8,))
    coverage = cover(expansion, held)
    assert coverage.unknown == {"model.layers.1.attn.q_norm.weight": "model.layers.1.attn.q.weight"}
    assert coverage.ignored == {"model.layers.1.rope.inv_freq": "recomputed"}
    check_once(coverage, held)


@pytest.mark.parametrize(
    "change",
    [
        lambda n: "backbone." + n.removeprefix("model.") if n.startswith("model.") else n,
        lambda n: "language_model." + n,
        lambda n: n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n,
        lambda n: n.removeprefix("model."),
        lambda n: n.replace("model.", "a.b.c.", 1) if n.startswith("model.") else "a.b.c." + n,
    ],
)
@pytest.mark.parametrize("quantised", [False, True])
def test_a_renamed_root_is_recognised(change: Any, quantised: bool) -> None:
    quant = claim(["re:.*attn.*"]) if quantised else None
    expansion, held = complete(quant)
    changed = {change(name): entry for name, entry in held.items()}
    coverage = cover(expansion, changed, quant)
    assert coverage.complete, (coverage.missing, coverage.unknown)
    assert coverage.roots
    assert coverage.used == set(changed)


def test_a_root_is_not_guessed_where_the_name_itself_exists() -> None:
    expansion, held = complete()
    held["other.layers.0.attn.q.weight"] = Held("BF16", (64, 32))
    coverage = cover(expansion, held)
    assert not coverage.roots
    assert list(coverage.unknown) == ["other.layers.0.attn.q.weight"]


def test_a_lost_head_takes_no_other_root() -> None:
    expansion, held = complete()
    del held["lm_head.weight"]
    coverage = cover(expansion, held)
    assert not coverage.roots
    assert list(coverage.missing) == ["lm_head.weight"]


def test_roots_of_nothing() -> None:
    assert find_roots(["model.x.weight"], {}) == {}
    assert find_roots([], {"model.x.weight": 1}) == {}
    assert rooted("model.a", {"model.": "m.", "": "x."}) == "m.a"


def test_claims_and_files_are_compared_in_both_directions() -> None:
    quant = claim(["re:.*attn.*"])
    expansion, held = complete(quant)
    plain = complete()[1]
    for e in range(EXPERTS):  # claimed packed, stored plain
        base = f"model.layers.0.moe.experts.{e}.up.weight"
        del held[f"{base}_packed"], held[f"{base}_scale"]
        held[base] = plain[base]
    del held["model.layers.2.attn.q.weight"]  # claimed plain, stored packed
    held["model.layers.2.attn.q.weight_packed"] = Held("U8", (64, 16))
    held["model.layers.2.attn.q.weight_scale"] = Held("U8", (64, 1))
    coverage = cover(expansion, held, quant)
    assert coverage.complete
    found = {(c.name, c.claimed, c.stored, c.why, c.count) for c in coverage.contradictions}
    assert found == {
        ("model.layers.0.moe.experts.{e}.up.weight", "mxfp4_pack", "bf16", None, EXPERTS),
        ("model.layers.2.attn.q.weight", "unquantised", "mxfp4_pack", None, 1),
    }


def test_an_acknowledged_contradiction_carries_its_reason() -> None:
    rules = (*RULES, Stored("*.attn.q.weight", None, why="left out of the list"))
    quant = claim([])
    expansion, held = complete(quant, rules)
    assert held["model.layers.0.attn.q.weight"].dtype == "BF16"
    coverage = cover(expansion, held, quant)
    assert coverage.complete
    assert {c.why for c in coverage.contradictions} == {"left out of the list"}


def test_shapes_dtypes_and_narrowed_values() -> None:
    expansion, held = complete()
    held["model.layers.0.attn.q.weight"] = Held("BF16", (32, 64))
    held["model.layers.1.attn.q.weight"] = Held("I64", (64, 32))
    held["model.layers.2.moe.gate.bias"] = Held("BF16", (EXPERTS,))
    coverage = cover(expansion, held)
    assert set(coverage.misfit) == {"model.layers.0.attn.q.weight", "model.layers.1.attn.q.weight"}
    assert "[32, 64], expected [64, 32]" in coverage.misfit["model.layers.0.attn.q.weight"]
    assert "I64" in coverage.misfit["model.layers.1.attn.q.weight"]
    assert list(coverage.narrowed) == ["model.layers.2.moe.gate.bias"]
    assert not coverage.unknown
    assert not coverage.complete


def test_a_transposed_scale_is_a_misfit() -> None:
    quant = resolve({"quant_method": "fp8", "weight_block_size": [16, 16]})
    expansion, held = complete(quant)
    name = "model.layers.1.attn.q.weight_scale_inv"
    assert held[name].shape == (4, 2)
    held[name] = Held("F32", (2, 4))
    coverage = cover(expansion, held, quant)
    assert list(coverage.misfit) == [name]


def test_entries_with_numbers_tell_experts_apart() -> None:
    quant = claim(["re:.*attn.*", "model.layers.1.moe.experts.3.up"])
    assert quant.numbered
    expansion, held = complete(quant)
    assert "model.layers.1.moe.experts.3.up.weight" in held
    assert "model.layers.1.moe.experts.4.up.weight_packed" in held
    coverage = cover(expansion, held, quant)
    assert coverage.complete
    assert not coverage.contradictions
    assert coverage.formats["mxfp4_pack"] == 3 * EXPERTS - 1
    group = next(g for g in expansion.groups if g.name.startswith("model.layers.1.moe.experts"))
    assert stored_format(group, "model.layers.1.moe.experts.3.up.weight", expansion, quant, BF16) == BF16
    assert stored_format(group, "model.layers.1.moe.experts.4.up.weight", expansion, quant, BF16) == MXFP4_PACK


def test_rules_that_count_characters_tell_experts_apart_as_well() -> None:
    quant = claim(["re:.*attn.*", r"re:.*experts\..\.up"])  # one character: experts 0 to 9
    assert not quant.numbered
    expansion, held = complete(quant)
    assert "model.layers.0.moe.experts.9.up.weight" in held
    assert "model.layers.0.moe.experts.10.up.weight_packed" in held
    assert cover(expansion, held, quant).complete


def test_a_scheme_of_another_kind_is_asked_for_every_module() -> None:
    class ByParity:
        def scheme(self, module: str, role: str = "linear") -> Format | None:
            number = module.split("experts.")[-1].split(".")[0]
            return MXFP4_PACK if number.isdigit() and int(number) % 2 else None

    expansion = expand(decls(), RULES)
    parts = expected_parts(expansion, ByParity(), BF16)
    held = {part.name: Held(part.dtype[0], shape) for _, part, shape in parts}
    coverage = cover(expansion, held, ByParity())
    assert coverage.complete
    assert coverage.formats["mxfp4_pack"] == 3 * EXPERTS // 2


def test_an_alias_is_reported_and_not_unknown() -> None:
    expansion, held = complete()
    held["model.embed_copy.weight"] = held["model.embed.weight"]
    coverage = cover(expansion, held)
    assert coverage.complete
    assert coverage.aliases == {"model.embed_copy.weight": "embed"}


def test_an_empty_checkpoint_misses_everything() -> None:
    expansion, held = complete()
    coverage = cover(expansion, {})
    assert set(coverage.missing) == set(held)


def test_nearest_names_are_of_the_same_place() -> None:
    names = [f"m.layers.{i}.experts.{e}.gate_proj.weight" for i in range(20) for e in range(60)]
    others = [n.replace("gate_proj", "gate").replace("m.", "model.", 1) for n in names]
    found = nearest(names, others)
    assert found == dict(zip(names, others, strict=True))
    assert nearest(["zzzz"], ["model.layers.0.q"]) == {"zzzz": ""}
    assert nearest(["a.b"], []) == {"a.b": ""}


def test_block_fp8_is_found_without_a_claim_and_contradicts_it() -> None:
    quant = resolve({"quant_method": "fp8", "weight_block_size": [128, 128]})
    expansion, held = complete(quant)
    coverage = cover(expansion, held)
    assert coverage.complete
    assert coverage.formats[FP8_BLOCK.name] == 3 + 3 * EXPERTS
    assert all(c.claimed == "unquantised" and c.why is None for c in coverage.contradictions)
