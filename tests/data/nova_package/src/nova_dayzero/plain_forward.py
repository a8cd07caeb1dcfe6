"""A plain forward of Nova, for align: one sequence, float32. Run by path in its own process; imports no dayzero."""

import math

import torch

NAME = "plain forward of the Nova package"


def forward(reader, config, tokens, emit):
    h_TD = reader.tensor("model.embed_tokens.weight")[torch.tensor(tokens)]
    emit("embed", h_TD)
    for i in range(config["num_hidden_layers"]):

        def weight(name, at=f"model.layers.{i}."):
            return reader.tensor(f"{at}{name}.weight")

        x_TD = rms(h_TD, weight("input_layernorm"), config)
        mixed_TD = attend(x_TD, weight, config) if i % 2 else average(x_TD, weight, config)
        emit(f"layers.{i}.mixer", mixed_TD)
        h_TD = h_TD + mixed_TD
        x_TD = rms(h_TD, weight("post_attention_layernorm"), config)
        out_TD = torch.relu(x_TD @ weight("mlp.up").T) ** 2 @ weight("mlp.down").T
        emit(f"layers.{i}.channel", out_TD)
        h_TD = h_TD + out_TD
        emit(f"layers.{i}", h_TD)
    h_TD = rms(h_TD, reader.tensor("model.norm.weight"), config)
    emit("final_norm", h_TD)
    return h_TD @ reader.tensor("lm_head.weight").T


def rms(x, weight, config):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def average(x_TD, weight, config):
    v_TW = x_TD @ weight("mean.v").T
    at = torch.arange(len(x_TD))
    back = at[:, None] - at[None]
    seen_TT = ((back >= 0) & (back < config["mean_window"])).float()
    mean_TW = seen_TT @ v_TW / seen_TT.sum(-1, keepdim=True)
    return (torch.sigmoid(x_TD @ weight("mean.gate").T) * mean_TW) @ weight("mean.o").T


def turn(x_TK, theta):
    half = x_TK.shape[1] // 2
    rate = torch.tensor([theta ** (-p / half) for p in range(half)], dtype=torch.float64)
    angle = torch.outer(torch.arange(len(x_TK), dtype=torch.float64), rate)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x_TK[:, :half], x_TK[:, half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)


def attend(x_TD, weight, config):
    size, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (x_TD @ weight(f"self_attn.{n}_proj").T for n in "qkv")
    future = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
    outs = []
    for head in range(heads):
        one, kv = slice(head * size, (head + 1) * size), head * kv_heads // heads * size
        q_TK, k_TK = turn(q[:, one], config["rope_theta"]), turn(k[:, kv : kv + size], config["rope_theta"])
        score_TT = (q_TK @ k_TK.T / math.sqrt(size)).masked_fill(future, -math.inf)
        outs.append(torch.softmax(score_TT, -1) @ v[:, kv : kv + size])
    return torch.cat(outs, 1) @ weight("self_attn.o_proj").T
