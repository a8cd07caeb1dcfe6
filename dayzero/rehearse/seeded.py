"""A model whose parameters are made where they are used, from their names and a seed, instead of read.

They are made under our names, not the publisher's: a stack of experts is one tensor and takes a few calls, where the
publisher's names would take some for each of its matrices (K, an expert, a layer: 75,000 of them in the largest
models). Rules and config still say in which format each parameter is stored, and that each has exactly one rule; there
is nothing of a file that could be left over. What is stored in 4 or 8 bits is made as codes and scales, and decoded
from these, so that a parameter has the same values packed or not.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.mixers import Mixer
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.coverage import Alike, Coverage, stored_format
from dayzero.checkpoint.coverage import Source as Stored
from dayzero.checkpoint.dequant import e8m0_table
from dayzero.checkpoint.formats import parts as stored_parts
from dayzero.checkpoint.formats import stored_bytes
from dayzero.checkpoint.index import Index
from dayzero.checkpoint.lazy import ExpertStack
from dayzero.checkpoint.rules import Group
from dayzero.checkpoint.seeded_source import SeededSource
from dayzero.checkpoint.stream import AS_TENSORS, Loader
from dayzero.decl import Form, Format, Fp8Blocks, Mxfp4, Packed, ParamDecl
from dayzero.models.blueprint import Blueprint
from dayzero.rehearse.draws import Coded, Draw, coded, draw_of, quantiles
from dayzero.rehearse.picks import key_of, pick, rows_of

DECODED_ELEMENTS = {"cpu": 1 << 18}  # decoded at once: they take some 16 bytes each meanwhile
MOST_DECODED = 1 << 25  # elsewhere

Box = tuple[range, ...]  # a run along each dimension


def seeded_coverage(plan: Blueprint) -> Coverage:
    """What a complete checkpoint of ``plan`` holds for the plain forward, as if its files were there."""

    def stored(group: Group) -> Sequence[Stored]:
        name = group.name.replace("{e}", "0")
        fmt = stored_format(group, name, plan.expansion, plan.quant, plan.plain)
        return [Stored(group.name, fmt, ())] if group.count is None else Alike(group.name, fmt, (), group.count)

    groups = list(plan.expansion.groups)
    return Coverage(groups, [stored(group) for group in groups])


class SeededLoader(Loader):
    """A ``Loader`` that makes what others read. seed: of all parameters. bytes_read: what the stored form would take.

    No statistics are taken: they would find what was put there.
    """

    def __init__(self, source: SeededSource, plan: Blueprint, dtype: torch.dtype) -> None:
        coverage = seeded_coverage(plan)
        self._spec: ModelSpec = plan.spec
        super().__init__(source, Index({}, {}, 0, []), coverage, dtype)
        total = sum(self.stored_bytes([name]) for name in self._decls)
        self.index = Index({}, {}, total, [])
        self.seed = source.asked.seed
        self._plain: dict[tuple[Draw, torch.dtype], Tensor] = {}  # tables on the device
        self._coded: dict[tuple[Format, float], Coded] = {}

    def place(self, device: str) -> None:
        """From now on parameters are made on this device; experts that are asked for one by one, too."""
        self.device = torch.device(device)
        self._plain, self._coded = {}, {}

    def load(
        self, prefix: str, lazy: Container[str] = (), keep_bytes: int = 0, packed: Mapping[str, Form] = AS_TENSORS
    ) -> dict[str, Tensor]:
        """As ``Loader.load``. Matrices that could be had by rows are made whole; experts are not kept."""
        del keep_bytes
        names = self.names(prefix)
        assert names, f"no declared parameter is named {prefix} or lies below it"
        out: dict[str, Any] = {}
        for name in names:
            decl = self._decls[name]
            if name in lazy and self.by_expert(name):
                out[name] = ExpertStack(decl.shape, self._dtype_of(decl), partial(self._slice, name))
                continue
            out[name] = self.piece(name) if self._wanted(name, packed) is None else self.packed_piece(name)
            self.bytes_read += self.stored_bytes([name])
        return out

    def expert(
        self, names: Sequence[str], number: int, packed: Mapping[str, Form] = AS_TENSORS
    ) -> dict[str, Tensor | Packed]:
        """As ``Loader.expert``. For any thread."""
        return {
            name: self._packed_slice(name, number) if name in packed else self._slice(name, number) for name in names
        }

    def by_expert(self, name: str) -> bool:
        return len(self._decls[name].shape) == 3

    def stored_bytes(self, names: Sequence[str]) -> int:
        return sum(stored_bytes(self.format_of(name), self._decls[name].shape) for name in names)

    def format_of(self, name: str) -> Format:
        """The format that a checkpoint of the model stores the parameter in."""
        return self.coverage.sources[self._groups[name][0]][0].format

    def _slice(self, name: str, number: int) -> Tensor:
        return self.piece(name, self._box_of(name, number))[0]

    def _packed_slice(self, name: str, number: int) -> Packed:
        return self.packed_piece(name, self._box_of(name, number))[0]

    def _box_of(self, name: str, number: int) -> Box:
        return (range(number, number + 1), *(range(n) for n in self._decls[name].shape[1:]))

    def piece(self, name: str, box: Box | None = None) -> Tensor:
        """The parameter, or a box of it: what a rank holds. It equals that slice of the whole, bit for bit."""
        decl = self._decls[name]
        box = box or tuple(range(n) for n in decl.shape)
        shape, dtype = tuple(map(len, box)), self._dtype_of(decl)
        fmt, draw = self.format_of(name), draw_of(decl, self._mixer_of(name), self._spec.tie.tied)
        if draw.kind == "constant":
            return torch.full(shape, draw.size, dtype=dtype, device=self.device)
        rows = rows_of(decl.shape[:-1], box[:-1])
        if fmt.quantized:
            made = self._decoded(decl, rows, box[-1])
        else:
            made = pick(self._plain_table(draw, dtype), key_of(name, self.seed), rows, box[-1])
        return made.view(shape)

    def packed_piece(self, name: str, box: Box | None = None) -> Packed:
        """The parameter, or a box of it that begins and ends with scale blocks, as it is stored."""
        parts, fmt = self.parts(name, box), self.format_of(name)
        assert fmt.form is not None, f"{name} is stored in {fmt.name}, which no operator takes"
        if fmt.form == "mxfp4":
            return Mxfp4(parts["weight"], parts["scale"])
        scales = parts["scale"]
        scales = e8m0_table().to(scales.device)[scales.int()] if fmt.scale == "e8m0" else scales.float()
        return Fp8Blocks(parts["weight"].view(torch.float8_e4m3fn), scales)

    def parts(self, name: str, box: Box | None = None) -> dict[str, Tensor]:
        """Codes and scales of a quantised parameter, or of a box of whole scale blocks: ``weight`` uint8, a byte for
        one e4m3 code or two of 4 bits along the last dimension; ``scale``: exponents and e4m3 scales as uint8;
        ``tensor_scale`` where it has one."""
        decl, fmt = self._decls[name], self.format_of(name)
        assert fmt.block is not None, f"{name} is stored in {fmt.name}, which has no scales"
        box = box or tuple(range(n) for n in decl.shape)
        made, grid = self._tables_of(decl), _grid(decl.shape, fmt.block)
        scale_box = (*box[:-2], *(_divided(run, size) for run, size in zip(box[-2:], fmt.block, strict=True)))
        codes_box = (*box[:-1], _divided(box[-1], made.per_byte))
        keys = key_of(name, self.seed), key_of(f"{name}:scale", self.seed)
        codes = pick(made.codes, keys[0], rows_of(decl.shape[:-1], codes_box[:-1]), codes_box[-1])
        scales = pick(made.scales, keys[1], rows_of(grid[:-1], scale_box[:-1]), scale_box[-1])
        out = {"weight": codes.view(tuple(map(len, codes_box))), "scale": scales.view(tuple(map(len, scale_box)))}
        if made.whole is not None:
            kept = made.whole if fmt.tensor_scale == "multiply" else 1 / made.whole
            shape = next(part.shape for part in stored_parts(fmt, "t", decl.shape) if part.role == "tensor_scale")
            out["tensor_scale"] = torch.full(shape, kept, device=self.device)
        return out

    def _decoded(self, decl: ParamDecl, rows: Tensor, columns: range) -> Tensor:
        """[R, C] of these numbers of rows, some at a time."""
        fmt, made, shape = self.format_of(decl.name), self._tables_of(decl), decl.shape
        assert fmt.block is not None
        keys = key_of(decl.name, self.seed), key_of(f"{decl.name}:scale", self.seed)
        grid, code_bytes, groups = (
            _grid(shape, fmt.block),
            _divided(columns, made.per_byte),
            _divided(columns, fmt.block[1]),
        )
        first = columns.start - code_bytes.start * made.per_byte
        group_of = torch.arange(columns.start, columns.stop, device=self.device) // fmt.block[1] - groups.start
        out = torch.empty(len(rows), len(columns), dtype=self._dtype_of(decl), device=self.device)
        step = max(1, DECODED_ELEMENTS.get(self.device.type, MOST_DECODED) // max(1, len(columns)))
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            values = pick(made.values, keys[0], some, code_bytes).flatten(1)[:, first : first + len(columns)]
            scale_rows = some // shape[-2] * grid[-2] + some % shape[-2] // fmt.block[0]
            exact = values * pick(made.scale_values, keys[1], scale_rows, groups).index_select(1, group_of)
            out[begin : begin + step] = exact if made.whole is None else exact * made.whole
        return out

    def _plain_table(self, draw: Draw, dtype: torch.dtype) -> Tensor:
        if (draw, dtype) not in self._plain:
            self._plain[draw, dtype] = quantiles(draw).to(dtype).to(self.device)
        return self._plain[draw, dtype]

    def _tables_of(self, decl: ParamDecl) -> Coded:
        """Of the parameter's format, on the device."""
        fmt, draw = self.format_of(decl.name), draw_of(decl, self._mixer_of(decl.name), self._spec.tie.tied)
        if (fmt, draw.size) not in self._coded:
            made = coded(fmt, draw.size)
            codes, values, scales, scale_values = (table.to(self.device) for table in made[:4])
            self._coded[fmt, draw.size] = Coded(codes, values, scales, scale_values, made.whole)
        return self._coded[fmt, draw.size]

    def _mixer_of(self, name: str) -> Mixer | None:
        words = name.split(".")
        return self._spec.layers[int(words[1])].mixer if words[0] == "layers" and words[2] == "mixer" else None


def _divided(run: range, size: int) -> range:
    return range(run.start // size, -(-run.stop // size))


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
