"""The choice of experts from the router's input: its product, and what is chosen by that, as one site.

T tokens, D model width, E experts, N chosen experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dayzero.ops.bounds import MATMUL_F32
from dayzero.ops.contract import contract
from dayzero.ops.linear import matmul_f32
from dayzero.ops.moe import SCORES, route


class Choosing(NamedTuple):
    """How experts are chosen by logits: as in ``moe.route``."""

    top_k: int
    score: str
    groups: tuple[int, int] = (1, 1)
    renormalise: bool = True
    scale: float = 1.0
    eps: float = 0.0


@contract(
    "moe.matmul_route",
    bound=MATMUL_F32,
    traits={"score": SCORES, "bias": (None, "select", "logit"), "groups": (False, True), "renormalise": (False, True)},
    composed=True,
)
def matmul_route(
    x_TD: Tensor,
    w_ED: Tensor,
    choosing: Choosing,
    *,
    logit_bias_E: Tensor | None = None,
    select_bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``moe.route`` of ``linear.matmul_f32`` of x and w: (ids [T, N] int64, weights [T, N] f32).

    logit_bias: of the product, any float; select_bias: ``moe.route``'s, f32. Where two experts' scores lie closer than
    the bound of the product, either may be chosen.
    """
    logits_TE = matmul_f32.body(x_TD, w_ED, logit_bias_E)
    top_k, score, groups, renormalise, scale, eps = choosing
    return route.body(
        logits_TE, top_k, score=score, bias_E=select_bias_E, groups=groups, renormalise=renormalise, scale=scale,
        eps=eps,
    )  # fmt: skip
