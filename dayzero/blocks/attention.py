"""Grouped-query softmax attention over each sequence's pages.

T tokens of the step, H query heads, K key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from dayzero.arch.mixers import Attention
from dayzero.blocks.site import Params, Site, Unary, turns
from dayzero.ops.heads_write import HeadNorms, Kept, norm_rope_write
from dayzero.ops.latent_write import Turn
from dayzero.view import Codec, StepView, TokenStore

Heads = tuple[Tensor, Tensor, Tensor]  # q [T, H, D], k and v [T, K, D], as projected
Enter = Callable[[Heads, TokenStore, TokenStore, StepView], Tensor]  # (heads, keys' store, values', view) -> q


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Heads normed, turned and written by one operator: each store says where its records lie, the second one last."""

    op: Callable[..., Tensor]
    norms: HeadNorms | None
    turn_of: Callable[[Tensor], Turn | None]

    def __call__(self, heads: Heads, k_store: TokenStore, v_store: TokenStore, view: StepView) -> Tensor:
        q_THD, k_TKD, v_TKD = heads
        entered: list[Tensor] = []

        def keys(k: Tensor, k_rows: Tensor, blocks: Tensor, offsets: Tensor, codec: Codec | None) -> None:
            def values(v: Tensor, v_rows: Tensor, *places: Any) -> None:
                kept = Kept(k_rows, v_rows, blocks, offsets)
                entered.append(self.op(q_THD, k, v, kept, codec, self.norms, self.turn_of(view.positions)))

            v_store.append(view, v_TKD, values)

        k_store.append(view, k_TKD, keys)
        return entered[0]


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
        self.enter: Enter = self._at_once(params) or self._in_turn
        self.gate = site.op("attention.gate", "gate") if spec.gate else None

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's keys and values to the stores, unless it reads another layer's."""
        spec = self.spec
        made = dict(zip(spec.made, self.project(x_TD), strict=True))
        q_THD, gate_THD = self._queries(made["q"])
        k_store = cast(TokenStore, view.stores[self.site.part("k")])
        v_store = cast(TokenStore, view.stores[self.site.part("v")])
        if spec.kv_layer is not None:
            q_THD = self._turned("q", q_THD, view)
        else:
            k_TKD, v_TKD = (made[n].unflatten(-1, (spec.kv_heads, spec.head_dim)) for n in ("k", "v"))
            q_THD = self.enter((q_THD, k_TKD, v_TKD), k_store, v_store, view)
        out_THD, _ = self.attend(
            q_THD, k_store.pages(view), v_store.pages(view),
            scale=spec.softmax_scale, window=spec.window, sinks_H=self.sinks_H,
        )  # fmt: skip
        if self.gate is not None:
            out_THD = self.gate(out_THD, gate_THD)
        return self.o(out_THD.flatten(-2))

    def _at_once(self, params: Params) -> AtOnce | None:
        """None where no operator is bound that does all: the reference is the operators in turn, so those that are
        bound to them do the work."""
        if not self.spec.enters_at_once:
            return None
        op, norm = self.site.op(norm_rope_write.name, "qkv"), self.spec.qk_norm
        if op is norm_rope_write.body:
            return None
        norms = None
        if norm is not None:
            norms = HeadNorms(params["q_norm"], params["k_norm"], norm.eps, norm.offset, norm.scale_in)
        return AtOnce(op, norms, turns(self.spec.rope))

    def _in_turn(self, heads: Heads, k_store: TokenStore, v_store: TokenStore, view: StepView) -> Tensor:
        q_THD, k_TKD, v_TKD = heads
        q_THD = self._turned("q", q_THD, view)
        k_store.append(view, self._turned("k", k_TKD, view), self.write["k"])
        v_store.append(view, v_TKD, self.write["v"])
        return q_THD

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
