"""A part of a parameter as a load of its own: one slice of a stack, or rows of a matrix, and where it is read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dayzero.checkpoint.found import Alike, Entry, Source
from dayzero.checkpoint.rules import Fuse, Group, Rule, Slice, Split, Target
from dayzero.decl import FP8_SIZE, Form, ParamDecl


def slice_decl(decl: ParamDecl, number: int) -> ParamDecl:
    """Slice ``number`` along dimension 0 of a parameter, as a parameter: ``layers.3.channel.experts.up[7]``."""
    return replace(decl, name=f"{decl.name}[{number}]", shape=decl.shape[1:], cuts=())


def gives_slices(group: Group, sources: Sequence[Source], entries: Mapping[str, Entry]) -> bool:
    """Whether a slice along dimension 0 of the group's parameters can be read without the others.

    Either each slice is a tensor of its own, or every stored part of the one tensor starts with that dimension.
    """
    if group.count is not None:
        return True
    if len(group.shape) < 3:  # rows of a matrix: scale blocks and transpositions reach across them
        return False
    if any(piece is not None and piece.dim == 0 for t in group.targets for piece in (t.of_tensor, t.of_param)):
        return False
    parts = [(role, entries[name].shape) for role, name in sources[0].parts if role != "input_scale"]
    return all(role != "shape" and tuple(shape[:1]) == group.shape[:1] for role, shape in parts)


def packed_form(group: Group, sources: Sequence[Source]) -> Form | None:
    """The form that the group is stored in throughout, where what its targets take of it can be cut from codes and
    scales alike: 4 bits along rows, FP8 between scale blocks. None where it has to be decoded."""
    formats = {sources.format} if isinstance(sources, Alike) else {s.format for s in sources}
    forms = {fmt.form for fmt in formats}
    form = forms.pop() if len(forms) == 1 else None
    if form is None or not isinstance(group.rule, Rule | Split | Fuse):
        return None
    columns = len(group.shape) - 1
    for target in group.targets:
        of_param = target.of_param  # it counts dimensions of a stack, or of what ``{e}`` names one of
        pieces = [piece for piece in (target.of_tensor, of_param) if piece is not None]
        if form == "mxfp4" and any(piece.dim == columns for piece in pieces):
            return None
        if form == "fp8_block" and any(
            piece.dim >= columns - 1 and (piece.start % FP8_SIZE or piece.step != 1) for piece in pieces
        ):
            return None
    return form


def slice_of(
    group: Group, sources: Sequence[Source], params: Collection[str], number: int
) -> tuple[Group, Source, int | None]:
    """(group that fills ``slice_decl`` of the named ``params``, where it is stored, which slice of each stored part).

    The last is None where the slice is a tensor of its own.
    """
    whole = group.count is None
    targets = tuple(_slice_target(t, number, whole) for t in group.targets if t.decl.name in params)
    if whole:
        return replace(group, shape=group.shape[1:], targets=targets), sources[0], number
    return replace(group, count=None, targets=targets), sources[number], None


def _slice_target(target: Target, number: int, whole: bool) -> Target:
    """whole: the pieces are counted in dimensions of the whole stack, not of a slice."""
    pieces = (target.of_tensor, target.of_param)
    of_tensor, of_param = (_shifted(p) for p in pieces) if whole else pieces
    return Target(slice_decl(target.decl, number), False, of_tensor, of_param)


def _shifted(piece: Slice | None) -> Slice | None:
    return None if piece is None else replace(piece, dim=piece.dim - 1)


def rows_decl(decl: ParamDecl, rows: range) -> ParamDecl:
    """These rows of a matrix, as a parameter: ``head[0:8192]``."""
    return replace(decl, name=f"{decl.name}[{rows.start}:{rows.stop}]", shape=(len(rows), *decl.shape[1:]), cuts=())


def gives_rows(group: Group, source: Source, entries: Mapping[str, Entry]) -> bool:
    """Whether the group is one plain matrix that is stored as it is, row after row."""
    plain = group.count is None and not source.format.quantized and not getattr(group.rule, "transpose_plain", False)
    whole = len(group.targets) == 1 and group.targets[0].of_tensor is None and group.targets[0].of_param is None
    stored = tuple(entries[source.parts[0][1]].shape)
    return plain and whole and len(group.shape) == 2 and stored == group.shape


def rows_of(group: Group, part: ParamDecl) -> Group:
    """The group that fills ``part``, which is a ``rows_decl``, and nothing else."""
    return replace(group, shape=part.shape, plain_shapes=(part.shape,), targets=(Target(part),))
