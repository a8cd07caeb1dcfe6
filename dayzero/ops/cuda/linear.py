"""Matrix products with few rows at the speed of reading the weight, in bf16 or in blocks of 8 bits; with more rows,
torch's library, or ``linear_fp8``.

T tokens, K input width, N output width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dayzero.decl import FP8_SIZE, Fp8Blocks
from dayzero.ops.activation import NUMBERS, activation_of
from dayzero.ops.cuda import build, linear_fp8
from dayzero.ops.cuda.build import Kernel, load
from dayzero.ops.fp8_blocks import packed_rows
from dayzero.ops.triton import machine
from dayzero.ops.triton.linear_fp8 import Rounded
from dayzero.ops.vendor import torch_cuda

Weight = Tensor | Fp8Blocks
MOST_ROWS = 16  # that the kernel takes


def check_machine() -> None:
    """Raise MachineError where one of the ways cannot be gone."""
    build.check_machine()
    machine.check_machine()
    torch_cuda.check_machine()


NO_GLU = -1


class Setting(NamedTuple):
    """Of a launch: warps a block, tiles of 16 rows of the weight, blocks of 32 inputs a stage (of 64 in 8 bits), stages
    of the ring."""

    warps: int
    tiles: int
    unroll: int
    stages: int


def pack(w_NK: Weight) -> Weight:
    """The weight with rows in one piece: what lies beside it in one matrix is multiplied by one call. Of one in 8 bits:
    ``fp8_blocks.packed_rows``."""
    return packed_rows(w_NK) if isinstance(w_NK, Fp8Blocks) else w_NK.contiguous()


def matmul(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul`` of bf16 numbers: sums in f32, one rounding. In a graph, a weight must have been there before
    the graph is replayed."""
    setting = _setting(x_TK, w_NK)
    if setting is not None:
        return _few(x_TK, w_NK, bias_N, x_TK.dtype, setting)
    if isinstance(w_NK, Fp8Blocks):
        return linear_fp8.matmul(x_TK, w_NK, bias_N)
    return torch_cuda.matmul(x_TK, w_NK, bias_N)


def matmul_f32(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_f32`` of bf16 numbers: exact products, sums in f32. Graphs: as ``matmul``."""
    setting = _setting(x_TK, w_NK)
    if setting is not None:
        return _few(x_TK, w_NK, bias_N, torch.float32, setting)
    if isinstance(w_NK, Fp8Blocks):
        return linear_fp8.matmul_f32(x_TK, w_NK, bias_N)
    return torch_cuda.matmul_f32(x_TK, w_NK, bias_N)


def few_gated(x_TK: Tensor, w_NK: Weight, activation: Mapping[str, Any]) -> Tensor | None:
    """glu of x times the first and the second half of w, [..., N / 2], both rounded before; None where rows are too
    many, or numbers of another type."""
    setting = _setting(x_TK, w_NK)
    if setting is None or w_NK.shape[0] % 2:
        return None
    if isinstance(w_NK, Fp8Blocks) and w_NK.shape[0] // 2 % FP8_SIZE:
        raise ValueError(f"a matrix of {w_NK.shape} in 8 bits: blocks of scales lie in both of its halves")
    return _few(x_TK, w_NK, None, x_TK.dtype, setting, activation=activation)


def few_added(x_TK: Tensor, w_NK: Weight, added_TN: Tensor) -> Tensor | None:
    """added + the product, which is rounded before, [..., N]; None as above."""
    setting = _setting(x_TK, w_NK)
    if setting is None or added_TN.dtype != x_TK.dtype or not added_TN.is_contiguous():
        return None
    return _few(x_TK, w_NK, None, x_TK.dtype, setting, added=added_TN)


def few_rounded(x_TK: Rounded, w_NK: Weight, bias_N: Tensor | None) -> Tensor | None:
    """The product in bf16, with codes of x that are bf16 numbers and a weight in 8 bits; None as above, and for another
    weight."""
    setting = _setting(x_TK.codes, w_NK) if isinstance(w_NK, Fp8Blocks) else None
    return None if setting is None else _few(x_TK.codes, w_NK, bias_N, x_TK.codes.dtype, setting, x_scales=x_TK.scales)


def _setting(x: Tensor, w: Weight) -> Setting | None:
    """How the kernel for few rows is launched; None where others take over: more rows, other dtypes, and rows that do
    not begin at 16 bytes."""
    codes, (outputs, width) = w.codes if isinstance(w, Fp8Blocks) else w, w.shape
    piece = 16 // codes.element_size()  # numbers of the weight that a thread takes at once
    aligned = (
        width % piece == 0 and codes.stride(0) % piece == 0 and codes.stride(1) == 1 and codes.data_ptr() % 16 == 0
    )
    stored = torch.float8_e4m3fn if isinstance(w, Fp8Blocks) else torch.bfloat16
    if not (aligned and codes.dtype == stored and x.dtype == torch.bfloat16 and x.numel() and outputs):
        return None
    rows = x.numel() // width
    if rows > MOST_ROWS or (rows > 8 and outputs * width > 17 << 20):
        return None
    return _of_fp8(rows, outputs, width) if isinstance(w, Fp8Blocks) else _of_bf16(rows, outputs, width)


def _of_bf16(rows: int, outputs: int, width: int) -> Setting:
    """What was best on an H200; 132, 264 and 396 are its multiprocessors times the blocks that one holds."""
    blocks = -(-outputs // 16)
    if rows > 8:
        return Setting(16, 1, 2, 3) if blocks <= 132 else Setting(16, 2, 1, 3)
    if width <= 128:  # one step of four warps
        return Setting(4, 1, 1, 3)
    if blocks <= 264:
        return Setting(16, 1, 2, 3 if blocks <= 132 else 2)
    return Setting(8, 1, 2, 4) if blocks <= 396 else Setting(8, 2, 2, 2)


def _of_fp8(rows: int, outputs: int, width: int) -> Setting:
    """As many bytes under way as with bf16, and no warp without work. A block reads all of x, two bytes a number, from
    the second-level cache: more than four rows are worth 32 rows of the weight."""
    blocks = -(-outputs // 16)
    if width <= 512:  # a step of eight warps
        return Setting(4, 1, 1, 4)
    if blocks <= 132:
        return Setting(16, 1, 1, 6)
    if width <= 2048:
        return Setting(8, 1, 1, 4) if rows <= 4 or blocks <= 264 else Setting(8, 2, 1, 4)
    if blocks <= 264 or (blocks <= 528 and rows <= 4):  # in one go, of up to four blocks a multiprocessor
        return Setting(8, 1, 2, 4 if blocks <= 264 else 3)
    return Setting(8, 2, 1, 4)


class Constants(ctypes.Structure):
    """Of an activation, as the kernel takes them."""

    _fields_ = tuple((word, ctypes.c_float) for word in NUMBERS)


def at_16_bytes(x_TK: Tensor) -> Tensor:
    """bf16 rows that lie in a piece each and begin at 16 bytes; copied where they do not."""
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        return x_TK.clone(memory_format=torch.contiguous_format)
    return x_TK


def _few(
    x: Tensor, w: Weight, bias: Tensor | None, dtype: torch.dtype, setting: Setting,
    *, activation: Mapping[str, Any] | None = None, added: Tensor | None = None, x_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """activation: of the products with the two halves of w. added: what the product is added to. x_scales: of codes, by
    block of columns and row. None: none."""
    lead, (outputs, inputs) = x.shape[:-1], w.shape
    glu, numbers, made = NO_GLU, [0.0] * len(NUMBERS), 16 * setting.tiles
    if activation is not None:
        (glu, numbers), outputs, made = activation_of(activation), outputs // 2, made // 2
    x = at_16_bytes(x.reshape(-1, inputs))
    rows = x.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    kind = 0 if bias is None else 1 if bias.dtype == torch.bfloat16 else 2
    bias = bias if bias is None else bias.contiguous() if kind == 1 else bias.float().contiguous()
    fp8 = isinstance(w, Fp8Blocks)
    parts = (x, x_scales, w.codes, w.scales) if isinstance(w, Fp8Blocks) else (x, w)
    strides = [ctypes.c_int64(0 if part is None else part.stride(0)) for part in parts]
    # In a graph weights are there already, so they may be asked for while the kernel ahead still runs.
    overlap = torch.cuda.is_current_stream_capturing()
    grid, threads = (-(-outputs // made),), 32 * setting.warps
    forms = {"OUT_F32": int(dtype == torch.float32), "BIAS": kind, "GLU": glu, "ADDED": int(added is not None)}
    forms |= {"XSCALED": int(x_scales is not None)} if fp8 else {}
    kernel, constants = _kernel(setting, (rows + 7) // 8, forms, fp8), Constants(*numbers)
    arguments: tuple[Any, ...] = (*parts, bias, y, rows, outputs, inputs, *strides, constants, added)
    kernel(grid, threads, arguments, overlap=overlap)
    return y.view(*lead, outputs)


def _kernel(setting: Setting, cols: int, forms: Mapping[str, int], fp8: bool) -> Kernel:
    defines: dict[str, object] = {word.upper(): value for word, value in setting._asdict().items()}
    defines |= {"COLS": cols, **forms}
    ring = setting.stages * setting.unroll * 2 * setting.tiles * setting.warps * 32 * 16
    source, name = ("linear_fp8.cu", "few_rows_fp8") if fp8 else ("linear.cu", "few_rows")
    return load(source, name, defines=defines, shared_bytes=ring)
