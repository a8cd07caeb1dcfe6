"""From byte ranges to parameters, one layer at a time.

A load plans which stored tensors it needs, walks them in file order, reads each byte range once, decodes it and writes
its slices into preallocated parameters. Besides the parameters being built, one stored tensor is held at a time (from
a source that reads in parallel: as many as it keeps in flight). A stack of experts, or a matrix, can be left where it
is: then each expert, or the rows that are asked for, are read when they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from dayzero.checkpoint.coverage import Coverage
from dayzero.checkpoint.coverage import Source as Stored
from dayzero.checkpoint.dequant import dequantize
from dayzero.checkpoint.index import Index
from dayzero.checkpoint.lazy import ExpertStack, MatrixRows
from dayzero.checkpoint.rules import Group, Narrow, Slice, Target
from dayzero.checkpoint.slices import gives_rows, gives_slices, rows_decl, rows_of, slice_decl, slice_of
from dayzero.checkpoint.source import Source, in_order
from dayzero.checkpoint.statistics import judge_norms, statistics
from dayzero.decl import ParamDecl
from dayzero.errors import CheckpointError
from dayzero.finding import Finding

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Need:
    """One logical tensor that a load needs: where it is, its {e}, and the targets that it fills now.

    part: only this slice, or these rows, along dimension 0 of each stored tensor; None for all of it.
    """

    group: Group
    number: int | None
    stored: Stored
    targets: tuple[Target, ...]
    part: int | range | None = None


@dataclass(slots=True)
class _Building:
    """A parameter being filled. done: slices written so far, as (expert, slice); filled: elements written so far."""

    decl: ParamDecl
    tensor: Tensor
    done: set[tuple[int | None, Slice | None]] = field(default_factory=set)
    filled: int = 0

    def write(self, target: Target, number: int | None, value: Tensor) -> None:
        place = (number if target.stacked else None, target.of_param)
        assert place not in self.done, f"{self.decl.name}: {place} is filled twice"
        into = self.tensor if number is None or not target.stacked else self.tensor[number]
        into = _cut(into, target.of_param)
        assert into.shape == value.shape, f"{self.decl.name}: {tuple(value.shape)} does not fit {tuple(into.shape)}"
        into.copy_(value)
        self.done.add(place)
        self.filled += value.numel()


class Loader:
    """Parameters of a covered checkpoint by name, decoded, in the model's orientation and shape.

    dtype: what parameters become (float32 where a declaration says so). bytes_read: bytes of tensors read so far.
    """

    def __init__(self, source: Source, index: Index, coverage: Coverage, dtype: torch.dtype) -> None:
        if not coverage.complete:
            lost = [*coverage.missing, *coverage.unknown, *coverage.misfit]
            raise CheckpointError(f"{source.name}: {len(lost)} tensors missing, unknown or misshapen, e.g. {lost[0]}.")
        self.source, self.index, self.coverage, self.dtype = source, index, coverage, dtype
        self.bytes_read = 0
        self._found: list[Finding] = []
        self._checked: set[str] = set()
        self._told: set[tuple[str, str]] = set()  # (kind of finding, parameter)
        self._decls: dict[str, ParamDecl] = {}
        self._groups: dict[str, list[int]] = {}  # parameter -> positions of the groups that fill it
        for position, group in enumerate(coverage.groups):
            for target in group.targets:
                self._decls[target.decl.name] = target.decl
                places = self._groups.setdefault(target.decl.name, [])
                if not places or places[-1] != position:
                    places.append(position)
        self._decls |= {decl.name: decl for decl in coverage.filled}
        self._aliases: dict[str, list[str]] = {}
        for tensor, param in coverage.aliases.items():
            self._aliases.setdefault(param, []).append(tensor)

    @property
    def findings(self) -> list[Finding]:
        """What the statistics of the parameters loaded so far showed; the caller decides what follows."""
        norms = [f for f in self._found if f.kind == "weights.norm_mean"]
        seen = [self._decls[n] for n in self._checked if n in self._decls]
        checked = sum(decl.role == "norm" and decl.center is not None for decl in seen)
        return [f for f in self._found if f.kind != "weights.norm_mean"] + judge_norms(norms, checked)

    def names(self, prefix: str = "") -> list[str]:
        """Parameters whose name is ``prefix`` or lies below it; all for an empty prefix."""
        return [n for n in self._decls if not prefix or n == prefix or n.startswith(f"{prefix}.")]

    def load(self, prefix: str, lazy: Container[str] = (), keep_bytes: int = 0) -> dict[str, Tensor]:
        """Every parameter whose name is ``prefix`` or starts with ``prefix.``, freshly allocated.

        lazy: names of stacked parameters that are wanted as an ``ExpertStack``, for callers that only index them by
        expert, and of matrices wanted as ``MatrixRows``; one whose parts do not lie apart in the files is loaded all
        the same. keep_bytes: experts that were read are kept, for as long as the result is, until they fill this much;
        what comes later is read each time. None of them is given up for another, as runs over the experts of a layer
        ask for them in the same order: each would find the ones given up that it needs next.
        Errors: CheckpointError naming the tensor when bytes cannot be read or decoded, when the padding of a narrowed
        tensor is not zero, or when a tied copy differs from its original.
        """
        names = self.names(prefix)
        assert names, f"no declared parameter is named {prefix} or lies below it"
        apart: dict[str, object] = {n: self._rows(n) for n in names if n in lazy and self._by_row(n)}
        by_expert = [n for n in names if n in lazy and n not in apart and self._by_expert(n)]
        apart |= self._stacks(by_expert, keep_bytes)
        building = {name: self._allocate(self._decls[name]) for name in names if name not in apart}
        for decl, rule in self.coverage.filled.items():
            if decl.name in building:
                building[decl.name].tensor.fill_(rule.fill)
                building[decl.name].filled = decl.numel
        self._fill(building, self._needs(building))
        # Who asks for parts that lie apart uses them as tensors; nobody else meets one.
        return {n: cast(Tensor, apart[n]) if n in apart else building[n].tensor for n in names}

    def _fill(self, building: Mapping[str, _Building], needs: Sequence[_Need], judge: bool = True) -> None:
        """Read ``needs`` in their order into what is being built, which must then be complete."""
        reads = in_order([partial(self._read, need) for need in needs], self.source.parallel_reads)
        for need in needs:
            parts = next(reads)
            self.bytes_read += sum(p.numel() * p.element_size() for p in parts.values())
            self._write(need, parts, building)
            del parts  # before the next tensor is read
        for name, one in building.items():
            assert one.filled == one.decl.numel, f"{name}: {one.filled} of {one.decl.numel} elements were filled"
            if judge:
                self._check(one)

    def _by_expert(self, name: str) -> bool:
        groups = [(self.coverage.groups[p], self.coverage.sources[p]) for p in self._groups.get(name, ())]
        return bool(groups) and all(gives_slices(g, stored, self.index.entries) for g, stored in groups)

    def _by_row(self, name: str) -> bool:
        places, entries = self._groups.get(name, ()), self.index.entries
        groups = [(self.coverage.groups[p], self.coverage.sources[p][0]) for p in places]
        copies = all(tuple(entries[alias].shape) == self._decls[name].shape for alias in self._aliases.get(name, ()))
        return len(groups) == 1 and copies and gives_rows(*groups[0], entries)

    def _rows(self, name: str) -> MatrixRows:
        decl, place = self._decls[name], self._groups[name][0]
        group, stored = self.coverage.groups[place], self.coverage.sources[place][0]

        def read(spans: Sequence[range], compare: bool) -> list[Tensor]:
            parts = [rows_decl(decl, span) for span in spans]
            needs = [
                _Need(rows_of(group, part), None, stored, (Target(part),), span)
                for part, span in zip(parts, spans, strict=True)
            ]
            building = {part.name: self._allocate(part) for part in parts}
            self._fill(building, needs, judge=False)
            values = [one.tensor for one in building.values()]
            for span, value in zip(spans, values if compare else (), strict=False):
                self._compare_copies(name, value, span)
            return values

        def judge(value: Tensor, part: str) -> None:
            self._note(statistics(replace(decl, name=part), value))

        return MatrixRows(decl, self._dtype_of(decl), read, judge)

    def _stacks(self, names: Sequence[str], keep_bytes: int) -> dict[str, ExpertStack]:
        """Stacks of one load. Parameters that share a stored tensor come with one read of it."""
        ready: dict[tuple[str, int], Tensor] = {}
        kept: dict[tuple[str, int], Tensor] = {}
        left_bytes = keep_bytes

        def read(name: str, expert: int) -> Tensor:
            nonlocal left_bytes
            if (name, expert) in kept:
                return kept[name, expert]
            if (name, expert) not in ready:
                ready.clear()
                together = [n for n in names if n == name or set(self._groups[n]) == set(self._groups[name])]
                ready.update({(n, expert): value for n, value in self._expert(together, expert).items()})
            value = ready.pop((name, expert))
            if value.nbytes <= left_bytes:
                left_bytes -= value.nbytes
                kept[name, expert] = value
            return value

        return {n: ExpertStack(self._decls[n].shape, self._dtype_of(self._decls[n]), partial(read, n)) for n in names}

    def _expert(self, names: Sequence[str], expert: int) -> dict[str, Tensor]:
        decls = {name: slice_decl(self._decls[name], expert) for name in names}
        needs = []
        for position in sorted({p for name in names for p in self._groups[name]}):
            group, stored, part = slice_of(
                self.coverage.groups[position], self.coverage.sources[position], names, expert
            )
            needs.append(_Need(group, None, stored, group.targets, part))
        building = {decl.name: self._allocate(decl) for decl in decls.values()}
        self._fill(building, sorted(needs, key=self._place))
        return {name: building[decl.name].tensor for name, decl in decls.items()}

    def _dtype_of(self, decl: ParamDecl) -> torch.dtype:
        return torch.float32 if decl.keep == "f32" else self.dtype

    def _allocate(self, decl: ParamDecl) -> _Building:
        return _Building(decl, torch.empty(decl.shape, dtype=self._dtype_of(decl)))

    def _needs(self, building: Mapping[str, _Building]) -> list[_Need]:
        positions = sorted({p for name in building for p in self._groups.get(name, ())})
        needs = []
        for position in positions:
            group = self.coverage.groups[position]
            targets = tuple(t for t in group.targets if t.decl.name in building)
            for number, stored in zip(group.numbers, self.coverage.sources[position], strict=True):
                needs.append(_Need(group, number, stored, targets))
        return sorted(needs, key=self._place)

    def _place(self, need: _Need) -> tuple[str, int]:
        entry = self.index.entries[need.stored.parts[0][1]]
        return entry.file, entry.start

    def _read(self, need: _Need) -> dict[str, Tensor]:
        """The stored parts that decoding needs, by role."""
        return {role: self._tensor(name, need.part) for role, name in need.stored.parts if role != "input_scale"}

    def _tensor(self, name: str, part: int | range | None = None) -> Tensor:
        """A stored tensor, or its slice or rows ``part`` along dimension 0."""
        entry = self.index.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{name} in {entry.file} has element type {entry.dtype}, which cannot be decoded.")
        dtype = DTYPES[entry.dtype]
        if entry.nbytes != prod(entry.shape) * dtype.itemsize:
            raise CheckpointError(f"{name} in {entry.file} has {entry.nbytes} bytes, which do not fit its shape.")
        shape, size, first = entry.shape, entry.nbytes, entry.start
        if part is not None:
            rows = range(part, part + 1) if isinstance(part, int) else part
            first += rows.start * (size // shape[0])
            size = len(rows) * (size // shape[0])
            shape = shape[1:] if isinstance(part, int) else (len(rows), *shape[1:])
        data = self.source.read(entry.file, first, size)
        if not data:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            # The buffer is read-only and torch cannot say so; what is built from it is always a copy.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

    def _write(self, need: _Need, parts: Mapping[str, Tensor], building: Mapping[str, _Building]) -> None:
        value = self._decode(need, parts, building)
        if isinstance(need.group.rule, Narrow):
            _check_padding(value, need.targets[0], need.stored.name)
        for target in need.targets:
            building[target.decl.name].write(target, need.number, _cut(value, target.of_tensor))

    def _decode(self, need: _Need, parts: Mapping[str, Tensor], building: Mapping[str, _Building]) -> Tensor:
        """The logical tensor in the parameter's orientation and shape."""
        stored, group = need.stored, need.group
        if stored.format.quantized:
            dtypes = {building[t.decl.name].tensor.dtype for t in need.targets}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            return dequantize(stored.format, parts, group.shape, dtype, stored.name)
        weight = parts["weight"]
        # Plain values are cast while they are copied into the parameter, so no second copy is made here.
        value = dequantize(stored.format, parts, tuple(weight.shape), weight.dtype, stored.name)
        if getattr(group.rule, "transpose_plain", False):
            value = value.transpose(-1, -2)
        return value if tuple(value.shape) == group.shape else value.reshape(group.shape)

    def _check(self, one: _Building) -> None:
        name = one.decl.name
        self._compare_copies(name, one.tensor)
        if name not in self._checked:
            self._checked.add(name)
            self._note(statistics(one.decl, one.tensor))

    def _compare_copies(self, name: str, value: Tensor, rows: range | None = None) -> None:
        """``value``: parameter ``name``, or these rows of it."""
        for alias in self._aliases.get(name, ()):
            if not torch.equal(self._tensor(alias, rows).reshape(value.shape).to(value.dtype), value):
                raise CheckpointError(
                    f"{alias} differs from the tensor that {name} is loaded from, though config.json ties the two "
                    "(tie_word_embeddings); one of them is wrong."
                )

    def _note(self, found: Finding | None) -> None:
        if found is not None:
            stack = found.evidence[0].partition("[")[0]  # of a parameter that is read in parts, the first odd one
            if (found.kind, stack) not in self._told:
                self._told.add((found.kind, stack))
                self._found.append(found)


def _cut(value: Tensor, piece: Slice | None) -> Tensor:
    """A view of ``value``."""
    if piece is None:
        return value
    index = [slice(None)] * value.dim()
    index[piece.dim] = slice(piece.start, piece.stop, piece.step)
    return value[tuple(index)]


def _check_padding(value: Tensor, target: Target, tensor: str) -> None:
    assert target.of_tensor is not None
    rest = value[target.of_tensor.stop :]
    if rest.any():
        at = target.of_tensor.stop + int(rest.reshape(rest.shape[0], -1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{tensor} has {value.shape[0]} rows of which the model uses {target.of_tensor.stop}, but row {at} of the "
            "padding is not zero; the size in config.json or in the recipe is wrong."
        )
