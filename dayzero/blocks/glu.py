"""The gated dense channel mixer: down(act(gate x, up x))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dayzero.arch.channels import GLU
from dayzero.blocks.site import Params, Site, Unary, activation_args
from dayzero.ops.fp8_blocks import joined
from dayzero.ops.linear import matmul_add, matmul_glu
from dayzero.view import StepView


class GLUBlock:
    """``GLU``. adds: its result is added to another's (``onto``)."""

    def __init__(self, spec: GLU, params: Params, site: Site, *, adds: bool = False) -> None:
        self.act, self.act_args = site.op("activation.glu", "act"), activation_args(spec.act)
        self.gated = self._at_once(params, site) or self._in_turn(params, site)
        op = site.op(matmul_add.name, "down") if adds and not site.rounds("down") else matmul_add.body
        self.down: Unary | None = None
        self.down_onto: Callable[[Tensor, Tensor], Tensor] | None = None
        if op is matmul_add.body:  # which is the two in turn
            self.down = site.linear(params, "down")
        else:  # the weight is laid out once
            weight = site.laid_out(matmul_add.name, "down", params["down"])
            self.down_onto = lambda x_TI, out_TD: op(x_TI, weight, out_TD)

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]. Not where its product is bound to be added: that has the weight, for ``onto``."""
        del view
        assert self.down is not None, "its last product adds"
        return self.down(self.gated(x_TD))

    def ahead(self, x_TD: Tensor) -> Tensor:
        """What ``onto`` takes, made of x [T, dim] alone: the whole result [T, dim], or where the last product is bound
        to be added, what goes into that [T, inner]."""
        gated_TI = self.gated(x_TD)
        return gated_TI if self.down is None else self.down(gated_TI)

    def onto(self, out_TD: Tensor, ahead_TX: Tensor) -> Tensor:
        """out + what it makes of x, both [T, dim]. ahead: ``ahead(x)``."""
        return out_TD + ahead_TX if self.down_onto is None else self.down_onto(ahead_TX, out_TD)

    def _at_once(self, params: Params, site: Site) -> Unary | None:
        """None where no operator is bound that multiplies and activates, as its reference is the operators in turn, and
        where the two weights cannot be one or their inputs are rounded."""
        if site.rounds("gate") or site.rounds("up"):
            return None
        op = site.op(matmul_glu.name, "gate_up")
        together = None if op is matmul_glu.body else joined([params["gate"], params["up"]])
        if together is None:
            return None
        weight = site.laid_out(matmul_glu.name, "gate_up", together)
        return lambda x_TD: op(x_TD, weight, self.act_args)

    def _in_turn(self, params: Params, site: Site) -> Unary:
        gate_up = site.linears(params, ("gate", "up"))
        return lambda x_TD: self.act(*gate_up(x_TD), **self.act_args)
