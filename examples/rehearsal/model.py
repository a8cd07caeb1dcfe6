"""The rehearsal model as functions over a dict of tensors under the publisher's names, for training.

Tokens of all sequences of a batch stand one after another [N, D]; only attention knows how long a sequence is. So one
compiled graph of each function below serves every length. The functions follow the published formulas of Kimi K3.1;
what differs is only what gradients need: experts are one wide matrix whose columns of experts not chosen are zeroed.

Names are the release's without ``language_model.``; the matrices of all experts of a layer are stacked under
``block_sparse_moe.experts.w1`` [E, inner, latent], ``w3``, ``w2`` [E, latent, inner]. Norms, gates' sums, recurrence
and the residual stream are float32; matrices are used in the training dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import attention
import kda
import mxfp4
import torch
import torch.nn.functional as F
import vision
from sizes import Config
from torch import Tensor
from vision import norm

RANK_EPS = UNIT_EPS = 1e-6
# What the release keeps in float32, and what is computed with in float32 though it is kept in bfloat16.
IN_F32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
WIDE = ("norm.weight", "layernorm.weight", "norm0.weight", "norm1.weight", "k_norm.bias", "res_proj.weight",
        "pos_emb.weight", "gate.weight")  # fmt: skip

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass
class Batch:
    """ids, targets int64 [B, L]; weight float32 and kind uint8 [B, L], of the targets; rows int64 [B, M], sampled for
    the index. pixels uint8 [P, side, side, 3] and places int64 [P, tokens], flat positions in ids of their rows."""

    ids: Tensor
    targets: Tensor
    weight: Tensor
    kind: Tensor
    rows: Tensor
    pixels: Tensor | None = None
    places: Tensor | None = None


@dataclass
class Run:
    """How to compute. dtype: of matrices; compile: wraps each function. index_losses and loads grow in a forward."""

    dtype: torch.dtype = torch.float32
    sparse: bool = False
    compile: Callable[[Any], Any] = lambda f: f
    index_losses: list[Tensor] = field(default_factory=list)
    loads: dict[int, Tensor] = field(default_factory=dict)


# --- parameters ---------------------------------------------------------------------------------------------------


def shapes(config: Config) -> Shapes:
    text = config["text_config"]
    dim, vocab = text["hidden_size"], text["vocab_size"]
    out: Shapes = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim),
                   "model.norm.weight": (dim,), "model.output_attn_res_norm.weight": (dim,),
                   "model.output_attn_res_proj.weight": (1, dim)}  # fmt: skip
    for number in range(text["num_hidden_layers"]):
        own: Shapes = {f"{n}.weight": (dim,) for n in ("input_layernorm", "post_attention_layernorm",
                                                       "self_attention_res_norm", "mlp_res_norm")}  # fmt: skip
        own |= {f"{n}.weight": (1, dim) for n in ("self_attention_res_proj", "mlp_res_proj")}
        own |= _mixer_shapes(text, number + 1 in text["linear_attn_config"]["full_attn_layers"])
        own |= _channel_shapes(text, number < text["first_k_dense_replace"])
        out |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    return out | vision.shapes(config)


def _mixer_shapes(text: Config, full: bool) -> Shapes:
    dim, linear = text["hidden_size"], text["linear_attn_config"]
    if full:
        heads, q_rank, rank = text["num_attention_heads"], text["q_lora_rank"], text["kv_lora_rank"]
        own, shared, size = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        index = text["dsa_config"]
        out: Shapes = {
            "q_a_proj": (q_rank, dim), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (own + shared), q_rank),
            "kv_a_proj_with_mqa": (rank + shared, dim), "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (own + size), rank), "g_proj": (heads * size, dim), "o_proj": (dim, heads * size),
            "indexer.wq_b": (index["num_heads"] * index["head_dim"], q_rank), "indexer.wk": (index["head_dim"], dim),
            "indexer.weights_proj": (index["num_heads"], dim), "indexer.k_norm": (index["head_dim"],),
        }  # fmt: skip
        named = {f"self_attn.{name}.weight": shape for name, shape in out.items()}
        return named | {"self_attn.indexer.k_norm.bias": (index["head_dim"],)}
    heads, size = linear["num_heads"], linear["head_dim"]
    wide = heads * size
    out = {f"{n}_proj": (wide, dim) for n in "qkvg"} | {f"{n}_conv1d": (wide, 1, 4) for n in "qkv"}
    out |= {"f_a_proj": (size, dim), "f_b_proj": (wide, size), "b_proj": (heads, dim), "o_norm": (size,),
            "o_proj": (dim, wide)}  # fmt: skip
    named = {f"self_attn.{name}.weight": shape for name, shape in out.items()}
    return named | {"self_attn.A_log": (heads,), "self_attn.dt_bias": (wide,)}


def _channel_shapes(text: Config, is_dense: bool) -> Shapes:
    dim, inner, latent = text["hidden_size"], text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    if is_dense:
        wide = text["intermediate_size"]
        return {"mlp.gate_proj.weight": (wide, dim), "mlp.up_proj.weight": (wide, dim),
                "mlp.down_proj.weight": (dim, wide)}  # fmt: skip
    experts, shared = text["num_experts"], text["num_shared_experts"] * inner
    out: Shapes = {
        "gate.weight": (experts, dim), "gate.e_score_correction_bias": (experts,),
        "routed_expert_down_proj.weight": (latent, dim), "routed_expert_norm.weight": (latent,),
        "routed_expert_up_proj.weight": (dim, latent), "shared_experts.gate_proj.weight": (shared, dim),
        "shared_experts.up_proj.weight": (shared, dim), "shared_experts.down_proj.weight": (dim, shared),
        "experts.w1": (experts, inner, latent), "experts.w3": (experts, inner, latent),
        "experts.w2": (experts, latent, inner),
    }  # fmt: skip
    return {f"block_sparse_moe.{name}": shape for name, shape in out.items()}


def initial(config: Config, seed: int) -> Weights:
    """float32. Decays reach from one token to about a thousand; residual mixes begin as plain means."""
    draw = torch.Generator().manual_seed(seed)
    depth = 2 * config["text_config"]["num_hidden_layers"]
    out: Weights = {}
    for name, shape in shapes(config).items():
        value = torch.randn(shape, generator=draw)
        if name.endswith(("norm.weight", "layernorm.weight", "norm0.weight", "norm1.weight")):
            value = torch.ones(shape)
        elif name.endswith(("res_proj.weight", "e_score_correction_bias", "A_log", "k_norm.bias")):
            value = torch.zeros(shape)
        elif name.endswith("dt_bias"):
            value = torch.empty(shape).uniform_(-8.0, -1.0, generator=draw)
        elif name.endswith("conv1d.weight"):
            value = value * 0.3
            value[..., -1] += 0.7
        elif name.endswith(("embed_tokens.weight", "pos_emb.weight")):
            value = value * 0.5
        else:
            fan_in = math.prod(shape[1:]) if "experts.w" not in name else shape[2]
            out_of_a_part = name.endswith(
                ("o_proj.weight", "down_proj.weight", "up_proj.weight", "wo.weight", "fc1.weight")
            )
            value = value * fan_in**-0.5 * ((depth / 4) ** -0.5 if out_of_a_part and ".gate_" not in name else 1.0)
        out[name] = value
    return out


def working(masters: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """What a forward computes with: the numbers that a checkpoint of now would hold, if ``dtype`` is bfloat16.

    Experts are rounded to MXFP4 in any case; matrices are in ``dtype``, the others as wide as the masters.
    """
    out = {}
    for name, value in masters.items():
        if ".experts.w" in name:
            out[name] = mxfp4.rounded(value).to(dtype)
        elif name.endswith(IN_F32):
            out[name] = value
        else:
            out[name] = value.to(dtype).to(value.dtype) if name.endswith(WIDE) else value.to(dtype)
    return out


# --- parts of a layer, each compiled once -------------------------------------------------------------------------


def enter(sources: list[Tensor], query: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """What a part reads: the learned mix of the bank's sums and the running one [N, D] each, normed."""
    values = torch.stack(sources, 1)
    share = torch.softmax(norm(values, query, eps).sum(-1), -1)
    return norm((share[..., None] * values).sum(1), gamma, eps).to(dtype)


def delta_mixer(x: Tensor, own: Weights, place: Tensor, heads: int, bound: float, eps: float) -> Tensor:
    """KDA. place: int64 [N], where each token stands in its own sequence."""
    wide = own["self_attn.dt_bias"].dtype
    matrix = torch.cat([own[f"self_attn.{n}_proj.weight"] for n in "qkv"])
    taps = torch.cat([own[f"self_attn.{n}_conv1d.weight"] for n in "qkv"])[:, 0]
    y = (x @ matrix.T).to(wide)
    mixed = y * taps[:, 3]
    for lag in (1, 2, 3):
        earlier = F.pad(y, (0, 0, lag, 0))[: len(y)]
        mixed = mixed + torch.where(place[:, None] >= lag, earlier, 0) * taps[:, 3 - lag]
    q, k, v = F.silu(mixed).unflatten(1, (3, heads, -1)).unbind(1)
    q, k = (n * torch.rsqrt((n * n).sum(-1, keepdim=True) + UNIT_EPS) for n in (q, k))
    z = (x @ own["self_attn.f_a_proj.weight"].T @ own["self_attn.f_b_proj.weight"].T).to(wide)
    z = (z + own["self_attn.dt_bias"]).unflatten(1, (heads, -1))
    g = bound * torch.sigmoid(own["self_attn.A_log"].exp()[:, None] * z)
    beta = torch.sigmoid((x @ own["self_attn.b_proj.weight"].T).to(wide))
    first = place[:: kda.CHUNK] == 0
    o = kda.chunked(q * q.shape[2] ** -0.5, k, v, g, beta, first)
    o = norm(o, own["self_attn.o_norm.weight"], eps).flatten(1)
    o = o * torch.sigmoid((x @ own["self_attn.g_proj.weight"].T).to(wide))
    return (o.to(x.dtype) @ own["self_attn.o_proj.weight"].T).to(wide)


def latent_inputs(x: Tensor, own: Weights, text: Config) -> tuple[Tensor, ...]:
    """(q, k [N, H, K], v [N, H, V]; q, k, weights of the index, which send no gradient into the layer)."""
    wide, dtype = own["self_attn.q_a_layernorm.weight"].dtype, x.dtype
    heads, rank, index = text["num_attention_heads"], text["kv_lora_rank"], text["dsa_config"]
    q_latent = norm((x @ own["self_attn.q_a_proj.weight"].T).to(wide), own["self_attn.q_a_layernorm.weight"], RANK_EPS)
    q_latent = q_latent.to(dtype)
    q = (q_latent @ own["self_attn.q_b_proj.weight"].T).unflatten(1, (heads, -1))
    both = x @ own["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = norm(both[:, :rank].to(wide), own["self_attn.kv_a_layernorm.weight"], RANK_EPS).to(dtype)
    kv = (latent @ own["self_attn.kv_b_proj.weight"].T).unflatten(1, (heads, -1))
    shared = both[:, None, rank:].expand(-1, heads, -1)
    k = torch.cat((kv[..., : text["qk_nope_head_dim"]], shared), -1)
    x, q_latent = x.detach(), q_latent.detach()
    index_q = (q_latent @ own["self_attn.indexer.wq_b.weight"].T).unflatten(1, (index["num_heads"], -1))
    index_k = (x @ own["self_attn.indexer.wk.weight"].T).to(wide)
    index_k = F.layer_norm(index_k, index_k.shape[1:], own["self_attn.indexer.k_norm.weight"],
                           own["self_attn.indexer.k_norm.bias"], text["rms_norm_eps"]).to(dtype)  # fmt: skip
    index_w = (x @ own["self_attn.indexer.weights_proj.weight"].T) * index["num_heads"] ** -0.5
    # Scores are compared with each other: in bfloat16 many would be equal.
    return q, k, kv[..., text["qk_nope_head_dim"] :], index_q.to(wide), index_k.to(wide), index_w.to(wide)


def latent_output(o: Tensor, x: Tensor, own: Weights) -> Tensor:
    """o [N, H, V], gated by the layer's input x."""
    gated = o.flatten(1) * torch.sigmoid(x @ own["self_attn.g_proj.weight"].T)
    return (gated @ own["self_attn.o_proj.weight"].T).to(own["input_layernorm.weight"].dtype)


def situ(gate: Tensor, up: Tensor, text: Config) -> Tensor:
    beta, linear = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear * torch.tanh(up / linear))


def glu(x: Tensor, own: Weights, at: str, text: Config) -> Tensor:
    gate, up = x @ own[f"{at}gate_proj.weight"].T, x @ own[f"{at}up_proj.weight"].T
    return (situ(gate, up, text) @ own[f"{at}down_proj.weight"].T).to(own["input_layernorm.weight"].dtype)


def experts(x: Tensor, own: Weights, text: Config) -> tuple[Tensor, Tensor]:
    """(output [N, D], share of the tokens that chose each expert [E])."""
    own = {name.removeprefix("block_sparse_moe."): value for name, value in own.items()}
    wide = own["gate.weight"].dtype
    score = torch.sigmoid(x.to(wide) @ own["gate.weight"].T)
    ids = (score + own["gate.e_score_correction_bias"]).topk(text["num_experts_per_token"], -1).indices
    chosen = torch.zeros_like(score).scatter(1, ids, 1.0)
    kept = score * chosen
    share = kept / (kept.sum(-1, keepdim=True) + 1e-20) * text["routed_scaling_factor"]
    z = x @ own["routed_expert_down_proj.weight"].T
    inner = situ(z @ own["experts.w1"].flatten(0, 1).T, z @ own["experts.w3"].flatten(0, 1).T, text)
    inner = (inner.unflatten(1, share.shape[1:] + (-1,)) * share[..., None].to(inner.dtype)).flatten(1)
    r = (inner @ own["experts.w2"].transpose(1, 2).flatten(0, 1)).to(wide)
    r = norm(r, own["routed_expert_norm.weight"], text["rms_norm_eps"]).to(x.dtype)
    routed = (r @ own["routed_expert_up_proj.weight"].T).to(wide)
    return routed + glu(x, own, "shared_experts.", text), chosen.mean(0)


def token_losses(h: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy, whether the likeliest token is the target) of each token [N], float32 or wider."""
    logits = h @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


# --- the whole ----------------------------------------------------------------------------------------------------


def hidden(weights: Weights, config: Config, batch: Batch, run: Run) -> Tensor:
    """The normed output [B L, D] that the head reads."""
    text = config["text_config"]
    size, length = batch.ids.shape
    if length % kda.CHUNK:
        raise ValueError(f"a sequence has {length} tokens, no whole number of chunks of {kda.CHUNK}")
    place = torch.arange(length, device=batch.ids.device).repeat(size)
    p = F.embedding(batch.ids.flatten(), weights["model.embed_tokens.weight"])
    p = p.to(weights["model.norm.weight"].dtype)
    if batch.pixels is not None and batch.places is not None:
        tower = {n: v for n, v in weights.items() if n.startswith(("vision_tower", "mm_projector"))}
        seen = run.compile(vision.rows)(batch.pixels, tower, config, run.dtype)
        p = p.index_put((batch.places.flatten(),), seen.flatten(0, 1))
    bank: list[Tensor] = []
    for number in range(text["num_hidden_layers"]):
        at = f"model.layers.{number}."
        own = {name.removeprefix(at): value for name, value in weights.items() if name.startswith(at)}
        p, bank = layer(p, bank, own, text, number, (place, batch), run)
    query = mix_query(weights, "model.output_attn_res")
    return run.compile(enter)([*bank, p], query, weights["model.norm.weight"], text["rms_norm_eps"], run.dtype)


def mix_query(weights: Weights, mix: str) -> Tensor:
    return weights[f"{mix}_norm.weight"] * weights[f"{mix}_proj.weight"][0]


def layer(
    p: Tensor, bank: list[Tensor], own: Weights, text: Config, number: int, at: tuple[Tensor, Batch], run: Run
) -> tuple[Tensor, list[Tensor]]:
    """One layer: the running sum and the bank behind it."""
    (place, batch), eps = at, text["rms_norm_eps"]
    query = mix_query(own, "self_attention_res")
    x = run.compile(enter)([*bank, p], query, own["input_layernorm.weight"], eps, run.dtype)
    opens = number % text["attn_res_block_size"] == 0
    bank = [*bank, p] if opens else bank
    mixer = {name: value for name, value in own.items() if name.startswith(("self_attn.", "input_layernorm"))}
    if number + 1 in text["linear_attn_config"]["full_attn_layers"]:
        out = latent_mixer(x, mixer, text, batch, run)
    else:
        linear = text["linear_attn_config"]
        out = run.compile(delta_mixer)(x, mixer, place, linear["num_heads"], linear["gate_lower_bound"], eps)
    p = out if opens else p + out
    query = mix_query(own, "mlp_res")
    x = run.compile(enter)([*bank, p], query, own["post_attention_layernorm.weight"], eps, run.dtype)
    channel = {name: value for name, value in own.items() if name.startswith(("mlp.", "block", "input_layernorm"))}
    if number < text["first_k_dense_replace"]:
        return p + run.compile(glu)(x, channel, "mlp.", text), bank
    out, run.loads[number] = run.compile(experts)(x, channel, text)
    return p + out, bank


def latent_mixer(x: Tensor, own: Weights, text: Config, batch: Batch, run: Run) -> Tensor:
    parts = run.compile(latent_inputs)(x, own, text)
    q, k, v, *of_index = (part.unflatten(0, batch.ids.shape) for part in parts)
    index = attention.Index(*of_index)
    if torch.is_grad_enabled():
        run.index_losses.append(attention.index_loss(q.detach(), k.detach(), index, batch.rows))
    if run.sparse and batch.ids.shape[1] > text["dsa_config"]["top_k"]:
        o = attention.sparse(q, k, v, index, text["dsa_config"]["top_k"])
    else:
        o = attention.dense(q, k, v)
    return run.compile(latent_output)(o.flatten(0, 1), x, own)
