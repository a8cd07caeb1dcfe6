"""The gated delta rule: projections around one operator that does the rest (``recurrence.paged``).

T tokens, H value heads, G key heads, K key width, V value width, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

from torch import Tensor

from dayzero.arch.mixers import Delta
from dayzero.blocks.site import Params, Site, Unary
from dayzero.ops.delta_paged import Kept, Raw, Weights, paged_chunked
from dayzero.view import StateStore, StepView

Recurrence = Literal["recurrent", "chunked"]


class DeltaBlock:
    """``Delta``. Stores: ``<site>.state`` [H, K, V] float32, and ``<site>.q_conv``, ``k_conv``, ``v_conv`` [C, W-1]:
    the last inputs of each convolution, before it and its activation.

    recurrence: ``recurrent`` is ``recurrence.paged`` as it is bound; its reference goes token by token, so that a run
    may be split anywhere without a change, and its variants need not. ``chunked`` is that contract's variant of this
    name, whatever is bound: 64 tokens at a time, which differs in the last bits.
    """

    def __init__(self, spec: Delta, params: Params, site: Site, *, recurrence: Recurrence = "recurrent") -> None:
        self.spec, self.site = spec, site
        self.project = {part: site.linear(params, part) for part in ("q", "k", "v")}
        self.decay = self._decay(params)
        self.beta = site.linear(params, "beta")
        self.out_gate = self._pair(params, "gate", spec.gate_rank is not None)
        shape = (spec.heads,) if spec.decay == "head" else (spec.heads, spec.key_dim)
        self.weights = Weights(
            params["q_conv"], params["k_conv"], params["v_conv"], params["a_log"], params["dt_bias"].reshape(shape),
            params["o_norm"],
        )  # fmt: skip
        self.o = site.linear(params, "o")
        bound = site.op("recurrence.paged", "recur")
        recur: Callable[..., Tensor] = bound if recurrence == "recurrent" else paged_chunked
        self.recur = partial(recur, eps=spec.norm_eps, act=spec.out_gate, lower=spec.lower)

    def _pair(self, params: Params, name: str, low_rank: bool) -> Unary:
        """The projection ``name``, or the low-rank pair ``name_a``, ``name_b`` without anything in between."""
        if not low_rank:
            return self.site.linear(params, name)
        first, second = self.site.linear(params, f"{name}_a"), self.site.linear(params, f"{name}_b")
        return lambda x: second(first(x))

    def _decay(self, params: Params) -> Unary:
        """x [T, dim] -> raw decay [T, H, K] (per channel) or [T, H] (per head)."""
        spec = self.spec
        if spec.decay == "head":
            return self._pair(params, "a", False)
        raw = self._pair(params, "f", spec.decay_rank is not None)
        return lambda x: raw(x).unflatten(-1, (spec.heads, spec.key_dim))

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; replaces the state and the convolution windows of every sequence in the step."""
        q_TC, k_TC, v_TC = (self.project[part](x_TD) for part in ("q", "k", "v"))
        raw = Raw(q_TC, k_TC, v_TC, self.decay(x_TD), self.beta(x_TD), self.out_gate(x_TD))
        return self.o(self.recur(raw, self.weights, self._kept(view)).flatten(-2))

    def _kept(self, view: StepView) -> Kept:
        """Settled: the projections of this layer stand between the step before and the operator."""
        stores = (view.stores[self.site.part(word)] for word in ("state", "q_conv", "k_conv", "v_conv"))
        state, q, k, v = (cast(StateStore, store).states(view) for store in stores)
        return Kept(
            state.rows, q.rows, k.rows, v.rows, state.table, view.query_start, view.start, view.spans, settled=True
        )
