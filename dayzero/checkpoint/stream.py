"""From byte ranges to parameters, one layer at a time.

A load plans which stored tensors it needs, walks them in file order, reads each byte range once, decodes it and writes
its slices into preallocated parameters, on an accelerator through ``staging``. Besides the parameters being built, one
stored tensor is held at a time (from a source that reads in parallel: as many as it keeps in flight). A stack of
experts, or a matrix, can be left where it is: then each expert, or the rows that are asked for, are read when they are.
A matrix in MXFP4 or in blocks of FP8 can stay as it is stored.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from dayzero.checkpoint.building import (
    Building,
    Need,
    check_padding,
    cut,
    memory_of,
    new_packed,
    packed_bytes,
    tensor_of,
)
from dayzero.checkpoint.coverage import Coverage
from dayzero.checkpoint.dequant import dequantize, keep_packed
from dayzero.checkpoint.extents import Extent, decoding, extent_of
from dayzero.checkpoint.index import Index
from dayzero.checkpoint.lazy import ExpertStack, MatrixRows
from dayzero.checkpoint.ranges import in_order
from dayzero.checkpoint.rules import Narrow, Target
from dayzero.checkpoint.slices import (
    gives_rows,
    gives_slices,
    packed_form,
    rows_decl,
    rows_of,
    slice_decl,
    slice_of,
)
from dayzero.checkpoint.source import Source, read_together
from dayzero.checkpoint.staging import NUM_READERS, Staging
from dayzero.checkpoint.statistics import judge_norms, packed_statistics, statistics
from dayzero.decl import Form, Packed, ParamDecl
from dayzero.errors import CheckpointError
from dayzero.finding import Finding

HOST = torch.device("cpu")
AS_TENSORS: Mapping[str, Form] = {}  # nothing stays as it is stored


class Loader:
    """Parameters of a covered checkpoint by name, decoded, in the model's orientation and shape.

    dtype: what parameters become (float32 where a declaration says so). bytes_read: bytes of tensors read so far.
    device: where parameters are made (``place``).
    """

    device = HOST

    def __init__(self, source: Source, index: Index, coverage: Coverage, dtype: torch.dtype) -> None:
        if not coverage.complete:
            lost = [*coverage.missing, *coverage.unknown, *coverage.misfit]
            raise CheckpointError(f"{source.name}: {len(lost)} tensors missing, unknown or misshapen, e.g. {lost[0]}.")
        coverage = coverage.whole()  # layers beside the plain forward are there for who asks for them
        self.source, self.index, self.coverage, self.dtype = source, index, coverage, dtype
        self.bytes_read = 0
        self._staging: Staging | None = None
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

    def place(self, device: str) -> None:
        """From now on ``load`` and ``expert`` make parameters on this device."""
        self.device = torch.device(device)
        self._staging = None if self.device.type == "cpu" else Staging(self.device)

    def rest(self) -> None:
        """Let go of host memory that only loading needs; what is loaded later takes it again."""
        if self._staging is not None:
            self._staging.free()

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

    def load(
        self, prefix: str, lazy: Container[str] = (), keep_bytes: int = 0, packed: Mapping[str, Form] = AS_TENSORS
    ) -> dict[str, Tensor]:
        """Every parameter whose name is ``prefix`` or starts with ``prefix.``, freshly allocated.

        lazy: names of stacked parameters that are wanted as an ``ExpertStack``, for callers that only index them by
        expert, and of matrices wanted as ``MatrixRows``; one whose parts do not lie apart in the files is loaded all
        the same. keep_bytes: experts that were read are kept, for as long as the result is, until they fill this much;
        what comes later is read each time. None of them is given up for another, as runs over the experts of a layer
        ask for them in the same order: each would find the ones given up that it needs next. packed: form, by name,
        of parameters that are wanted as they are stored; one that ``packs`` gives no such form is decoded.
        Errors: CheckpointError naming the tensor when bytes cannot be read or decoded, when the padding of a narrowed
        tensor is not zero, or when a tied copy differs from its original.
        """
        names = self.names(prefix)
        assert names, f"no declared parameter is named {prefix} or lies below it"
        apart: dict[str, object] = {n: self._rows(n) for n in names if n in lazy and self._by_row(n)}
        by_expert = [n for n in names if n in lazy and n not in apart and self.by_expert(n)]
        apart |= self._stacks(by_expert, keep_bytes)
        building = {n: self._allocate(self._decls[n], self._wanted(n, packed)) for n in names if n not in apart}
        for decl, rule in self.coverage.filled.items():
            if decl.name in building:
                cast(Tensor, building[decl.name].tensor).fill_(rule.fill)
                building[decl.name].filled = decl.numel
        self._fill(building, self._needs(building))
        # Who asks for parts that lie apart, or for what is packed, uses them as tensors; nobody else meets one.
        return {n: cast(Tensor, apart[n] if n in apart else building[n].tensor) for n in names}

    def _fill(self, building: Mapping[str, Building], needs: Sequence[Need], judge: bool = True) -> None:
        """Read ``needs`` in their order into what is being built, which must then be complete."""
        at_once = self.source.parallel_reads
        if self._staging is not None:
            self._staging.begin()
            at_once = max(at_once, NUM_READERS)
        reads = in_order([partial(self._read, need, building) for need in needs], at_once)
        for need in needs:
            parts = next(reads)
            if isinstance(parts, int):
                self.bytes_read += parts
                building[need.targets[0].decl.name].mark(need.targets[0], need.number)
                continue
            self.bytes_read += sum(p.numel() * p.element_size() for p in parts.values())
            self._write(need, parts, building)
            del parts  # before the next tensor is read
        for one in building.values():
            self._whole(one)
            if judge:
                self._check(one)

    def _whole(self, one: Building) -> Building:
        assert one.filled == one.decl.numel, f"{one.decl.name}: {one.filled} of {one.decl.numel} elements were filled"
        return one

    def packs(self, name: str) -> Form | None:
        """The form that the parameter can be had in as it is stored (``slices.packed_form``); None where it has to be
        decoded."""
        groups = [(self.coverage.groups[p], self.coverage.sources[p]) for p in self._groups.get(name, ())]
        forms = {packed_form(group, stored) for group, stored in groups}
        return forms.pop() if len(forms) == 1 and name not in self._aliases else None

    def _wanted(self, name: str, packed: Mapping[str, Form]) -> Form | None:
        form = packed.get(name)
        return form if form is not None and form == self.packs(name) else None

    def expert(
        self, names: Sequence[str], number: int, packed: Mapping[str, Form] = AS_TENSORS
    ) -> dict[str, Tensor | Packed]:
        """One expert of each of these stacked parameters, freshly read; those in ``packed`` in that form, which
        ``packs`` gave, as views of what was read. Ranges that touch come with one read. For any thread: nothing of the
        loader changes.

        Errors: as ``load``.
        """
        needs = self._expert_needs(names, number)
        extents = [extent_of(self.index.entries, n, need.part) for need in needs for role, n in decoding(need.stored)]
        names_of = {slice_decl(self._decls[name], number).name: name for name in names}
        building: dict[str, Building] = {}
        out: dict[str, Tensor | Packed] = {}
        with nullcontext() if self._staging is None else self._staging.queued():
            views = iter(self._together(extents))
            for need in needs:
                parts = {role: next(views) for role, _ in decoding(need.stored)}
                kept = tuple(t for t in need.targets if names_of[t.decl.name] in packed)
                if kept:
                    value = keep_packed(need.stored.format, parts, need.group.shape, need.stored.name)
                    out |= {names_of[t.decl.name]: cut(value, t.of_tensor) for t in kept}
                rest = replace(need, targets=tuple(t for t in need.targets if t not in kept))
                for target in rest.targets:
                    building.setdefault(target.decl.name, self._allocate(target.decl))
                if rest.targets:
                    self._write(rest, parts, building)
        return out | {names_of[name]: self._whole(one).tensor for name, one in building.items()}

    def _together(self, extents: Sequence[Extent]) -> list[Tensor]:
        ranges = [(file, first, size) for file, first, size, *_ in extents]
        if self._staging is not None:
            brought = self._staging.bring_together(self.source, ranges)
            return [part.view(dtype).view(shape) for part, (*_, dtype, shape) in zip(brought, extents, strict=True)]
        data = read_together(self.source, ranges)
        return [tensor_of(part, dtype, shape) for part, (*_, dtype, shape) in zip(data, extents, strict=True)]

    def expert_bytes(self, name: str, form: Form | None) -> int:
        """Bytes of one expert of a stack, once it is read; form None: decoded."""
        decl = self._decls[name]
        shape = decl.shape[1:]
        return prod(shape) * self._dtype_of(decl).itemsize if form is None else packed_bytes(form, shape)

    def stored_bytes(self, names: Sequence[str]) -> int:
        """Bytes in the files of what fills these parameters."""
        found = {stored for name in names for p in self._groups[name] for stored in self.coverage.sources[p]}
        return sum(self.index.entries[tensor].nbytes for stored in found for _, tensor in decoding(stored))

    def by_expert(self, name: str) -> bool:
        """Whether one expert of the stack can be read without the others."""
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
                Need(rows_of(group, part), None, stored, (Target(part),), span)
                for part, span in zip(parts, spans, strict=True)
            ]
            building = {part.name: self._allocate(part) for part in parts}
            self._fill(building, needs, judge=False)
            values = [cast(Tensor, one.tensor) for one in building.values()]
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
        building = {decl.name: self._allocate(decl) for decl in decls.values()}
        self._fill(building, self._expert_needs(names, expert))
        return {name: cast(Tensor, building[decl.name].tensor) for name, decl in decls.items()}

    def _expert_needs(self, names: Sequence[str], expert: int) -> list[Need]:
        """What one expert of these stacks needs of the files, in their order."""
        needs = []
        for position in sorted({p for name in names for p in self._groups[name]}):
            group, stored, part = slice_of(
                self.coverage.groups[position], self.coverage.sources[position], names, expert
            )
            needs.append(Need(group, None, stored, group.targets, part))
        return sorted(needs, key=self._place)

    def _dtype_of(self, decl: ParamDecl) -> torch.dtype:
        return torch.float32 if decl.keep == "f32" else self.dtype

    def _allocate(self, decl: ParamDecl, form: Form | None = None) -> Building:
        if form is not None:
            return Building(decl, new_packed(form, decl.shape, self.device))
        return Building(decl, torch.empty(decl.shape, dtype=self._dtype_of(decl), device=self.device))

    def _needs(self, building: Mapping[str, Building]) -> list[Need]:
        positions = sorted({p for name in building for p in self._groups.get(name, ())})
        needs = []
        for position in positions:
            group = self.coverage.groups[position]
            targets = tuple(t for t in group.targets if t.decl.name in building)
            for number, stored in zip(group.numbers, self.coverage.sources[position], strict=True):
                needs.append(Need(group, number, stored, targets))
        return sorted(needs, key=self._place)

    def _place(self, need: Need) -> tuple[str, int]:
        entry = self.index.entries[need.stored.parts[0][1]]
        return entry.file, entry.start

    def _read(self, need: Need, building: Mapping[str, Building]) -> dict[str, Tensor] | int:
        """The stored parts that decoding needs, by role. Of a tensor that a parameter holds as it is stored: the bytes
        that were read, which are in their place already."""
        if self._staging is None:
            file, first, size, dtype, shape = extent_of(self.index.entries, need.stored.parts[0][1], need.part)
            memory = memory_of(need, building, dtype, shape)
            if memory is not None:
                self.source.read_into(file, first, memory)
                return size
        return {role: self._tensor(name, need.part) for role, name in decoding(need.stored)}

    def _tensor(self, name: str, part: int | range | None = None) -> Tensor:
        """A stored tensor, or its slice or rows ``part`` along dimension 0."""
        file, first, size, dtype, shape = extent_of(self.index.entries, name, part)
        if self._staging is not None:
            return self._staging.bring(self.source, file, first, size).view(dtype).reshape(shape)
        return tensor_of(self.source.read(file, first, size), dtype, shape)

    def _write(self, need: Need, parts: Mapping[str, Tensor], building: Mapping[str, Building]) -> None:
        kept = [t for t in need.targets if not isinstance(building[t.decl.name].tensor, Tensor)]
        if kept:
            packed = keep_packed(need.stored.format, parts, need.group.shape, need.stored.name)
            for target in kept:
                building[target.decl.name].write(target, need.number, cut(packed, target.of_tensor))
        if len(kept) == len(need.targets):
            return
        value = self._decode(need, parts, building)
        if isinstance(need.group.rule, Narrow):
            check_padding(value, need.targets[0], need.stored.name)
        for target in need.targets:
            if target not in kept:
                building[target.decl.name].write(target, need.number, cut(value, target.of_tensor))

    def _decode(self, need: Need, parts: Mapping[str, Tensor], building: Mapping[str, Building]) -> Tensor:
        """The logical tensor in the parameter's orientation and shape."""
        stored, group = need.stored, need.group
        if stored.format.quantized:
            held = [building[t.decl.name].tensor for t in need.targets]
            dtypes = {tensor.dtype for tensor in held if isinstance(tensor, Tensor)}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            return dequantize(stored.format, parts, group.shape, dtype, stored.name)
        weight = parts["weight"]
        # Plain values are cast while they are copied into the parameter, so no second copy is made here.
        value = dequantize(stored.format, parts, tuple(weight.shape), weight.dtype, stored.name)
        if getattr(group.rule, "transpose_plain", False):
            value = value.transpose(-1, -2)
        return value if tuple(value.shape) == group.shape else value.reshape(group.shape)

    def _check(self, one: Building) -> None:
        name, value = one.decl.name, one.tensor
        if isinstance(value, Tensor):
            self._compare_copies(name, value)
        if name not in self._checked:
            self._checked.add(name)
            judged = statistics(one.decl, value) if isinstance(value, Tensor) else packed_statistics(one.decl, value)
            self._note(judged)

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
