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
        raw_decay = "a" if spec.decay == "head" else "f"
        decay = _pair(raw_decay, None if spec.decay == "head" else spec.decay_rank)
        gate = _pair("gate", spec.gate_rank)
        # beta last: what stands before it begins at whole 16 bytes of a joint product's row
        self.project = site.linears(params, ("q", "k", "v", decay[0], gate[0], "beta"))
        self.decay, self.out_gate = (self._rest(params, names) for names in (decay, gate))
        shape = (spec.heads,) if spec.decay == "head" else (spec.heads, spec.key_dim)
        self.weights = Weights(
            params["q_conv"], params["k_conv"], params["v_conv"], params["a_log"], params["dt_bias"].reshape(shape),
            params["o_norm"],
        )  # fmt: skip
        self.o = site.linear(params, "o")
        bound = site.op("recurrence.paged", "recur")
        recur: Callable[..., Tensor] = bound if recurrence == "recurrent" else paged_chunked
        self.recur = partial(recur, eps=spec.norm_eps, act=spec.out_gate, lower=spec.lower)

    def _rest(self, params: Params, names: tuple[str, ...]) -> Unary:
        """What follows the projection ``names[0]``: the second of a low-rank pair, or nothing."""
        return self.site.linear(params, names[1]) if len(names) > 1 else lambda x: x

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; replaces the state and the convolution windows of every sequence in the step."""
        q_TC, k_TC, v_TC, decay, gate, beta_TH = self.project(x_TD)
        z = self.decay(decay)
        if self.spec.decay == "channel":
            z = z.unflatten(-1, (self.spec.heads, self.spec.key_dim))
        raw = Raw(q_TC, k_TC, v_TC, z, beta_TH, self.out_gate(gate))
        return self.o(self.recur(raw, self.weights, self._kept(view)).flatten(-2))

    def _kept(self, view: StepView) -> Kept:
        """Settled: the projections of this layer stand between the step before and the operator."""
        stores = (view.stores[self.site.part(word)] for word in ("state", "q_conv", "k_conv", "v_conv"))
        state, q, k, v = (cast(StateStore, store).states(view) for store in stores)
        return Kept(
            state.rows, q.rows, k.rows, v.rows, state.table, view.query_start, view.start, view.spans, settled=True
        )


def _pair(name: str, rank: int | None) -> tuple[str, ...]:
    """Names of a projection: one, or a low-rank pair without anything in between."""
    return (name,) if rank is None else (f"{name}_a", f"{name}_b")
