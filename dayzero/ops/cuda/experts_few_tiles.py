"""Routed experts of a few tokens for stacks in tiles of 4 or 8 bits: gate and up with the activation, down with the
weighted sum, two launches.

T tokens, N chosen a token, D model width, I intermediate width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dayzero.ops.activation import activation_of
from dayzero.ops.cuda.build import Kernel, load
from dayzero.ops.cuda.linear import NO_GLU, Constants, at_16_bytes
from dayzero.ops.triton.fp8_tiles import ByteTiles
from dayzero.ops.triton.mxfp4 import Tiles
from dayzero.units import ceil_div

Biases = tuple[Tensor, Tensor, Tensor] | None
_ROWS = 16  # of a block


class Ring(NamedTuple):
    """warps: of a block. stages: each 16 rows of a tile of one or two matrices a warp; all but one are under way."""

    warps: int
    stages: int


# Of gate and up, and of down, by bits: three blocks a multiprocessor but for two of gate and up in 8 bits, and four of
# down in 4. Not measured yet.
RINGS: Mapping[int, tuple[Ring, Ring]] = {4: (Ring(8, 3), Ring(8, 5)), 8: (Ring(8, 3), Ring(8, 4))}


def bits_of(stacks: tuple[Any, ...]) -> int:
    """Of the codes of stacks that all are in tiles of one form; 0 for others."""
    for form, bits in ((Tiles, 4), (ByteTiles, 8)):
        if all(isinstance(stack, form) for stack in stacks):
            return bits
    return 0


def biases_of(biases: Biases) -> tuple[int, tuple[Tensor | None, ...]]:
    """(what they are, as kernels call it; the biases as they take them)."""
    if biases is None:
        return 0, (None, None, None)
    if all(one.dtype == torch.bfloat16 for one in biases):
        return 1, tuple(one.contiguous() for one in biases)
    return 2, tuple(one.float().contiguous() for one in biases)


def few_tiles(
    rows: tuple[Tensor, Tensor, Tensor], stacks: tuple[Any, ...], activation: Mapping[str, Any], biases: Biases,
    how: tuple[Ring, Ring],
) -> Tensor:  # fmt: skip
    """The two launches. rows: x [T, D] in bf16, ids [T, N], weights [T, N]. stacks: gate, up, down, in tiles of one
    form. D and I must be even."""
    x, (gate, up, down) = at_16_bytes(rows[0]), stacks
    ids, weights = rows[1].long().contiguous(), rows[2].float().contiguous()
    (tokens, chosen), (num_experts, inner, width) = ids.shape, gate.shape
    kind, (gate_bias, up_bias, down_bias) = biases_of(biases)
    glu, numbers = activation_of(activation)
    hidden, out = x.new_empty(tokens * chosen, inner), x.new_empty(tokens, width)
    # In a graph stacks are there already, so down's rows may be asked for while gate and up still run.
    overlap, bits = torch.cuda.is_current_stream_capturing(), bits_of(stacks)
    stride: Any = ctypes.c_int64(x.stride(0))
    kernel = _kernel("gate_up", how[0], bits, 2, {"GATED": 1, "BIAS": kind, "GLU": glu})
    kernel(
        (tokens * chosen, ceil_div(inner, _ROWS)), 32 * how[0].warps,
        (x, ids, *_parts(gate), *_parts(up), gate_bias, up_bias, hidden, num_experts, chosen, inner, width,
         *_tiles(gate), stride, Constants(*numbers)),
        overlap=overlap,
    )  # fmt: skip
    kernel = _kernel("down_sum", how[1], bits, 1, {"CHOSEN": chosen, "BIAS": kind, "GLU": NO_GLU})
    kernel(
        (tokens, ceil_div(width, _ROWS)), 32 * how[1].warps,
        (hidden, ids, weights, *_parts(down), down_bias, out, num_experts, width, inner, *_tiles(down)),
        overlap=overlap,
    )  # fmt: skip
    return out


def _parts(stack: Tiles | ByteTiles) -> tuple[Tensor | None, ...]:
    """Codes, what they are scaled by, shifts."""
    if isinstance(stack, Tiles):
        return stack.codes, stack.exponents, stack.shifts
    return stack.codes, stack.scales, None


def _tiles(stack: Tiles | ByteTiles) -> tuple[int, int]:
    """How many a matrix is tall and wide."""
    return stack.codes.shape[1], stack.codes.shape[2]


def _kernel(name: str, how: Ring, bits: int, matrices: int, forms: Mapping[str, int]) -> Kernel:
    defines: dict[str, object] = {"BITS": bits, "WARPS": how.warps, "STAGES": how.stages, **forms}
    bytes_a_thread = 8 * bits + (8 if bits == 4 else 0)  # of a stage and matrix
    shared = how.stages * matrices * 32 * how.warps * bytes_a_thread
    return load("experts_few_tiles.cu", name, defines=defines, shared_bytes=shared)
