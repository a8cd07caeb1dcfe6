"""Residual kinds: how a site's input is made from what the stack carries, and its output put back.

T tokens, D width, B bank rows. A carry is a value: entering and leaving make new ones, and no carry that was made
before changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from dayzero.arch.norms import Norm
from dayzero.arch.residuals import AttnRes, Plain, Residual
from dayzero.blocks.site import Params, Site
from dayzero.ops.contract import Contract
from dayzero.ops.residual import add_norm, attn_mix_norm

SiteWord = Literal["mixer", "channel"]


class Room:
    """Memory for the bank of one forward: [B, T, D], allocated once, a row in one piece. Rows are written once, in
    order; a bank is a view of the first few, so it never changes, whatever is added behind it."""

    def __init__(self, rows_BTD: Tensor) -> None:
        self.rows_BTD, self.used = rows_BTD, 0

    def bank(self) -> Tensor:
        """The rows that are written, tokens first: [T, used, D], no copy."""
        return self.rows_BTD[: self.used].transpose(0, 1)

    def add(self, row_TD: Tensor) -> None:
        assert self.used < self.rows_BTD.shape[0], f"the bank of {self.rows_BTD.shape[0]} is full"
        self.rows_BTD[self.used] = row_TD
        self.used += 1


class Unadded(Mapping[str, Tensor]):
    """The part ``h`` of a plain carry while a site's output still stands beside it: whoever wants the sum gets it, and
    the next site may want sum and norm at once. Added once, whoever asks first."""

    def __init__(self, stream_TD: Tensor, out_TD: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.terms: tuple[Tensor, Tensor] | None = (stream_TD, out_TD)
        self._add, self._sum_TD = add, stream_TD

    def settle(self, sum_TD: Tensor) -> None:
        """This is the sum; its terms are let go."""
        self.terms, self._sum_TD = None, sum_TD

    def __getitem__(self, name: str) -> Tensor:
        if name != "h":
            raise KeyError(name)
        if self.terms is not None:
            self.settle(self._add(*self.terms))
        return self._sum_TD

    def __iter__(self) -> Iterator[str]:
        return iter(("h",))

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Carry:
    """Named tensors, tokens first; the first is the main part. Parts as ``Residual.carry()`` declares them.

    room: where the part ``bank`` lies and can grow without being copied; None when it lies elsewhere.
    """

    parts: Mapping[str, Tensor]
    room: Room | None = field(default=None, compare=False)

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


def fused(site: Site, norm: Norm, contract: Contract, part: str) -> Callable[..., Any] | None:
    """The operator of ``contract``, which is a norm behind something else, with the norm's options. None where it is
    the reference: that is the two in turn, so the operators that are bound to them do the work."""
    if norm.kind != "rms":
        return None
    op = site.op(contract.name, part)
    options = {"eps": norm.eps, "offset": norm.offset, "scale_in": norm.scale_in}
    return None if op is contract.body else lambda *tensors, **given: op(*tensors, **options, **given)


class PlainEntry:
    """How a site reads a plain carry: the norm ``name``_norm of the stream, added up in the same go where what is bound
    to ``name``_add_norm can."""

    def __init__(self, norm: Norm, params: Params, site: Site, name: str) -> None:
        self.norm, self.weight_D = site.norm(norm, params, f"{name}_norm"), params[f"{name}_norm"]
        self.fused = fused(site, norm, add_norm, f"{name}_add_norm")

    def __call__(self, carry: Carry) -> Tensor:
        parts = carry.parts
        if self.fused is None or not isinstance(parts, Unadded) or parts.terms is None:
            return self.norm(carry["h"])
        sum_TD, x_TD = self.fused(*parts.terms, self.weight_D)
        parts.settle(sum_TD)
        return x_TD


class PlainBlock:
    """``Plain``: h + site(norm(h)), the output normed too when sandwiched. Carry: h [T, D]."""

    def __init__(self, spec: Plain, params: Params, site: Site) -> None:
        self.entries = {s: PlainEntry(spec.norm, params, site, s) for s in ("mixer", "channel")}
        words = ("mixer", "channel") if spec.sandwich else ()
        self.out_norms = {s: site.norm(spec.norm, params, f"{s}_out_norm") for s in words}
        self.add = site.op("residual.add", "add")

    def enter(self, carry: Carry, site: SiteWord) -> Tensor:
        return self.entries[site](carry)

    def leave(self, carry: Carry, site: SiteWord, out_TD: Tensor) -> Carry:
        if site in self.out_norms:
            out_TD = self.out_norms[site](out_TD)
        return Carry(Unadded(carry["h"], out_TD, self.add))


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
        self.weights = {s: params[f"{s}_norm"] for s in ("mixer", "channel")}
        self.fused = {s: fused(site, spec.norm, attn_mix_norm, f"{s}_mix_then_norm") for s in ("mixer", "channel")}
        self.add = site.op("residual.add", "add")

    def enter(self, carry: Carry, site: SiteWord) -> Tensor:
        sources, both = (carry["partial"], carry["bank"].transpose(0, 1)), self.fused[site]
        if both is not None:
            return both(*sources, *self.keys[site], self.weights[site])
        return self.norms[site](self.mix[site](*sources, *self.keys[site], eps=self.spec.norm.eps))

    def leave(self, carry: Carry, site: SiteWord, out_TD: Tensor) -> Carry:
        if site == "mixer" and self.starts_block:
            room = _grown(carry, self.spec.bank)
            return Carry({"partial": out_TD, "bank": room.bank()}, room)
        return Carry({"partial": self.add(carry["partial"], out_TD), "bank": carry["bank"]}, carry.room)


def _grown(carry: Carry, most_rows: int) -> Room:
    """The carry's bank and behind it the running sum: in the same room when its next row is free, else in a new one.

    It is not free for who goes on a second time from the same carry, and there is no room where a carry was put
    together from parts; both are for alignment, which runs a layer several times.
    """
    partial_TD, bank_TBD = carry["partial"], carry["bank"]
    room, filled = carry.room, bank_TBD.shape[1]
    if room is None or room.used != filled:
        room = Room(partial_TD.new_empty(most_rows, *partial_TD.shape))
        for row_TD in bank_TBD.unbind(1):
            room.add(row_TD)
    room.add(partial_TD)
    return room


def build_residual(spec: Residual, params: Params, site: Site, number: int) -> ResidualBlock:
    """The block of layer ``number``."""
    return PlainBlock(spec, params, site) if isinstance(spec, Plain) else DepthBlock(spec, params, site, number)


def open_carry(spec: Residual, embedded_TD: Tensor) -> Carry:
    """What the first layer gets."""
    if isinstance(spec, Plain):
        return Carry({"h": embedded_TD})
    room = Room(embedded_TD.new_empty(spec.bank, *embedded_TD.shape))
    return Carry({"partial": embedded_TD, "bank": room.bank()}, room)


def close_carry(spec: Residual, carry: Carry, params: Params, site: Site) -> Tensor:
    """The stream [T, D] behind the last layer, before the final norm. params: ``close_mix_norm`` and ``_proj``."""
    if isinstance(spec, Plain):
        return carry["h"]
    mix = site.op("residual.attn_mix", "close_mix")
    key_norm, key_proj = params["close_mix_norm"], params["close_mix_proj"]
    return mix(carry["partial"], carry["bank"].transpose(0, 1), key_norm, key_proj, eps=spec.norm.eps)
