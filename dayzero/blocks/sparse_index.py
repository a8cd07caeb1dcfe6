"""The sparse index: which positions a layer's queries attend to, and where the selection waits for later layers.

T tokens, H index heads, D index width, K = top_k selected positions.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dayzero.arch.mixers import Index
from dayzero.blocks.site import Params, Site
from dayzero.view import StepView, TokenStore

SELECTED = "index.selected"  # scratch name of the newest selection [T, K]


class IndexBlock:
    """``Index`` that owns an indexer. Store: ``<site>.k`` [D] a token, normed and rotated."""

    def __init__(self, spec: Index, params: Params, site: Site) -> None:
        assert not spec.shared, "a shared index has no indexer of its own"
        self.spec, self.site = spec, site
        self.q, self.k = site.linear(params, "q"), site.linear(params, "k")
        self.k_norm = site.norm(spec.key_norm, params, "k_norm")
        self.weights = site.linear(params, "weights", f32=True)
        self.rope = site.rope(spec.rope)
        self.score, self.top_k = site.op("sparse_index.score", "score"), site.op("sparse_index.top_k", "top_k")

    def select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        """Selected positions [T, K] int64, ascending, -1 pads; left in the scratch for layers that share them.

        query: what the index queries are projected from (the normed q latent) [T, R].
        """
        spec = self.spec
        q_THD = self.rope(self.q(query_TR).unflatten(-1, (spec.heads, spec.head_dim)), view.positions)
        k_TD = self.rope(self.k_norm(self.k(x_TD))[:, None], view.positions)[:, 0]
        weights_TH = self.weights(x_TD)
        selected_TK = torch.full((x_TD.shape[0], spec.top_k), -1, dtype=torch.int64, device=x_TD.device)
        store = cast(TokenStore, view.stores[self.site.part("k")])
        store.append(view, k_TD)
        for span in view.spans:
            k_LD, first = store.history(view, span)
            assert first == 0, "an index sees the whole sequence"
            scores_TL = self.score(q_THD[span.rows], k_LD, weights_TH[span.rows], start=span.start, scale=spec.scale)
            selected_TK[span.rows] = self.top_k(scores_TL, spec.top_k, start=span.start)
        view.scratch[SELECTED] = selected_TK
        return selected_TK


def last_selection(view: StepView, site: str) -> Tensor:
    """What the last layer with an indexer selected in this step [T, K]."""
    found = view.scratch.get(SELECTED)
    assert isinstance(found, Tensor), f"{site} shares an index, but no earlier layer of this step made one"
    return found
