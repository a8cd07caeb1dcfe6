"""A tiny Kimi K3 or K3.1 checkpoint written tensor by tensor from the published table, for tests of its oracle.

It shares nothing with the package's recipe or twin, so that a name or shape wrong in one of them shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import dayzero

ORACLES = Path(dayzero.__file__).parent / "oracles"
VOCAB, D, HEADS, SIZE, LATENT, INNER, EXPERTS = 97, 48, 3, 8, 32, 64, 7
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 5,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": 40, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2, "rms_norm_eps": 1e-5, "num_experts": EXPERTS, "num_experts_per_token": 3,
    "num_shared_experts": 2, "moe_intermediate_size": INNER, "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "mla_use_nope": True, "mla_use_output_gate": True,
    "linear_attn_config": {
        "num_heads": HEADS, "head_dim": SIZE, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        "gate_lower_bound": -5.0, "full_attn_layers": [2, 4, 5], "kda_layers": [1, 3],
    },
}  # fmt: skip
VISION = {
    "patch_size": 2, "vt_hidden_size": 16, "vt_intermediate_size": 20, "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2, "qkv_hidden_size": 24, "merge_kernel_size": [2, 2], "projector_ln_eps": 1e-5,
}  # fmt: skip
PLACEHOLDER = 90
INDEX = {"dsa_layers": [2, 4, 5], "num_heads": 4, "head_dim": 8, "top_k": 5}


def config(index: bool = False, top_k: int = 5) -> dict[str, Any]:
    text = TEXT | ({"dsa_config": INDEX | {"top_k": top_k}} if index else {})
    return {"text_config": text, "vision_config": VISION, "media_placeholder_token_id": PLACEHOLDER}


def tensors(index: bool = False, seed: int = 3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def put(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        value = torch.randn(*shape, generator=draw)
        value = 1 + 0.2 * value if "norm" in name and name.endswith("weight") else value * shape[-1] ** -0.5
        made[name] = value.to(dtype)

    root = "language_model."
    put(f"{root}model.embed_tokens.weight", VOCAB, D)
    put(f"{root}lm_head.weight", VOCAB, D)
    put(f"{root}model.norm.weight", D)
    put(f"{root}model.output_attn_res_norm.weight", D)
    put(f"{root}model.output_attn_res_proj.weight", 1, D)
    for number in range(TEXT["num_hidden_layers"]):
        _layer(put, made, draw, f"{root}model.layers.{number}.", number, index)
    _vision(put)
    return made


def _layer(put: Any, made: dict[str, Tensor], draw: torch.Generator, at: str, number: int, index: bool) -> None:
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        put(f"{at}{name}.weight", D)
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        put(f"{at}{name}.weight", 1, D)
    attn, wide = f"{at}self_attn.", HEADS * SIZE
    if number + 1 in TEXT["linear_attn_config"]["full_attn_layers"]:
        shapes = {"q_a_proj": (24, D), "q_a_layernorm": (24,), "q_b_proj": (HEADS * 12, 24),
                  "kv_a_proj_with_mqa": (20, D), "kv_a_layernorm": (16,), "kv_b_proj": (HEADS * 14, 16),
                  "g_proj": (HEADS * 6, D), "o_proj": (D, HEADS * 6)}  # fmt: skip
        if index:
            shapes |= {"indexer.wq_b": (32, 24), "indexer.wk": (8, D), "indexer.weights_proj": (4, D),
                       "indexer.k_norm": (8,)}  # fmt: skip
    else:
        shapes = {f"{n}_proj": (wide, D) for n in "qkvg"}
        shapes |= {"f_a_proj": (SIZE, D), "f_b_proj": (wide, SIZE), "b_proj": (HEADS, D), "o_proj": (D, wide)}
        for n in "qkv":
            put(f"{attn}{n}_conv1d.weight", wide, 1, 4, dtype=torch.float32)
        put(f"{attn}dt_bias", wide, dtype=torch.float32)
        put(f"{attn}o_norm.weight", SIZE, dtype=torch.float32)
        made[f"{attn}A_log"] = torch.cat((torch.randn(HEADS, generator=draw), torch.zeros(SIZE - HEADS)))
    for name, shape in shapes.items():
        put(f"{attn}{name}.weight", *shape)
    if number < TEXT["first_k_dense_replace"]:
        put(f"{at}mlp.gate_proj.weight", 40, D)
        put(f"{at}mlp.up_proj.weight", 40, D)
        put(f"{at}mlp.down_proj.weight", D, 40)
        return
    moe = f"{at}block_sparse_moe."
    put(f"{moe}gate.weight", EXPERTS, D)
    put(f"{moe}gate.e_score_correction_bias", EXPERTS, dtype=torch.float32)
    put(f"{moe}routed_expert_down_proj.weight", LATENT, D)
    put(f"{moe}routed_expert_norm.weight", LATENT)
    put(f"{moe}routed_expert_up_proj.weight", D, LATENT)
    for name, shape in (("gate_proj", (40, D)), ("up_proj", (40, D)), ("down_proj", (D, 40))):
        put(f"{moe}shared_experts.{name}.weight", *shape)
    for e in range(EXPERTS):
        for name, rows, columns in (("w1", INNER, LATENT), ("w3", INNER, LATENT), ("w2", LATENT, INNER)):
            where = f"{moe}experts.{e}.{name}.weight"
            codes = torch.randint(0, 256, (rows, columns // 2), generator=draw)
            made[f"{where}_packed"] = codes.to(torch.uint8)
            made[f"{where}_scale"] = torch.randint(122, 126, (rows, columns // 32), generator=draw).to(torch.uint8)


def _vision(put: Any) -> None:
    put("vision_tower.patch_embed.proj.weight", 16, 3, 2, 2)
    put("vision_tower.patch_embed.pos_emb.weight", 4, 4, 16)
    for i in range(VISION["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{i}."
        shapes = {"norm0": (16,), "norm1": (16,), "wqkv": (72, 16), "wo": (16, 24), "mlp.fc0": (20, 16),
                  "mlp.fc1": (16, 20)}  # fmt: skip
        for name, shape in shapes.items():
            put(f"{at}{name}.weight", *shape)
    put("vision_tower.encoder.final_layernorm.weight", 16)
    put("mm_projector.proj.0.weight", 64, 64)
    put("mm_projector.proj.2.weight", D, 64)
    put("mm_projector.post_norm.weight", D)


def write(folder: Path, made: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
