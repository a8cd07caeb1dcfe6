"""MXFP4 for kernels: a layout that a matrix unit takes from registers, and the turn into e4m3 at the speed of a copy.

R rows (out), C columns (in), E experts, G = C / 32 groups that share an exponent, B = ceil(C / 128) blocks of columns.

Tiles. A matrix is cut into tiles of 64 rows x 128 columns, 1,024 words of 32 bits each, a tile in a row of memory. Two
neighbouring words hold 16 codes, of one row and of eight pairs of neighbouring columns. Within the words the bits lie
so that a pair of codes comes out as two bf16 numbers with one rotation and one mask: bf16 has its sign in bit 15, and
the code's exponent and mantissa fit bits 8 to 6 (code 1, a half, is then a subnormal, as it is in e2m1). The number is
too small by 2^126, so a product with 2^(126 + k), k the group's exponent, gives the value exactly.

Which word holds what: word [k5, row 4-5, row 0-2, k1-2, row 3, k0] in this order of bits, from the highest down; the
planes p of a pair of words are (k4, k3) for the columns with k6 = 0 and again for those with k6 = 1. That is how a
thread of a warpgroup holds its part of the left operand of a product of 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.decl import Mxfp4
from dayzero.ops.experts_mxfp4 import GROUP, distances, live_groups
from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.units import ceil_div

__all__ = ["Tiles", "check_machine", "pack", "to_e4m3", "top_exponents"]

ROWS, COLUMNS = 64, 128  # of a tile
WORDS = ROWS * COLUMNS // 8
HIGHEST = 128  # stored exponent up to which 2^(126 + k) is a bf16 number

# Of each plane: the word its bits lie in (0, 1, or 2 for what is left of both), and by how much it is rotated right.
_PLANES = ((0, 26), (0, 30), (0, 4), (2, 0), (1, 8), (1, 28), (1, 2), (2, 6))
_LEFT = 0xC180C180  # bits of word 0 that planes in "what is left" have; the others of it are word 1's
_PAIR = 0x81C081C0  # of two bf16 numbers: sign, two bits of the exponent, one of the mantissa
SCRATCH = 64 << 20  # bytes that laying out a stack may take besides its result
# The same for a kernel that lays codes out: a code's four bits come from bits 6, 7, 8 and 15.
_WORDS = tl.constexpr(WORDS)
_SOURCES, _ROTATIONS = (tl.constexpr(tuple(plane[i] for plane in _PLANES)) for i in range(2))
_LEFT_BITS, _PAIR_BITS = tl.constexpr(_LEFT), tl.constexpr(_PAIR)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A stack of matrices [E, R, C] in tiles, A = the even number of tiles from R / 64 up.

    codes: int32 [E, A, B, 1024]. exponents: int32 [E, A, B, 64], by row [row 4-5, row 0-2, row 3], of four groups the
    biased exponent of 2^(126 + k - shift), one a byte. shifts: f32 [E], 2^shift, by which a matrix's products are to
    be multiplied: 1 unless a live group's exponent is above 1. What is beyond R or C is zero. A group smaller than
    2^-250 of the matrix's largest becomes zero."""

    codes: Tensor
    exponents: Tensor
    shifts: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.exponents, self.shifts))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return self.shape[0]


def pack(stack: Mxfp4) -> Tiles:
    """A stack [E, R, C] laid out in tiles: codes in one launch, exponents some matrices at a time, so that scratch is
    about ``SCRATCH`` bytes, or three times a matrix's codes."""
    num_experts, num_rows, num_columns = stack.shape
    tall, wide = 2 * ceil_div(num_rows, 2 * ROWS), ceil_div(num_columns, COLUMNS)
    device = stack.codes.device
    codes = torch.empty(num_experts, tall, wide, WORDS, dtype=torch.int32, device=device)
    exponents = torch.empty(num_experts, tall, wide, ROWS, dtype=torch.int32, device=device)
    shifts = torch.ones(num_experts, dtype=torch.float32, device=device)
    if codes.numel():
        _lay_out[tall * wide, num_experts](
            stack.codes, codes, *stack.codes.stride(), num_rows, num_columns // 2, wide, num_warps=4
        )
        step = max(1, SCRATCH // max(1, 3 * stack[0].codes.numel()))
        for first in range(0, num_experts, step):
            some = slice(first, first + step)
            _pack_exponents(Mxfp4(stack.codes[some], stack.scales[some]), exponents[some], shifts[some])
    return Tiles(codes, exponents, shifts, stack.shape)


def _pack_exponents(stack: Mxfp4, exponents: Tensor, shifts: Tensor) -> None:
    """Write those of matrices [E, R, C]: exponents [E, A, B, 64], shifts [E]."""
    num_experts, num_rows, num_columns = stack.shape
    tall, wide = exponents.shape[1:3]
    live = live_groups(stack)
    stored = torch.where(live, stack.scales.int(), 0)
    above = (stored.flatten(1).amax(1) - HIGHEST).clamp(min=0)
    shifts.copy_(torch.exp2(above.float()))
    field = torch.where(live, (stored - above[:, None, None] + 126).clamp(min=0), 0)
    field = torch.nn.functional.pad(field, (0, wide * COLUMNS // GROUP - field.shape[2], 0, tall * ROWS - num_rows))
    # Rows of a tile as [row 4-5, row 3, row 0-2]; stored with row 3 last.
    rows = field.view(num_experts, tall, 4, 2, 8, wide, 4).permute(0, 1, 5, 2, 4, 3, 6)
    rows = rows.reshape(num_experts, tall, wide, ROWS, 4)
    exponents.copy_(rows.to(torch.uint8).contiguous().view(torch.int32)[..., 0])


@triton.jit
def _lay_out(codes, out, matrix_step, row_step, byte_step, R, BYTES, wide):
    """Grid (tiles of a matrix, E). Codes [E, R, BYTES] as words of tiles, zeros beyond R and BYTES."""
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, _WORDS // 2)  # of words: [k5, row 4-5, row 0-2, k1-2, row 3]
    row = tile // wide * 64 + (pair >> 6 & 3) * 16 + (pair & 1) * 8 + (pair >> 3 & 7)
    first = tile % wide * 64 + (pair >> 8) * 16 + (pair >> 1 & 3)
    at = codes + expert * matrix_step + row.to(tl.int64) * row_step
    one, two = tl.zeros((_WORDS // 2,), tl.int64), tl.zeros((_WORDS // 2,), tl.int64)
    for plane in tl.static_range(8):  # k6, k4, k3
        byte = first + (plane >> 2) * 32 + (plane >> 1 & 1) * 8 + (plane & 1) * 4
        b = tl.load(at + byte * byte_step, mask=(row < R) & (byte < BYTES), other=0).to(tl.int64)
        bits = ((b & 7) << 6) | ((b & 8) << 12) | ((b & 0x70) << 18) | ((b & 0x80) << 24)
        bits = ((bits << _ROTATIONS[plane]) | (bits >> (32 - _ROTATIONS[plane]))) & 0xFFFFFFFF
        if _SOURCES[plane] == 0:
            one |= bits
        elif _SOURCES[plane] == 1:
            two |= bits
        else:
            one |= bits & _LEFT_BITS
            two |= bits & (0xFFFFFFFF - _LEFT_BITS)
    words = out + (expert * tl.num_programs(0) + tile) * _WORDS + pair * 2
    tl.store(words, one.to(tl.int32))
    tl.store(words + 1, two.to(tl.int32))


def _assembly() -> str:
    lines = ["{", ".reg .b32 left, t;", f"lop3.b32 left, $8, $9, {_LEFT:#010x}, 0xE4;"]
    for plane, (word, rotation) in enumerate(_PLANES):
        source = ("$8", "$9", "left")[word]
        if rotation:
            lines.append(f"shf.r.wrap.b32 t, {source}, {source}, {rotation};")
            source = "t"
        lines.append(f"and.b32 t, {source}, {_PAIR:#010x};")
        lines.append(f"mul.rn.bf16x2 ${plane}, t, ${10 if plane < 4 else 12};")
    return "\n".join([*lines, "}"])


_ASSEMBLY = tl.constexpr(_assembly())
_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_SLOW = tl.constexpr(INTERPRETED)


@triton.jit
def _plane(word, rotation: tl.constexpr, power):
    """What the assembly does for one plane, in f32: word int64 of 32 bits [...], power f32 [..., 2] -> [..., 2]."""
    turned = ((word >> rotation) | (word << (32 - rotation))) & _PAIR_BITS
    pair = tl.join(turned & 0xFFFF, turned >> 16)
    return (pair << 16).to(tl.int32).to(tl.float32, bitcast=True) * power


@triton.jit
def _planes_slow(words, low, high):
    """The eight planes of words int32 [..., 2], for the interpreter, which has no assembly and no bf16."""
    first, second = tl.split(words.to(tl.int64) & 0xFFFFFFFF)
    left = (first & _LEFT_BITS) | (second & (0xFFFFFFFF - _LEFT_BITS))
    low, high = (low << 16).to(tl.float32, bitcast=True), (high << 16).to(tl.float32, bitcast=True)
    return (
        _plane(first, 26, low), _plane(first, 30, low), _plane(first, 4, low), _plane(left, 0, low),
        _plane(second, 8, high), _plane(second, 28, high), _plane(second, 2, high), _plane(left, 6, high),
    )  # fmt: skip


@triton.jit
def placed(a, b, c, d, TALL: tl.constexpr):
    """Planes of (k4, k3) = 00, 01, 10, 11, each [tile, k5, row 4-5, row 0-2, k1-2, row 3, k0], as one matrix."""
    both = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(both, (0, 2, 5, 3, 1, 7, 8, 4, 6)), (TALL * 64, 64))


@triton.jit
def word_places(step, TALL: tl.constexpr):
    """[TALL, 2, 512]: where the words of TALL tiles, one below another, lie, ``step`` words apart. In this order each
    of 4 * TALL warps finds what it multiplies."""
    tile, half = tl.arange(0, TALL)[:, None, None], tl.arange(0, 2)[None, :, None] * 512
    return tile * step + half + tl.arange(0, 512)[None, None, :]


@triton.jit
def row_places(step, TALL: tl.constexpr):
    """[TALL, 4, 8, 2]: where the tiles' exponents of their rows lie, in the form that ``widened`` takes them."""
    tile, high = tl.arange(0, TALL)[:, None, None, None], tl.arange(0, 4)[None, :, None, None]
    low = tl.arange(0, 8)[None, None, :, None]
    return tile * step + (high * 8 + low) * 2 + tl.arange(0, 2)[None, None, None, :]


@triton.jit
def widened(words, exponents, TALL: tl.constexpr):
    """TALL tiles below one another, words int32 [TALL, 2, 512] and exponents int32 [TALL, 4, 8, 2], as their left and
    right halves [TALL * 64, 64] in bf16."""
    words = tl.reshape(words, (TALL, 2, 4, 8, 4, 2, 2))
    of_rows = exponents[:, None, :, :, None, :, None]
    group = tl.arange(0, 2)[None, :, None, None, None, None, None] * 8
    low = tl.broadcast_to(((of_rows >> group) & 0xFF) * 0x00800080, words.shape)
    high = tl.broadcast_to(((of_rows >> (group + 16)) & 0xFF) * 0x00800080, words.shape)
    if _SLOW:
        a, b, c, d, e, f, g, h = _planes_slow(words, low, high)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _ASSEMBLY, _REGISTERS, [words, low, high], dtype=_BF16, is_pure=True, pack=2
        )
    return placed(a, b, c, d, TALL), placed(e, f, g, h, TALL)


# --- e4m3 ------------------------------------------------------------------------------------------------------------


def top_exponents(matrix: Mxfp4) -> Tensor:
    """uint8 [..., R, B]: the largest stored exponent of a live group of each block, 133 (a scale of 2^0) where none
    is. Made once at load: a kernel that reduced over groups would run at half the speed."""
    return (distances(matrix)[1] + 127).to(torch.uint8)


def to_e4m3(matrix: Mxfp4, top: Tensor, out: Tensor, scale: Tensor) -> None:
    """``experts_mxfp4.to_e4m3`` for [..., R, C], bit for bit, in one launch. top: ``top_exponents`` of it. out
    (float8_e4m3fn [..., R, C]) and scale (f32 [..., R, B]) are overwritten; all four are contiguous."""
    num_groups = matrix.scales.numel()
    if num_groups == 0:
        return
    for part in (matrix.codes, matrix.scales, top, out, scale):
        assert part.is_contiguous(), "matrices that are converted lie row behind row"
    groups, blocks = matrix.scales.shape[-1], top.shape[-1]
    _convert[ceil_div(num_groups, 256),](
        matrix.codes.view(torch.int32), matrix.scales, top, _table(out.device), out.view(torch.int64), scale,
        num_groups, groups, blocks, GROUPS=256, EVEN=groups == 4 * blocks, num_warps=8,
    )  # fmt: skip


@lru_cache(maxsize=4)
def _table(device: torch.device) -> Tensor:
    """int64 [21]: for each distance d from a block's largest exponent, magnitude * 2^(6 - d) as eight e4m3 bytes."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = magnitudes * torch.exp2(6 - torch.arange(21.0))[:, None]
    return scaled.to(torch.float8_e4m3fn).view(torch.int64).flatten().to(device)


# Eight codes of a word and a row of the table -> eight bytes. ``prmt`` looks four magnitudes up at once; the signs go
# from the fourth bit of each code to the eighth of its byte.
_BYTES = tl.constexpr("""{
.reg .b32 low, high, select, spread, moved, first, second;
mov.b64 {low, high}, $2;
and.b32 select, $1, 0x77777777;
prmt.b32 first, low, high, select;
shr.u32 select, select, 16;
prmt.b32 second, low, high, select;
prmt.b32 spread, $1, 0, 0x1100;
shl.b32 moved, spread, 4;
lop3.b32 first, spread, 0x80008000, first, 0xEA;
lop3.b32 first, moved, 0x00800080, first, 0xEA;
prmt.b32 spread, $1, 0, 0x3322;
shl.b32 moved, spread, 4;
lop3.b32 second, spread, 0x80008000, second, 0xEA;
lop3.b32 second, moved, 0x00800080, second, 0xEA;
mov.b64 $0, {first, second};
}""")


@triton.jit
def _bytes_slow(words, rows):
    out = tl.zeros(words.shape, tl.int64)
    wide = words.to(tl.int64)
    for i in tl.static_range(8):
        code = (wide >> (4 * i)) & 15
        out |= (((rows >> ((code & 7) * 8)) & 0x7F) | ((code & 8) << 4)) << (8 * i)
    return out


@triton.jit
def _convert(
    codes, scales, top, table, out, scale, num_groups, groups, blocks, GROUPS: tl.constexpr, EVEN: tl.constexpr
):
    """A group of 32 a thread: 16 bytes in, 32 out. groups, blocks: of a row. EVEN: rows are whole blocks."""
    at = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = at < num_groups
    if EVEN:
        block = at // 4
        first = at % 4 == 0
    else:
        group = at % groups
        block = at // groups * blocks + group // 4
        first = group % 4 == 0
    words = tl.arange(0, 4)[None, :]
    given = tl.load(codes + at[:, None] * 4 + words, mask=here[:, None], other=0)
    largest = tl.load(top + block, mask=here, other=0).to(tl.int32)
    own = tl.load(scales + at, mask=here, other=0).to(tl.int32)
    rows = tl.load(table + tl.minimum(tl.maximum(largest - own, 0), 20))[:, None]
    rows = tl.broadcast_to(rows, given.shape)
    if _SLOW:
        made = _bytes_slow(given, rows)
    else:
        made = tl.inline_asm_elementwise(_BYTES, "=l,r,l", [given, rows], dtype=tl.int64, is_pure=True, pack=1)
    tl.store(out + at[:, None] * 4 + words, made, mask=here[:, None])
    field = largest - 6
    bits = tl.where(field > 0, field << 23, 1 << tl.maximum(22 + field, 0))
    tl.store(scale + block, bits.to(tl.float32, bitcast=True), mask=here & first)
