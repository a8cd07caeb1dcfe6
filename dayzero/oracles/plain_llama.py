"""A plain forward of the Llama shape, written from the papers: a second opinion beside a library's code.

Worked example of the protocol for ``--oracle FILE.py``: ``forward(reader, config, tokens, emit) -> logits``. ``reader``
is the independent decoder; ``emit(site, value)`` hands over one output. One sequence, float32, everything explicit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "plain forward of the Llama shape"


def forward(reader: Any, config: dict[str, Any], tokens: list[int], emit: Callable[[str, Tensor], None]) -> Tensor:
    """Logits [T, vocab] float32 for T tokens; emits embed, each layer's mixer, channel and sum, and final_norm."""
    h_TD = reader.tensor("model.embed_tokens.weight")[torch.tensor(tokens)]
    emit("embed", h_TD)
    angles_TP = _angles(config, len(tokens))
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def weight(name: str, at: str = at) -> Tensor:
            return reader.tensor(f"{at}{name}.weight")

        x_TD = _rms(h_TD, weight("input_layernorm"), config)
        mixed_TD = _attend(x_TD, weight, config, angles_TP)
        emit(f"layers.{i}.mixer", mixed_TD)
        h_TD = h_TD + mixed_TD
        x_TD = _rms(h_TD, weight("post_attention_layernorm"), config)
        gate_TI = x_TD @ weight("mlp.gate_proj").T
        inner_TI = gate_TI * torch.sigmoid(gate_TI) * (x_TD @ weight("mlp.up_proj").T)
        out_TD = inner_TI @ weight("mlp.down_proj").T
        emit(f"layers.{i}.channel", out_TD)
        h_TD = h_TD + out_TD
        emit(f"layers.{i}", h_TD)
    h_TD = _rms(h_TD, reader.tensor("model.norm.weight"), config)
    emit("final_norm", h_TD)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings", False) else "lm_head.weight"
    return h_TD @ reader.tensor(head).T


def _rms(x_TD: Tensor, weight_D: Tensor, config: dict[str, Any]) -> Tensor:
    return x_TD / torch.sqrt((x_TD * x_TD).mean(-1, keepdim=True) + config.get("rms_norm_eps", 1e-6)) * weight_D


def _angles(config: dict[str, Any], num_tokens: int) -> Tensor:
    """Position times frequency, [T, head size / 2]; no context extension."""
    rope = config.get("rope_parameters") or {}
    kind = (config.get("rope_scaling") or rope).get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rope type {kind}: this plain forward knows only the default")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    size = _head_dim(config)
    rate_P = torch.tensor([theta ** (-2 * p / size) for p in range(size // 2)], dtype=torch.float64)
    return torch.outer(torch.arange(num_tokens, dtype=torch.float64), rate_P)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _turn(x_TD: Tensor, angles_TP: Tensor) -> Tensor:
    """Each pair (x[p], x[p + half]) turned by its angle."""
    half = x_TD.shape[-1] // 2
    cos, sin = angles_TP.cos().float(), angles_TP.sin().float()
    a, b = x_TD[:, :half], x_TD[:, half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)


def _attend(x_TD: Tensor, weight: Callable[[str], Tensor], config: dict[str, Any], angles_TP: Tensor) -> Tensor:
    size, num_heads = _head_dim(config), int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    q, k, v = (x_TD @ weight(f"self_attn.{n}_proj").T for n in "qkv")
    future = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
    outs = []
    for head in range(num_heads):
        kv = head * num_kv_heads // num_heads
        q_TD = _turn(q[:, head * size : (head + 1) * size], angles_TP)
        k_TD = _turn(k[:, kv * size : (kv + 1) * size], angles_TP)
        score_TT = (q_TD @ k_TD.T / math.sqrt(size)).masked_fill(future, -math.inf)
        outs.append(torch.softmax(score_TT, -1) @ v[:, kv * size : (kv + 1) * size])
    return torch.cat(outs, 1) @ weight("self_attn.o_proj").T
