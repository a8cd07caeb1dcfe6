"""Residual kinds as data: how a layer's input is made from what the stack carries, and its output put back.

The carry is what a pipeline stage sends and what a graph holds: its parts are declared here, per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.arch.norms import Norm
from dayzero.decl import OpUse, ParamDecl, Role


@dataclass(frozen=True, slots=True)
class CarryPart:
    """One tensor of the carry: shape per token, element type."""

    name: str
    shape: tuple[int, ...]
    element: str = "bf16"


@dataclass(frozen=True, slots=True)
class Plain:
    """Pre-norm residual: h ← h + site(norm(h)) for the mixer and the channel. sandwich: outputs are normed too."""

    norm: Norm
    sandwich: bool = False

    kind = "plain"

    def params(self, p: str) -> list[ParamDecl]:
        out = self.norm.params(f"{p}.mixer_norm") + self.norm.params(f"{p}.channel_norm")
        if self.sandwich:
            out += self.norm.params(f"{p}.mixer_out_norm") + self.norm.params(f"{p}.channel_out_norm")
        return out

    def close_params(self) -> list[ParamDecl]:
        return []

    def close_contracts(self, final_norm: Norm, last: str) -> list[OpUse]:
        return final_norm.fused_use("residual.add_norm", "final_add_norm", "final_norm", f"residual.add@{last}.add")

    def contracts(self, p: str) -> list[OpUse]:
        sites = ("mixer_norm", "channel_norm") + (("mixer_out_norm", "channel_out_norm") if self.sandwich else ())
        uses = [self.norm.use(f"{p}.{s}") for s in sites] + [OpUse("residual.add", f"{p}.add")]
        before = _before(p)  # whose channel's output the mixer's norm is behind; the first layer's is behind nothing
        for s, adds in (("mixer", before), ("channel", p)):
            added = f"residual.add@{adds}.add" if adds else ""
            uses += self.norm.fused_use(
                "residual.add_norm", f"{p}.{s}_add_norm", f"{p}.{s}_norm", added, beside=not adds
            )
        return uses

    def carry(self) -> tuple[CarryPart, ...]:
        return (CarryPart("h", (self.norm.dim,)),)


@dataclass(frozen=True, slots=True)
class AttnRes:
    """Block attention residuals (Kimi K3): each site reads softmax-mixed block sums and the running sum.

    every: layers in a block; the running sum joins the bank before layer l when l % every == 0. bank: most entries.
    """

    norm: Norm
    every: int
    bank: int

    kind = "attn_res"

    def params(self, p: str) -> list[ParamDecl]:
        out = self.norm.params(f"{p}.mixer_norm") + self.norm.params(f"{p}.channel_norm")
        # The first layer's first query weighs a single source, so that nothing follows from what it holds: training
        # leaves it as it began, which may be zero, and no fault.
        alone = p.rpartition(".")[2] == "0"
        for site in ("mixer_mix", "channel_mix"):
            out += self.norm.params(f"{p}.{site}_norm")
            role: Role = "scalar" if alone and site == "mixer_mix" else "router"
            out.append(ParamDecl(f"{p}.{site}_proj", (1, self.norm.dim), role))
        return out

    def close_params(self) -> list[ParamDecl]:
        return [*self.norm.params("close_mix_norm"), ParamDecl("close_mix_proj", (1, self.norm.dim), "router")]

    def close_contracts(self, final_norm: Norm, last: str) -> list[OpUse]:
        return [OpUse("residual.attn_mix", "close_mix")]

    def contracts(self, p: str) -> list[OpUse]:
        uses = [self.norm.use(f"{p}.{s}") for s in ("mixer_norm", "channel_norm")]
        uses += [OpUse("residual.attn_mix", f"{p}.{s}") for s in ("mixer_mix", "channel_mix")]
        for s in ("mixer", "channel"):
            uses += self.norm.fused_use(
                "residual.attn_mix_norm", f"{p}.{s}_mix_then_norm", f"{p}.{s}_norm", f"residual.attn_mix@{p}.{s}_mix"
            )
        return [*uses, OpUse("residual.add", f"{p}.add")]

    def carry(self) -> tuple[CarryPart, ...]:
        return (CarryPart("partial", (self.norm.dim,)), CarryPart("bank", (self.bank, self.norm.dim)))


def _before(p: str) -> str:
    """``layers.2`` of ``layers.3``; empty for the first layer."""
    stack, _, number = p.rpartition(".")
    return f"{stack}.{int(number) - 1}" if int(number) else ""


Residual = Plain | AttnRes
