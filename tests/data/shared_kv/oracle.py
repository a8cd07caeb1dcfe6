"""A plain forward of Lean: one sequence, float32, written from the config alone."""

import math

import torch


def forward(reader, config, tokens, emit):
    h_TD = reader.tensor("model.embed_tokens.weight")[torch.tensor(tokens)]
    emit("embed", h_TD)
    kinds, kept = config["layer_kinds"], {}
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for i, kind in enumerate(kinds):
        at = f"model.layers.{i}."
        x_TD = rms(h_TD, reader.tensor(at + "input_layernorm.weight"), config)
        if i < own:
            kept[kind] = [x_TD @ reader.tensor(f"{at}self_attn.{n}_proj.weight").T for n in "kv"]
        mixed_TD = attend(x_TD @ reader.tensor(at + "self_attn.q_proj.weight").T, *kept[kind], kind, config)
        mixed_TD = mixed_TD @ reader.tensor(at + "self_attn.o_proj.weight").T
        emit(f"layers.{i}.mixer", mixed_TD)
        h_TD = h_TD + mixed_TD
        x_TD = rms(h_TD, reader.tensor(at + "post_attention_layernorm.weight"), config)
        gate, up, down = (reader.tensor(f"{at}mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        out_TD = (torch.nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
        emit(f"layers.{i}.channel", out_TD)
        h_TD = h_TD + out_TD
        emit(f"layers.{i}", h_TD)
    h_TD = rms(h_TD, reader.tensor("model.norm.weight"), config)
    emit("final_norm", h_TD)
    return h_TD @ reader.tensor("lm_head.weight").T


def rms(x, weight, config):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def turn(x_TD, theta):
    size = x_TD.shape[-1]
    rate = torch.tensor([theta ** (-2 * p / size) for p in range(size // 2)], dtype=torch.float64)
    angle = torch.outer(torch.arange(len(x_TD), dtype=torch.float64), rate)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x_TD.split(size // 2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(q, k, v, kind, config):
    size, heads, shared = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    t = torch.arange(len(q))
    hidden = t[None, :] > t[:, None]
    if kind == "window":
        hidden |= t[None, :] <= t[:, None] - config["window"]
    outs = []
    for head in range(heads):
        mine, its = slice(head * size, (head + 1) * size), head * shared // heads
        its = slice(its * size, (its + 1) * size)
        score = turn(q[:, mine], config["rope_theta"]) @ turn(k[:, its], config["rope_theta"]).T / math.sqrt(size)
        outs.append(torch.softmax(score.masked_fill(hidden, -math.inf), -1) @ v[:, its])
    return torch.cat(outs, 1)
