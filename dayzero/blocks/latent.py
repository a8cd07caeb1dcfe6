"""Multi-head latent attention over cached latent rows, dense or at selected positions.

T tokens, H heads, N key width from the latent, P shared key width, D = N + P, R latent width, C = R + P, V value width,
L rows of one sequence's history, A selected positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from dayzero.arch.mixers import MLA
from dayzero.blocks.site import Params, Site, Unary, turns
from dayzero.blocks.sparse_index import Generator, IndexBlock, build_index, last_selection
from dayzero.ops.latent import attend
from dayzero.ops.latent_write import LatentNorm, write_latent
from dayzero.view import Paged, StepView, TokenStore, in_turn

Form = Literal["absorbed", "expanded"]
Whole = Callable[..., Tensor]  # the contract ``latent.attend``


class LatentBlock:
    """``MLA``. Store: ``<site>.latent`` [C] a token: [normed latent | shared key, rotated where there is a rope].

    form: ``absorbed`` moves W_UK to the query and W_UV behind the softmax; ``expanded`` makes keys and values of all
    heads. The absorbed form is ``attention.paged`` over the cached rows, with an index ``attention.sparse``: all heads
    read one key. A variant of ``latent.attend``, where one is bound, chooses between the two row by row. keep_lists:
    whether a later layer reads the lists of this one's index.
    """

    def __init__(
        self, spec: MLA, params: Params, site: Site, *, form: Form = "absorbed", keep_lists: bool = True
    ) -> None:
        self.spec, self.site, self.form = spec, site, form
        gate = ("gate",) if spec.gate else ()
        # What is made of x alone: one product, where a variant takes weights side by side.
        self.project = site.linears(params, ("q" if spec.q_rank is None else "q_a", "kv_a", *gate))
        self.q_b: Unary | None = None
        if spec.q_rank is not None:
            self.q_b = site.linear(params, "q_b")
            self.q_norm = site.norm(spec.norm(spec.q_rank), params, "q_a_norm")
        self.kv_norm = site.norm(spec.norm(spec.kv_rank), params, "kv_a_norm")
        self.kv_b = params["kv_b"]
        self.o = site.linear(params, "o")
        self.write, fused = site.op("cache.write", "latent"), site.op("cache.write_latent", "row")
        norm = spec.norm(spec.kv_rank)
        self.row_norm = LatentNorm(params["kv_a_norm"], norm.eps, norm.scale_in)
        self.turn_of = turns(spec.rope)
        # The reference is the operators one by one: those that are bound to them do the work.
        self.fused = None if fused is write_latent.body else fused
        self.rope = site.rope(spec.rope)
        self.gate = site.op("attention.gate", "gate") if spec.gate else None
        self.index: Generator | None = None
        if spec.index is not None and not spec.index.shared:
            self.index = build_index(spec.index, params.below("index"), site.below("index"), keep_lists)
        if form == "expanded":
            self.attend = site.op("latent.attend_expanded", "attend")
        else:
            self.attend = site.op("attention.paged" if spec.index is None else "attention.sparse", "attend")
            self.into_latent, self.out_of_latent = (
                site.op("latent.queries", "queries"),
                site.op("latent.values", "values"),
            )
            self.w_uk_HNR, self.w_uv_HVR = site.op("latent.absorb", "kv_b")(
                self.kv_b, spec.heads, spec.nope, spec.v_dim
            )
        self.whole: Whole | None = None
        if form == "absorbed" and spec.index is None:
            whole = site.op("latent.attend", "attention")
            self.whole = None if whole is attend.body else whole

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's latent rows, and index keys where the layer has an indexer.

        Beside an indexer's work the queries are made; beside a latent row alone that would not be worth it.
        """
        q_TC, kv_TC, *gate = self.project(x_TD)
        query_TR = x_TD if self.q_b is None else self.q_norm(q_TC)
        store = cast(TokenStore, view.stores[self.site.part("latent")])
        kept = partial(self._keep_and_select, x_TD, query_TR, kv_TC, store, view)
        queries = partial(self._queries, q_TC, query_TR, view)
        beside = view.beside if isinstance(self.index, IndexBlock) else in_turn
        selected_TA, q_THX = beside(kept, queries)
        if self.whole is not None:
            out_THV = self.whole(q_THX, store.pages(view), self.kv_b, scale=self.spec.softmax_scale)
        elif self.form == "absorbed":
            out_THV = self._absorbed(q_THX, store.pages(view), selected_TA, x_TD.dtype)
        else:
            out_THV = self._expanded(q_THX, store, view, selected_TA)
        if self.gate is not None:
            out_THV = self.gate(out_THV, *gate)
        return self.o(out_THV.flatten(-2))

    def _queries(self, q_TC: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        """As attention takes them: [T, H, C] in the absorbed form, [T, H, D] in the expanded one and for ``whole``."""
        spec = self.spec
        q_THD = (q_TC if self.q_b is None else self.q_b(query_TR)).unflatten(-1, (spec.heads, spec.q_dim))
        if spec.rope is not None:
            q_nope, q_shared = q_THD.split((spec.nope, spec.shared), dim=-1)
            q_THD = torch.cat((q_nope, self.rope(q_shared, view.positions)), dim=-1)
        in_latent = self.form == "absorbed" and self.whole is None
        return self.into_latent(q_THD, self.w_uk_HNR) if in_latent else q_THD

    def _keep_and_select(
        self, x_TD: Tensor, query_TR: Tensor, kv_TC: Tensor, store: TokenStore, view: StepView
    ) -> Tensor | None:
        self._keep(kv_TC, store, view)
        return self._select(x_TD, query_TR, view)

    def _keep(self, kv_TC: Tensor, store: TokenStore, view: StepView) -> None:
        """Norm the latent, turn the shared key, write the rows."""
        if self.fused is not None:
            turn = self.turn_of(view.positions)
            store.append(view, kv_TC, partial(self.fused, norm=self.row_norm, turn=turn))
            return
        latent_TR, shared_TP = kv_TC.split((self.spec.kv_rank, self.spec.shared), dim=-1)
        shared_TP = self.rope(shared_TP[:, None], view.positions)[:, 0]
        store.append(view, torch.cat((self.kv_norm(latent_TR), shared_TP), dim=-1), self.write)

    def _select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor | None:
        if self.spec.index is None:
            return None
        if self.index is not None:
            selected_TA = self.index.select(x_TD, query_TR, view)
        else:
            selected_TA = last_selection(view, self.site.name)
        self.site.show_layer("index", selected_TA)
        return selected_TA

    def _expanded(self, q_THD: Tensor, store: TokenStore, view: StepView, selected_TA: Tensor | None) -> Tensor:
        """[T, H, V], each sequence over a copy of its history."""
        out_THV = q_THD.new_empty(q_THD.shape[0], self.spec.heads, self.spec.v_dim)
        for span in view.spans:
            cache_LC, first = store.history(view, span)
            assert first == 0, "latent attention sees the whole sequence"
            listed = {} if selected_TA is None else {"allowed_TA": selected_TA[span.rows]}
            out_THV[span.rows], _ = self.attend(
                q_THD[span.rows], cache_LC, self.kv_b, start=span.start, scale=self.spec.softmax_scale, **listed
            )
        return out_THV

    def _absorbed(self, q_THC: Tensor, rows: Paged, selected_TA: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[T, H, V]: the cached rows are one key head, and begin with its values."""
        listed = () if selected_TA is None else (selected_TA,)
        out_THR, _ = self.attend(
            q_THC, rows.headed(), None, *listed, scale=self.spec.softmax_scale, value_dim=self.spec.kv_rank
        )
        return self.out_of_latent(out_THR, self.w_uv_HVR, dtype)
