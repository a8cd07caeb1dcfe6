"""Blocks of FP8 for kernels: a layout that a matrix unit takes from registers as bf16.

R rows (out), C columns (in), E experts, B = ceil(C / 128) blocks of columns, S = ceil(R / 128) of rows.

Tiles. A matrix is cut into tiles of 64 rows x 128 columns, each as two halves of 64 columns, a half 1,024 words of 32
bits in a row of memory. Two neighbouring words hold eight codes of e4m3, of one row and of four pairs of neighbouring
columns. Within the words the bits lie so that a pair comes out as two bf16 numbers with a mask, or with two shifts and
two masks: bf16 has its sign in bit 15, and the code's exponent and mantissa fit bits 10 to 4 (a subnormal of e4m3 is
then one of bf16). The number is too small by 2^120, so a product with that gives the code's value exactly.

Which word holds what: word [k5, row 4-5, row 0-2, k1-2, row 3, k0] in this order of bits, from the highest down, as in
``mxfp4``; the planes p of a pair of words are (k4, k3); the halves are k6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.decl import Fp8Blocks
from dayzero.ops.triton.machine import INTERPRETED
from dayzero.ops.triton.mxfp4 import placed
from dayzero.units import ceil_div

ROWS, COLUMNS = 64, 128  # of a tile
HALF = 1024  # words of half a tile

_MASK = 0x87F087F0  # of two bf16 numbers: sign, four bits of the exponent, three of the mantissa
_LOW, _HIGH = 0x80F080F0, 0x07000700  # of these, what planes 2 and 3 find four bits below and above
_HALF = tl.constexpr(HALF)
_MASK_BITS, _LOW_BITS, _HIGH_BITS = tl.constexpr(_MASK), tl.constexpr(_LOW), tl.constexpr(_HIGH)
_SLOW = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class ByteTiles:
    """A stack of matrices [E, R, C] in tiles, A = 2 S.

    codes: int32 [E, A, B, 2, 1024]. scales: f32 [E, S, B], by which sums over the 128 columns of a block of a block's
    128 rows are to be multiplied. What is beyond R or C is zero. A block that holds a NaN has NaN for a scale: all
    sums with it are NaN, where decoded values would make those of one row NaN."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * (self.codes.numel() + self.scales.numel())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return self.shape[0]


def pack(stack: Fp8Blocks) -> ByteTiles:
    """A stack [E, R, C] laid out in tiles, in one launch."""
    num_experts, num_rows, num_columns = stack.shape
    tall, wide = 2 * ceil_div(num_rows, 2 * ROWS), ceil_div(num_columns, COLUMNS)
    codes = torch.empty(num_experts, tall, wide, 2, HALF, dtype=torch.int32, device=stack.codes.device)
    scales = stack.scales.contiguous()
    if codes.numel():
        spoilt = torch.empty(num_experts, tall // 2, 2, wide, dtype=torch.int32, device=codes.device)
        _lay_out[tall * wide, num_experts](
            stack.codes.view(torch.uint8), codes, spoilt, *stack.codes.stride(), num_rows, num_columns, wide,
            num_warps=4,
        )  # fmt: skip
        scales = scales.masked_fill(spoilt.amax(2) > 0, torch.nan)
    return ByteTiles(codes, scales, stack.shape)


@triton.jit
def _lay_out(codes, out, spoilt, matrix_step, row_step, column_step, R, C, wide):
    """Grid (tiles of a matrix, E). Codes [E, R, C] as words of tiles, zeros beyond R and C; whether one is NaN."""
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = expert * tl.num_programs(0) + tile
    pair = tl.arange(0, _HALF // 2)  # of words: [k5, row 4-5, row 0-2, k1-2, row 3]
    row = tile // wide * 64 + (pair >> 6 & 3) * 16 + (pair & 1) * 8 + (pair >> 3 & 7)
    first = tile % wide * 128 + (pair >> 8) * 32 + (pair >> 1 & 3) * 2
    at = codes + expert * matrix_step + row.to(tl.int64) * row_step
    wrong = tl.zeros((_HALF // 2,), tl.int32)
    for half in tl.static_range(2):
        one, two = tl.zeros((_HALF // 2,), tl.int64), tl.zeros((_HALF // 2,), tl.int64)
        for plane in tl.static_range(4):  # k4, k3
            bits = tl.zeros((_HALF // 2,), tl.int64)
            for k0 in tl.static_range(2):
                column = first + (half * 64 + (plane >> 1) * 16 + (plane & 1) * 8 + k0)
                b = tl.load(at + column * column_step, mask=(row < R) & (column < C), other=0).to(tl.int64)
                wrong |= ((b & 0x7F) == 0x7F).to(tl.int32)
                bits |= ((b & 0x80) << 8 | (b & 0x7F) << 4) << (16 * k0)
            if plane == 0:
                one |= bits
            elif plane == 1:
                two |= bits
            elif plane == 2:
                one |= (bits & _LOW_BITS) >> 4
                two |= (bits & _HIGH_BITS) << 4
            else:
                two |= (bits & _LOW_BITS) >> 4
                one |= (bits & _HIGH_BITS) << 4
        words = out + (number * 2 + half) * _HALF + pair * 2
        tl.store(words, one.to(tl.int32))
        tl.store(words + 1, two.to(tl.int32))
    tl.store(spoilt + number, tl.max(wrong, 0))


_ASSEMBLY = tl.constexpr(f"""{{
.reg .b32 low, high;
and.b32 $0, $4, {_MASK:#010x};
and.b32 $1, $5, {_MASK:#010x};
shl.b32 low, $4, 4;
and.b32 low, low, {_LOW:#010x};
shr.b32 high, $5, 4;
lop3.b32 $2, high, {_HIGH:#010x}, low, 0xEA;
shl.b32 low, $5, 4;
and.b32 low, low, {_LOW:#010x};
shr.b32 high, $4, 4;
lop3.b32 $3, high, {_HIGH:#010x}, low, 0xEA;
mov.b32 low, 0x7B807B80;
mul.rn.bf16x2 $0, $0, low;
mul.rn.bf16x2 $1, $1, low;
mul.rn.bf16x2 $2, $2, low;
mul.rn.bf16x2 $3, $3, low;
}}""")
_REGISTERS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))
_BF16 = tl.constexpr((tl.bfloat16,) * 4)


@triton.jit
def _plane(bits):
    """What the assembly does with a plane at last, in f32: int64 of 32 bits [...] -> [..., 2]."""
    pair = tl.join(bits & 0xFFFF, bits >> 16)
    return (pair << 16).to(tl.int32).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _planes_slow(words):
    """The four planes of words int32 [..., 2], for the interpreter, which has no assembly and no bf16."""
    one, two = tl.split(words.to(tl.int64) & 0xFFFFFFFF)
    c = ((one << 4) & _LOW_BITS) | ((two >> 4) & _HIGH_BITS)
    d = ((two << 4) & _LOW_BITS) | ((one >> 4) & _HIGH_BITS)
    return _plane(one & _MASK_BITS), _plane(two & _MASK_BITS), _plane(c), _plane(d)


@triton.jit
def widened_bytes(words, TALL: tl.constexpr):
    """One half of TALL tiles below one another, words int32 [TALL, 2, 512] -> [TALL * 64, 64] codes in bf16."""
    words = tl.reshape(words, (TALL, 2, 4, 8, 4, 2, 2))
    if _SLOW:
        a, b, c, d = _planes_slow(words)
    else:
        a, b, c, d = tl.inline_asm_elementwise(_ASSEMBLY, _REGISTERS, [words], dtype=_BF16, is_pure=True, pack=2)
    return placed(a, b, c, d, TALL)
