"""A plain forward of Kimi K3 and K3.1, written from the published formulas: the second opinion beside our blocks.

K3 alternates a recurrence with channel-wise decay (KDA) and gated latent attention without positions; every part of a
layer reads a learned mix of earlier block sums (attention residuals); experts work in a narrower space on 4-bit
matrices. K3.1 adds an index to its latent layers: each token attends to the few earlier ones that score highest.
One sequence, float32, everything explicit; recurrence, mix and scores that decide a choice are summed in float64.

Letters: T tokens, D width, H heads, K and V sizes of a head, R rank of a latent, E experts, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kimi_k3_vision import image_rows, normalised, splice  # type: ignore[import-not-found]  # beside this file, run by path
from torch import Tensor

NAME = "plain forward of Kimi K3 and K3.1"
RANK_EPS = 1e-6  # the norms inside the low-rank projections have this one whatever the config says
UNIT_EPS = 1e-6  # below the root when a query or key is brought to length 1
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DSA_KEYS = (  # the publisher's spelling was not to be had: what related configs write is accepted too
    ("dsa_layers", "layers", "sparse_layers", "indexer_layers", "sparse_attn_layers"),
    ("num_heads", "n_heads", "index_n_heads", "num_index_heads"),
    ("head_dim", "index_head_dim"),
    ("top_k", "topk", "index_topk"),
)
QUERIES_AT_ONCE = 256
ROWS_AT_ONCE = 8192

Weight = Callable[[str], Tensor]
Config = dict[str, Any]
Emit = Callable[[str, Tensor], None]


def forward(reader: Any, config: Config, tokens: list[int], emit: Emit, images: Sequence[Tensor] = ()) -> Tensor:
    """Logits [T, vocab] float32.

    images: pixels of each, uint8 [height, width, 3]; its rows replace the embeddings of as many placeholder tokens, in
    order. Sites beside the text's: ``vision.embed``, ``vision.blocks.{i}``, ``vision``.
    ValueError for a config whose variant this forward does not know, or when placeholders and rows differ in number.
    """
    text = config.get("text_config", config)
    check(text)
    root = "language_model." if "language_model.model.embed_tokens.weight" in reader.places else ""
    ids = torch.tensor(tokens)
    p_TD = table_rows(reader, f"{root}model.embed_tokens.weight", ids)
    if images:
        pixels = [normalised(image) for image in images]
        rows_MD = image_rows(reader, config, pixels, emit)
        p_TD = splice(p_TD, ids == config["media_placeholder_token_id"], rows_MD)
    emit("embed", p_TD)
    bank: list[Tensor] = []
    for number in range(text["num_hidden_layers"]):
        p_TD, bank = layer(reader, f"{root}model.layers.{number}.", text, number, p_TD, bank, emit)
        emit(f"layers.{number}", p_TD)
        emit(f"layers.{number}.carry.bank", torch.stack(bank, 1))
    query_D = mix_query(reader, f"{root}model.output_attn_res")
    h_TD = mix(p_TD, bank, query_D, eps_of(text))
    h_TD = rms(h_TD, reader.tensor(f"{root}model.norm.weight"), eps_of(text))
    emit("final_norm", h_TD)
    return head(reader, f"{root}lm_head.weight", h_TD)


def check(text: Config) -> None:
    """ValueError when the config asks for something that is not written down here."""
    linear = text["linear_attn_config"]
    known: list[tuple[str, Any, Any]] = [
        ("hidden_act", text.get("hidden_act"), "situ"),
        ("moe_router_activation_func", text.get("moe_router_activation_func"), "sigmoid"),
        ("moe_layer_freq", text.get("moe_layer_freq", 1), 1),
        ("num_expert_group", text.get("num_expert_group", 1), 1),
        ("mla_use_nope", text.get("mla_use_nope"), True),
        ("mla_use_output_gate", text.get("mla_use_output_gate"), True),
        ("latent_moe_use_norm", text.get("latent_moe_use_norm"), True),
        ("moe_renormalize", text.get("moe_renormalize"), True),
        ("use_full_rank_gate", linear.get("use_full_rank_gate"), True),
        ("tie_word_embeddings", text.get("tie_word_embeddings", False), False),
    ]
    for key, found, expected in known:
        if found != expected:
            raise ValueError(f"{key} is {found!r}: this plain forward knows only {expected!r}")


def eps_of(text: Config) -> float:
    return float(text["rms_norm_eps"])


# --- tensors ------------------------------------------------------------------------------------------------------


def table_rows(reader: Any, name: str, ids: Tensor) -> Tensor:
    """Rows of a plainly stored table, float32."""
    return reader.raw(name)[ids].float()


def head(reader: Any, name: str, h_TD: Tensor) -> Tensor:
    table_VD = reader.raw(name)
    parts = [h_TD @ table_VD[at : at + ROWS_AT_ONCE].float().T for at in range(0, len(table_VD), ROWS_AT_ONCE)]
    return torch.cat(parts, 1)


def matrix(reader: Any, name: str) -> Tensor:
    """``name.weight`` as float32: stored plainly, or as 4-bit codes with one scale byte per 32 inputs."""
    packed = f"{name}.weight_packed"
    if packed in reader.places:
        return decode_mxfp4(reader.raw(packed), reader.raw(f"{name}.weight_scale"))
    return reader.tensor(f"{name}.weight")


def decode_mxfp4(packed_OJ: Tensor, scale_OG: Tensor) -> Tensor:
    """[O, 2J] float32. Byte j holds input 2j in its low half and 2j + 1 in its high half; a scale byte b is 2^(b-127).

    A half byte is a sign (bit 3) and one of eight sizes. ValueError for scale byte 255, which is not a number.
    """
    if bool((scale_OG == 255).any()):
        raise ValueError("a scale is NaN or infinite")
    halves_OJ2 = torch.stack((packed_OJ & 15, packed_OJ >> 4), -1)
    code_OI = halves_OJ2.flatten(1).long()
    size_OI = torch.tensor(E2M1, dtype=torch.float64)[code_OI & 7]
    value_OI = torch.where(code_OI >= 8, -size_OI, size_OI)
    group = value_OI.shape[1] // scale_OG.shape[1]
    scale_OI = torch.exp2(scale_OG.double() - 127).repeat_interleave(group, 1)
    return (value_OI * scale_OI).float()


# --- small functions ----------------------------------------------------------------------------------------------


def rms(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_TD / torch.sqrt((x_TD * x_TD).mean(-1, keepdim=True) + eps) * weight_D


def unit(x_THK: Tensor) -> Tensor:
    """Length 1: over the root of the sum (not the mean) of squares, with the small number inside the root."""
    return x_THK / torch.sqrt((x_THK * x_THK).sum(-1, keepdim=True) + UNIT_EPS)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU: [b tanh(g/b) sigmoid(g)] [c tanh(u/c)]; both factors saturate."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def largest(score_TN: Tensor, count: int) -> Tensor:
    """bool [T, N]: the ``count`` largest of each row that are not -inf, of equals those with the lower id."""
    count = min(count, score_TN.shape[1])
    least_T1 = score_TN.topk(count, -1).values[:, -1:]
    above_TN = score_TN > least_T1
    equal_TN = score_TN == least_T1
    room_T1 = count - above_TN.sum(-1, keepdim=True)
    chosen_TN = above_TN | (equal_TN & (equal_TN.cumsum(-1) <= room_T1))
    return chosen_TN & (score_TN > -math.inf)


def ids_of(chosen_TN: Tensor, width: int) -> Tensor:
    """int32 [T, width]: the marked ids of each row in rising order, then -1."""
    token, chosen = chosen_TN.nonzero(as_tuple=True)  # row by row, each in rising order
    place = (chosen_TN.cumsum(-1) - 1)[token, chosen]
    out = torch.full((len(chosen_TN), width), -1, dtype=torch.int32)
    out[token, place] = chosen.int()
    return out


# --- attention residuals ------------------------------------------------------------------------------------------


def mix_query(reader: Any, name: str) -> Tensor:
    """The learned query [D] of one mix, float64: gamma times projection. It does not depend on the token."""
    return reader.tensor(f"{name}_norm.weight").double() * reader.tensor(f"{name}_proj.weight")[0].double()


def mix(p_TD: Tensor, bank: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    """Softmax over the bank's sums and the running one; keys are normed without gamma, values are as they are.

    Without a bank there is one source, of weight 1.
    """
    value_TND = torch.stack([*bank, p_TD], 1).double()
    key_TND = value_TND / torch.sqrt((value_TND * value_TND).mean(-1, keepdim=True) + eps)
    share_TN = torch.softmax(key_TND @ query_D, -1)
    return (share_TN[..., None] * value_TND).sum(1).float()


def layer(
    reader: Any, at: str, text: Config, number: int, p_TD: Tensor, bank: list[Tensor], emit: Emit
) -> tuple[Tensor, list[Tensor]]:
    """One layer: the running sum and the bank behind it. What a part reads is never added back."""

    def weight(name: str) -> Tensor:
        return matrix(reader, at + name)

    eps, site = eps_of(text), f"layers.{number}"
    h_TD = mix(p_TD, bank, mix_query(reader, f"{at}self_attention_res"), eps)  # the first layer's is p itself
    opens = number % text["attn_res_block_size"] == 0
    if opens:
        bank = [*bank, p_TD]
    x_TD = rms(h_TD, weight("input_layernorm"), eps)
    if number + 1 in text["linear_attn_config"]["full_attn_layers"]:
        mixed_TD = latent_attention(x_TD, weight, reader, at, text, number, emit)
    else:
        mixed_TD = delta_attention(x_TD, weight, reader, at, text)
    emit(f"{site}.mixer", mixed_TD)
    p_TD = mixed_TD if opens else p_TD + mixed_TD
    m_TD = mix(p_TD, bank, mix_query(reader, f"{at}mlp_res"), eps)
    x_TD = rms(m_TD, weight("post_attention_layernorm"), eps)
    if number < text["first_k_dense_replace"]:
        out_TD = glu(x_TD, weight, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", text)
    else:
        out_TD = experts(x_TD, weight, reader, at, text, lambda ids: emit(f"{site}.experts", ids))
    emit(f"{site}.channel", out_TD)
    return p_TD + out_TD, bank


# --- KDA ----------------------------------------------------------------------------------------------------------


def delta_attention(x_TD: Tensor, weight: Weight, reader: Any, at: str, text: Config) -> Tensor:
    linear = text["linear_attn_config"]
    heads, size = int(linear["num_heads"]), int(linear["head_dim"])
    attn = f"{at}self_attn."

    def by_head(name: str) -> Tensor:
        taps_CK = reader.tensor(f"{attn}{name}_conv1d.weight")[:, 0]
        if taps_CK.shape[1] != linear["short_conv_kernel_size"]:
            raise ValueError(f"{attn}{name}_conv1d has {taps_CK.shape[1]} taps, the config says otherwise")
        y_TC = convolve(x_TD @ weight(f"self_attn.{name}_proj").T, taps_CK)
        return (y_TC * torch.sigmoid(y_TC)).unflatten(1, (heads, size))

    q_THK, k_THK, v_THV = by_head("q"), by_head("k"), by_head("v")
    q_THK, k_THK = unit(q_THK) * size**-0.5, unit(k_THK)
    z_TC = x_TD @ weight("self_attn.f_a_proj").T @ weight("self_attn.f_b_proj").T
    z_TC = z_TC + reader.tensor(f"{attn}dt_bias")
    a_log_H = reader.tensor(f"{attn}A_log")[:heads]  # one number a head; the file's longer vector ends in padding
    log_decay_THK = bounded_gate(z_TC.unflatten(1, (heads, size)), a_log_H, float(linear["gate_lower_bound"]))
    beta_TH = torch.sigmoid(x_TD @ weight("self_attn.b_proj").T)
    empty = torch.zeros(heads, size, size, dtype=torch.float64)
    o_THV, _ = delta_rule(q_THK, k_THK, v_THV, log_decay_THK, beta_TH, empty)
    y_THV = rms(o_THV, reader.tensor(f"{attn}o_norm.weight"), eps_of(text))
    y_TC = y_THV.flatten(1) * torch.sigmoid(x_TD @ weight("self_attn.g_proj").T)
    return y_TC @ weight("self_attn.o_proj").T


def convolve(x_TC: Tensor, taps_CK: Tensor) -> Tensor:
    """Each channel alone: y[t] = sum over j of taps[j] x[t - (K - 1) + j], with zeros before the sequence."""
    num_tokens, num_taps = len(x_TC), taps_CK.shape[1]
    padded = torch.cat((torch.zeros(num_taps - 1, x_TC.shape[1]), x_TC))
    return sum((taps_CK[:, j] * padded[j : j + num_tokens] for j in range(num_taps)), torch.zeros_like(x_TC))


def bounded_gate(z_THK: Tensor, a_log_H: Tensor, lower_bound: float) -> Tensor:
    """Log of the decay, in (lower_bound, 0), for each channel of the key."""
    return lower_bound * torch.sigmoid(torch.exp(a_log_H)[:, None] * z_THK)


def delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, log_decay_THK: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] float32 and the state behind the last token, float64. Token by token:

    S <- diag(e^g) S;  u = beta (v - S' k);  S <- S + k u';  o = S' q.
    """
    q_THK, k_THK, v_THV, log_decay_THK, beta_TH = (
        x.double() for x in (q_THK, k_THK, v_THV, log_decay_THK, beta_TH)
    )  # fmt: skip
    state_HKV = state_HKV.double()
    outs = []
    for t in range(len(q_THK)):
        state_HKV = torch.exp(log_decay_THK[t])[:, :, None] * state_HKV
        recalled_HV = torch.einsum("hkv,hk->hv", state_HKV, k_THK[t])
        u_HV = beta_TH[t][:, None] * (v_THV[t] - recalled_HV)
        state_HKV = state_HKV + k_THK[t][:, :, None] * u_HV[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q_THK[t]))
    return torch.stack(outs).float(), state_HKV


# --- latent attention ---------------------------------------------------------------------------------------------


def latent_attention(
    x_TD: Tensor, weight: Weight, reader: Any, at: str, text: Config, number: int, emit: Emit
) -> Tensor:
    """Expanded, without any rotation: keys are [own part | part shared by all heads], gated before the output."""
    heads, rank = int(text["num_attention_heads"]), int(text["kv_lora_rank"])
    own, shared, size = int(text["qk_nope_head_dim"]), int(text["qk_rope_head_dim"]), int(text["v_head_dim"])
    q_TR = rms(x_TD @ weight("self_attn.q_a_proj").T, weight("self_attn.q_a_layernorm"), RANK_EPS)
    q_THK = (q_TR @ weight("self_attn.q_b_proj").T).unflatten(1, (heads, own + shared))
    both_TR = x_TD @ weight("self_attn.kv_a_proj_with_mqa").T
    latent_TR = rms(both_TR[:, :rank], weight("self_attn.kv_a_layernorm"), RANK_EPS)
    k_shared_TK = both_TR[:, rank:]
    kv_THC = (latent_TR @ weight("self_attn.kv_b_proj").T).unflatten(1, (heads, own + size))
    index = indexed(text, number)
    pick = None
    if index is not None:
        pick = index_scores(x_TD, q_TR, weight, reader, at, text, index)
    outs, sets = [], []
    for first in range(0, len(x_TD), QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, len(x_TD))
        seen_QT = torch.arange(last) <= torch.arange(first, last)[:, None]
        if pick is not None and index is not None:
            seen_QT = largest(pick(first, last).masked_fill(~seen_QT, -math.inf), int(index["top_k"]))
            sets.append(ids_of(seen_QT, int(index["top_k"])))
        q_QHK = q_THK[first:last]
        outs.append(torch.stack([_attend(q_QHK[:, h], kv_THC[:last, h], k_shared_TK[:last], seen_QT, own)
                                 for h in range(heads)], 1))  # fmt: skip
    if sets:
        emit(f"layers.{number}.index", torch.cat(sets))
    o_TC = torch.cat(outs).flatten(1)
    return (o_TC * torch.sigmoid(x_TD @ weight("self_attn.g_proj").T)) @ weight("self_attn.o_proj").T


def _attend(q_QK: Tensor, kv_TC: Tensor, k_shared_TK: Tensor, seen_QT: Tensor, own: int) -> Tensor:
    """One head: softmax over the tokens that are seen. kv: [own part of the key | value]."""
    k_TK = torch.cat((kv_TC[:, :own], k_shared_TK), 1)
    score_QT = (q_QK @ k_TK.T / math.sqrt(k_TK.shape[1])).masked_fill(~seen_QT, -math.inf)
    return torch.softmax(score_QT, -1) @ kv_TC[:, own:]


def indexed(text: Config, number: int) -> Config | None:
    """The index's numbers, by the first spelling of each, if layer ``number`` (from 0; the config: from 1) has one."""
    given = text.get("dsa_config")
    if not given:
        return None
    index = {names[0]: given[name] for names in DSA_KEYS for name in names if name in given}
    if len(index) < len(DSA_KEYS):
        raise ValueError(
            f"dsa_config has the keys {sorted(given)}: this plain forward finds {sorted(index)} among them"
        )
    return index if number + 1 in index["dsa_layers"] else None


def index_scores(
    x_TD: Tensor, q_TR: Tensor, weight: Weight, reader: Any, at: str, text: Config, index: Config
) -> Callable[[int, int], Tensor]:
    """(first, last) -> I [last - first, last]: sum over heads of w_h H^-1/2 ReLU(q_h k size^-1/2).

    Queries come from the normed query latent, keys from the layer's input through a LayerNorm whose bias is optional.
    """
    heads, size = int(index["num_heads"]), int(index["head_dim"])
    at = f"{at}self_attn.indexer."
    q_THK = (q_TR @ weight("self_attn.indexer.wq_b").T).unflatten(1, (heads, size)).double()
    k_TK = (x_TD @ weight("self_attn.indexer.wk").T).double()
    k_TK = k_TK - k_TK.mean(-1, keepdim=True)
    k_TK = k_TK / torch.sqrt((k_TK * k_TK).mean(-1, keepdim=True) + eps_of(text))
    k_TK = k_TK * weight("self_attn.indexer.k_norm").double()
    if f"{at}k_norm.bias" in reader.places:
        k_TK = k_TK + reader.tensor(f"{at}k_norm.bias").double()
    w_TH = (x_TD @ weight("self_attn.indexer.weights_proj").T).double() * heads**-0.5

    def scores(first: int, last: int) -> Tensor:
        total = torch.zeros(last - first, last, dtype=torch.float64)
        for h in range(heads):
            dots = q_THK[first:last, h] @ k_TK[:last].T * size**-0.5
            total += w_TH[first:last, h, None] * dots.clamp_min(0)
        return total

    return scores


# --- channels -----------------------------------------------------------------------------------------------------


def glu(x_TD: Tensor, weight: Weight, gate: str, up: str, down: str, text: Config) -> Tensor:
    inner = situ(x_TD @ weight(gate).T, x_TD @ weight(up).T,
                 float(text["activation_situ_beta"]), float(text["activation_situ_linear_beta"]))  # fmt: skip
    return inner @ weight(down).T


def experts(x_TD: Tensor, weight: Weight, reader: Any, at: str, text: Config, tell: Callable[[Tensor], None]) -> Tensor:
    """Routed experts in the narrow space, normed over their complete sum, beside the shared ones at full width."""
    moe = "block_sparse_moe."
    bias_E = reader.tensor(f"{at}{moe}gate.e_score_correction_bias")
    scale = float(text["routed_scaling_factor"])
    count = int(text["num_experts_per_token"])
    chosen_TE, share_TE = route(x_TD, weight(f"{moe}gate"), bias_E, count, scale)
    tell(ids_of(chosen_TE, count))
    z_TL = x_TD @ weight(f"{moe}routed_expert_down_proj").T
    sum_TL = torch.zeros_like(z_TL, dtype=torch.float64)
    for e in range(chosen_TE.shape[1]):
        rows, name = chosen_TE[:, e].nonzero()[:, 0], f"{moe}experts.{e}."
        if not len(rows):
            reader.spare(*(f"{at}{name}{w}.weight" for w in ("w1", "w2", "w3")))
            continue
        out = glu(z_TL[rows], weight, f"{name}w1", f"{name}w3", f"{name}w2", text)
        sum_TL[rows] += share_TE[rows, e, None].double() * out.double()
    r_TL = rms(sum_TL.float(), weight(f"{moe}routed_expert_norm"), eps_of(text))
    shared = f"{moe}shared_experts."
    shared_TD = glu(x_TD, weight, f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj", text)
    return r_TL @ weight(f"{moe}routed_expert_up_proj").T + shared_TD


def route(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor]:
    """Which experts each token takes (bool) and their shares, both [T, E]. The bias chooses and does not weigh."""
    score_TE = torch.sigmoid((x_TD.double() @ gate_ED.double().T).float())
    chosen_TE = largest(score_TE + bias_E, count)
    kept_TE = torch.where(chosen_TE, score_TE, 0.0)
    return chosen_TE, kept_TE / (kept_TE.sum(-1, keepdim=True) + 1e-20) * scale
