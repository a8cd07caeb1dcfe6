"""The gated delta rule: short convolutions, gates, recurrence, gated output norm.

T tokens, H value heads, G key heads, K key width, V value width, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dayzero.arch.mixers import Delta
from dayzero.blocks.site import Params, Site, Unary
from dayzero.view import Span, StateStore, StepView

Recurrence = Literal["recurrent", "chunked"]


class DeltaBlock:
    """``Delta``. Stores: ``<site>.state`` [H, K, V] float32, and ``<site>.q_conv``, ``k_conv``, ``v_conv`` [C, W-1]:
    the last inputs of each convolution, before it and its activation.

    recurrence: ``recurrent`` is ``recurrence.delta``, whose reference goes token by token, so that a run may be split
    anywhere without a change, and whose variants need not; ``chunked`` works on 64 tokens at a time and differs in the
    last bits.
    """

    def __init__(self, spec: Delta, params: Params, site: Site, *, recurrence: Recurrence = "recurrent") -> None:
        self.spec, self.site = spec, site
        self.project = {part: site.linear(params, part) for part in ("q", "k", "v")}
        self.taps = {part: params[f"{part}_conv"] for part in self.project}
        self.convolve = {part: site.op("conv.causal", f"{part}_conv") for part in self.project}
        self.decay = self._decay(params)
        self.beta = site.linear(params, "beta")
        self.out_gate = self._pair(params, "gate", spec.gate_rank is not None)
        self.norm_weight_V = params["o_norm"]
        self.norm = site.op("norm.rms_gated", "o_norm")
        self.o = site.linear(params, "o")
        self.recur = self._recurrence(recurrence)

    def _pair(self, params: Params, name: str, low_rank: bool) -> Unary:
        """The projection ``name``, or the low-rank pair ``name_a``, ``name_b`` without anything in between."""
        if not low_rank:
            return self.site.linear(params, name)
        first, second = self.site.linear(params, f"{name}_a"), self.site.linear(params, f"{name}_b")
        return lambda x: second(first(x))

    def _decay(self, params: Params) -> Unary:
        """x [T, dim] -> log-decay [T, H, K] (per channel) or [T, H] (per head), float32."""
        spec, a_log_H, bias = self.spec, params["a_log"], params["dt_bias"]
        per_head = spec.decay == "head"
        raw = self._pair(params, *(("a", False) if per_head else ("f", spec.decay_rank is not None)))
        shape = (spec.heads,) if per_head else (spec.heads, spec.key_dim)
        if spec.lower is None:
            gate = self.site.op("recurrence.gate_softplus", "decay")
        else:
            gate = partial(self.site.op("recurrence.gate_bounded", "decay"), lower=spec.lower)
        return lambda x: gate(raw(x).unflatten(-1, shape), a_log_H, bias.reshape(shape))

    def _recurrence(self, form: Recurrence) -> Callable[..., tuple[Tensor, Tensor]]:
        if form == "recurrent":
            return self.site.op("recurrence.delta", "recur")
        chunked: Callable[..., Any] = self.site.op("recurrence.delta_chunked", "recur")
        return lambda *inputs: chunked(*inputs)[:2]

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; replaces the state and the convolution windows of every sequence in the step."""
        spec = self.spec
        mixed = {part: project(x_TD) for part, project in self.project.items()}
        g, beta_TH = self.decay(x_TD), torch.sigmoid(self.beta(x_TD).double()).float()
        out_THV = x_TD.new_empty(x_TD.shape[0], spec.heads, spec.value_dim)
        state_store = cast(StateStore, view.stores[self.site.part("state")])
        for span in view.spans:
            q, k, v = (self._convolve(part, mixed[part][span.rows], span, view) for part in ("q", "k", "v"))
            out_THV[span.rows], state_HKV = self.recur(
                q.unflatten(-1, (spec.key_heads, spec.key_dim)), k.unflatten(-1, (spec.key_heads, spec.key_dim)),
                v.unflatten(-1, (spec.heads, spec.value_dim)), g[span.rows], beta_TH[span.rows],
                state_store.read(view, span),
            )  # fmt: skip
            state_store.write(view, span, state_HKV)
        gate_THV = self.out_gate(x_TD).unflatten(-1, (spec.heads, spec.value_dim))
        out_THV = self.norm(out_THV, gate_THV, self.norm_weight_V, eps=spec.norm_eps, act=spec.out_gate)
        return self.o(out_THV.flatten(-2))

    def _convolve(self, part: str, x_TC: Tensor, span: Span, view: StepView) -> Tensor:
        store = cast(StateStore, view.stores[self.site.part(f"{part}_conv")])
        window_WC = store.read(view, span).T
        y_TC, window_WC = self.convolve[part](x_TC, self.taps[part], window_WC, act="silu")
        store.write(view, span, window_WC.T)
        return y_TC
