"""Which piece of a parameter a rank holds, and why a layout is not legal."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dayzero.decl import Cut, Format, ParamDecl
from dayzero.parallel.mesh import Mesh, Place, axis_place, axis_size


@dataclass(frozen=True, slots=True)
class Piece:
    """start and stop along each dimension of the parameter: what one rank holds."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)


def is_expert(decl: ParamDecl) -> bool:
    """Whether an ep axis cuts the parameter: its tp cut then cuts each expert."""
    return any(cut.axis == "ep" for cut in decl.cuts)


def cut_range(decl: ParamDecl, cut: Cut, ranks: int, coordinate: int) -> tuple[int, int]:
    """Elements [start, stop) along cut.dim for one coordinate; legal cuts only (see why_not)."""
    size = decl.shape[cut.dim]
    units = size // cut.unit
    if units % ranks == 0:
        step = size // ranks
        return coordinate * step, (coordinate + 1) * step
    owner = coordinate // (ranks // units)  # repeat: several ranks hold the same unit
    return owner * cut.unit, (owner + 1) * cut.unit


def piece_of(decl: ParamDecl, mesh: Mesh, place: Place) -> Piece:
    """The slice of ``decl`` that the rank at ``place`` holds; the whole of it where no cut applies."""
    starts, stops = [0] * len(decl.shape), list(decl.shape)
    expert = is_expert(decl)
    for cut in decl.cuts:
        ranks = axis_size(mesh, cut.axis, expert=expert)
        if ranks > 1:
            starts[cut.dim], stops[cut.dim] = cut_range(decl, cut, ranks, axis_place(place, cut.axis, expert=expert))
    return Piece(tuple(starts), tuple(stops))


def why_not(decl: ParamDecl, mesh: Mesh, stored: Format | None) -> str | None:
    """Why the mesh cannot cut this parameter, as a sentence, or None. stored: its format, whose blocks stay whole."""
    expert = is_expert(decl)
    for cut in decl.cuts:
        ranks = axis_size(mesh, cut.axis, expert=expert)
        if ranks == 1:
            continue
        size = decl.shape[cut.dim]
        units = size // cut.unit
        repeats = cut.repeat and ranks % units == 0
        if units % ranks and not repeats:
            what = f"{units} units of {cut.unit}" if cut.unit > 1 else f"{units}"
            return (
                f"{cut.axis}{ranks}: {decl.name} has {what} along dimension {cut.dim}, "
                f"which {ranks} ranks do not divide"
            )
        block = _block_along(stored, len(decl.shape), cut.dim)
        width = cut.unit if repeats and units % ranks else size // ranks
        if width % block and width != size:
            return (
                f"{cut.axis}{ranks}: {decl.name} would be cut every {width}, "
                f"which splits the {block}-wide scale blocks of {stored.name if stored else ''}"
            )
    return None


def _block_along(stored: Format | None, rank: int, dim: int) -> int:
    if stored is None or stored.block is None or dim < rank - 2:
        return 1
    return stored.block[0] if dim == rank - 2 else stored.block[1]
