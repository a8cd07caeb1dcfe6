"""Parts of logical tensors, for forwards that must not hold a whole one: single experts, single rows.

The independent decoder reads a tensor by name. Here a slice along the first dimension gets a name of its own, made of
the same bytes, so that the decoder itself stays the only code that turns bytes into numbers.
"""

from __future__ import annotations

import torch
from decode import Place, Reader  # type: ignore[import-not-found]  # beside this file, run by path
from torch import Tensor

_SCALE_ENDS = ("_scale_inv", "_scale_2", "_global_scale", "_scale", "_shape")


def logical_names(reader: Reader) -> dict[str, tuple[str, ...]]:
    """Logical tensor -> the physical ones that hold it: values first, then scales, found by what stands beside what."""
    have = reader.places
    held: dict[str, list[str]] = {}
    for name in sorted(have):
        held.setdefault(_owner(name, have), []).append(name)
    return {logical: tuple(parts) for logical, parts in held.items()}


def _owner(name: str, have: dict[str, Place]) -> str:
    for end, other in (("_blocks", "_scales"), ("_scales", "_blocks")):
        if name.endswith(end) and name.removesuffix(end) + other in have:
            return name.removesuffix(end)
    if name.endswith("_packed"):
        return name.removesuffix("_packed")
    for end in _SCALE_ENDS:
        base = name.removesuffix(end)
        if base != name and (base in have or base + "_packed" in have):
            return base
    base = name.removesuffix("scale") + "weight"
    if name.endswith(".scale") and base in have and not have[base].code.startswith(("F32", "F16", "BF16")):
        return base
    return name


def can_slice(reader: Reader, name: str, parts: tuple[str, ...], num: int) -> bool:
    """Whether every physical part of a logical tensor has ``num`` slices along its first dimension."""
    shapes = [reader.places[p].shape for p in parts]
    return all(s[:1] == (num,) and len(s) > 1 for s in shapes) and all(p.startswith(name) for p in parts)


def is_plain(reader: Reader, name: str, parts: tuple[str, ...]) -> bool:
    """Whether the tensor is stored by itself, as floats without scales."""
    return parts == (name,) and reader.places[name].code.startswith(("F32", "F16", "BF16", "F64"))


def slice_tensor(reader: Reader, name: str, parts: tuple[str, ...], index: int) -> Tensor:
    """Slice ``index`` of logical tensor ``name`` along its first dimension, decoded to float32."""
    alias = f"{name}#slice"
    made = []
    for part in parts:
        place = reader.places[part]
        size = (place.end - place.begin) // place.shape[0]
        begin = place.begin + index * size
        made.append(alias + part.removeprefix(name))
        reader.places[made[-1]] = Place(place.file, place.code, place.shape[1:], begin, begin + size)
    try:
        return reader.tensor(alias)
    finally:
        for part in made:
            del reader.places[part]


def rows(reader: Reader, name: str, first: int, last: int) -> Tensor:
    """Rows [first, last) of a plainly stored matrix, as float32 [last - first, columns]."""
    place = reader.places[name]
    size = (place.end - place.begin) // place.shape[0]
    alias = f"{name}#rows"
    begin = place.begin + first * size
    shape = (last - first, *place.shape[1:])
    reader.places[alias] = Place(place.file, place.code, shape, begin, begin + (last - first) * size)
    try:
        return reader.tensor(alias)
    finally:
        del reader.places[alias]


def gather_rows(reader: Reader, name: str, wanted: Tensor) -> Tensor:
    """Rows ``wanted`` [N] of a plainly stored matrix, as float32 [N, columns]; one read a row."""
    return torch.cat([rows(reader, name, int(i), int(i) + 1) for i in wanted])
