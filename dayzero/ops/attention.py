"""Causal attention of one sequence over its own keys.

T queries, L keys (rows of a history, oldest first), H query heads, K key heads (H a multiple of K; query head h reads
key head h // (H/K)), G = H/K, D query and key width, V value width.

``start`` is the row of ``k`` that holds the first query's own key: the position of the first query minus the position
of the first key. Query i sees rows up to start + i; with a window of W, only the last W of them, its own included.
Rows need not end at the last query: for a part of the keys held elsewhere start may be negative or beyond L.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import ATTENTION, ELEMENTWISE
from dayzero.ops.contract import contract

TRAITS = {
    "window": (False, True, "int"), "sinks": (False, True), "softcap": (False, True), "value_width": ("same", "other"),
    "grouped": (False, True),
}  # fmt: skip
NEGATIVE_INFINITY = float("-inf")
TILE_TOKENS = 64


def visible(num_queries: int, num_keys: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """[T, L] bool: which rows each query sees."""
    own_T1 = torch.arange(start, start + num_queries, device=device)[:, None]
    rows_L = torch.arange(num_keys, device=device)
    seen_TL = rows_L <= own_T1
    return seen_TL if window is None else seen_TL & (rows_L > own_T1 - window)


def softmax_f64(scores: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(probabilities, lse) over the last dimension of f64 scores; a row that sees nothing gives zeros and -inf.

    sink: a further logit, broadcast against lse, that takes its share and has no value. lse includes it.
    """
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.double()[..., None])
    safe = torch.where(top == NEGATIVE_INFINITY, torch.zeros_like(top), top)
    weights = torch.exp(scores - safe)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.double()[..., None] - safe)
    return weights / torch.where(total == 0, torch.ones_like(total), total), (safe + total.log())[..., 0]


def _scores(q_THD: Tensor, k_LKD: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[H, T, L] f64, every row visible."""
    heads, key_heads = q_THD.shape[1], k_LKD.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads cannot share {key_heads} key heads evenly")
    q_KGTD = q_THD.double().permute(1, 0, 2).unflatten(0, (key_heads, heads // key_heads))
    s_HTL = (q_KGTD @ k_LKD.double().permute(1, 2, 0)[:, None]).flatten(0, 1) * scale
    return s_HTL if softcap is None else softcap * torch.tanh(s_HTL / softcap)


def _values(p_HTL: Tensor, v_LKV: Tensor) -> Tensor:
    """[T, H, V] f64."""
    p_KGTL = p_HTL.unflatten(0, (v_LKV.shape[1], -1))
    return (p_KGTL @ v_LKV.double().permute(1, 0, 2)[:, None]).flatten(0, 1).permute(1, 0, 2)


@contract("attention.causal", bound=ATTENTION, traits=TRAITS)
def causal(
    q_THD: Tensor,
    k_LKD: Tensor,
    v_LKV: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] f32).

    Scores are q.k * scale, then softcap * tanh(score / softcap) if given. sinks: a logit per head, neither scaled nor
    capped, that joins the softmax and has no value (gpt-oss); lse includes it. A query that sees nothing gives zeros
    and lse -inf (or the sink).
    """
    s_HTL = _scores(q_THD, k_LKD, scale, softcap)
    seen_TL = visible(q_THD.shape[0], k_LKD.shape[0], start, window, q_THD.device)
    p_HTL, lse_HT = softmax_f64(
        s_HTL.masked_fill(~seen_TL, NEGATIVE_INFINITY), None if sinks_H is None else sinks_H[:, None]
    )
    return _values(p_HTL, v_LKV).to(q_THD.dtype), lse_HT.T.float()


@contract("attention.merge", bound=ELEMENTWISE)
def merge(out_PTHV: Tensor, lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Join P attentions over disjoint keys by their log-sum-exp: (out [T, H, V] in out's dtype, lse [T, H] f32).

    A sink must have been counted in one part only. Parts that saw nothing (lse -inf) have no weight.
    """
    weights_THP, lse_TH = softmax_f64(lse_PTH.double().permute(1, 2, 0))
    return (weights_THP.permute(2, 0, 1)[..., None] * out_PTHV.double()).sum(0).to(out_PTHV.dtype), lse_TH.float()


def causal_tiled(
    q_THD: Tensor,
    k_LKD: Tensor,
    v_LKV: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention.causal`` a tile of keys at a time, merged by log-sum-exp: scores never exceed [H, T, tile]."""
    parts = []
    for first in range(0, k_LKD.shape[0], TILE_TOKENS):
        rows = slice(first, first + TILE_TOKENS)
        parts.append(
            causal.body(
                q_THD.double(), k_LKD[rows], v_LKV[rows],
                start=start - first, scale=scale, window=window, softcap=softcap,
            )
        )  # fmt: skip
    if sinks_H is not None or not parts:
        heads = q_THD.shape[1]
        out = q_THD.new_zeros(q_THD.shape[0], heads, v_LKV.shape[2], dtype=torch.float64)
        sink_H = sinks_H if sinks_H is not None else q_THD.new_full((heads,), NEGATIVE_INFINITY)
        parts.append((out, sink_H.float().expand(q_THD.shape[0], heads)))
    out_THV, lse_TH = merge.body(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    return out_THV.to(q_THD.dtype), lse_TH


@contract("attention.gate", bound=ELEMENTWISE, traits={"per": ("channel", "head")})
def gate(out_THV: Tensor, gate_T: Tensor) -> Tensor:
    """out * sigmoid(gate), f32 inside, in out's dtype. gate: [T, H], [T, H, V] or [T, H*V]."""
    if gate_T.numel() == out_THV.numel():
        return (out_THV.float() * torch.sigmoid(gate_T.double().reshape(out_THV.shape)).float()).to(out_THV.dtype)
    if tuple(gate_T.shape) != tuple(out_THV.shape[:2]):
        raise ValueError(f"a gate of {tuple(gate_T.shape)} fits neither channels nor heads of {tuple(out_THV.shape)}")
    return (out_THV.float() * torch.sigmoid(gate_T.double()).float()[..., None]).to(out_THV.dtype)
