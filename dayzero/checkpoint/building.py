"""A load's pieces: what it needs of the files, and the parameters that it fills."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import overload

import torch
from torch import Tensor

from dayzero.checkpoint.coverage import Source as Stored
from dayzero.checkpoint.rules import Group, Narrow, Slice, Target
from dayzero.decl import FP8_SIZE, Form, Fp8Blocks, Mxfp4, Packed, ParamDecl
from dayzero.errors import CheckpointError
from dayzero.units import ceil_div


@dataclass(frozen=True, slots=True)
class Need:
    """One logical tensor that a load needs: where it is, its {e}, and the targets that it fills now.

    part: only this slice, or these rows, along dimension 0 of each stored tensor; None for all of it.
    """

    group: Group
    number: int | None
    stored: Stored
    targets: tuple[Target, ...]
    part: int | range | None = None


@dataclass(slots=True)
class Building:
    """A parameter being filled. done: slices written so far, as (expert, slice); filled: elements written so far."""

    decl: ParamDecl
    tensor: Tensor | Packed
    done: set[tuple[int | None, Slice | None]] = field(default_factory=set)
    filled: int = 0

    def place(self, target: Target, number: int | None) -> Tensor | Packed:
        """The part of the parameter that a target fills: a view."""
        into = self.tensor if number is None or not target.stacked else self.tensor[number]
        return cut(into, target.of_param)

    def mark(self, target: Target, number: int | None) -> None:
        """Count the target's part as filled."""
        place = (number if target.stacked else None, target.of_param)
        assert place not in self.done, f"{self.decl.name}: {place} is filled twice"
        self.done.add(place)
        self.filled += prod(self.place(target, number).shape)

    def write(self, target: Target, number: int | None, value: Tensor | Packed) -> None:
        into = self.place(target, number)
        self.mark(target, number)
        assert into.shape == value.shape, f"{self.decl.name}: {tuple(value.shape)} does not fit {tuple(into.shape)}"
        if isinstance(into, Tensor):
            assert isinstance(value, Tensor), f"{self.decl.name}: packed values for a decoded parameter"
            into.copy_(value)
        else:
            assert type(value) is type(into), f"{self.decl.name}: other values than its form has"
            into.codes.copy_(value.codes)
            into.scales.copy_(value.scales)


@overload
def cut(value: Tensor, piece: Slice | None) -> Tensor: ...
@overload
def cut(value: Packed, piece: Slice | None) -> Packed: ...
def cut(value: Tensor | Packed, piece: Slice | None) -> Tensor | Packed:
    """A view of ``value``. Of a packed matrix ``slices.packed_form`` says which there are."""
    if piece is None:
        return value
    if isinstance(value, Mxfp4):
        assert piece.dim < len(value.shape) - 1, "columns of 4 bits are not cut apart"
        return Mxfp4(cut(value.codes, piece), cut(value.scales, piece))
    if isinstance(value, Fp8Blocks):
        blocks = piece
        if piece.dim >= len(value.shape) - 2:
            assert piece.start % FP8_SIZE == 0 and piece.step == 1, "a piece of a scale block is not cut off"
            blocks = Slice(piece.dim, piece.start // FP8_SIZE, -(-piece.stop // FP8_SIZE))
        return Fp8Blocks(cut(value.codes, piece), cut(value.scales, blocks))
    index = [slice(None)] * value.dim()
    index[piece.dim] = slice(piece.start, piece.stop, piece.step)
    return value[tuple(index)]


def new_packed(form: Form, shape: tuple[int, ...], device: torch.device) -> Packed:
    """A packed matrix, or a stack of them, of this logical shape, its values undefined."""
    codes, scales = packed_shapes(form, shape)
    if form == "mxfp4":
        return Mxfp4(*(torch.empty(size, dtype=torch.uint8, device=device) for size in (codes, scales)))
    return Fp8Blocks(
        torch.empty(codes, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )


def packed_bytes(form: Form, shape: tuple[int, ...]) -> int:
    """Of a packed matrix, or a stack of them, of this logical shape."""
    codes, scales = packed_shapes(form, shape)
    return prod(codes) + prod(scales) * (1 if form == "mxfp4" else 4)


def packed_shapes(form: Form, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the codes, of the scales) of a packed matrix, or a stack of them, of this logical shape."""
    *stack, rows, columns = shape
    if form == "mxfp4":
        return (*stack, rows, columns // 2), (*stack, rows, columns // 32)
    return shape, (*stack, ceil_div(rows, FP8_SIZE), ceil_div(columns, FP8_SIZE))


def check_padding(value: Tensor, target: Target, tensor: str) -> None:
    assert target.of_tensor is not None
    rest = value[target.of_tensor.stop :]
    if rest.any():
        at = target.of_tensor.stop + int(rest.reshape(rest.shape[0], -1).any(1).nonzero()[0])
        raise CheckpointError(
            f"{tensor} has {value.shape[0]} rows of which the model uses {target.of_tensor.stop}, but row {at} of the "
            "padding is not zero; the size in config.json or in the recipe is wrong."
        )


def memory_of(
    need: Need, building: Mapping[str, Building], dtype: torch.dtype, shape: tuple[int, ...]
) -> memoryview | None:
    """The host memory of the (part of a) parameter that holds exactly the bytes of what is stored in this dtype and
    shape; None where it is decoded, cut, turned, padded, or goes to several places."""
    rule, target = need.group.rule, need.targets[0]
    if len(need.targets) > 1 or target.of_tensor is not None or need.stored.format.quantized:
        return None
    if isinstance(rule, Narrow) or getattr(rule, "transpose_plain", False):
        return None
    into = building[target.decl.name].place(target, need.number)
    if not isinstance(into, Tensor) or into.dtype != dtype or not tuple(into.shape) == shape == need.group.shape:
        return None
    if not into.is_contiguous() or not into.numel():
        return None
    return memoryview(into.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensor_of(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes as a tensor, which must not be written to."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # The buffer is read-only and torch cannot say so; nobody writes to a parameter.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
