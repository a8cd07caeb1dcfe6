"""Channel mixers as data: gated dense layers and mixtures of experts. Matrices are [out, in], experts [E, out, in]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.arch.mixers import linear_use
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.outside import OutsideChannel
from dayzero.decl import Cut, OpUse, ParamDecl

ExpertInputs = Literal["bf16", "fp8_128"]


@dataclass(frozen=True, slots=True)
class GLU:
    """down(act(gate x, up x)); inner: hidden width."""

    dim: int
    inner: int
    act: Activation = Activation()

    kind = "glu"

    def params(self, p: str) -> list[ParamDecl]:
        cut = (Cut(0, "tp"),)
        return [
            ParamDecl(f"{p}.gate", (self.inner, self.dim), cuts=cut),
            ParamDecl(f"{p}.up", (self.inner, self.dim), cuts=cut),
            ParamDecl(f"{p}.down", (self.dim, self.inner), cuts=(Cut(1, "tp"),)),
        ]

    def contracts(self, p: str) -> list[OpUse]:
        return [
            *(linear_use(f"{p}.{n}") for n in ("gate", "up", "down")), self.act.use(f"{p}.act"),
            # two products and what is made of them
            self.act.use(
                f"{p}.gate_up", "linear.matmul_glu",
                (f"linear.matmul@{p}.gate", f"linear.matmul@{p}.up", f"activation.glu@{p}.act"),
            ),
        ]  # fmt: skip

    def active_params(self) -> int:
        return 3 * self.dim * self.inner


@dataclass(frozen=True, slots=True)
class Router:
    """How tokens choose experts; logits are float32.

    score: ``sigmoid``; ``softmax`` over all experts; ``softmax_topk`` over the chosen. bias ``select``: a float32
    bias that only chooses, the unbiased score weighs; ``logit``: added to the logits. groups: experts come in groups,
    top_groups of them stay (group score = sum of its two best). renormalise: divide by the chosen sum + eps.
    """

    experts: int
    top_k: int
    score: Literal["sigmoid", "softmax", "softmax_topk"]
    bias: Literal["select", "logit"] | None = None
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0

    def use(self, site: str, contract: str = "moe.route", parts: tuple[str, ...] = ()) -> OpUse:
        traits = (("bias", self.bias), ("groups", self.groups > 1), ("score", self.score))
        return OpUse(contract, site, traits, parts)


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts (+ shared expert, + latent width).

    inner: an expert's hidden width. shared: dense experts that see every token; shared_gate: σ(w·x) multiplies them.
    latent: experts work at this width between a down and an up projection; latent_norm normalises the complete sum.
    bias: gate, up and down of each expert have biases. inputs: format that the inputs of an expert's products are
    rounded to; a plan's choice, not the model's: with weights in 4 bits ``bf16`` is W4A16 and ``fp8_128`` W4A8.
    """

    dim: int
    inner: int
    router: Router
    act: Activation = Activation()
    shared: GLU | None = None
    shared_gate: bool = False
    latent: int | None = None
    latent_norm: Norm | None = None
    bias: bool = False
    inputs: ExpertInputs = "bf16"

    kind = "moe"

    @property
    def contract(self) -> str:
        """The contract of the experts: each format of inputs has its own."""
        return "moe.experts" if self.inputs == "bf16" else f"moe.experts_{self.inputs}"

    @property
    def width(self) -> int:
        """Width the experts read and write."""
        return self.latent or self.dim

    def params(self, p: str) -> list[ParamDecl]:
        experts = self.router.experts
        ep, rows, cols = Cut(0, "ep"), Cut(1, "tp"), Cut(2, "tp")
        out = [ParamDecl(f"{p}.router", (experts, self.dim), "router")]
        if self.router.bias == "select":
            out.append(ParamDecl(f"{p}.router_bias", (experts,), "bias", "f32", "f32"))
        elif self.router.bias == "logit":
            out.append(ParamDecl(f"{p}.router_bias", (experts,), "bias"))
        out += [
            ParamDecl(f"{p}.experts.gate", (experts, self.inner, self.width), cuts=(ep, rows)),
            ParamDecl(f"{p}.experts.up", (experts, self.inner, self.width), cuts=(ep, rows)),
            ParamDecl(f"{p}.experts.down", (experts, self.width, self.inner), cuts=(ep, cols)),
        ]
        if self.bias:
            out += [
                ParamDecl(f"{p}.experts.gate_bias", (experts, self.inner), "bias", cuts=(ep, rows)),
                ParamDecl(f"{p}.experts.up_bias", (experts, self.inner), "bias", cuts=(ep, rows)),
                ParamDecl(f"{p}.experts.down_bias", (experts, self.width), "bias", cuts=(ep,)),
            ]
        if self.latent:
            out.append(ParamDecl(f"{p}.latent_down", (self.latent, self.dim)))
            out.append(ParamDecl(f"{p}.latent_up", (self.dim, self.latent)))
        if self.latent_norm:
            out += self.latent_norm.params(f"{p}.latent_norm")
        if self.shared:
            out += self.shared.params(f"{p}.shared")
        if self.shared_gate:
            out.append(ParamDecl(f"{p}.shared_gate", (1, self.dim)))
        return out

    def contracts(self, p: str) -> list[OpUse]:
        out = [OpUse("linear.matmul_f32", f"{p}.router"), self.router.use(f"{p}.route")]
        both = tuple(use.place for use in out)
        out.append(self.router.use(f"{p}.choose", "moe.matmul_route", both))  # the two in one
        out.append(OpUse(self.contract, f"{p}.experts", (("act", self.act.kind), ("bias", self.bias))))
        if self.latent:
            out += [linear_use(f"{p}.latent_down"), linear_use(f"{p}.latent_up")]
        if self.latent_norm:
            out.append(self.latent_norm.use(f"{p}.latent_norm"))
        if self.shared:
            out += self.shared.contracts(f"{p}.shared")
        if self.shared_gate:
            out.append(linear_use(f"{p}.shared_gate"))
        elif self.shared:
            down = f"{p}.shared.down"  # its product, and the sum with the routed
            out.append(OpUse("linear.matmul_add", down, parts=(f"linear.matmul@{down}",)))
        return out

    def active_params(self) -> int:
        """Weights one token meets."""
        total = self.router.experts * self.dim + self.router.top_k * 3 * self.inner * self.width
        total += 2 * self.latent * self.dim if self.latent else 0
        total += self.shared.active_params() if self.shared else 0
        return total + (self.dim if self.shared_gate else 0)


Channel = GLU | MoE | OutsideChannel
