"""Tiny checkpoints of every family, written by transformers, for comparing our forward with the library's.

Sizes are odd where a family allows it; top-k of indexes and windows lie far below the test's length, and indexes have
eight heads, because with few heads many scores are exactly 0 and ties sit at the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 512
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 24}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
INDEX = {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GATED_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "num_key_value_heads": 2, "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """config_class and model_class are names in transformers; rename maps names it writes to those publishers use."""

    config_class: str
    model_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rename: Callable[[str], str] = lambda name: name


def _kimi_names(name: str) -> str:
    return name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.")


FAMILIES: Mapping[str, Tiny] = {
    "llama": Tiny("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "attention_bias": True}),
    "llama_tied": Tiny(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **GROUPED, "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": Tiny("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "qwen3_moe": Tiny(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LATENT, "n_group": 2, "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": Tiny(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {
            **LATENT, **INDEX, "n_group": 2, "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm5": Tiny(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**LATENT, **INDEX, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "kimi_linear": Tiny(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": None, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 20, "num_experts": 8, "num_experts_per_token": 3,
            "moe_intermediate_size": 32, "num_shared_experts": 1, "num_hidden_layers": 5, "linear_num_heads": 4,
            "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "model_max_length": 256,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2,
        },
        _kimi_names,
    ),
    "gpt_oss": Tiny(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GROUPED, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3_5": Tiny("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GATED_DELTA),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            **GATED_DELTA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}  # fmt: skip


def perturb(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter, and every persistent bias buffer, values that test it: nothing stays at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    persistent = set(model.state_dict())
    tied: set[int] = set()
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)]
    with torch.no_grad():
        for name, value in named:
            if not value.is_floating_point() or value.data_ptr() in tied:
                continue
            tied.add(value.data_ptr())
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() >= 2 and min(value.shape[-2:]) > 1:
                value.copy_(noise * (1.0 if "embed" in name else value.shape[-1] ** -0.5))
            else:
                value.add_(0.1 * noise)


def write_tiny(family: str, folder: Path, seed: int = 0, *, settings: Mapping[str, Any] | None = None) -> Any:
    """Save a perturbed tiny model of ``family`` under the publisher's tensor names; returns transformers' model.
    settings: of its config, in place of the family's."""
    tiny = FAMILIES[family]
    config_class = getattr(transformers, tiny.config_class)
    wanted = {**COMMON, **tiny.settings, **(settings or {})}
    config = config_class(**wanted)
    for key, value in wanted.items():
        if key in ("rope_parameters", "layer_types"):
            continue
        assert getattr(config, key, value) == value, f"{tiny.config_class} did not take {key}"
    torch.manual_seed(seed)
    model_class = getattr(transformers, tiny.model_class)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    perturb(model, seed)
    model.save_pretrained(folder)
    shard = folder / "model.safetensors"
    tensors = {tiny.rename(name): value.clone() for name, value in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    return model
