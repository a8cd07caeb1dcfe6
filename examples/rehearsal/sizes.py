"""The rehearsal model's sizes as a publisher's config.json would give them: Kimi K3.1's keys with small numbers."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

RANKS = 1792
VOCAB = RANKS + 256
BOS, EOS, PLACEHOLDER, PADDING = (RANKS + offset for offset in (0, 2, 21, 255))
LAYERS, FULL = 8, (4, 8)
CONTEXT = 8192 + 256  # what is trained on, and room for an answer

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax", "scale_dtype": "torch.uint8",
                "strategy": "group", "symmetric": True, "type": "float", "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip

TEXT: Config = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "attn_res_block_size": 3, "bos_token_id": BOS, "dtype": "bfloat16",
    "eos_token_id": EOS, "first_k_dense_replace": 1, "hidden_act": "situ", "hidden_size": 192,
    "initializer_range": 0.02, "intermediate_size": 512, "kv_lora_rank": 128, "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": list(FULL), "gate_lower_bound": -5.0, "head_dim": 64,
        "kda_layers": [n for n in range(1, LAYERS + 1) if n not in FULL], "num_heads": 3,
        "short_conv_kernel_size": 4, "use_full_rank_gate": True,
    },
    "max_position_embeddings": CONTEXT, "mla_use_nope": True, "mla_use_output_gate": True,
    "moe_intermediate_size": 64, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 4, "num_expert_group": 1, "num_experts": 16,
    "num_experts_per_token": 4, "num_hidden_layers": LAYERS, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0, "num_shared_experts": 2, "pad_token_id": PADDING, "q_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "quantization_config": QUANTIZATION, "rms_norm_eps": 1e-5,
    "routed_expert_hidden_size": 96, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 64, "vocab_size": VOCAB,
    "dsa_config": {"dsa_layers": list(FULL), "head_dim": 64, "num_heads": 4, "top_k": 256},
}  # fmt: skip

# A picture of 96 x 96 pixels has 12 x 12 patches, which is the table of positions as it stands, and takes 36 tokens.
VISION: Config = {
    "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "init_pos_emb_height": 12, "init_pos_emb_time": 4,
    "init_pos_emb_width": 12, "linear_bias": False, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "mlp_type": "mlp2", "mm_hidden_size": 96, "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False, "patch_size": 8, "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "qkv_hidden_size": 96,
    "text_hidden_size": 192, "vt_hidden_size": 96, "vt_intermediate_size": 192, "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 4,
}  # fmt: skip

CONFIG: Config = {
    "architectures": ["KimiK31ForConditionalGeneration"], "bos_token_id": BOS, "dtype": "bfloat16",
    "eos_token_id": EOS, "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>",
    "media_placeholder_token_id": PLACEHOLDER, "model_type": "kimi_k31", "pad_token_id": PADDING,
    "text_config": TEXT, "tie_word_embeddings": False, "vision_config": VISION,
}  # fmt: skip

# What remote-code processors call media_proc_cfg: the numbers by which an image becomes pixels.
PREPROCESSOR: Config = {
    "media_proc_cfg": {
        "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 65536, "merge_kernel_size": 2, "patch_limit_on_one_side": 512, "patch_size": 8,
    }
}  # fmt: skip

_SMALL_TEXT: Config = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "attn_res_block_size": 2,
    "kv_lora_rank": 32, "q_lora_rank": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
    "linear_attn_config": TEXT["linear_attn_config"]
    | {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 32},
    "dsa_config": {"dsa_layers": [2, 4], "head_dim": 16, "num_heads": 2, "top_k": 32},
}  # fmt: skip
_SMALL_VISION: Config = {
    "mm_hidden_size": 48, "qkv_hidden_size": 48, "text_hidden_size": 96, "vt_hidden_size": 48,
    "vt_intermediate_size": 96, "vt_num_hidden_layers": 2,
}  # fmt: skip
# The same structure for a CPU: what tests train for a few steps, and where a change of recipe is tried first.
SMALL: Config = CONFIG | {"text_config": TEXT | _SMALL_TEXT, "vision_config": VISION | _SMALL_VISION}
