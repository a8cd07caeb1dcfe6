"""Keys that would change the maths are refused by name; keys nobody knows stay unread; spellings must agree."""

from __future__ import annotations

import pytest
from model_configs import changed, config_of, opened

from dayzero.arch.raw import Raw
from dayzero.errors import ConfigError
from dayzero.models.registry import find

REFUSED = [
    ("qwen3_30b_a3b", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    ("qwen3_8b", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_8b", {"layer_types": ["sliding_attention"] * 36}, "layer_types"),
    ("qwen3_8b", {"layer_types": ["full_attention"] * 35}, "names 35 layers"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
    ("deepseek_v32", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 61}, "full_attention"),
    ("glm_5", {"indexer_rope_interleave": 0.5}, "indexer_rope_interleave"),
    ("glm_5", {"indexer_types": ["shared"] * 78}, "first layer"),
    ("glm_5", {"index_topk_pattern": "FS"}, "index_topk_pattern"),
    ("glm_5", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
    ("gpt_oss_20b", {"attention_bias": False}, "attention_bias"),
    ("gpt_oss_20b", {"initial_context_length": 8192}, "initial_context_length"),
    ("gpt_oss_20b", {"rope_scaling": None}, "rope_scaling"),
    ("gpt_oss_20b", {"experts_per_token": 8}, "experts_per_token"),
    ("kimi_linear_48b_a3b", {"mla_use_nope": False}, "mla_use_nope"),
    ("kimi_linear_48b_a3b", {"layer_types": ["linear_attention"] * 27}, "layer_types"),
    ("kimi_linear_48b_a3b", {"hidden_act": "relu"}, "hidden_act"),
    ("kimi_k3", {"hidden_act": "silu"}, "hidden_act"),
    ("kimi_k3", {"dsa_config": {"layers": [1], "num_heads": 8, "head_dim": 32, "top_k": 8}}, "layer 1"),
    ("qwen3_5_35b_a3b", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5_35b_a3b", {"mlp_only_layers": [3]}, "mlp_only_layers"),
    ("qwen3_5_35b_a3b", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
]


@pytest.mark.parametrize(("name", "keys", "said"), REFUSED)
def test_refused_by_name(name, keys, said):
    config = changed(name, lambda text: text.update(keys))
    recipe = find(config).recipe
    assert recipe is not None
    with pytest.raises(ConfigError, match=said):
        recipe.make_spec(Raw(config))


def test_layer_lists_of_kimi_count_from_one_and_name_every_layer():
    config = config_of("kimi_linear_48b_a3b")
    config["linear_attn_config"]["full_attn_layers"] = [0, 4, 8, 12, 16, 20, 24]
    with pytest.raises(ConfigError, match="counted from 1"):
        opened(config)


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k3_1"])
@pytest.mark.parametrize("given", [{}, {"gate_lower_bound": None}], ids=["absent", "null"])
def test_bounded_decay_without_its_bound_is_not_taken_for_the_unbounded_one(name, given):
    config = config_of(name)
    linear = config["text_config"]["linear_attn_config"]
    assert opened(config).spec.layers[0].mixer.lower == -5.0
    del linear["gate_lower_bound"]
    linear.update(given)
    with pytest.raises(ConfigError, match="gate_lower_bound"):
        opened(config)


@pytest.mark.parametrize("name", ["kimi_k3_1", "qwen3_5_35b_a3b", "deepseek_v3", "gpt_oss_20b", "qwen3_8b"])
def test_a_key_nobody_knows_stays_unread(name):
    config = changed(name, lambda text: text.update(attention_softcap=30.0))
    assert [key.rsplit(".", 1)[-1] for key in opened(config).raw.unread()] == ["attention_softcap"]


def test_bookkeeping_words_are_forgiven_in_model_configs_only():
    """``top_k`` is a sampling default that a library once wrote into configs; inside dsa_config it is not."""
    config = config_of("kimi_k3")
    assert config["text_config"]["top_k"] == 50 and opened(config).raw.unread() == []
    config["text_config"]["linear_attn_config"]["top_k"] = 8
    assert opened(config).raw.unread() == ["text_config.linear_attn_config.top_k"]


def test_dsa_config_accepts_declared_spellings_only():
    config = config_of("kimi_k3_1")
    dsa = config["text_config"]["dsa_config"]
    dsa["index_topk"] = dsa.pop("top_k")
    dsa["temperature"] = 0.5
    got = opened(config)
    assert got.raw.unread() == ["text_config.dsa_config.temperature"]
    assert got.spec.layers[3].mixer.index.top_k == 2048
    dsa["top_k_tokens"] = dsa.pop("index_topk")
    with pytest.raises(ConfigError, match="top_k"):
        opened(config)


def test_new_spellings_give_the_same_model():
    """transformers writes layer_types and flat linear keys where the release has linear_attn_config."""
    old = config_of("kimi_linear_48b_a3b")
    new = dict(old)
    lists = new.pop("linear_attn_config")
    full = set(lists["full_attn_layers"])
    new["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in range(1, 28)]
    new.update(linear_num_heads=32, linear_head_dim=128, linear_conv_kernel_dim=4)
    new["num_local_experts"], new["num_experts_per_tok"] = new.pop("num_experts"), new.pop("num_experts_per_token")
    got = opened(new)
    assert got.spec.layers == opened(old).spec.layers
    assert got.raw.unread() == []


def test_rope_parameters_give_the_same_model_as_rope_scaling():
    old = config_of("deepseek_v3")
    new = dict(old)
    scaling = dict(new.pop("rope_scaling"), rope_theta=new.pop("rope_theta"))
    scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = scaling
    assert opened(new).spec.layers == opened(old).spec.layers
    assert opened(new).raw.unread() == []


def test_yarn_temperature_goes_where_each_family_puts_it():
    latent = opened(config_of("deepseek_v3")).spec.layers[0].mixer
    assert latent.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert latent.rope.magnitude() == 1.0
    plain = opened(config_of("gpt_oss_20b")).spec.layers[0].mixer
    assert plain.softmax_scale == 64**-0.5
    assert plain.rope.magnitude() == pytest.approx(1.3465735902799727)
    assert plain.rope.scaling.truncate is False


def test_rope_styles_differ_inside_one_model():
    for name, inner in (("deepseek_v32", "half"), ("glm_5", "interleaved")):
        mixer = opened(config_of(name)).spec.layers[0].mixer
        assert (mixer.rope.style, mixer.index.rope.style, mixer.index.rope.dims) == ("interleaved", inner, 64)
    assert opened(config_of("kimi_k3_1")).spec.layers[3].mixer.index.rope is None


def test_index_sharing_by_schedule_list_and_pattern():
    full = [0, 1, 2, *range(6, 78, 4)]
    by_schedule = [layer.mixer.index.shared for layer in opened(config_of("glm_5_2")).spec.layers]
    assert [i for i, shared in enumerate(by_schedule) if not shared] == full
    listed = ["full" if i in full else "shared" for i in range(78)]
    for keys in ({"indexer_types": listed}, {"index_topk_pattern": "".join("FS"[i not in full] for i in range(78))}):
        got = opened(changed("glm_5", lambda text, keys=keys: text.update(keys)))
        assert [layer.mixer.index.shared for layer in got.spec.layers] == by_schedule
        assert got.raw.unread() == []


def test_windows_of_dense_qwen_start_where_the_config_says():
    config = changed("qwen3_8b", lambda text: text.update(use_sliding_window=True, sliding_window=4096))
    config["max_window_layers"] = 30
    windows = [layer.mixer.window for layer in opened(config).spec.layers]
    assert windows == [None] * 30 + [4096] * 6


def test_sparse_step_and_dense_exceptions_of_routed_qwen():
    config = changed("qwen3_30b_a3b", lambda text: text.update(decoder_sparse_step=2, mlp_only_layers=[3]))
    kinds = [layer.channel.kind for layer in opened(config).spec.layers[:8]]
    assert kinds == ["glu", "moe", "glu", "glu", "glu", "moe", "glu", "moe"]


def test_norm_offsets_of_qwen3_5():
    spec = opened(config_of("qwen3_5_35b_a3b")).spec
    assert spec.final_norm.offset and spec.layers[0].residual.norm.offset and spec.layers[3].mixer.qk_norm.offset
    assert not opened(config_of("qwen3_8b")).spec.final_norm.offset
