"""Plain torch on a CPU, in the dtype of the inputs: fast enough to talk to a small model on a laptop.

Letters as in the references. Answers of a row may depend in the last bits on how many rows come with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.decl import Mxfp4
from dayzero.ops.activation import glu
from dayzero.ops.attention import visible
from dayzero.ops.experts_mxfp4 import tile_rows, widen
from dayzero.ops.paged import by_row
from dayzero.view import Paged


def matmul(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul`` by F.linear."""
    return F.linear(x_TK, w_NK.to(x_TK.dtype), None if bias_N is None else bias_N.to(x_TK.dtype))


def matmul_f32(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_f32`` by F.linear in float32."""
    return F.linear(x_TK.float(), w_NK.float(), None if bias_N is None else bias_N.float())


def add(stream_TH: Tensor, out_TH: Tensor) -> Tensor:
    """``residual.add`` in the wider of both dtypes, which for narrow ones adds in f32 and rounds once."""
    return (stream_TH + out_TH).to(stream_TH.dtype)


def attention_causal(
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
    """``attention.causal`` by torch's CPU flash kernel, the one behind scaled_dot_product_attention: called directly
    because only so it gives the log-sum-exp. No sinks, no softcap; the narrower of D and V is padded with zeros.
    """
    if sinks_H is not None or softcap is not None:
        raise ValueError("this variant has neither sinks nor softcap; bind another one to this site")
    num_queries, heads, width = q_THD.shape
    value_width = v_LKV.shape[2]
    if num_queries == 0 or k_LKD.shape[0] == 0:  # the kernel divides by both
        blind = q_THD.new_full((num_queries, heads), float("-inf"), dtype=torch.float32)
        return q_THD.new_zeros(num_queries, heads, value_width), blind
    wide = max(width, value_width)
    mask_TL = visible(num_queries, k_LKD.shape[0], start, window, q_THD.device)
    bias_TL = None if mask_TL.all() else q_THD.new_zeros(mask_TL.shape).masked_fill(~mask_TL, float("-inf"))
    q, k, v = (
        F.pad(x, (0, wide - x.shape[2])).transpose(0, 1)[None].repeat_interleave(heads // x.shape[1], dim=1)
        for x in (q_THD, k_LKD.to(q_THD.dtype), v_LKV.to(q_THD.dtype))
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias_TL, scale=scale)
    blind_T = ~mask_TL.any(-1)
    out_THV = out[0].transpose(0, 1)[..., :value_width].masked_fill(blind_T[:, None, None], 0.0)
    return out_THV, lse[0].T.masked_fill(blind_T[:, None], float("-inf"))


def attention_paged(q_THD: Tensor, keys: Paged, values: Paged, **options: Any) -> tuple[Tensor, Tensor]:
    """``attention.paged`` by ``attention_causal``, row by row."""
    return by_row(attention_causal, q_THD, keys, values, **options)


def attention_full(q_NHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """``attention.full`` by the kernel of ``attention_causal``, which never holds all scores."""
    if q_NHK.shape[0] == 0:
        return torch.empty_like(q_NHK), q_NHK.new_zeros(q_NHK.shape[:2], dtype=torch.float32)
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q_NHK, k_MHK, v_MHK))  # it takes rows to be packed
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    return out[0].transpose(0, 1), lse[0].T


def tiled(x_TK: Tensor, w_NK: Tensor | Mxfp4, bias_N: Tensor | None = None) -> Tensor:
    """``matmul``; a matrix in 4 bits is widened to x's dtype a tile of rows at a time."""
    if not isinstance(w_NK, Mxfp4):
        return matmul(x_TK, w_NK, bias_N)
    out_TN, step = x_TK.new_empty(len(x_TK), len(w_NK)), tile_rows(w_NK.shape[1])
    for start in range(0, len(w_NK), step):
        rows = slice(start, start + step)
        some_N = None if bias_N is None else bias_N[rows]
        out_TN[:, rows] = matmul(x_TK, widen(w_NK[rows], x_TK.dtype), some_N)
    return out_TN


def moe_experts(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``moe.experts`` with the rows sorted by expert and one product for each expert that was hit. Matrices in 4 bits
    are widened tile by tile: never a whole one."""
    flat = ids_TN.reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows = order // ids_TN.shape[1]
    weight_R1 = weights_TN.reshape(-1, 1)[order].float()
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    sum_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    first = 0
    for expert, count in zip(experts.tolist(), counts.tolist()):
        some = slice(first, first + count)
        first += count
        if expert < 0:
            continue
        b_gate, b_up, b_down = (b[expert] for b in biases) if biases is not None else (None, None, None)
        x_RD = x_TD[rows[some]]
        hidden = glu.body(tiled(x_RD, gate_EID[expert], b_gate), tiled(x_RD, up_EID[expert], b_up), **activation)
        out = tiled(hidden, down_EDI[expert], b_down).float()
        sum_TD.index_add_(0, rows[some], weight_R1[some] * out)
    return sum_TD.to(x_TD.dtype)
