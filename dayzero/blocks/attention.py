"""Grouped-query softmax attention over each sequence's pages.

T tokens of the step, H query heads, K key heads, D head width.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from dayzero.arch.mixers import Attention
from dayzero.blocks.site import Params, Site
from dayzero.view import StepView, TokenStore


class AttentionBlock:
    """``Attention``: projections, per-head norms, rotation, history, softmax with window and sinks, gate, output.

    Stores: ``<site>.k`` and ``<site>.v`` [K, D] a token, keys normed and rotated.
    """

    def __init__(self, spec: Attention, params: Params, site: Site) -> None:
        self.spec, self.site = spec, site
        self.q, self.k, self.v = (site.linear(params, n, bias=spec.bias) for n in ("q", "k", "v"))
        self.o = site.linear(params, "o", bias=spec.out_bias)
        self.rope = site.rope(spec.rope)
        self.q_norm = site.norm(spec.qk_norm, params, "q_norm") if spec.qk_norm else None
        self.k_norm = site.norm(spec.qk_norm, params, "k_norm") if spec.qk_norm else None
        self.sinks_H = params["sinks"] if spec.sinks else None
        self.attend = site.op("attention.paged", "attend")
        self.gate = site.op("attention.gate", "gate") if spec.gate else None

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's keys and values to the stores."""
        spec = self.spec
        q_THD, gate_THD = self._queries(x_TD)
        k_TKD = self.k(x_TD).unflatten(-1, (spec.kv_heads, spec.head_dim))
        v_TKD = self.v(x_TD).unflatten(-1, (spec.kv_heads, spec.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = self.rope(q_THD, view.positions), self.rope(k_TKD, view.positions)
        k_store = cast(TokenStore, view.stores[self.site.part("k")])
        v_store = cast(TokenStore, view.stores[self.site.part("v")])
        k_store.append(view, k_TKD)
        v_store.append(view, v_TKD)
        out_THD, _ = self.attend(
            q_THD, k_store.pages(view), v_store.pages(view),
            scale=spec.softmax_scale, window=spec.window, sinks_H=self.sinks_H,
        )  # fmt: skip
        if self.gate is not None:
            out_THD = self.gate(out_THD, gate_THD)
        return self.o(out_THD.flatten(-2))

    def _queries(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """(q [T, H, D], gate [T, H, D] or None): with a gate, rows of q are [q | gate] head by head."""
        heads = self.q(x_TD).unflatten(-1, (self.spec.heads, -1))
        if not self.spec.gate:
            return heads, None
        q_THD, gate_THD = heads.split(self.spec.head_dim, dim=-1)
        return q_THD, gate_THD
