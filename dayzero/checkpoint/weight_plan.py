"""Rules × index × declarations × rank: every copy a rank makes, and the proof that each byte is placed exactly once.

A plan keeps one line for all experts of a layer (``Copy.experts``), so that 82,000 experts cost as little as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from dayzero.checkpoint.coverage import Coverage
from dayzero.checkpoint.formats import stored_bytes
from dayzero.checkpoint.rules import Group, Slice, Target
from dayzero.decl import Format, ParamDecl
from dayzero.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts, stops along each dimension of a parameter
PieceOf = Callable[[ParamDecl], Box | None]  # what a rank holds of a parameter; None when nothing


@dataclass(frozen=True, slots=True)
class Copy:
    """One transfer: a box of a logical tensor into a box of a parameter.

    source: tensor name, with {e} when experts is set (the run of expert numbers). source_box and param_box: start and
    stop along each dimension, the parameter's in the rank's own coordinates. via: stored format it is decoded from.
    step: stride along dimension ``step_dim`` of the source where rows are interleaved. read_bytes: stored bytes of all.
    """

    source: str
    experts: range | None
    source_box: Box
    step: int
    step_dim: int
    via: str
    param: str
    param_box: Box
    read_bytes: int

    @property
    def count(self) -> int:
        return 1 if self.experts is None else len(self.experts)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What one rank loads. ignored: tensors left out on purpose; bytes_read: in the stored formats."""

    rank: int
    copies: tuple[Copy, ...]
    ignored: int
    bytes_read: int

    def __len__(self) -> int:
        return sum(copy.count for copy in self.copies)


def group_formats(coverage: Coverage) -> list[Format]:
    """The stored format of each group, whose tensors are stacked into one parameter.

    Errors: CheckpointError when the tensors of a group are stored in different formats.
    """
    out = []
    for group, sources in zip(coverage.groups, coverage.sources, strict=True):
        names = {s.format.name for s in sources}
        if len(names) > 1:
            raise CheckpointError(
                f"{group.name} is stored in {' and '.join(sorted(names))}; one layer's experts must agree."
            )
        out.append(sources[0].format)
    return out


def plan_rank(
    groups: Sequence[Group], formats: Sequence[Format], rank: int, piece_of: PieceOf, num_ignored: int = 0
) -> WeightPlan:
    """The copies of one rank. piece_of tells which box of a parameter it holds."""
    copies = []
    for group, fmt in zip(groups, formats, strict=True):
        for target in group.targets:
            held = piece_of(target.decl)
            if held is not None:
                made = _transfer(fmt, target.stacked, target.of_tensor, target.of_param, held)
                if made is not None:
                    copies.append(Copy(group.name, *made[:4], fmt.name, target.decl.name, *made[4:]))
    return WeightPlan(rank, tuple(copies), num_ignored, sum(c.read_bytes for c in copies))


def copy_bytes(fmt: Format, target: Target, held: Box) -> int:
    """Stored bytes of what a rank reads for ``target`` when it holds this box of its parameter."""
    made = _transfer(fmt, target.stacked, target.of_tensor, target.of_param, held)
    return 0 if made is None else made.read_bytes


class _Transfer(NamedTuple):
    """A ``Copy`` without its names: the same for all layers of a kind."""

    experts: range | None
    source_box: Box
    step: int
    step_dim: int
    param_box: Box
    read_bytes: int


@lru_cache(maxsize=1 << 15)
def _transfer(
    fmt: Format, stacked: bool, of_tensor: Slice | None, of_param: Slice | None, held: Box
) -> _Transfer | None:
    """Arguments: of the target; held: what the rank holds of its parameter."""
    starts, stops = held
    experts: range | None = None
    if stacked:
        experts = range(starts[0], stops[0])
        starts, stops = starts[1:], stops[1:]
        if not experts:
            return None
    source_starts, source_stops, param_starts, param_stops = [], [], [], []
    step, step_dim = 1, 0
    for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        span = _overlap(of_param, dim, start, stop)
        if span is None:
            return None
        param_starts.append(span[0] - start)
        param_stops.append(span[1] - start)
        offset = span[2]
        if of_tensor is not None and of_tensor.dim == dim:
            step, step_dim = (of_tensor.step, dim) if of_tensor.step > 1 else (step, step_dim)
            source_starts.append(of_tensor.start + offset * of_tensor.step)
            source_stops.append(of_tensor.start + (offset + span[1] - span[0] - 1) * of_tensor.step + 1)
        else:
            source_starts.append(offset)
            source_stops.append(offset + span[1] - span[0])
    if experts is not None:
        param_starts.insert(0, 0)
        param_stops.insert(0, len(experts))
    shape = tuple(
        -(-(b - a) // (step if d == step_dim else 1))
        for d, (a, b) in enumerate(zip(source_starts, source_stops, strict=True))
    )
    size = stored_bytes(fmt, shape) * (1 if experts is None else len(experts))
    source_box, param_box = (tuple(source_starts), tuple(source_stops)), (tuple(param_starts), tuple(param_stops))
    return _Transfer(experts, source_box, step, step_dim, param_box, size)


def _overlap(of_param: Slice | None, dim: int, start: int, stop: int) -> tuple[int, int, int] | None:
    """(start, stop in the parameter, offset within the tensor) of what a rank's range shares with the tensor's part."""
    if of_param is None or of_param.dim != dim:
        return start, stop, start
    low, high = max(start, of_param.start), min(stop, of_param.stop)
    return (low, high, low - of_param.start) if low < high else None


@dataclass
class Proof:
    """gaps and overlaps: parameters of which some element is placed never, or twice on one replica."""

    params: int = 0
    elements: int = 0
    gaps: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.gaps and not self.overlaps


def prove(decls: Iterable[ParamDecl], pieces: Sequence[PieceOf], plans: Sequence[WeightPlan]) -> Proof:
    """Exactly once, by arithmetic: (a) in every rank each held box is filled by its copies without gap or overlap;
    (b) over all ranks the distinct boxes of a parameter tile it: they are disjoint and add up to it."""
    proof = Proof()
    filled: list[dict[str, tuple[Box, ...]]] = [{} for _ in plans]
    for boxes, plan in zip(filled, plans, strict=True):
        for copy in plan.copies:
            boxes[copy.param] = (*boxes.get(copy.param, ()), copy.param_box)
    for decl in decls:
        proof.params += 1
        proof.elements += decl.numel
        distinct: set[Box] = set()
        for rank, piece_of in enumerate(pieces):
            held = piece_of(decl)
            if held is None:
                continue
            distinct.add(held)
            local = tuple(b - a for a, b in zip(*held, strict=True))
            _check_tiling(decl.name, local, filled[rank].get(decl.name, ()), f"rank {rank}", proof)
        _check_tiling(decl.name, decl.shape, tuple(sorted(distinct)), "all ranks", proof)
    return proof


def _check_tiling(name: str, shape: tuple[int, ...], boxes: tuple[Box, ...], where: str, proof: Proof) -> None:
    disjoint, inside, volume = _tiling(shape, boxes)
    whole = _volume(((0,) * len(shape), shape))
    if not disjoint:
        proof.overlaps.append(f"{name} ({where})")
    elif volume != whole or not inside:
        proof.gaps.append(f"{name} ({where}): {volume} of {whole} elements")


@lru_cache(maxsize=1 << 15)
def _tiling(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[bool, bool, int]:
    """Whether the boxes are disjoint, whether all lie inside ``shape``, and their volumes added up."""
    disjoint = not any(_intersect(p, q) for i, p in enumerate(boxes) for q in boxes[:i])
    inside = all(a >= 0 and b <= s for box in boxes for a, b, s in zip(*box, shape, strict=True))
    return disjoint, inside, sum(_volume(box) for box in boxes)


def _volume(box: Box) -> int:
    total = 1
    for start, stop in zip(*box, strict=True):
        total *= max(0, stop - start)
    return total


def _intersect(p: Box, q: Box) -> bool:
    return all(a1 < b2 and a2 < b1 for a1, b1, a2, b2 in zip(*p, *q, strict=True))
