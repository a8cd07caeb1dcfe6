"""Gated activations of feed-forward layers.

T tokens, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.contract import contract

_CONSTANTS: dict[str, set[str]] = {
    "silu": set(), "gelu_tanh": set(), "clamped": {"limit", "alpha"}, "silu_clamped": {"limit"},
    "situ": {"beta", "linear_beta"},
}  # fmt: skip
KINDS = tuple(_CONSTANTS)
NUMBERS = ("limit", "alpha", "beta", "linear_beta")  # constants of a kind, in the order that kernels take them


def activation_of(activation: Mapping[str, Any]) -> tuple[int, list[float]]:
    """(number of its kind, its constants as kernels take them) of keyword arguments of ``activation.glu``."""
    return KINDS.index(activation.get("kind", "silu")), [float(activation.get(word, 0.0)) for word in NUMBERS]


@contract("activation.gelu", bound=ELEMENTWISE, traits={"form": ("erf", "tanh")})
def gelu(x: Tensor, *, form: str) -> Tensor:
    """x times the normal distribution's share below x, in f64, rounded once to x's dtype. form: ``erf`` is exact,
    ``tanh`` the approximation that some models were trained with (Hendrycks and Gimpel, arXiv 1606.08415)."""
    if form not in ("erf", "tanh"):
        raise ValueError(f"form is 'erf' or 'tanh', not {form!r}")
    return F.gelu(x.double(), approximate="tanh" if form == "tanh" else "none").to(x.dtype)


@contract("activation.glu", bound=ELEMENTWISE, traits={"kind": KINDS})
def glu(
    gate_TI: Tensor,
    up_TI: Tensor,
    *,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    linear_beta: float = 0.0,
) -> Tensor:
    """act(gate) * up in f64, rounded once to gate's dtype.

    silu: silu(g) u. gelu_tanh: gelu_tanh(g) u.
    clamped (gpt-oss): G = min(g, limit), U = clamp(u, +-limit), G sigmoid(alpha G) (U + 1).
    silu_clamped (DeepSeek V4): silu(min(g, limit)) clamp(u, +-limit).
    situ (Kimi K3): beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta).
    A kind's own constants must be given (not 0) and no others, so that one family's clamp cannot leak into another.
    """
    given = {k for k, v in (("limit", limit), ("alpha", alpha), ("beta", beta), ("linear_beta", linear_beta)) if v}
    wanted = _CONSTANTS.get(kind)
    if given != wanted:
        raise ValueError(f"activation {kind!r} got {sorted(given)}; kinds and their constants are {_CONSTANTS}")
    g, u = gate_TI.double(), up_TI.double()
    if limit:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if kind == "clamped":
        y = g * torch.sigmoid(alpha * g) * (u + 1)
    elif kind == "situ":
        y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    elif kind == "gelu_tanh":
        y = F.gelu(g, approximate="tanh") * u
    else:
        y = F.silu(g) * u
    return y.to(gate_TI.dtype)
