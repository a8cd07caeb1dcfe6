"""Norms and activations as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.decl import OpUse, ParamDecl


@dataclass(frozen=True, slots=True)
class Norm:
    """dim: width that is normalised. kind ``rms`` or ``layer`` (mean removed, with bias when ``bias``).

    offset: the stored weight is w and (1 + w) multiplies. scale_in: whether the weight multiplies in float32 before
    the cast, or after the cast in the activation dtype.
    """

    dim: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: bool = False
    bias: bool = False
    scale_in: Literal["f32", "dtype"] = "dtype"

    def params(self, name: str, *, keep: Literal["f32"] | None = None) -> list[ParamDecl]:
        """``name`` for the weight, ``name_bias`` for the bias."""
        out = [ParamDecl(name, (self.dim,), "norm", keep, center=0.0 if self.offset else 1.0)]
        if self.bias:
            out.append(ParamDecl(f"{name}_bias", (self.dim,), "bias", keep))
        return out

    def use(self, site: str) -> OpUse:
        if self.kind == "layer":
            return OpUse("norm.layer", site)
        return OpUse("norm.rms", site, self._traits())

    def fused_use(
        self, contract: str, site: str, norm_site: str, behind: str = "", *, beside: bool = False
    ) -> list[OpUse]:
        """The use of a contract that has this norm behind something else; none for a kind that no such contract has.

        behind: the place of what the norm is behind, if anything. beside: the norm runs by itself as well.
        """
        if self.kind != "rms":
            return []
        norm = (f"norm.rms@{norm_site}",)
        return [OpUse(contract, site, self._traits(), (*norm, behind) if behind else norm, norm if beside else ())]

    def _traits(self) -> tuple[tuple[str, object], ...]:
        return ("offset", self.offset), ("scale_in", self.scale_in)


@dataclass(frozen=True, slots=True)
class Activation:
    """What a gated channel does with (gate, up).

    silu: silu(g)·u. clamped (gpt-oss): G=min(g, limit), U=clamp(u, ±limit), G·σ(alpha·G)·(U+1).
    silu_clamped: silu(min(g, limit))·clamp(u, ±limit).
    situ (Kimi K3): beta·tanh(g/beta)·σ(g) · linear_beta·tanh(u/linear_beta).
    """

    kind: Literal["silu", "clamped", "silu_clamped", "situ"] = "silu"
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    linear_beta: float = 1.0

    def use(self, site: str, contract: str = "activation.glu", parts: tuple[str, ...] = ()) -> OpUse:
        return OpUse(contract, site, (("kind", self.kind),), parts)
