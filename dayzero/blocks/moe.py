"""Mixtures of experts: router, routed experts (at a latent width where the spec says so), shared expert.

T tokens, D model width, E experts, N chosen experts a token, W width the experts work at.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.glu import GLUBlock
from dayzero.blocks.site import Params, Site, activation_args
from dayzero.ops.router import Choosing, matmul_route
from dayzero.view import StepView

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]  # x [T, D] -> (ids, weights) [T, N]
RENORMALISE_EPS = 1e-20  # what the publishers' routers add to the sum; it changes nothing unless the sum is 0
MATRICES = ("gate", "up", "down")


def stacked_experts(spec: ModelSpec, bound: Container[str] = ()) -> frozenset[str]:
    """Parameters [E, …] that are only ever indexed by expert, so that a loader may give them one expert at a time.

    bound: ``contract@site`` of operators that run a variant: those may want the tensor, so theirs are left out.
    """
    sites = expert_sites(spec).items()
    return frozenset(f"{s}.{matrix}" for s, moe in sites if f"{moe.contract}@{s}" not in bound for matrix in MATRICES)


def expert_sites(spec: ModelSpec) -> dict[str, MoE]:
    """Site of a layer's experts, which is also the prefix of their matrices, and the layer's spec of them."""
    mixtures = ((i, layer.channel) for i, layer in enumerate(spec.layers))
    return {f"layers.{i}.channel.experts": channel for i, channel in mixtures if isinstance(channel, MoE)}


@runtime_checkable
class Fetched(Protocol):
    """The matrices of a layer's experts, where they are fetched when they are asked for."""

    def expect(self, experts: Sequence[int]) -> None:
        """These experts come next, in this order, each once."""


class MoEBlock:
    """``MoE``. Shows the chosen expert ids [T, N] at ``layers.{i}.experts``."""

    def __init__(self, spec: MoE, params: Params, site: Site) -> None:
        self.spec, self.site = spec, site
        router = spec.router
        self.logits = site.linear(params, "router", bias=router.bias == "logit", f32=True)
        self.select_bias_E = params["router_bias"] if router.bias == "select" else None
        self.route = site.op("moe.route", "route")
        self.choosing = Choosing(
            router.top_k, router.score, (router.groups, router.top_groups), router.renormalise, router.scale,
            RENORMALISE_EPS,
        )  # fmt: skip
        self.choose = self._at_once(params) or self._in_turn
        self.experts = site.op(spec.contract, "experts")
        self.weights = tuple(site.laid_out(spec.contract, "experts", params[f"experts.{n}"]) for n in MATRICES)
        self.fetched = self.weights[0] if isinstance(self.weights[0], Fetched) else None
        self.biases = tuple(params[f"experts.{n}_bias"] for n in MATRICES) if spec.bias else None
        self.act_args = activation_args(spec.act)
        self.latent_down = site.linear(params, "latent_down") if spec.latent else None
        self.latent_up = site.linear(params, "latent_up") if spec.latent else None
        self.latent_norm = site.norm(spec.latent_norm, params, "latent_norm") if spec.latent_norm else None
        self.shared: GLUBlock | None = None
        if spec.shared:
            inner = params.below("shared"), site.below("shared")
            self.shared = GLUBlock(spec.shared, *inner, adds=not spec.shared_gate)
        self.shared_gate = site.linear(params, "shared_gate") if spec.shared_gate else None

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim].

        The shared expert runs beside the routed ones, but for a last product that adds to their sum: that is one launch
        behind the two as it is in turn, and made aside it would be one more, to add what it gives.
        """
        if self.shared is None:
            return self._routed(x_TD, view)
        routed, ahead = partial(self._routed, x_TD, view), partial(self._shared_ahead, self.shared, x_TD, view)
        return self.shared.onto(*view.beside(routed, ahead))

    def _routed(self, x_TD: Tensor, view: StepView) -> Tensor:
        """[T, dim]: the sum of the chosen experts. The router sees x itself, not the latent."""
        ids_TN, weights_TN = self.choose(x_TD)
        self.site.show_layer("experts", ids_TN)
        if self.fetched is not None and view.real is not None:  # no expert is read for what pads a step
            ids_TN = torch.where(view.real[:, None], ids_TN, -1)
        x_TW = x_TD if self.latent_down is None else self.latent_down(x_TD)
        chosen = partial(self._chosen, x_TW, ids_TN, weights_TN)
        out = chosen() if self.fetched is None else view.on_host(chosen, x_TW)
        if self.latent_norm is not None:
            out = self.latent_norm(out)
        return out if self.latent_up is None else self.latent_up(out)

    def _shared_ahead(self, shared: GLUBlock, x_TD: Tensor, view: StepView) -> Tensor:
        """Of what every token gets besides, all that needs no routed expert: see ``GLUBlock.ahead``."""
        if self.shared_gate is None:
            return shared.ahead(x_TD)
        share_T1 = torch.sigmoid(self.shared_gate(x_TD).double()).float()
        shared_TD = shared.forward(x_TD, view)
        return (share_T1 * shared_TD.float()).to(shared_TD.dtype)

    def _at_once(self, params: Params) -> Choose | None:
        """None where no operator is bound that multiplies and chooses: its reference is the two in turn."""
        op = self.site.op(matmul_route.name, "choose")
        if op is matmul_route.body:
            return None
        biased = self.spec.router.bias == "logit"
        weight_ED, bias_E = params["router"], params["router_bias"] if biased else None
        return partial(
            op, w_ED=weight_ED, choosing=self.choosing, logit_bias_E=bias_E, select_bias_E=self.select_bias_E
        )

    def _in_turn(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        top_k, score, groups, renormalise, scale, eps = self.choosing
        return self.route(
            self.logits(x_TD), top_k, score=score, bias_E=self.select_bias_E, groups=groups, renormalise=renormalise,
            scale=scale, eps=eps,
        )  # fmt: skip

    def _chosen(self, x_TW: Tensor, ids_TN: Tensor, weights_TN: Tensor) -> Tensor:
        """[T, W] what the chosen experts make of x; those that are fetched are asked for by the host."""
        if self.fetched is not None:
            ids_TN = ids_TN.cpu()  # the only thing that is waited for
            self.fetched.expect([e for e in ids_TN.unique().tolist() if e >= 0])
        return self.experts(x_TW, ids_TN, weights_TN, *self.weights, self.act_args, biases=self.biases)
