"""Multi-head latent attention over cached latent rows, dense or at selected positions.

T tokens, H heads, N key width from the latent, P shared key width, D = N + P, R latent width, C = R + P, V value width,
L rows of one sequence's history, A selected positions.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from dayzero.arch.mixers import MLA
from dayzero.blocks.site import Params, Site, Unary
from dayzero.blocks.sparse_index import IndexBlock, last_selection
from dayzero.view import Span, StepView, TokenStore

Form = Literal["absorbed", "expanded"]
Sparse = Literal["gather", "masked"]


class LatentBlock:
    """``MLA``. Store: ``<site>.latent`` [C] a token: [normed latent | shared key, rotated where there is a rope].

    form: ``absorbed`` moves W_UK to the query and W_UV behind the softmax; ``expanded`` makes keys and values of all
    heads. sparse: with an index, ``gather`` reads only the selected rows, ``masked`` scores all rows and masks.
    """

    def __init__(
        self, spec: MLA, params: Params, site: Site, *, form: Form = "absorbed", sparse: Sparse = "gather"
    ) -> None:
        self.spec, self.site, self.form, self.sparse = spec, site, form, sparse
        self.q_a: Unary | None = None
        if spec.q_rank is None:
            self.q_b = site.linear(params, "q")
        else:
            self.q_a, self.q_b = site.linear(params, "q_a"), site.linear(params, "q_b")
            self.q_norm = site.norm(spec.norm(spec.q_rank), params, "q_a_norm")
        self.kv_a = site.linear(params, "kv_a")
        self.kv_norm = site.norm(spec.norm(spec.kv_rank), params, "kv_a_norm")
        self.kv_b = params["kv_b"]
        self.o = site.linear(params, "o")
        self.rope = site.rope(spec.rope)
        self.gate_of = site.linear(params, "gate") if spec.gate else None
        self.gate = site.op("attention.gate", "gate") if spec.gate else None
        self.index: IndexBlock | None = None
        if spec.index is not None and not spec.index.shared:
            self.index = IndexBlock(spec.index, params.below("index"), site.below("index"))
        self.attend = site.op(f"latent.attend_{form}", "attend")
        if spec.index is not None and (form, sparse) == ("absorbed", "masked"):
            self.attend_rows = site.op("attention.sparse", "attend")
            self.w_uk_HNR, self.w_uv_HVR = site.op("latent.absorb", "kv_b")(
                self.kv_b, spec.heads, spec.nope, spec.v_dim
            )

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's latent rows, and index keys where the layer has an indexer."""
        spec = self.spec
        query_TR = x_TD if self.q_a is None else self.q_norm(self.q_a(x_TD))
        q_THD = self.q_b(query_TR).unflatten(-1, (spec.heads, spec.q_dim))
        latent_TR, shared_TP = self.kv_a(x_TD).split((spec.kv_rank, spec.shared), dim=-1)
        if spec.rope is not None:
            q_nope, q_shared = q_THD.split((spec.nope, spec.shared), dim=-1)
            q_THD = torch.cat((q_nope, self.rope(q_shared, view.positions)), dim=-1)
            shared_TP = self.rope(shared_TP[:, None], view.positions)[:, 0]
        rows_TC = torch.cat((self.kv_norm(latent_TR), shared_TP), dim=-1)
        selected_TA = self._select(x_TD, query_TR, view)
        store = cast(TokenStore, view.stores[self.site.part("latent")])
        out_THV = x_TD.new_empty(x_TD.shape[0], spec.heads, spec.v_dim)
        store.append(view, rows_TC)
        for span in view.spans:
            cache_LC, first = store.history(view, span)
            assert first == 0, "latent attention sees the whole sequence"
            out_THV[span.rows] = self._attend(q_THD[span.rows], cache_LC, span, selected_TA)
        if self.gate is not None and self.gate_of is not None:
            out_THV = self.gate(out_THV, self.gate_of(x_TD))
        return self.o(out_THV.flatten(-2))

    def _select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor | None:
        if self.spec.index is None:
            return None
        if self.index is not None:
            selected_TA = self.index.select(x_TD, query_TR, view)
        else:
            selected_TA = last_selection(view, self.site.name)
        self.site.show_layer("index", selected_TA)
        return selected_TA

    def _attend(self, q_THD: Tensor, cache_LC: Tensor, span: Span, selected_TA: Tensor | None) -> Tensor:
        """[T, H, V] of one span."""
        scale = self.spec.softmax_scale
        if selected_TA is None:
            return self.attend(q_THD, cache_LC, self.kv_b, start=span.start, scale=scale)[0]
        allowed_TA = selected_TA[span.rows]
        native = "gather" if self.form == "absorbed" else "masked"
        if self.sparse == native:
            return self.attend(q_THD, cache_LC, self.kv_b, start=span.start, scale=scale, allowed_TA=allowed_TA)[0]
        if self.sparse == "masked":
            return self._absorbed_masked(q_THD, cache_LC, span.start, allowed_TA)
        outs = []
        for i, allowed_A in enumerate(allowed_TA):
            rows = allowed_A[allowed_A >= 0]
            # Selected rows are all visible, so the query stands at the last of them.
            start = rows.shape[0] - 1
            outs.append(self.attend(q_THD[i : i + 1], cache_LC[rows], self.kv_b, start=start, scale=scale)[0])
        return torch.cat(outs)

    def _absorbed_masked(self, q_THD: Tensor, cache_LC: Tensor, start: int, allowed_TA: Tensor) -> Tensor:
        """All heads read one key and value head, the cached rows: what a sparse multi-query kernel computes."""
        nope, rank = self.spec.nope, self.spec.kv_rank
        q_64 = q_THD.double()
        q_latent = torch.einsum("thn,hnr->thr", q_64[..., :nope], self.w_uk_HNR.double())
        rows_LKC = cache_LC.double()[:, None]
        out_THR, _ = self.attend_rows(
            torch.cat((q_latent, q_64[..., nope:]), dim=-1), rows_LKC, rows_LKC[..., :rank], allowed_TA,
            start=start, scale=self.spec.softmax_scale,
        )  # fmt: skip
        return torch.einsum("thr,hvr->thv", out_THR, self.w_uv_HVR.double()).to(q_THD.dtype)
