"""Residual kinds: how a site's input is made from what the stack carries, and its output put back.

T tokens, D width, B bank rows. A carry is a value: entering and leaving make new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, cat

from dayzero.arch.residuals import AttnRes, Plain, Residual
from dayzero.blocks.site import Params, Site

SiteWord = Literal["mixer", "channel"]


@dataclass(frozen=True, slots=True)
class Carry:
    """Named tensors, tokens first; the first is the main part. Parts as ``Residual.carry()`` declares them."""

    parts: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    @property
    def main(self) -> Tensor:
        return next(iter(self.parts.values()))


class ResidualBlock(Protocol):
    """How one layer hangs on the stream."""

    def enter(self, carry: Carry, site: SiteWord) -> Tensor:
        """The site's normed input [T, D]."""

    def leave(self, carry: Carry, site: SiteWord, out_TD: Tensor) -> Carry:
        """The carry with the site's output put back."""


class PlainBlock:
    """``Plain``: h + site(norm(h)), the output normed too when sandwiched. Carry: h [T, D]."""

    def __init__(self, spec: Plain, params: Params, site: Site) -> None:
        self.norms = {s: site.norm(spec.norm, params, f"{s}_norm") for s in ("mixer", "channel")}
        words = ("mixer", "channel") if spec.sandwich else ()
        self.out_norms = {s: site.norm(spec.norm, params, f"{s}_out_norm") for s in words}
        self.add = site.op("residual.add", "add")

    def enter(self, carry: Carry, site: SiteWord) -> Tensor:
        return self.norms[site](carry["h"])

    def leave(self, carry: Carry, site: SiteWord, out_TD: Tensor) -> Carry:
        if site in self.out_norms:
            out_TD = self.out_norms[site](out_TD)
        return Carry({"h": self.add(carry["h"], out_TD)})


class DepthBlock:
    """``AttnRes``: each site reads a softmax mixture over the bank of block sums and the running sum.

    Carry: partial [T, D], bank [T, B, D] with B growing to the spec's bank. At the first layer of a block the running
    sum, as it was before that layer, joins the bank, and the mixer's output starts the next sum.
    """

    def __init__(self, spec: AttnRes, params: Params, site: Site, number: int) -> None:
        self.spec, self.starts_block = spec, number % spec.every == 0
        self.norms = {s: site.norm(spec.norm, params, f"{s}_norm") for s in ("mixer", "channel")}
        self.keys = {s: (params[f"{s}_mix_norm"], params[f"{s}_mix_proj"]) for s in ("mixer", "channel")}
        self.mix = {s: site.op("residual.attn_mix", f"{s}_mix") for s in ("mixer", "channel")}
        self.add = site.op("residual.add", "add")

    def enter(self, carry: Carry, site: SiteWord) -> Tensor:
        mixed_TD = self.mix[site](
            carry["partial"], carry["bank"].transpose(0, 1), *self.keys[site], eps=self.spec.norm.eps
        )
        return self.norms[site](mixed_TD)

    def leave(self, carry: Carry, site: SiteWord, out_TD: Tensor) -> Carry:
        partial_TD, bank_TBD = carry["partial"], carry["bank"]
        if site == "channel" or not self.starts_block:
            return Carry({"partial": self.add(partial_TD, out_TD), "bank": bank_TBD})
        bank_TBD = cat((bank_TBD, partial_TD[:, None]), dim=1)
        assert bank_TBD.shape[1] <= self.spec.bank, f"the bank of {self.spec.bank} is full"
        return Carry({"partial": out_TD, "bank": bank_TBD})


def build_residual(spec: Residual, params: Params, site: Site, number: int) -> ResidualBlock:
    """The block of layer ``number``."""
    return PlainBlock(spec, params, site) if isinstance(spec, Plain) else DepthBlock(spec, params, site, number)


def open_carry(spec: Residual, embedded_TD: Tensor) -> Carry:
    """What the first layer gets."""
    if isinstance(spec, Plain):
        return Carry({"h": embedded_TD})
    num_tokens, width = embedded_TD.shape
    return Carry({"partial": embedded_TD, "bank": embedded_TD.new_empty(num_tokens, 0, width)})


def close_carry(spec: Residual, carry: Carry, params: Params, site: Site) -> Tensor:
    """The stream [T, D] behind the last layer, before the final norm. params: ``close_mix_norm`` and ``_proj``."""
    if isinstance(spec, Plain):
        return carry["h"]
    mix = site.op("residual.attn_mix", "close_mix")
    key_norm, key_proj = params["close_mix_norm"], params["close_mix_proj"]
    return mix(carry["partial"], carry["bank"].transpose(0, 1), key_norm, key_proj, eps=spec.norm.eps)
