"""Mixture of experts: which experts a token goes to, and what they make of it.

T tokens, E experts, N chosen experts a token, D model width, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.activation import KINDS, glu
from dayzero.ops.bounds import ELEMENTWISE, EXPERTS
from dayzero.ops.contract import contract
from dayzero.ops.experts_mxfp4 import dense
from dayzero.ops.linear import matmul

SCORES = ("sigmoid", "softmax", "softmax_topk")


def _softmax(values: Tensor) -> Tensor:
    return torch.softmax(values, dim=-1)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest along the last dimension, best first, the lower index on ties."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


@contract(
    "moe.route",
    bound=ELEMENTWISE,
    traits={"score": SCORES, "bias": (None, "select", "logit"), "groups": (False, True), "renormalise": (False, True)},
)
def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    renormalise: bool = True,
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(ids [T, N] int64, best first; weights [T, N] f32). logits and bias must be f32.

    score ``sigmoid`` or ``softmax`` (over all experts): choose by score + bias, weigh by the score without the bias.
    ``softmax_topk`` (gpt-oss): choose by logit, weigh by a softmax over the chosen; renormalise does not apply. A bias
    on the logits (trait bias = ``logit``) is the router's linear's; the bias here only selects.
    groups = (number of groups, groups kept): a group's score is the sum of its two best biased scores; experts of
    other groups are -inf. renormalise: weights / (sum + eps), then times scale. Ties go to the lower id.
    """
    dtypes = {x.dtype for x in (logits_TE, bias_E) if x is not None}
    if score not in SCORES or dtypes != {torch.float32}:
        raise ValueError(f"routing needs f32 logits and bias and a score of {SCORES}, not {score!r}, {dtypes}")
    if score == "softmax_topk":
        scores = logits_TE
    else:
        squash = torch.sigmoid if score == "sigmoid" else _softmax
        scores = squash(logits_TE.double()).float()
    by_choice = scores if bias_E is None else scores + bias_E
    num_groups, kept_groups = groups
    if num_groups > 1:
        grouped = by_choice.unflatten(-1, (num_groups, -1))
        strength = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        keep = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, _best(strength, kept_groups), True)
        by_choice = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
    ids_TN = _best(by_choice, top_k)
    weights_TN = scores.gather(-1, ids_TN)
    if score == "softmax_topk":
        weights_TN = _softmax(weights_TN.double()).float()
    elif renormalise:
        weights_TN = weights_TN / (weights_TN.sum(-1, keepdim=True) + eps)
    return ids_TN, weights_TN * scale


def summed_by_expert(x_TD: Tensor, ids_TN: Tensor, weights_TN: Tensor, one: Callable[[Tensor, int], Tensor]) -> Tensor:
    """sum over a token's experts of weight * one(x of the rows that chose it [R, D], expert) -> [T, D] in x's dtype.

    Experts are asked in ascending id, each that some token chose once; the sum runs in f32 in that order. An id of -1
    is no expert. ids may lie on the host beside an x that does not; else the host waits for a device once, for them.
    """
    sum_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    rows_of = _rows_by_expert(ids_TN.cpu())
    if not rows_of:
        return sum_TD.to(x_TD.dtype)
    ids_TN = ids_TN.to(x_TD.device, non_blocking=True)
    together = torch.cat(list(rows_of.values())).to(x_TD.device, non_blocking=True)
    for expert, rows in zip(rows_of, together.split(list(map(len, rows_of.values()))), strict=True):
        weight_R1 = torch.where(ids_TN == expert, weights_TN.float(), 0.0).sum(-1, keepdim=True)[rows]
        sum_TD[rows] += weight_R1 * one(x_TD[rows], expert).float()
    return sum_TD.to(x_TD.dtype)


def _rows_by_expert(ids_TN: Tensor) -> dict[int, Tensor]:
    """Rows [R] int64 that chose an expert, ascending, by its id, ascending. ids: on the host."""
    ids, places = ids_TN.flatten().sort(stable=True)
    experts, counts = ids.unique_consecutive(return_counts=True)
    rows = (places // max(1, ids_TN.shape[1])).split(counts.tolist())
    # One that a row chose twice stands there once.
    return {e: some.unique_consecutive() for e, some in zip(experts.tolist(), rows, strict=True) if e >= 0}


@contract("moe.experts", bound=EXPERTS, traits={"act": KINDS, "bias": (False, True), "activation": ("bf16",)})
def experts(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """sum over the chosen experts of weight * down(glu(gate x, up x)) -> [T, D] in x's dtype.

    activation: keyword arguments of ``activation.glu``, e.g. {"kind": "silu"}. biases: (gate [E, I], up [E, I],
    down [E, D]). Inputs of the products keep x's dtype (bf16: W4A16 where weights have 4 bits). Each projection is
    rounded to x's dtype; the weight is applied after down; the sum runs in f32 in ascending expert id. An id of -1 is
    no expert. The three matrices are only indexed by expert, each once, so they may be anything that gives an expert's
    matrix by its number: a tensor, a ``decl.Mxfp4``, which is widened exactly, or a ``decl.Fp8Blocks``, whose products
    of code and scale are rounded to f32.
    """

    def one(x_RD: Tensor, expert: int) -> Tensor:
        b_gate, b_up, b_down = (b[expert] for b in biases) if biases is not None else (None, None, None)
        gate = matmul.body(x_RD, dense(gate_EID[expert], x_RD.dtype), b_gate)
        up = matmul.body(x_RD, dense(up_EID[expert], x_RD.dtype), b_up)
        return matmul.body(glu.body(gate, up, **activation), dense(down_EDI[expert], x_RD.dtype), b_down)

    return summed_by_expert(x_TD, ids_TN, weights_TN, one)
