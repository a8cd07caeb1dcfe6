"""Which physical tensors of a checkpoint hold a logical matrix, with which element types and shapes.

A logical tensor has the name and shape a recipe speaks of (``model.layers.3.mlp.up_proj.weight``, ``[out, in]`` or
``[experts, out, in]``). How it is stored depends on its ``Format``; this file is the only place that knows. Element
types are safetensors codes. The arithmetic is in ``dequant``; nothing here imports torch.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from dayzero.decl import Format
from dayzero.units import ceil_div

PartRole = Literal["weight", "scale", "tensor_scale", "input_scale", "shape"]

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip

_PLAIN_DTYPE = {"f32": "F32", "bf16": "BF16", "f16": "F16"}

# First code is what we write; the others are spellings of the same numbers that published files use.
_SCALE_DTYPES = {
    "f32": ("F32", "BF16"),
    "e8m0": ("F8_E8M0", "U8"),
    "e4m3": ("F8_E4M3",),
    "bf16": ("BF16", "F16", "F32"),
}


class StoredPart(NamedTuple):
    """One physical tensor of a checkpoint.

    role: what it means for the logical tensor. name: full name in the file. dtype: allowed safetensors codes, the
    first being the one we write. shape: as in the file's header; ``()`` also admits ``(1,)``.
    optional: a file may lack it, and decoding the weight does not need it.
    """

    role: PartRole
    name: str
    dtype: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False

    def misfit(self, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Why a stored tensor of this dtype and shape cannot be this part, as a phrase; None when it can."""
        if dtype not in self.dtype:
            return f"is stored as {dtype}, expected {' or '.join(self.dtype)}"
        if tuple(shape) != self.shape and not (prod(self.shape) == 1 and tuple(shape) in ((), (1,))):
            return f"has shape {list(shape)}, expected {list(self.shape)}"
        return None


class _Template(NamedTuple):
    """A part without its name. ``suffix`` follows the tensor's name; ``sibling`` replaces its last word ``weight``."""

    role: PartRole
    suffix: str
    sibling: str | None
    dtype: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool


def parts(fmt: Format, tensor: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
    """The physical tensors that hold logical ``tensor`` of ``shape``, the weight first.

    tensor: ``….weight``, or a bare parameter name (``….experts.gate_up_proj``), to which suffixes are appended.
    shape: logical; must be legal for the format (``why_not``), else ValueError.
    """
    templates = _templates(fmt, shape)
    if tensor.endswith(".weight"):
        stem = tensor[: -len("weight")]
        names = [tensor + t.suffix if t.sibling is None else stem + t.sibling for t in templates]
    else:
        names = [tensor + t.suffix for t in templates]
    return tuple([StoredPart(t.role, n, t.dtype, t.shape, t.optional) for t, n in zip(templates, names)])


def stored_bytes(fmt: Format, shape: tuple[int, ...]) -> int:
    """Bytes in the file of a logical tensor of ``shape``, scales included, optional parts not."""
    return sum(prod(t.shape) * DTYPE_BITS[t.dtype[0]] // 8 for t in _templates(fmt, shape) if not t.optional)


def why_not(fmt: Format, shape: tuple[int, ...]) -> str | None:
    """Why no tensor of ``shape`` can be stored in ``fmt``, as a sentence; None when it can.

    Block FP8 admits a ragged last block in both directions; formats that pack along the input do not.
    """
    if fmt.block is None:
        return None
    if len(shape) not in (2, 3) or min(shape) < 1:
        return f"{fmt.name} stores matrices [out, in] or [experts, out, in], not a tensor of shape {list(shape)}"
    rows, columns = fmt.block
    if rows == 1 and shape[-1] % columns:
        return f"{fmt.name} needs an input size that is a multiple of {columns}, not {shape[-1]}"
    return None


@lru_cache(maxsize=4096)
def _templates(fmt: Format, shape: tuple[int, ...]) -> tuple[_Template, ...]:
    if fmt.block is None:
        return (_Template("weight", "", None, (_PLAIN_DTYPE[fmt.element],), shape, False),)
    reason = why_not(fmt, shape)
    if reason:
        raise ValueError(reason)
    assert fmt.scale is not None
    *lead, out_size, in_size = shape
    stack = tuple(lead)
    grid = (*stack, ceil_div(out_size, fmt.block[0]), ceil_div(in_size, fmt.block[1]))
    scale_dtypes = _SCALE_DTYPES[fmt.scale]
    packed = (*stack, out_size, in_size // 2)

    def weight(suffix: str, dtype: tuple[str, ...], stored: tuple[int, ...]) -> _Template:
        return _Template("weight", suffix, None, dtype, stored, False)

    def scale(suffix: str, sibling: str | None = None) -> _Template:
        return _Template("scale", suffix, sibling, scale_dtypes, grid, False)

    def input_scale(word: str, scalar: tuple[int, ...]) -> _Template:
        return _Template("input_scale", "_" + word, word, ("F32",), scalar, True)

    match fmt.layout:
        case "scale_inv":
            return weight("", ("F8_E4M3",), shape), scale("_scale_inv")
        case "weight_scale":
            return weight("", ("F8_E4M3",), shape), scale("_scale")
        case "scale" if fmt.element == "e4m3":
            return weight("", ("F8_E4M3",), shape), scale("_scale", "scale")
        case "scale":
            return weight("", ("I8", "U8"), packed), scale("_scale", "scale")
        case "blocks":
            return (
                weight("_blocks", ("U8",), (*stack, out_size, in_size // fmt.block[1], fmt.block[1] // 2)),
                scale("_scales")._replace(dtype=("U8", "F8_E8M0")),
            )
        case "packed":
            return weight("_packed", ("U8",), packed), scale("_scale")._replace(dtype=("U8", "F8_E8M0"))
        case "packed_global":
            scalar = stack or (1,)
            tensor_scale = _Template("tensor_scale", "_global_scale", None, ("F32",), scalar, False)
            return weight("_packed", ("U8",), packed), scale("_scale"), tensor_scale, input_scale(
                "input_global_scale", scalar
            )  # fmt: skip
        case "weight_scale_2":
            tensor_scale = _Template("tensor_scale", "_scale_2", None, ("F32",), stack, False)
            return weight("", ("U8",), packed), scale("_scale"), tensor_scale, input_scale("input_scale", stack)
        case "packed_shape":
            words = (*stack, out_size, in_size // 8)
            size = _Template("shape", "_shape", None, ("I64", "I32"), (len(shape),), False)
            return weight("_packed", ("I32",), words), scale("_scale"), size
    raise AssertionError(f"no layout {fmt.layout}")
