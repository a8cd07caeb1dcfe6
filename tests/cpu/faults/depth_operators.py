"""Faulty operators that only a model with residuals over depth, bounded decay, gated latent attention and images has.

T tokens, H heads, V value width, C channels, W taps, B bank rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dayzero.ops.activation import gelu
from dayzero.ops.attention import gate
from dayzero.ops.conv import causal as convolve
from dayzero.ops.norm import inverse_rms, rms, rms_gated
from dayzero.ops.recurrence import delta_recurrent, gate_bounded
from dayzero.ops.residual import attn_mix
from tests.cpu.faults.catalogue import first
from tests.cpu.faults.operators import bias_also_weighs, bias_in_bf16, faults_of, inside, variants_of, weighed_before

# --- residuals over depth -----------------------------------------------------------------------------------------


def gamma_on_values(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    return attn_mix.body(partial_TD, bank_BTD, norm_D, proj_D, eps=eps) * norm_D


def normed_values(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    """The keys are mixed instead of the sources as they are."""
    made = [x.float() * inverse_rms(x, eps) for x in (partial_TD, bank_BTD)]
    return attn_mix.body(made[0], made[1], norm_D, proj_D, eps=eps)


def gamma_forgotten(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    return attn_mix.body(partial_TD, bank_BTD, torch.ones_like(norm_D), proj_D, eps=eps)


def query_rounded(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    """The product of norm and projection is stored in bfloat16."""
    query_D = (norm_D * proj_D.reshape(-1)).bfloat16().float()
    return attn_mix.body(partial_TD, bank_BTD, torch.ones_like(norm_D), query_D, eps=eps)


def scores_scaled(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    """Scores are divided by the root of the width, as in attention."""
    return attn_mix.body(partial_TD, bank_BTD, norm_D, proj_D * norm_D.shape[0] ** -0.5, eps=eps)


def sources_in_bf16(partial_TD: Tensor, bank_BTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    low = [x.bfloat16().float() for x in (partial_TD, bank_BTD)]
    return attn_mix.body(low[0], low[1], norm_D, proj_D, eps=eps)


# --- bounded decay, recurrence, convolution -----------------------------------------------------------------------


@inside("gate_bounded")
def decay_clamped(z: Tensor, a_log_H: Tensor, dt_bias: Tensor, *, lower: float) -> Tensor:
    """The unbounded decay cut off at the bound: another function that looks alike."""
    rate = a_log_H.exp().reshape(-1, *[1] * (z.dim() - 2))
    return (-rate * torch.nn.functional.softplus(z + dt_bias)).clamp(min=lower)


@inside("gate_bounded")
def rate_of_one_head(z: Tensor, a_log_H: Tensor, dt_bias: Tensor, *, lower: float) -> Tensor:
    """A_log is broadcast: every head decays with the first one's rate."""
    return gate_bounded.body(z, a_log_H[:1].expand_as(a_log_H), dt_bias, lower=lower)


@inside("gate_bounded")
def padding_for_rates(z: Tensor, a_log_H: Tensor, dt_bias: Tensor, *, lower: float) -> Tensor:
    """The last entries of A_log, which are padding, stand for the first."""
    return gate_bounded.body(z, torch.zeros_like(a_log_H), dt_bias, lower=lower)


@inside("gate_bounded")
def decay_in_bf16(z: Tensor, a_log_H: Tensor, dt_bias: Tensor, *, lower: float) -> Tensor:
    return gate_bounded.body(z, a_log_H.bfloat16().float(), dt_bias.bfloat16().float(), lower=lower)


@inside("recur")
def beta_doubled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor | None) -> Any:
    return delta_recurrent.body(q, k, v, g, 2 * beta_TH, state)


@inside("recur")
def values_first_in_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
    """The state is left as [V, K] and taken as [K, V]: a run without chunks shows nothing."""
    out, after = delta_recurrent.body(q, k, v, g, beta, state)
    return out, after.transpose(-1, -2).contiguous()


@inside("convolve")
def window_of_outputs(x_TC: Tensor, weight_CW: Tensor, state_SC: Tensor | None = None, **given: Any) -> Any:
    """What is kept for the next chunk is behind the convolution and its activation."""
    y_TC, after_SC = convolve.body(x_TC, weight_CW, state_SC, **given)
    return y_TC, torch.cat((after_SC, y_TC))[-after_SC.shape[0] :]


@inside("convolve")
def taps_in_bf16(x_TC: Tensor, weight_CW: Tensor, *rest: Any, **given: Any) -> Any:
    return convolve.body(x_TC, weight_CW.bfloat16().float(), *rest, **given)


@inside("norm")
def output_norm_in_bf16(x: Tensor, gate: Tensor, weight_D: Tensor, **given: Any) -> Tensor:
    return rms_gated.body(x, gate, weight_D.bfloat16().float(), **given)


# --- latent attention's gate, gelu --------------------------------------------------------------------------------


def gate_dropped(out_THV: Tensor, gate_T: Tensor) -> Tensor:
    return out_THV


def gate_of_each_head(out_THV: Tensor, gate_T: Tensor) -> Tensor:
    """One number gates a whole head."""
    return gate.body(out_THV, gate_T.reshape(out_THV.shape)[..., 0])


def mean_kept(x: Tensor, weight_D: Tensor, bias_D: Tensor | None = None, *, eps: float) -> Tensor:
    """An RMS norm where a layer norm is meant; the bias is right."""
    y = rms.body(x, weight_D, eps=eps)
    return y if bias_D is None else y + bias_D


def other_gelu(x: Tensor, *, form: str) -> Tensor:
    return gelu.body(x, form="erf" if form == "tanh" else "tanh")


MIXER, CHANNEL = first("layers.0.mixer"), first("layers.0.channel")
KEPT = r"align\.floor.*layers\.0\.mixer"

# (function, contract or contract@site, kind, report, twin, pattern)
TABLE: tuple[tuple[Any, str, str, str, str, str], ...] = (
    (gamma_on_values, "residual.attn_mix", "F", "vllm-ascend#13315", "depth", MIXER),
    (normed_values, "residual.attn_mix", "F", "", "depth", MIXER),
    (gamma_forgotten, "residual.attn_mix", "F", "", "depth", CHANNEL),
    (query_rounded, "residual.attn_mix", "F", "", "depth", CHANNEL),
    (scores_scaled, "residual.attn_mix", "F", "", "depth", CHANNEL),
    (sources_in_bf16, "residual.attn_mix", "F", "", "depth", MIXER),
    (decay_clamped, "recurrence.paged", "F", "", "depth", MIXER),
    (rate_of_one_head, "recurrence.paged", "A", "", "depth", MIXER),
    (padding_for_rates, "recurrence.paged", "A", "", "depth", MIXER),
    (decay_in_bf16, "recurrence.paged", "A", "", "depth", MIXER),
    (beta_doubled, "recurrence.paged", "F", "", "depth", MIXER),
    (values_first_in_state, "recurrence.paged", "F", "vllm#41292", "depth", KEPT),
    (window_of_outputs, "recurrence.paged", "F", "", "depth", KEPT),
    (taps_in_bf16, "recurrence.paged", "A", "", "depth", MIXER),
    (output_norm_in_bf16, "recurrence.paged", "A", "", "depth", MIXER),
    (gate_dropped, "attention.gate", "E", "", "depth", first("layers.3.mixer")),
    (gate_of_each_head, "attention.gate", "E", "", "depth", first("layers.3.mixer")),
    (bias_in_bf16, "moe.route", "G", "TensorRT-LLM#17061", "depth", first("layers.1.experts")),
    (bias_also_weighs, "moe.route", "G", "", "depth", first("layers.1.channel")),
    (weighed_before, "moe.experts", "G", "", "depth", first("layers.1.channel")),
    (mean_kept, "norm.layer", "F", "", "depth_index", first("layers.3.index")),
    (other_gelu, "activation.gelu@projector.act", "F", "", "depth", first("vision")),
    (other_gelu, "activation.gelu@vision.blocks.0.act", "F", "", "depth", first("vision.blocks.0")),
)  # fmt: skip

VARIANTS = variants_of(TABLE)
FAULTS = faults_of(TABLE)
