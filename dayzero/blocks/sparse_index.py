"""The sparse index: which positions a layer's queries attend to, and where the selection waits for later layers.

T tokens, H index heads, D index width, K listed positions.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from dayzero.arch.index import AnyIndex, Index, LocalIndex
from dayzero.blocks.site import Params, Site
from dayzero.ops.sparse_index import Pooling
from dayzero.view import Paged, StepView, TokenStore

SELECTED = "index.selected"  # scratch name of the newest selection [T, K]


class Generator(Protocol):
    """A layer's index that makes lists of its own."""

    def select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        """Listed positions [T, K] int64, ascending, -1 pads at the end.

        x: the layer's input; query [T, R]: what the index queries are projected from (the normed q latent).
        """


def build_index(spec: AnyIndex, params: Params, site: Site, keep: bool) -> Generator:
    """The block that computes ``spec``, which must not share another layer's lists. keep: as in ``IndexBlock``."""
    return LocalIndexBlock(spec, site) if isinstance(spec, LocalIndex) else IndexBlock(spec, params, site, keep)


class IndexBlock:
    """``Index`` that owns an indexer. Store: ``<site>.k`` [D] a token, normed and rotated; with gated pools also
    ``<site>.pool_gate`` [D]. keep: leave the lists to later layers; else they go when this layer has read them."""

    def __init__(self, spec: Index, params: Params, site: Site, keep: bool = True) -> None:
        assert not spec.shared, "a shared index has no indexer of its own"
        self.spec, self.site, self.keep = spec, site, keep
        self.q, self.k = site.linear(params, "q"), site.linear(params, "k")
        self.k_norm = site.norm(spec.key_norm, params, "k_norm")
        self.weights = site.linear(params, "weights", f32=True)
        self.rope = site.rope(spec.rope)
        self.gate = site.linear(params, "pool_gate") if spec.gated else None
        self.bias_SD = params["pool_bias"] if spec.gated else None
        self.write = {n: site.op("cache.write", n) for n in (("k", "pool_gate") if spec.gated else ("k",))}
        self.generate = site.op(f"sparse_index.{spec.generator}", "select")

    def select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        """As in ``Generator``; left in the scratch where layers share them."""
        spec = self.spec
        view.scratch.pop(SELECTED, None)  # no layer from here on reads the last one's
        q_THD = self.rope(self.q(query_TR).unflatten(-1, (spec.heads, spec.head_dim)), view.positions)
        k_TD = self.rope(self.k_norm(self.k(x_TD))[:, None], view.positions)[:, 0]
        keys, weights_TH = self._kept("k", k_TD, view), self.weights(x_TD)
        if spec.pool is None:
            selected_TK = self.generate(
                q_THD, weights_TH, keys, scale=spec.scale, k=spec.top_k, sinks=spec.sinks, window=spec.window
            )
        else:
            gates = None if self.gate is None else self._kept("pool_gate", self.gate(x_TD), view)
            pooling = Pooling(spec.pool.size, spec.pool.local, spec.pool.tail, gates, self.bias_SD)
            selected_TK = self.generate(q_THD, weights_TH, keys, pooling, scale=spec.scale, pools=spec.pools)
        if self.keep:
            view.scratch[SELECTED] = selected_TK
        return selected_TK

    def _kept(self, part: str, values_TD: Tensor, view: StepView) -> Paged:
        store = cast(TokenStore, view.stores[self.site.part(part)])
        store.append(view, values_TD, self.write[part])
        return store.pages(view)


class LocalIndexBlock:
    """``LocalIndex``: lists made from positions alone. No parameters, no store."""

    def __init__(self, spec: LocalIndex, site: Site) -> None:
        self.spec, self.generate = spec, site.op("sparse_index.window", "select")

    def select(self, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        if view.num_single == len(view.spans):  # as in a recorded step, where only the device knows where rows stand
            own_T = view.start.long()
        else:
            own_T = torch.cat([torch.arange(s.start, s.start + s.count, device=x_TD.device) for s in view.spans])
        return self.generate(own_T, window=self.spec.window, sinks=self.spec.sinks)


def last_selection(view: StepView, site: str) -> Tensor:
    """What the last layer with an indexer selected in this step [T, K]."""
    found = view.scratch.get(SELECTED)
    assert isinstance(found, Tensor), f"{site} shares an index, but no earlier layer of this step made one"
    return found
