"""Faulty operators of our own port. Each is bound as a variant of its contract and must be caught by ``align``.

T tokens, H heads, D head width, E experts, N chosen experts, L rows of a history, K and V key and value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.activation import glu
from dayzero.ops.attention import causal
from dayzero.ops.conv import causal as convolve
from dayzero.ops.delta_paged import PARTS, by_span
from dayzero.ops.latent import absorb
from dayzero.ops.linear import matmul
from dayzero.ops.moe import experts, route
from dayzero.ops.norm import inverse_rms, layer, rms, rms_gated
from dayzero.ops.paged import by_row, paged
from dayzero.ops.recurrence import _prepare, delta_recurrent, gate_softplus
from dayzero.ops.rope import apply
from dayzero.ops.sparse_index import score, tokens, top_k
from dayzero.view import Paged
from tests.cpu.faults.catalogue import Fault, Plant, first


def inside(part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a faulty part of the delta rule a faulty ``recurrence.paged``."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def whole(*given: Any, **options: Any) -> Tensor:
            return by_span(replace(PARTS, **{part: function}), *given, **options)

        return whole

    return wrap


# --- attention and rope -------------------------------------------------------------------------------------------


def sinks_dropped(q_THD: Tensor, keys: Paged, values: Paged, *, sinks_H: Tensor | None = None, **given: Any) -> Any:
    return paged.body(q_THD, keys, values, **given)


def sinks_scaled(q_THD: Tensor, keys: Paged, values: Paged, *, sinks_H: Tensor, scale: float, **given: Any) -> Any:
    """The sink logit takes the softmax scale that only q·k should."""
    return paged.body(q_THD, keys, values, sinks_H=sinks_H * scale, scale=scale, **given)


def heads_tiled(q_THD: Tensor, keys: Paged, values: Paged, **given: Any) -> Any:
    """Query head h reads key head h % K instead of h // (H / K): repeat where repeat_interleave is meant."""

    def attend(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        times = q_THD.shape[1] // k_LKD.shape[1]
        return causal.body(q_THD, k_LKD.repeat(1, times, 1), v_LKD.repeat(1, times, 1), **options)

    return by_row(attend, q_THD, keys, values, **given)


def values_first(kv_b: Tensor, heads: int, nope: int, value: int) -> Any:
    """A head's rows of kv_b are taken as [value | key] instead of [key | value]."""
    values, keys = kv_b.unflatten(0, (heads, -1)).split((value, nope), dim=1)
    return absorb.body(torch.cat((keys, values), dim=1).flatten(0, 1), heads, nope, value)


def position_shifted(x_THD: Tensor, positions: Tensor, freq_F: Tensor, **given: Any) -> Tensor:
    """Only one of q and k is turned one position too far: k has fewer heads than q."""
    wrong = positions + 1 if x_THD.shape[1] > 2 else positions
    return apply.body(x_THD, wrong, freq_F, **given)


# --- sparse index -------------------------------------------------------------------------------------------------


def _lists(keys: Paged, q_THD: Tensor, weights_TH: Tensor, k: int, scale: float, **other: Any) -> Tensor:
    """``sparse_index.tokens`` with another ``score``, another ``best``, or k forced otherwise."""
    judge, best = other.pop("score", score.body), other.pop("best", top_k.body)
    out_TK = torch.full((q_THD.shape[0], k), -1)
    for span in keys.spans:
        k_LD, rows = keys.history(span)[0], span.rows
        scores_TL = judge(q_THD[rows], k_LD, weights_TH[rows], start=span.start, scale=scale)
        out_TK[rows] = best(scores_TL, k, start=span.start, **other)
    return out_TK


def relu_dropped(q_THD: Tensor, weights_TH: Tensor, keys: Paged, **given: Any) -> Tensor:
    def products(q_THD: Tensor, k_LD: Tensor, weights_TH: Tensor, *, start: int, scale: float) -> Tensor:
        total = torch.einsum("thd,ld,th->tl", q_THD.double(), k_LD.double(), weights_TH.double()) * scale
        seen = score.body(q_THD, k_LD, weights_TH, start=start, scale=scale) > float("-inf")
        return total.float().masked_fill(~seen, float("-inf"))

    return _lists(keys, q_THD, weights_TH, **given, score=products)


def weights_in_bf16(q_THD: Tensor, weights_TH: Tensor, keys: Paged, **given: Any) -> Tensor:
    return tokens.body(q_THD, weights_TH.bfloat16().float(), keys, **given)


def one_fewer(q_THD: Tensor, weights_TH: Tensor, keys: Paged, *, k: int, **given: Any) -> Tensor:
    """One row fewer than top_k, padded so that shapes still fit."""
    return torch.nn.functional.pad(tokens.body(q_THD, weights_TH, keys, k=k - 1, **given), (0, 1), value=-1)


def start_forgotten(q_THD: Tensor, weights_TH: Tensor, keys: Paged, **given: Any) -> Tensor:
    """Rows of a later chunk are counted from 0: the first chunk, and a run without chunks, show nothing."""

    def from_zero(scores_TL: Tensor, k: int, *, start: int, **forced: Any) -> Tensor:
        return top_k.body(scores_TL, k, start=0, **forced)

    return _lists(keys, q_THD, weights_TH, **given, best=from_zero)


def local_window_forced(q_THD: Tensor, weights_TH: Tensor, keys: Paged, **given: Any) -> Tensor:
    """The newest rows are taken whatever they score, though the config declares no window."""
    return tokens.body(q_THD, weights_TH, keys, **{**given, "window": 2})


def first_rows_forced(q_THD: Tensor, weights_TH: Tensor, keys: Paged, **given: Any) -> Tensor:
    return tokens.body(q_THD, weights_TH, keys, **{**given, "sinks": 1})


def key_bias_dropped(x: Tensor, weight_D: Tensor, bias_D: Tensor | None = None, *, eps: float) -> Tensor:
    return layer.body(x, weight_D, None, eps=eps)


# --- router and experts -------------------------------------------------------------------------------------------


def bias_in_bf16(logits_TE: Tensor, top_k: int, *, bias_E: Tensor, **given: Any) -> Any:
    return route.body(logits_TE, top_k, bias_E=bias_E.bfloat16().float(), **given)


def bias_also_weighs(logits_TE: Tensor, top_k: int, **given: Any) -> Any:
    """The weights come from the biased scores that should only choose."""
    ids_TN, weights_TN = route.body(logits_TE, top_k, **{**given, "renormalise": False, "scale": 1.0})
    biased_TN = weights_TN + given["bias_E"][ids_TN]
    return ids_TN, biased_TN / biased_TN.sum(-1, keepdim=True) * given["scale"]


def weighed_before(x_TD: Tensor, ids_TN: Tensor, weights_TN: Tensor, *matrices: Any, **given: Any) -> Tensor:
    """The router's weight multiplies an expert's input instead of its output."""
    total = torch.zeros_like(x_TD)
    for n in range(ids_TN.shape[1]):
        ones = torch.ones_like(weights_TN[:, n : n + 1])
        total += experts.body(x_TD * weights_TN[:, n : n + 1], ids_TN[:, n : n + 1], ones, *matrices, **given)
    return total


def clamp_dropped(x_TD: Tensor, ids_TN: Tensor, weights_TN: Tensor, gate: Tensor, up: Tensor, down: Tensor,
                  activation: Mapping[str, Any], **given: Any) -> Tensor:  # fmt: skip
    return experts.body(x_TD, ids_TN, weights_TN, gate, up, down, {**activation, "limit": 1e9}, **given)


def gate_clamped_below(x_TD: Tensor, ids_TN: Tensor, weights_TN: Tensor, gate: Tensor, up: Tensor, down: Tensor,
                       activation: Mapping[str, Any], *, biases: Any) -> Tensor:  # fmt: skip
    """The gate is clamped on both sides; only from above is right."""
    total, limit = torch.zeros_like(x_TD), activation["limit"]
    for n in range(ids_TN.shape[1]):
        for expert in ids_TN[:, n].unique().tolist():
            rows = ids_TN[:, n] == expert
            g = matmul.body(x_TD[rows], gate[expert], biases[0][expert]).clamp(-limit, limit)
            u = matmul.body(x_TD[rows], up[expert], biases[1][expert])
            out = matmul.body(glu.body(g, u, **activation), down[expert], biases[2][expert])
            total[rows] += weights_TN[rows, n, None] * out
    return total


# --- norms --------------------------------------------------------------------------------------------------------


def offset_in_bf16(x: Tensor, weight_D: Tensor, *, offset: bool, **given: Any) -> Tensor:
    """1 + w is rounded to bfloat16, as a loader does that stores the sum."""
    return rms.body(x, (1 + weight_D).bfloat16().float() if offset else weight_D, offset=False, **given)


def mean_removed(x: Tensor, weight_D: Tensor, **given: Any) -> Tensor:
    """A layer norm where an RMS norm is meant."""
    return rms.body(x - x.mean(-1, keepdim=True), weight_D, **given)


@inside("norm")
def gate_before_norm(x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float, act: str) -> Tensor:
    """The gate multiplies before the norm; it belongs behind it."""
    squash = torch.sigmoid if act == "sigmoid" else torch.nn.functional.silu
    y = x.float() * squash(gate.float())
    return (y * inverse_rms(y, eps) * weight_D.float()).to(x.dtype)


@inside("norm")
def other_output_gate(x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float, act: str) -> Tensor:
    return rms_gated.body(x, gate, weight_D, eps=eps, act="silu" if act == "sigmoid" else "sigmoid")


# --- recurrence and convolution -----------------------------------------------------------------------------------


@inside("recur")
def beta_squashed_twice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor | None) -> Any:
    return delta_recurrent.body(q, k, v, g, torch.sigmoid(beta_TH), state)


@inside("recur")
def key_heads_tiled(q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, *rest: Any) -> Any:
    """Value head h uses key head h % G instead of h // (H / G)."""
    times = v_THV.shape[1] // q_TGK.shape[1]
    return delta_recurrent.body(q_TGK.repeat(1, times, 1), k_TGK.repeat(1, times, 1), v_THV, *rest)


@inside("recur")
def state_in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """The state is kept in bfloat16 between steps: a run without chunks shows nothing."""
    out, after = delta_recurrent.body(q, k, v, g, beta, None if state is None else state.bfloat16().float())
    return out, after


@inside("recur")
def norm_by_mean(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """Keys and queries are divided by the root of the mean of their squares, not of the sum.

    Queries stay right here: only k's wrong length is shown. The rule with k -> c k is the rule with beta -> c^2 beta
    and a state c times as large, which the reference computes.
    """
    width = k.shape[-1]
    out, after = delta_recurrent.body(q, k, v, g, (beta * width).clamp(max=1.9), state)
    return out * width**-0.5, after


@inside("recur")
def transposed_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """Queries and keys change places: the state is written by q and read by k."""
    return delta_recurrent.body(k, q, v, g, beta, state)


@inside("recur")
def unstable_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """The chunked form with e^(sum of g) and its inverse taken apart in float32: the inverse overflows at real decay.

    o_i = q_i (e^G_i S) + sum_j (q_i e^G_i)(k_j e^-G_j) u_j, with u from the triangular system of the same products.
    """
    q_, k_, v_, g_, beta_ = (x.float() for x in _prepare(q, k, v, g, beta))
    total = g_.cumsum(1)
    grown, shrunk = k_ * (-total).exp(), k_ * total.exp()
    s = torch.zeros(v_.shape[0], k_.shape[2], v_.shape[2]) if state is None else state
    system = torch.eye(v_.shape[1]) + (beta_ * (shrunk @ grown.transpose(1, 2))).tril(-1)
    u = torch.linalg.solve_triangular(system, beta_ * (v_ - shrunk @ s), upper=False)
    q_shrunk = q_ * total.exp()
    out = q_shrunk @ s + (q_shrunk @ grown.transpose(1, 2)).tril() @ u
    last = total[:, -1:]
    after = s * last.exp().transpose(1, 2) + (k_ * (last - total).exp()).transpose(1, 2) @ u
    return out.transpose(0, 1).to(v.dtype), after


@inside("recur")
def query_scale_forgotten(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """Queries are not scaled by K^-0.5. The norm behind hides it but for its eps."""
    out, after = delta_recurrent.body(q, k, v, g, beta, state)
    return out * q.shape[-1] ** 0.5, after


@inside("gate_softplus")
def step_bias_dropped(z: Tensor, a_log_H: Tensor, dt_bias: Tensor) -> Tensor:
    return gate_softplus.body(z, a_log_H, torch.zeros_like(dt_bias))


@inside("gate_softplus")
def rate_not_exponential(z: Tensor, a_log_H: Tensor, dt_bias: Tensor) -> Tensor:
    """A_log is used as A."""
    return gate_softplus.body(z, a_log_H.clamp(min=1e-3).log(), dt_bias)


@inside("convolve")
def window_of_zeros(x_TC: Tensor, weight_CW: Tensor, state_SC: Tensor | None = None, **given: Any) -> Any:
    """Each chunk starts with zeros instead of the inputs before it: only a run in chunks shows it."""
    return convolve.body(x_TC, weight_CW, None, **given)


@inside("convolve")
def taps_reversed(x_TC: Tensor, weight_CW: Tensor, *rest: Any, **given: Any) -> Any:
    return convolve.body(x_TC, weight_CW.flip(1), *rest, **given)


@inside("convolve")
def activation_dropped(x_TC: Tensor, weight_CW: Tensor, *rest: Any, act: str | None = None) -> Any:
    return convolve.body(x_TC, weight_CW, *rest, act=None)


# --- which of them is planted where -------------------------------------------------------------------------------

# (function, contract, kind, report, twin, pattern)
TABLE: tuple[tuple[Any, str, str, str, str, str], ...] = (
    (sinks_dropped, "attention.paged", "A", "vllm#49815", "sinks", first("layers.0.mixer")),
    (sinks_scaled, "attention.paged", "F", "", "sinks", first("layers.0.mixer")),
    (heads_tiled, "attention.paged", "E", "", "sinks", first("layers.0.mixer")),
    (values_first, "latent.absorb", "E", "sglang-jax#1036", "latent", first("layers.0.mixer")),
    (position_shifted, "rope.apply", "E", "", "sinks", first("layers.0.mixer")),
    (relu_dropped, "sparse_index.tokens", "E", "", "index", first("layers.0.index")),
    (weights_in_bf16, "sparse_index.tokens", "E", "", "index_long", r"^first diverging: layers\.\d\.index$"),
    (one_fewer, "sparse_index.tokens", "E", "", "index", first("layers.0.index")),
    (start_forgotten, "sparse_index.tokens", "E", "sglang#12583", "index", r"align\.floor.*layers\.0\.mixer"),
    (local_window_forced, "sparse_index.tokens", "E", "", "index", first("layers.0.index")),
    (first_rows_forced, "sparse_index.tokens", "E", "", "index", first("layers.0.index")),
    (key_bias_dropped, "norm.layer", "A", "", "index", first("layers.0.index")),
    (bias_in_bf16, "moe.route", "G", "sglang#37133", "latent", first("layers.3.experts")),
    (bias_also_weighs, "moe.route", "G", "TensorRT-LLM#13328", "latent", first("layers.3.channel")),
    (weighed_before, "moe.experts", "G", "", "latent", first("layers.3.channel")),
    (clamp_dropped, "moe.experts", "F", "sglang-das#118", "sinks", first("layers.0.channel")),
    (gate_clamped_below, "moe.experts", "F", "sglang#40035", "sinks", first("layers.0.channel")),
    (offset_in_bf16, "norm.rms", "F", "lmdeploy#4790", "head_delta", first("layers.0.mixer")),
    (mean_removed, "norm.rms", "F", "", "tied", first("layers.0.mixer")),
    (gate_before_norm, "recurrence.paged", "F", "", "head_delta", first("layers.0.mixer")),
    (other_output_gate, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
    (beta_squashed_twice, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
    (norm_by_mean, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
    (transposed_state, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
    (unstable_chunk, "recurrence.paged", "F", "tt-metal#53508", "channel_delta", first("layers.2.mixer")),
    (key_heads_tiled, "recurrence.paged", "F", "shainet#176", "head_delta", first("layers.0.mixer")),
    (state_in_bf16, "recurrence.paged", "F", "", "head_delta", r"align\.floor.*layers\.0\.mixer"),
    (query_scale_forgotten, "recurrence.paged", "F", "shainet#176", "head_delta", first("layers.0.mixer")),
    (step_bias_dropped, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
    (rate_not_exponential, "recurrence.paged", "F", "", "head_delta", first("layers.0.mixer")),
    (window_of_zeros, "recurrence.paged", "F", "", "channel_delta", r"align\.floor.*layers\.0\.mixer"),
    (taps_reversed, "recurrence.paged", "F", "", "head_delta", first("layers.0.mixer")),
    (activation_dropped, "recurrence.paged", "F", "", "channel_delta", first("layers.0.mixer")),
)  # fmt: skip


def _bound(contract: str, name: str) -> Plant:
    return lambda stack: {contract: name}


def variants_of(table: Iterable[tuple[Any, str, str, str, str, str]]) -> dict[str, dict[str, str]]:
    """contract -> variant -> ``module:function``. A site behind the contract's name says where it is bound."""
    out: dict[str, dict[str, str]] = {}
    for function, contract, *_ in table:
        place = f"{function.__module__}:{function.__name__}"
        out.setdefault(contract.partition("@")[0], {})[function.__name__] = place
    return out


def faults_of(table: Iterable[tuple[Any, str, str, str, str, str]]) -> tuple[Fault, ...]:
    """One fault a line, named after its function and its site or twin: a function may stand in several lines."""
    return tuple(
        Fault(
            f"{function.__name__.replace('_', ' ')} in {contract.partition('@')[2] or twin}",
            kind,
            report,
            twin,
            "align",
            names,
            plant=_bound(contract, function.__name__),
        )
        for function, contract, kind, report, twin, names in table
    )


VARIANTS = variants_of(TABLE)
FAULTS = faults_of(TABLE)
