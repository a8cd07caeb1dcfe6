"""Specs as data. No torch: inspect and plan read this file."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.decl import CacheNeed, Cut, OpUse, ParamDecl


@dataclass(frozen=True, slots=True)
class MeanWindow:
    """o(σ(gate x) · mean of v over the last ``window`` tokens, the current one included); width: of v and gate."""

    dim: int
    width: int
    window: int

    kind = "mean"
    block = "nova_dayzero.blocks:MeanBlock"

    def params(self, p: str) -> list[ParamDecl]:
        rows = (Cut(0, "tp"),)
        return [
            ParamDecl(f"{p}.v", (self.width, self.dim), cuts=rows),
            ParamDecl(f"{p}.gate", (self.width, self.dim), cuts=rows),
            ParamDecl(f"{p}.o", (self.dim, self.width), cuts=(Cut(1, "tp"),)),
        ]

    def cache(self, p: str) -> list[CacheNeed]:
        return [CacheNeed(f"{p}.v", (self.width,), "bf16", "kv_bf16", cuts=(Cut(0, "tp"),), window=self.window)]

    def contracts(self, p: str) -> list[OpUse]:
        linear = [OpUse("linear.matmul", f"{p}.{n}") for n in ("v", "gate", "o")]
        return [*linear, OpUse("average.window", f"{p}.average", (("partial", True),))]

    def flops(self, context: float) -> float:
        return self.width * min(context, self.window)

    def word(self) -> str:
        return f"mean window {self.window}"

    def sums(self, num_tokens: int) -> tuple[int, int, str]:
        del num_tokens
        return max(self.dim, self.width, self.window), 4, "norm, projections, mean, output"


@dataclass(frozen=True, slots=True)
class Squared:
    """down(relu(up x)²); inner: hidden width."""

    dim: int
    inner: int

    kind = "squared"
    block = "nova_dayzero.blocks:SquaredBlock"

    def params(self, p: str) -> list[ParamDecl]:
        return [
            ParamDecl(f"{p}.up", (self.inner, self.dim), cuts=(Cut(0, "tp"),)),
            ParamDecl(f"{p}.down", (self.dim, self.inner), cuts=(Cut(1, "tp"),)),
        ]

    def contracts(self, p: str) -> list[OpUse]:
        linear = [OpUse("linear.matmul", f"{p}.{n}") for n in ("up", "down")]
        return [*linear, OpUse("activation.relu_squared", f"{p}.act")]

    def active_params(self) -> int:
        return 2 * self.dim * self.inner

    def word(self) -> str:
        return f"squared {self.inner}"

    def sums(self) -> tuple[int, int, str]:
        return max(self.dim, self.inner), 3, "norm, up, down"
