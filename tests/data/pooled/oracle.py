"""A plain forward of Pond: one sequence, float32, lists made query by query from the config alone."""

import math

import torch


def forward(reader, config, tokens, emit):
    h_TD = reader.tensor("model.embed_tokens.weight")[torch.tensor(tokens)]
    emit("embed", h_TD)
    lists = None
    for i, kind in enumerate(config["layer_index"]):
        at = f"model.layers.{i}."

        def weight(name, at=at):
            return reader.tensor(f"{at}{name}.weight")

        x_TD = rms(h_TD, weight("input_layernorm"), config)
        query_TR = rms(x_TD @ weight("self_attn.q_a_proj").T, weight("self_attn.q_a_norm"), config)
        if kind != "shared":
            scores = indexed(x_TD, query_TR, weight, reader, at, config, kind)
            lists = [listed(t, kind, config, scores) for t in range(len(tokens))]
        emit(f"layers.{i}.index", padded(lists))
        mixed_TD = attend(x_TD, query_TR, weight, lists, config)
        emit(f"layers.{i}.mixer", mixed_TD)
        h_TD = h_TD + mixed_TD
        x_TD = rms(h_TD, weight("post_attention_layernorm"), config)
        gate, up, down = (weight(f"mlp.{n}_proj") for n in ("gate", "up", "down"))
        out_TD = (torch.nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
        emit(f"layers.{i}.channel", out_TD)
        h_TD = h_TD + out_TD
        emit(f"layers.{i}", h_TD)
    h_TD = rms(h_TD, reader.tensor("model.norm.weight"), config)
    emit("final_norm", h_TD)
    return h_TD @ reader.tensor("lm_head.weight").T


def rms(x, weight, config):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def padded(lists):
    widest = max(len(rows) for rows in lists)
    return torch.tensor([sorted(rows) + [-1] * (widest - len(rows)) for rows in lists])


def indexed(x, query, weight, reader, at, config, kind):
    """Scores [T, T] of tokens, or of gated pools [T, pools]; None where positions decide alone."""
    if kind in ("near", "near_and_first"):
        return None
    size, heads = config["index_head_dim"], config["index_heads"]
    raw = x @ weight("self_attn.indexer.wk").T
    keys = torch.nn.functional.layer_norm(
        raw, (size,), weight("self_attn.indexer.k_norm"), reader.tensor(f"{at}self_attn.indexer.k_norm.bias"), 1e-6
    )
    if kind == "gated_pools":
        keys = gated(keys, x @ weight("self_attn.indexer.gate").T, reader.tensor(f"{at}self_attn.indexer.place_bias"))
    q = (query @ weight("self_attn.indexer.wq").T).reshape(len(x), heads, size).double()
    w = (x @ weight("self_attn.indexer.weights").T).double()
    total = torch.zeros(len(x), len(keys), dtype=torch.float64)
    for h in range(heads):
        total += w[:, h, None] * torch.clamp(q[:, h] @ keys.double().T, min=0)
    return total / math.sqrt(heads * size)


def gated(keys, gates, bias):
    out, size = [], len(bias)
    for p in range(len(keys) // size):
        rows = slice(p * size, (p + 1) * size)
        share = torch.softmax((gates[rows] + bias).double(), 0)
        out.append((share * keys[rows].double()).sum(0))
    return torch.stack(out) if out else keys[:0].double()


def best(scores, among, count):
    return sorted(among, key=lambda row: (-float(scores[row]), row))[:count]


def listed(t, kind, config, scores):
    """Rows that the query at position t attends to."""
    top, size = config["index_topk"], config["index_pool"]
    near = set(range(max(0, t - config["index_window"] + 1), t + 1))
    first = set(range(min(t + 1, config["index_first"])))
    if kind == "near":
        return near
    if kind == "near_and_first":
        return near | first
    if kind == "forced":
        forced = near | first
        return forced | set(best(scores[t], set(range(t + 1)) - forced, top - len(forced)))
    if kind == "gated_pools":
        whole = (t + 1) // size
        pools = best(scores[t], range(whole), top // size)
        return {row for p in pools for row in range(p * size, (p + 1) * size)} | set(range(whole * size, t + 1))
    own = t // size
    score = [float(scores[t, p * size : min((p + 1) * size, t + 1)].max()) for p in range(own)]
    pools = [own, *best(score, range(own), top // size - 1)]
    return {row for p in pools for row in range(p * size, min((p + 1) * size, t + 1))}


def attend(x, query, weight, lists, config):
    heads, width, shared, size = (config[n] for n in ("num_attention_heads", "head_dim", "shared_dim", "v_head_dim"))
    rank, own = config["kv_lora_rank"], width - shared
    q = (query @ weight("self_attn.q_b_proj").T).reshape(len(x), heads, width)
    both = x @ weight("self_attn.kv_a_proj").T
    kv = rms(both[:, :rank], weight("self_attn.kv_a_norm"), config) @ weight("self_attn.kv_b_proj").T
    kv = kv.reshape(len(x), heads, own + size)
    outs = []
    for t, rows in enumerate(lists):
        rows = sorted(rows)
        for h in range(heads):
            k = torch.cat((kv[rows, h, :own], both[rows, rank:]), 1)
            share = torch.softmax(k @ q[t, h] / math.sqrt(width), 0)
            outs.append(share @ kv[rows, h, own:])
    return torch.stack(outs).reshape(len(x), heads * size) @ weight("self_attn.o_proj").T
