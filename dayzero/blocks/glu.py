"""The gated dense channel mixer: down(act(gate x, up x))."""

from __future__ import annotations

from torch import Tensor

from dayzero.arch.channels import GLU
from dayzero.blocks.site import Params, Site, activation_args
from dayzero.view import StepView


class GLUBlock:
    """``GLU``."""

    def __init__(self, spec: GLU, params: Params, site: Site) -> None:
        self.gate_up, self.down = site.linears(params, ("gate", "up")), site.linear(params, "down")
        self.act, self.act_args = site.op("activation.glu", "act"), activation_args(spec.act)

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]."""
        del view
        return self.down(self.act(*self.gate_up(x_TD), **self.act_args))
