"""What the specs compute. T tokens, D model width, W width of the mean."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dayzero.blocks.site import Params, Site
from dayzero.view import StepView, TokenStore
from nova_dayzero.specs import MeanWindow, Squared


class MeanBlock:
    """``MeanWindow``. Store: ``<site>.v`` [W] a token."""

    def __init__(self, spec: MeanWindow, params: Params, site: Site) -> None:
        self.spec, self.site = spec, site
        self.v, self.gate, self.o = (site.linear(params, n) for n in ("v", "gate", "o"))
        self.average = site.op("average.window", "average")

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]; appends the step's values to the store."""
        v_TW = self.v(x_TD)
        out_TW = torch.empty_like(v_TW)
        store = cast(TokenStore, view.stores[self.site.part("v")])
        store.append(view, v_TW)
        for span in view.spans:
            rows_LW, _ = store.history(view, span)
            out_TW[span.rows] = self.average(rows_LW, span.count, self.spec.window)
        return self.o((torch.sigmoid(self.gate(x_TD).double()) * out_TW.double()).to(x_TD.dtype))


class SquaredBlock:
    """``Squared``."""

    def __init__(self, spec: Squared, params: Params, site: Site) -> None:
        del spec
        self.up, self.down = site.linear(params, "up"), site.linear(params, "down")
        self.act = site.op("activation.relu_squared", "act")

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]."""
        del view
        return self.down(self.act(self.up(x_TD)))
