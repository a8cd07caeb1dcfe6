"""Ranks and axes, as data. No torch: what communicates over the axes comes with the engine.

One stage of the pipeline has dp × cp × tp ranks. Experts are spread over ep of them: inside the tp group when
ep <= tp (each expert is then cut tp / ep ways), across groups when ep is a multiple of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dayzero.decl import Axis


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes. ep does not multiply the number of ranks: it re-uses those of a stage."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def stage_ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def num_ranks(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def expert_tp(self) -> int:
        """Ways one expert is cut."""
        return max(1, self.tp // self.ep)

    def why_not(self) -> str | None:
        """Why these sizes make no mesh, or None."""
        for name in ("tp", "ep", "pp", "cp", "dp"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1"
        if self.ep <= self.tp:
            return None if self.tp % self.ep == 0 else f"ep {self.ep} does not divide tp {self.tp}"
        if self.ep % self.tp:
            return f"ep {self.ep} is no multiple of tp {self.tp}"
        if self.stage_ranks % self.ep:
            return f"ep {self.ep} does not divide the {self.stage_ranks} ranks of a stage (dp × cp × tp)"
        return None

    def place(self, rank: int) -> Place:
        """Coordinates of a rank: tp fastest, then cp, dp, and the pipeline stage slowest."""
        inside = rank % self.stage_ranks
        tp, cp, dp = inside % self.tp, inside // self.tp % self.cp, inside // (self.tp * self.cp)
        if self.ep <= self.tp:
            ep, expert_tp = tp // self.expert_tp, tp % self.expert_tp
        else:
            ep, expert_tp = inside % self.ep, 0
        return Place(rank, rank // self.stage_ranks, tp, cp, dp, ep, expert_tp)

    def places(self) -> Iterator[Place]:
        return (self.place(rank) for rank in range(self.num_ranks))

    def text(self) -> str:
        sizes = [(n, getattr(self, n)) for n in ("tp", "ep", "pp", "cp", "dp")]
        return " ".join(f"{n}{v}" for n, v in sizes if v > 1) or "1 rank"


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of one rank. expert_tp: which cut of its experts it holds."""

    rank: int
    stage: int
    tp: int
    cp: int
    dp: int
    ep: int
    expert_tp: int


def axis_size(mesh: Mesh, axis: Axis, *, expert: bool) -> int:
    """Ranks along an axis as a parameter sees it: a cut of an expert over tp has expert_tp ranks."""
    return mesh.expert_tp if axis == "tp" and expert else int(getattr(mesh, axis))


def axis_place(place: Place, axis: Axis, *, expert: bool) -> int:
    """The rank's coordinate along that axis."""
    if axis == "tp" and expert:
        return place.expert_tp
    return {"tp": place.tp, "ep": place.ep, "pp": place.stage, "cp": place.cp, "dp": place.dp}[axis]
