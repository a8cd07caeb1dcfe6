"""Every recipe against the real config of its family: recognised, nothing unread, totals as published."""

from __future__ import annotations

from math import prod

import pytest
from model_configs import NAMES, config_of, opened, real

from dayzero.arch.cost import active_params, cache_cost, total_params
from dayzero.checkpoint.coverage import expected_parts
from dayzero.checkpoint.formats import DTYPE_BITS
from dayzero.decl import BF16
from dayzero.models.registry import find
from dayzero.rehearse.shrink import lost_traits, shrink

RECIPES = {
    "smollm2_135m": "llama", "qwen3_8b": "qwen3", "qwen3_30b_a3b": "qwen3", "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32", "glm_5": "glm5", "glm_5_2": "glm5", "gpt_oss_20b": "gpt_oss",
    "gpt_oss_120b": "gpt_oss", "kimi_linear_48b_a3b": "kimi_linear", "kimi_k3": "kimi_k3", "kimi_k3_1": "kimi_k3",
    "qwen3_5_35b_a3b": "qwen3_5", "qwen3_5_27b_text": "qwen3_5",
}  # fmt: skip

# name -> (total, active) in units of 1e9 as their publishers or the checkpoints' sums have them, and half a last digit.
# embed: whether the published active count includes the embedding matrix, which a token only looks up.
PUBLISHED = {
    "qwen3_8b": (8.19, None, 0.005, False),
    "qwen3_30b_a3b": (30.5, 3.35, 0.05, True),
    "deepseek_v3": (671.0, 36.6, 0.05, False),
    "gpt_oss_20b": (20.9, 3.6, 0.05, False),
    "gpt_oss_120b": (116.8, 5.1, 0.05, False),
    "glm_5": (744.0, 40.8, 0.5, False),
    "glm_5_2": (743.4, 40.3, 0.05, False),
    "kimi_linear_48b_a3b": (49.12, 3.48, 0.005, True),
    "kimi_k3": (2779.9, 104.2, 0.05, False),
    "qwen3_5_27b_text": (26.9, None, 0.05, False),
    "qwen3_5_35b_a3b": (35.107, None, 0.005, False),  # 34.66 of the text, 0.447 of the tower
}


def test_every_config_has_an_expected_recipe():
    assert set(NAMES) == set(RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_found_everything_read_every_parameter_filled_once(name):
    got = real(name)
    assert got.recipe.name == RECIPES[name]
    assert got.raw.unread() == []
    assert got.expansion.without_rule == []
    assert got.expansion.filled_twice == []
    names = [decl.name for decl in got.spec.params()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMES)
def test_every_reason_for_ignoring_is_a_sentence_part(name):
    got = real(name)
    assert all(len(why) > 3 for why in got.raw.ledger.ignored.values())
    assert not set(got.raw.ledger.ignored) & {"num_hidden_layers", "rope_theta"} or "kimi" in name


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_totals_are_the_published_ones(name):
    total, active, within, embed = PUBLISHED[name]
    spec = real(name).spec
    assert total_params(spec) / 1e9 == pytest.approx(total, abs=within)
    if active is not None:
        counted = active_params(spec) + (spec.vocab * spec.dim if embed else 0)
        assert counted / 1e9 == pytest.approx(active, abs=within)


def test_smollm2_to_the_unit():
    assert total_params(real("smollm2_135m").spec) == 134_515_008


def test_sparse_index_adds_its_own_parameters_only():
    dense, sparse = real("deepseek_v3").spec, real("deepseek_v32").spec
    one = 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168
    assert total_params(sparse) - total_params(dense) == 61 * one


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes"),
    [
        ("kimi_k3", 497_220, 1_560_860_324_864),
        ("kimi_k3_1", 497_220 + 24 * 5, None),
        ("kimi_linear_48b_a3b", 20_493, None),
        ("smollm2_135m", 272, 269_030_016),
    ],
)
def test_tensors_of_a_complete_checkpoint(name, num_tensors, num_bytes):
    got = real(name)
    seen, total = set(), 0
    for _, part, shape in expected_parts(got.expansion, got.quant, BF16):
        seen.add(part.name)
        total += prod(shape) * DTYPE_BITS[part.dtype[0]] // 8
    assert len(seen) == num_tensors
    assert num_bytes is None or total == num_bytes


def test_k3_names_and_formats():
    got = real("kimi_k3")
    parts = {p.name: (p.dtype[0], s) for _, p, s in expected_parts(got.expansion, got.quant, BF16) if ".1." in p.name}
    moe, attn = "language_model.model.layers.1.block_sparse_moe.", "language_model.model.layers.1.self_attn."
    assert parts[moe + "experts.7.w1.weight_packed"] == ("U8", (3072, 1792))
    assert parts[moe + "experts.7.w2.weight_scale"] == ("U8", (3584, 96))
    assert parts[moe + "routed_expert_down_proj.weight"] == ("BF16", (3584, 7168))
    assert parts[moe + "gate.e_score_correction_bias"] == ("F32", (896,))
    assert parts[attn + "A_log"] == ("F32", (128,))
    assert parts[attn + "q_conv1d.weight"] == ("F32", (12288, 1, 4))
    assert parts[attn + "o_norm.weight"] == ("F32", (128,))


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "sequence"),
    [
        ("kimi_k3", 27_648, 15_744, 449_372_160),
        ("kimi_linear_48b_a3b", 8_064, None, 43_417_600),
        ("deepseek_v32", 61 * 1408, 61 * 788, 0),
        ("glm_5_2", None, 53_940, 0),
        ("glm_5", None, 61_464, 0),
        ("kimi_k3_1", 27_648 + 24 * 256, 15_744 + 24 * 132, 449_372_160),
        ("gpt_oss_20b", 12 * 2048, None, 0),
    ],
)
def test_cache_bytes(name, bf16, fp8, sequence):
    spec = real(name).spec
    wide, narrow = cache_cost(spec, "bf16"), cache_cost(spec, "fp8")
    assert bf16 is None or wide.per_token == bf16
    assert fp8 is None or narrow.per_token == fp8
    assert wide.per_sequence == sequence


@pytest.mark.parametrize("name", NAMES)
def test_twin_keeps_every_trait(name):
    got = real(name)
    small = shrink(got.config, got.recipe.twin, keep_vocab=False, changes={})
    twin = opened(small)
    assert twin.recipe.name == got.recipe.name
    assert twin.raw.unread() == []
    assert lost_traits(got.spec, twin.spec) == []
    assert total_params(twin.spec) < 10_000_000
    assert all(i < twin.spec.vocab for i in twin.spec.stop_ids) and bool(twin.spec.stop_ids) == bool(got.spec.stop_ids)
    # Raises when a size is illegal for the format, as an input of 48 would be for groups of 32.
    assert sum(1 for _ in expected_parts(twin.expansion, twin.quant, BF16)) > 20


def test_twin_traits_bite():
    """What a twin must force: top-k and window below length, padding, few KV heads, groups, short last block."""
    small = {
        n: opened(shrink(config_of(n), real(n).recipe.twin, keep_vocab=False, changes={})).spec
        for n in ("kimi_k3_1", "deepseek_v32", "gpt_oss_20b", "glm_5_2", "qwen3_5_35b_a3b")
    }
    k3 = small["kimi_k3_1"].layers
    assert [layer.mixer.kind for layer in k3] == ["delta"] * 3 + ["latent"] + ["delta"] * 3 + ["latent"] * 2
    assert k3[0].mixer.heads < k3[0].mixer.key_dim
    assert k3[0].residual.bank == 3 and len(k3) % k3[0].residual.every
    assert k3[3].mixer.index.top_k == 8 and k3[3].mixer.index.heads >= 8
    router = small["deepseek_v32"].layers[3].channel.router
    assert 1 < router.top_groups < router.groups
    assert small["gpt_oss_20b"].layers[0].mixer.window == 8
    assert [layer.mixer.index.shared for layer in small["glm_5_2"].layers] == [i not in (0, 1, 2, 6) for i in range(8)]
    gated = small["qwen3_5_35b_a3b"].layers[3].mixer
    assert gated.rope.dims < gated.head_dim and gated.kv_heads < gated.heads


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k3_1", "qwen3_5_35b_a3b"])
def test_bare_text_config_is_the_same_text_model(name):
    outer = real(name)
    inner = opened(outer.config["text_config"])
    assert inner.recipe.name == outer.recipe.name
    assert inner.raw.unread() == []
    assert inner.spec.layers == outer.spec.layers
    assert inner.expansion.without_rule == inner.expansion.filled_twice == []
    assert not any(
        group.name.startswith(("language_model.", "model.language_model.")) for group in inner.expansion.groups
    )


def test_found_by_traits_not_by_name():
    text = config_of("kimi_k3")["text_config"]
    assert text["architectures"] == ["KimiLinearForCausalLM"] and text["model_type"] == "kimi_linear"
    assert find(text).recipe.name == "kimi_k3"
    for key in ("attn_res_block_size", "routed_expert_hidden_size"):
        del text[key]
    assert find(text).recipe is None  # neither model any longer
    renamed = dict(config_of("deepseek_v32"), architectures=["DeepseekV3ForCausalLM"])
    assert find(renamed).recipe is None
    renamed = dict(config_of("glm_5"), architectures=["DeepseekV32ForCausalLM"])
    assert "indexer_rope_interleave" in find(renamed).why
