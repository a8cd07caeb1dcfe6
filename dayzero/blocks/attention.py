"""Grouped-query softmax attention over each sequence's pages.

T tokens of the step, H query heads, K key heads, D head width.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from dayzero.arch.mixers import Attention
from dayzero.blocks.site import Params, Site, Unary
from dayzero.view import StepView, TokenStore


class AttentionBlock:
    """``Attention``: projections, per-head norms, rotation, history, softmax with window and sinks, gate, output.

    Stores: ``<site>.k`` and ``<site>.v`` [K, D] a token, keys normed and rotated; with ``kv_layer`` they are that
    layer's, which has written them in this step already.
    """

    def __init__(self, spec: Attention, params: Params, site: Site) -> None:
        self.spec, self.site = spec, site
        self.project = site.linears(params, spec.made, bias=spec.bias)
        self.o = site.linear(params, "o", bias=spec.out_bias)
        self.rope = site.rope(spec.rope)
        self.norms: dict[str, Unary] = {}
        if spec.qk_norm is not None:
            self.norms = {n: site.norm(spec.qk_norm, params, f"{n}_norm") for n in spec.made if n != "v"}
        self.sinks_H = params["sinks"] if spec.sinks else None
        self.attend = site.op("attention.paged", "attend")
        self.write = {n: site.op("cache.write", n) for n in spec.made if n != "q"}
        self.gate = site.op("attention.gate", "gate") if spec.gate else None

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's keys and values to the stores, unless it reads another layer's."""
        spec = self.spec
        made = dict(zip(spec.made, self.project(x_TD), strict=True))
        q_THD, gate_THD = self._queries(made["q"])
        q_THD = self._turned("q", q_THD, view)
        k_store = cast(TokenStore, view.stores[self.site.part("k")])
        v_store = cast(TokenStore, view.stores[self.site.part("v")])
        if spec.kv_layer is None:
            k_TKD, v_TKD = (made[n].unflatten(-1, (spec.kv_heads, spec.head_dim)) for n in ("k", "v"))
            k_store.append(view, self._turned("k", k_TKD, view), self.write["k"])
            v_store.append(view, v_TKD, self.write["v"])
        out_THD, _ = self.attend(
            q_THD, k_store.pages(view), v_store.pages(view),
            scale=spec.softmax_scale, window=spec.window, sinks_H=self.sinks_H,
        )  # fmt: skip
        if self.gate is not None:
            out_THD = self.gate(out_THD, gate_THD)
        return self.o(out_THD.flatten(-2))

    def _turned(self, part: str, x_THD: Tensor, view: StepView) -> Tensor:
        """Normed, where there is a norm, and rotated."""
        return self.rope(self.norms[part](x_THD) if part in self.norms else x_THD, view.positions)

    def _queries(self, made_TN: Tensor) -> tuple[Tensor, Tensor | None]:
        """(q [T, H, D], gate [T, H, D] or None): with a gate, rows of q are [q | gate] head by head."""
        heads = made_TN.unflatten(-1, (self.spec.heads, -1))
        if not self.spec.gate:
            return heads, None
        q_THD, gate_THD = heads.split(self.spec.head_dim, dim=-1)
        return q_THD, gate_THD
