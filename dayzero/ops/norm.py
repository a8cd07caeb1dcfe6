"""Norms over the last dimension.

All take any leading shape; D is the normed width. Sums run in f64 so that a row's result does not depend on how the
rows around it were vectorised; everything else is f32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops.bounds import CAST_FIRST, ELEMENTWISE
from dayzero.ops.contract import contract


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean x^2 + eps) over the last dimension, kept as size 1, f32."""
    return torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float()


@contract(
    "norm.rms",
    bound=CAST_FIRST,
    traits={"weight": (True, False), "offset": (False, True), "scale_in": ("f32", "dtype")},
)
def rms(
    x: Tensor, weight_D: Tensor | None = None, *, eps: float, offset: bool = False, scale_in: str = "f32"
) -> Tensor:
    """x / rms(x) * w, in x's dtype. offset: the factor is 1 + w.

    scale_in ``f32``: multiply by the weight in f32, then round once. ``dtype``: round to x's dtype first and again
    after the weight, as the Llama, DeepSeek and Kimi code does.
    """
    if scale_in not in ("f32", "dtype"):
        raise ValueError(f"scale_in is 'f32' or 'dtype', not {scale_in!r}")
    y = x.float() * inverse_rms(x, eps)
    if scale_in == "dtype":
        y = y.to(x.dtype).float()
    if weight_D is not None:
        y = y * (weight_D.float() + (1.0 if offset else 0.0))
    return y.to(x.dtype)


@contract("norm.layer", bound=ELEMENTWISE, traits={"weight": (True, False), "bias": (True, False)})
def layer(x: Tensor, weight_D: Tensor | None = None, bias_D: Tensor | None = None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b, variance over D without correction, in x's dtype."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).float()
    if weight_D is not None:
        y = y * weight_D.float()
    if bias_D is not None:
        y = y + bias_D.float()
    return y.to(x.dtype)


@contract("norm.rms_gated", bound=ELEMENTWISE, traits={"act": ("silu", "sigmoid")})
def rms_gated(x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float, act: str) -> Tensor:
    """x / rms(x) * w * act(gate), the weight before the gate, f32 inside, one rounding to x's dtype.

    gate has x's shape. Output norm of gated delta layers: ``silu`` in Qwen3-Next/3.5, ``sigmoid`` in Kimi.
    """
    gates: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
    if act not in gates:
        raise ValueError(f"act is one of {sorted(gates)}, not {act!r}")
    return (x.float() * inverse_rms(x, eps) * weight_D.float() * gates[act](gate.double()).float()).to(x.dtype)


@contract("norm.l2", bound=ELEMENTWISE)
def l2(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum x^2 + eps): eps inside the root and a sum, not a mean. In x's dtype."""
    return (x.float() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + eps).float()).to(x.dtype)
