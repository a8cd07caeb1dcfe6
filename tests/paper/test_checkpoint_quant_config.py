"""From a config's claim to a format per module: published claims, anchored matching, refusals, nothing unread."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.checkpoint.quant_config import find_quant_config, resolve
from dayzero.decl import (
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    FP8_BLOCK_WEIGHT_SCALE,
    INT4_PACK,
    MXFP4_INTERLEAVED,
    MXFP4_PACK,
    NVFP4_MODELOPT,
    NVFP4_PACK,
)
from dayzero.errors import ConfigError, UserError

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def weights(**changed):
    return {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
        "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None,
    } | changed  # fmt: skip


def compressed(fmt="mxfp4-pack-quantized", ignore=("lm_head",), targets=("Linear",), **changed):
    group = {"targets": list(targets), "weights": weights(**changed), "input_activations": None,
             "output_activations": None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed",
            "kv_cache_scheme": None, "ignore": list(ignore), "config_groups": {"group_0": group}}  # fmt: skip


INT4 = {"fmt": "pack-quantized", "type": "int"}
NVFP4 = {"fmt": "nvfp4-pack-quantized", "strategy": "tensor_group", "group_size": 16}
FLOAT8 = {"fmt": "float-quantized", "num_bits": 8, "strategy": "block", "group_size": None,
          "block_structure": [128, 128]}  # fmt: skip


def modelopt(exclude, **changed):
    body = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": exclude}
    return {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": body | changed}


def hits(table):
    return {entry: count for entry, _, count in table.entries()}


def test_no_claim_quantises_nothing():
    table = resolve(None)
    assert table.scheme("model.layers.0.mlp.up_proj") is None
    assert table.entries() == []


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (FP8, FP8_BLOCK), (GPT_OSS, MXFP4_INTERLEAVED), (compressed(), MXFP4_PACK), (compressed(**NVFP4), NVFP4_PACK),
        (compressed(**INT4), INT4_PACK), (compressed(**FLOAT8), FP8_BLOCK_WEIGHT_SCALE),
        (modelopt(["lm_head"]), NVFP4_MODELOPT),
    ],
)  # fmt: skip
def test_each_method_gives_its_format_and_leaves_nothing_unread(claim, expected):
    table = resolve(claim)
    assert table.scheme("model.layers.4.mlp.experts.0.up_proj") == expected
    assert table.unread == []


@pytest.mark.parametrize("role", ["embed", "norm", "router", "conv", "scalar", "bias"])
def test_only_linear_modules_get_a_scheme_but_rules_still_count(role):
    table = resolve(FP8 | {"modules_to_not_convert": ["lm_head"]})
    assert table.scheme("lm_head", role) is None
    assert table.scheme("model.embed_tokens", role) is None
    assert hits(table)["lm_head"] == 1


def test_the_trap_ignore_list_says_nothing_about_the_latent_projections():
    # A published list does not name modules that the files hold in bf16: the table must say what the config claims.
    ignore = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
              "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"]  # fmt: skip
    table = resolve(compressed(ignore=ignore, scale_dtype="torch.uint8", zp_dtype=None))
    root = "language_model.model.layers.1."
    assert table.scheme(root + "block_sparse_moe.experts.0.w1") == MXFP4_PACK
    assert table.scheme(root + "block_sparse_moe.routed_expert_down_proj") == MXFP4_PACK
    assert table.scheme(root + "self_attn.q_proj") is None
    assert table.scheme(root + "block_sparse_moe.shared_experts.up_proj") is None
    assert table.scheme(root + "mlp.gate_proj") is None
    assert hits(table) == {
        ignore[0]: 1, ignore[1]: 1, ignore[2]: 1, ignore[3]: 0, ignore[4]: 0, ignore[5]: 0, "Linear": 5,
    }  # fmt: skip


def test_a_module_counts_once_however_often_it_is_asked_for():
    table = resolve(compressed(ignore=["re:.*attn.*"]))
    for _ in range(3):
        table.scheme("model.layers.0.self_attn.o_proj")
        table.scheme("model.layers.0.self_attn.o_proj", "norm")
    assert hits(table) == {"re:.*attn.*": 1, "Linear": 1}


@pytest.mark.parametrize(
    ("entry", "module", "hit"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("gate", "model.layers.3.mlp.up_gate", False),
        ("self_attn", "model.layers.3.self_attn.q_proj", False),
        ("model.layers.*.self_attn", "model.layers.11.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.11.self_attn_norm", False),
        ("layers.*.mlp.gate", "model.layers.11.mlp.gate", True),
        (r"model\.layers\.(1|2)\.mlp", "model.layers.2.mlp.up_proj", True),
        (r"model\.layers\.(1|2)\.mlp", "model.layers.12.mlp.up_proj", False),
        ("re:.*self_attn", "model.layers.3.self_attn.q_proj", True),
        ("lm_head", "lm_head", True),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers", "unconverted"])
def test_fp8_lists_match_whole_segments_from_either_end(key, entry, module, hit):
    table = resolve(FP8 | {key: [entry]})
    assert table.scheme(module) == (None if hit else FP8_BLOCK)
    assert table.entries()[0] == (entry, key, int(hit))


@pytest.mark.parametrize(
    ("entry", "module", "hit"),
    [
        ("model.layers.0.mlp", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("up_proj", "model.layers.0.mlp.up_proj", False),
        ("re:.*mlp.*", "model.layers.0.mlp.up_proj", True),
        ("re:mlp", "model.layers.0.mlp.up_proj", False),
        ("re:model.layers.0", "model.layers.0.mlp.up_proj", True),
        ("model.layers.*.up_proj", "model.layers.0.mlp.up_proj", True),
        ("layers.*.up_proj", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_compressed_tensors_entries_match_as_the_library_does(entry, module, hit):
    assert resolve(compressed(ignore=[entry])).scheme(module) == (None if hit else MXFP4_PACK)


@pytest.mark.parametrize(
    ("entry", "module", "hit"),
    [
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", True),  # a glob is a glob
        ("model.layers.10.self_attn*", "model.layers.10.self_attn.q_proj", True),
        ("layers.10.self_attn*", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False),
        ("*.gate", "model.layers.1.mlp.gate", True),
        ("*.gate", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.[12].mlp.gate?", "model.layers.2.mlp.gate2", True),
        ("model.layers.[!12].mlp.gate?", "model.layers.2.mlp.gate2", False),
        ("lm_head", "lm_head", True),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_modelopt_entries_are_globs_on_full_names(nested, entry, module, hit):
    claim = modelopt([entry])
    if not nested:
        claim = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [entry], "producer": {"name": "x"}}
    table = resolve(claim)
    assert table.scheme(module) == (None if hit else NVFP4_MODELOPT)
    assert table.unread == []


def test_modelopt_mixed_precision_quantises_the_named_modules_only():
    layers = {"model.layers.1.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    table = resolve(modelopt([], quant_algo="MIXED_PRECISION", quantized_layers=layers))
    assert table.scheme("model.layers.1.ffn.experts.7.w1") == NVFP4_MODELOPT
    assert table.scheme("model.layers.1.ffn.shared_experts.w1") is None
    assert table.scheme("model.layers.11.ffn.experts.7.w1") is None
    layers["model.layers.2.ffn"] = {"quant_algo": "FP8"}
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.ffn\.quant_algo is 'FP8'.*'NVFP4'"):
        resolve(modelopt([], quant_algo="MIXED_PRECISION", quantized_layers=layers))


def test_modelopt_claim_with_groups_as_config_json_has_it():
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"targets": ["Linear"], "input_activations": args, "weights": args}
    claim = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme":
             {"num_bits": 8}, "config_groups": {"group_0": group}, "producer": {}}  # fmt: skip
    table = resolve(claim)
    assert table.unread == []
    assert table.facts == {"kv_cache_scheme": {"num_bits": 8}}


def test_the_most_specific_target_decides():
    claim = compressed(ignore=[])
    groups = claim["config_groups"]
    groups["group_1"] = {"targets": ["re:.*down_proj"], "format": "pack-quantized", "weights": weights(type="int")}
    groups["group_2"] = {"targets": ["model.layers.2.mlp.down_proj"], "format": "nvfp4-pack-quantized",
                         "weights": weights(strategy="tensor_group", group_size=16)}  # fmt: skip
    table = resolve(claim)
    assert table.scheme("model.layers.0.mlp.up_proj") == MXFP4_PACK
    assert table.scheme("model.layers.0.mlp.down_proj") == INT4_PACK
    assert table.scheme("model.layers.2.mlp.down_proj") == NVFP4_PACK


def test_roots_that_the_author_left_out():
    claim = compressed(ignore=["lm_head", "re:model.layers.0"])
    assert resolve(claim).scheme("language_model.lm_head") == MXFP4_PACK
    table = resolve(claim, roots=("language_model.",))
    assert table.scheme("language_model.lm_head") is None
    assert table.scheme("language_model.model.layers.0.mlp.up_proj") is None


def test_fp8_layout_and_block_size():
    assert resolve(FP8, fp8_layout="scale").scheme("a.b") == FP8_BLOCK_E8M0
    small = resolve(FP8 | {"weight_block_size": [32, 32]}).scheme("a.b")
    assert (small.block, small.layout, small.name) == ((32, 32), "scale_inv", "fp8_block[32,32]")


def test_unread_keys_are_named_with_their_path():
    claim = compressed()
    claim["store_dtype"] = "mxfp4"
    claim["config_groups"]["group_0"]["weights"]["rounding"] = "odd"
    assert resolve(claim).unread == [
        "quantization_config.store_dtype", "quantization_config.config_groups.group_0.weights.rounding",
    ]  # fmt: skip
    assert resolve(FP8 | {"weight_per_tensor": False}, "text_config.quantization_config").unread == [
        "text_config.quantization_config.weight_per_tensor"
    ]


@pytest.mark.parametrize(
    ("claim", "key", "value"),
    [
        ({"quant_method": "awq"}, "quant_method", "'awq'"),
        ({}, "quant_method", "None"),
        (FP8 | {"fmt": "e5m2"}, "fmt", "'e5m2'"),
        (FP8 | {"weight_block_size": None}, "weight_block_size", "None"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size", "[128]"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme", "'static'"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype", "'fp4'"),
        (compressed("int-quantized"), "format", "'int-quantized'"),
        (compressed(symmetric=False), "symmetric", "False"),
        (compressed(symmetric=1), "symmetric", "1"),
        (compressed(group_size=64), "group_size", "64"),
        (compressed(num_bits=6), "num_bits", "6"),
        (compressed(**INT4, actorder="group"), "actorder", "'group'"),
        (compressed(**INT4, num_bits=8), "num_bits", "8"),
        (compressed(**INT4, group_size=-1), "group_size", "-1"),
        (compressed(**(FLOAT8 | {"strategy": "channel", "block_structure": None})), "strategy", "'channel'"),
        (modelopt([], quant_algo="FP8"), "quant_algo", "'FP8'"),
        (modelopt([], group_size=32), "group_size", "32"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(claim, key, value):
    with pytest.raises(ConfigError, match=rf"\.{key} is {re.escape(value)}.*supported: \S"):
        resolve(claim)


@pytest.mark.parametrize("bad", ["re:(", "re:*", r"mlp(\d", "a{2"])
def test_a_broken_pattern_is_refused(bad):
    if bad == "a{2":  # a lone brace is legal and literal
        resolve(FP8 | {"ignored_layers": [bad]})
        return
    with pytest.raises(ConfigError, match="ignored_layers entry"):
        resolve(FP8 | {"ignored_layers": [bad]})


def test_where_the_claim_stands():
    assert find_quant_config({}) is None
    assert find_quant_config({"quantization_config": None, "text_config": {}}) is None
    assert find_quant_config({"compression_config": FP8}) == ("compression_config", FP8)
    assert find_quant_config({"text_config": {"quantization_config": FP8}}) == ("text_config.quantization_config", FP8)
    same = {"quantization_config": FP8, "text_config": {"quantization_config": copy.deepcopy(FP8)}}
    assert find_quant_config(same) == ("quantization_config", FP8)
    with pytest.raises(ConfigError, match="differ"):
        find_quant_config({"quantization_config": FP8, "text_config": {"quantization_config": GPT_OSS}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CLAIMS = [FP8, GPT_OSS, compressed(), compressed(**INT4), modelopt(["a*"])]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CLAIMS), st.data())
def test_damaged_claims_are_refused_or_resolved_never_a_traceback(claim, data):
    damaged = copy.deepcopy(claim)
    spot = damaged
    while True:
        key = data.draw(st.sampled_from(sorted(spot)))
        if not isinstance(spot[key], dict) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = data.draw(JSON)
    message = ""
    try:
        resolve(damaged).scheme("model.layers.0.mlp.up_proj")
    except UserError as error:
        message = str(error)
    assert not message or message.startswith("quantization_config") or " entry " in message
