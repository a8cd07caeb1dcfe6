"""Values that no model can have are refused in one sentence that names them, by every command that reads a config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_configs import changed, config_of, opened

from dayzero.arch.mixers import MLA
from dayzero.arch.raw import Raw
from dayzero.arch.sound import unsound
from dayzero.errors import ConfigError
from dayzero.models.recipe import read_spec
from dayzero.models.registry import find
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
BANDS = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
IMPOSSIBLE = [
    ("smollm2_135m", {"rms_norm_eps": 0}, "eps of the final norm is 0"),
    ("smollm2_135m", {"rms_norm_eps": -1e-5}, "eps of the final norm"),
    ("smollm2_135m", {"rms_norm_eps": 7}, "eps of the final norm is 7"),
    ("smollm2_135m", {"num_key_value_heads": 4}, "9 attention heads cannot share 4 KV heads"),
    ("smollm2_135m", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ("smollm2_135m", {"head_dim": 31}, "31 dims of a head turn"),
    ("smollm2_135m", {"rope_theta": 0}, "rope_theta is 0"),
    ("smollm2_135m", {"rope_theta": -10000.0}, "rope_theta is -10000"),
    ("smollm2_135m", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ("smollm2_135m", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ("smollm2_135m", {"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor is -2"),
    ("smollm2_135m", {"rope_scaling": {**BANDS, "low_freq_factor": 4.0}}, "bands are 4 and 4"),
    ("deepseek_v3", {"num_experts_per_tok": 129}, "chooses 129 experts of 128"),
    ("deepseek_v3", {"n_group": 7}, "256 experts do not divide into 7 groups"),
    ("deepseek_v3", {"n_group": 256, "topk_group": 8}, "leave no two in a group"),
    ("deepseek_v3", {"topk_group": 9}, "9 of 8 expert groups"),
    ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ("deepseek_v3", {"routed_scaling_factor": -2.5}, "routed_scaling_factor"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 0}}, "factor is 0"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "ramp goes from 32 to 1"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "beta_slow": 0}}, "ramp goes from 0"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 0.0}}, "attention factor is 0"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position"),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, "63 dims of a head turn"),
    ("gpt_oss_20b", {"swiglu_limit": 0}, "swiglu_limit"),
    ("gpt_oss_20b", {"num_local_experts": 3}, "chooses 4 experts of 3"),
    ("kimi_linear_48b_a3b", {"num_experts_per_token": 257}, "chooses 257 experts of 256"),
    ("kimi_k3", {"activation_situ_beta": -4.0}, "the activation's beta is -4"),
    ("qwen3_5_35b_a3b", {"linear_num_value_heads": 33}, "33 value heads cannot share 16 key heads"),
]


@pytest.mark.parametrize(("name", "keys", "said"), IMPOSSIBLE)
def test_a_value_that_no_model_can_have(name: str, keys: dict[str, Any], said: str) -> None:
    config = changed(name, lambda text: text.update(keys))
    recipe = find(config).recipe
    assert recipe is not None
    with pytest.raises(ConfigError, match=said) as caught:
        read_spec(recipe, Raw(config))
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("rope", "said"),
    [({"mrope_section": [11, 11, 11]}, "add up to the 32 pairs"), ({"partial_rotary_factor": 1.5}, "384 dims turn"),
     ({"partial_rotary_factor": 0.0}, "0 dims of a head turn")],
)  # fmt: skip
def test_parts_of_a_head_and_their_sections(rope: dict[str, Any], said: str) -> None:
    config = changed("qwen3_5_35b_a3b", lambda text: text["rope_parameters"].update(rope))
    recipe = find(config).recipe
    assert recipe is not None
    with pytest.raises(ConfigError, match=said):
        read_spec(recipe, Raw(config))


def test_a_bounded_decay_has_a_bound_below_zero() -> None:
    config = changed("kimi_k3", lambda text: text["linear_attn_config"].update(gate_lower_bound=5.0))
    recipe = find(config).recipe
    assert recipe is not None
    with pytest.raises(ConfigError, match="gate_lower_bound"):
        read_spec(recipe, Raw(config))


def test_a_shared_index_needs_one_before_it() -> None:
    spec = opened(config_of("glm_5")).spec
    first = spec.layers[0]
    assert isinstance(first.mixer, MLA) and first.mixer.index is not None
    mixer = replace(first.mixer, index=replace(first.mixer.index, shared=True))
    broken = replace(spec, layers=(replace(first, mixer=mixer), *spec.layers[1:]))
    assert unsound(spec) == [] and "none before it owns one" in unsound(broken)[0]


def test_inspect_and_plan_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of("smollm2_135m"), "num_key_value_heads": 4}))
    report = inspect_source(str(tmp_path / "config.json"))
    assert [f.kind for f in report.findings if f.verdict == "fail"] == ["config.value"]
    with pytest.raises(ConfigError) as caught:
        plan_source(str(tmp_path / "config.json"), PlanOptions("h100"))
    assert str(caught.value) in [f.claim for f in report.findings]


DROPPED = [
    ("smollm2_135m", {"partial_rotary_factor": 0.5}, "turns whole heads"),
    ("qwen3_8b", {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}, "one kind of position"),
    ("deepseek_v3", {"partial_rotary_factor": 0.25}, "turns whole heads"),
    ("smollm2_135m", {"rope_interleaved": True}, "rope_interleaved"),
    ("smollm2_135m", {"head_dim": 0}, "head_dim"),
    ("kimi_k3_1", {"dsa_config": {"layers": [], "num_heads": 8, "head_dim": 32, "top_k": 8}}, "each once"),
    ("kimi_k3_1", {"dsa_config": {"layers": [4, 4], "num_heads": 8, "head_dim": 32, "top_k": 8}}, "each once"),
    ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is null"),
]


@pytest.mark.parametrize(("name", "keys", "said"), DROPPED)
def test_a_key_that_the_family_has_no_use_for_is_refused(name: str, keys: dict[str, Any], said: str) -> None:
    """Each was read once and then dropped, so that the model computed something else than its config says."""
    config = changed(name, lambda text: text.update(keys))
    recipe = find(config).recipe
    assert recipe is not None
    with pytest.raises(ConfigError, match=said):
        read_spec(recipe, Raw(config))


def test_every_scaling_reaches_the_rope() -> None:
    """A family that usually comes with one kind of scaling takes the others as they are, or refuses them."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = changed("gpt_oss_20b", lambda text: text.update(rope_scaling=scaling))
    del config["initial_context_length"]
    plain, scaled = opened(changed("gpt_oss_20b", lambda _: None)), opened(config)
    frequencies = [got.spec.layers[0].mixer.rope.inv_freq()[0] for got in (plain, scaled)]
    assert frequencies == [1.0, 0.25]


def test_what_was_read_is_not_called_ignored() -> None:
    """The ledger once said of a dtype of bfloat16 that it was ignored as null."""
    for name in ("smollm2_135m", "kimi_k3", "gpt_oss_20b", "qwen3_5_35b_a3b"):
        raw = opened(config_of(name)).raw
        raw.unread()
        both = [
            key for key in raw.ledger.ignored if key in raw.ledger.read and _value(config_of(name), key) is not None
        ]
        assert both == []


def _value(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
