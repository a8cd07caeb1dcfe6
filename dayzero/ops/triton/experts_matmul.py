"""Grouped products of routed experts: each tile of rows times its expert's matrices, which are read once a tile
(``experts_sums``), and the kernels that do it.

T tokens, N chosen a token, D width, I intermediate width, K inner dimension of a product, R its rows (out). Slots,
places and tiles: ``experts_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.activation import activation_of
from dayzero.ops.experts_tables import Settings
from dayzero.ops.triton.activation import glu_of
from dayzero.ops.triton.experts_rows import OVERLAP, Sorted, begun, nearest
from dayzero.ops.triton.experts_sums import sums_of
from dayzero.ops.triton.fp8_tiles import ByteTiles
from dayzero.ops.triton.mxfp4 import COLUMNS, Tiles
from dayzero.units import ceil_div

Biases = tuple[Tensor, Tensor, Tensor] | None
Stack = Tensor | Tiles | ByteTiles  # as it is laid out


@triton.jit
def exists_tile(tiles, num_tiles, tile, num_experts, ONE: tl.constexpr):
    """Whether there is such a tile. ONE: ``tiles`` are the choices of a single token, each of which is a tile."""
    if ONE:
        expert = tl.load(tiles + tile)
        return (expert >= 0) & (expert < num_experts)
    return tile < tl.load(num_tiles)


@triton.jit
def rows_left(tiles, ends, most):
    """Rows from this program's tile's first to its expert's last."""
    tile = tl.program_id(1)
    return tl.load(ends + tl.load(tiles + tile)) - tl.load(tiles + most + tile)


@triton.jit
def tile_of(tiles, ends, order, most, tile, PER: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr):
    """(expert, places [ROWS], which of them are in the tile, source row of each: of one that is not, some row).

    PER: choices a token, where the source is a token; 0 where it is the place."""
    expert = tl.load(tiles + tile)
    row = tl.arange(0, ROWS)
    if ONE:
        places, inside = tile + row, row == 0
        source = tl.zeros((ROWS,), tl.int32) + (0 if PER > 0 else tile)
    else:
        places = tl.load(tiles + most + tile) + row
        inside = places < tl.load(ends + expert)
        if PER > 0:
            source = tl.load(order + places, mask=inside, other=0) // PER
        else:
            source = tl.where(inside, places, 0)
    return expert.to(tl.int64), places, inside, source


@triton.jit
def _gate_up_tile(
    x, gate, up, gate_exponents, up_exponents, gate_shifts, up_shifts, gate_bias, up_bias, hidden, slots,
    scales, behind, tiles, ends, order, most, stride, R, tall, limit, alpha, beta, linear_beta,
    K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    PER: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, HIGH: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    """hidden [place, R] = glu(gate x + bias, up x + bias) for HIGH of the R rows and the places of a tile. In SPLIT
    parts: hidden [part, 2, place, R] are the parts' sums of both in f32, which ``_activate`` adds."""
    high, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, places, inside, source = tile_of(tiles, ends, order, most, tile, PER, ROWS, ONE)
    if scales is not None:
        scales += tile if ONE else tl.load(tiles + most + tile)
    g, u = sums_of(
        x + source[None, :].to(tl.int64) * stride, gate, up, gate_exponents, up_exponents, gate_shifts, up_shifts,
        scales, behind, inside, expert, high, split, R, tall, K, True, BITS, EVEN, SPLIT, ROWS, HIGH, DEEP,
    )  # fmt: skip
    rows = high * HIGH + tl.arange(0, HIGH)
    exists = rows < R
    to = hidden + places[None, :].to(tl.int64) * R + rows[:, None]
    mask = exists[:, None] & inside[None, :]
    if SPLIT > 1:
        to += 2 * split * slots * R
        tl.store(to, g, mask=mask)
        tl.store(to + slots * R, u, mask=mask)
    else:
        if BIAS:
            g += tl.load(gate_bias + expert * R + rows, mask=exists, other=0.0).to(tl.float32)[:, None]
            u += tl.load(up_bias + expert * R + rows, mask=exists, other=0.0).to(tl.float32)[:, None]
        dtype = hidden.dtype.element_ty
        y = glu_of(
            nearest(g, dtype).to(tl.float32), nearest(u, dtype).to(tl.float32), limit, alpha, beta, linear_beta, KIND
        )
        tl.store(to, nearest(y, dtype), mask=mask)


@triton.jit
def _gate_up(
    x, gate, up, gate_exponents, up_exponents, gate_shifts, up_shifts, gate_bias, up_bias, hidden, slots,
    scales, behind, tiles, num_tiles, ends, order, most, num_experts, stride, R, tall, limit, alpha, beta, linear_beta,
    K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    PER: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr,
    HIGH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of up to ROWS rows, as one of SMALL rows where so many are enough."""
    begun()
    if not exists_tile(tiles, num_tiles, tl.program_id(1), num_experts, ONE):
        return
    if SMALL > 0 and rows_left(tiles, ends, most) <= SMALL:
        _gate_up_tile(
            x, gate, up, gate_exponents, up_exponents, gate_shifts, up_shifts, gate_bias, up_bias, hidden, slots,
            scales, behind, tiles, ends, order, most, stride, R, tall, limit, alpha, beta, linear_beta, K, KIND, BIAS,
            BITS, EVEN, PER, ONE, SPLIT, SMALL, HIGH, DEEP,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x, gate, up, gate_exponents, up_exponents, gate_shifts, up_shifts, gate_bias, up_bias, hidden, slots,
            scales, behind, tiles, ends, order, most, stride, R, tall, limit, alpha, beta, linear_beta, K, KIND, BIAS,
            BITS, EVEN, PER, ONE, SPLIT, ROWS, HIGH, DEEP,
        )  # fmt: skip


@triton.jit
def _activate(
    parts, gate_bias, up_bias, hidden, ids, order, ends, slots, num_experts, R, limit, alpha, beta, linear_beta,
    KIND: tl.constexpr, BIAS: tl.constexpr, ONE: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """hidden [place, R] of the sums that ``_gate_up`` left in parts, added in the parts' order."""
    place = tl.program_id(0)
    begun()
    rows = tl.program_id(1) * STEP + tl.arange(0, STEP)
    if ONE:
        expert = tl.load(ids + place)
        if (expert < 0) | (expert >= num_experts):
            return
    else:
        if place >= tl.load(ends + num_experts - 1):
            return
        expert = tl.load(ids + tl.load(order + place))
    exists = rows < R
    g, u = tl.zeros((STEP,), tl.float32), tl.zeros((STEP,), tl.float32)
    for part in tl.static_range(SPLIT):
        g += tl.load(parts + (2 * part * slots + place) * R + rows, mask=exists, other=0.0)
        u += tl.load(parts + (2 * part * slots + slots + place) * R + rows, mask=exists, other=0.0)
    if BIAS:
        g += tl.load(gate_bias + expert * R + rows, mask=exists, other=0.0).to(tl.float32)
        u += tl.load(up_bias + expert * R + rows, mask=exists, other=0.0).to(tl.float32)
    dtype = hidden.dtype.element_ty
    y = glu_of(
        nearest(g, dtype).to(tl.float32), nearest(u, dtype).to(tl.float32), limit, alpha, beta, linear_beta, KIND
    )
    tl.store(hidden + place.to(tl.int64) * R + rows, nearest(y, dtype), mask=exists)


@triton.jit
def _down_tile(
    hidden, down, exponents, shifts, bias, out, slots, scales, behind, tiles, ends, order, most, R, tall,
    K: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """out [slot, R] = down hidden + bias for HIGH of the R rows and the places of a tile; out [part, slot, R] in f32 in
    SPLIT parts, the bias in the first, which ``experts_rows.combine`` adds."""
    high, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, places, inside, source = tile_of(tiles, ends, order, most, tile, 0, ROWS, ONE)
    if scales is not None:
        scales += tile if ONE else tl.load(tiles + most + tile)
    y, _ = sums_of(
        hidden + source[None, :].to(tl.int64) * K, down, down, exponents, exponents, shifts, shifts,
        scales, behind, inside, expert, high, split, R, tall, K, False, BITS, EVEN, SPLIT, ROWS, HIGH, DEEP,
    )  # fmt: skip
    rows = high * HIGH + tl.arange(0, HIGH)
    exists = rows < R
    if BIAS:
        added = tl.load(bias + expert * R + rows, mask=exists & (split == 0), other=0.0)
        y += added.to(tl.float32)[:, None]
    target = places if ONE else tl.load(order + places, mask=inside, other=0)
    to = out + (target + split * slots)[None, :].to(tl.int64) * R + rows[:, None]
    tl.store(to, nearest(y, out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def _down(
    hidden, down, exponents, shifts, bias, out, slots, scales, behind, tiles, num_tiles, ends, order, most,
    num_experts, R, tall,
    K: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of up to ROWS rows, as one of SMALL rows where so many are enough."""
    begun()
    if not exists_tile(tiles, num_tiles, tl.program_id(1), num_experts, ONE):
        return
    if SMALL > 0 and rows_left(tiles, ends, most) <= SMALL:
        _down_tile(
            hidden, down, exponents, shifts, bias, out, slots, scales, behind, tiles, ends, order, most, R, tall, K,
            BIAS, BITS, EVEN, ONE, SPLIT, SMALL, HIGH, DEEP,
        )  # fmt: skip
    else:
        _down_tile(
            hidden, down, exponents, shifts, bias, out, slots, scales, behind, tiles, ends, order, most, R, tall, K,
            BIAS, BITS, EVEN, ONE, SPLIT, ROWS, HIGH, DEEP,
        )  # fmt: skip


def bits_of(stack: Stack) -> int:
    """Of a code of a stack; 0 of a plain one."""
    return 4 if isinstance(stack, Tiles) else 8 if isinstance(stack, ByteTiles) else 0


def _parts(matrix: Stack) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pointers of a matrix for a kernel: codes or values, exponents or scales of blocks, shifts."""
    if isinstance(matrix, Tiles):
        return matrix.codes, matrix.exponents, matrix.shifts
    if isinstance(matrix, ByteTiles):
        return matrix.codes, matrix.scales, None
    return matrix, None, None


def _even(inner: int, bits: int, settings: Settings) -> bool:
    """Whether the steps of all parts are whole."""
    return inner % (settings["SPLIT"] * (COLUMNS if bits else settings["DEEP"])) == 0


def gate_up(
    x_TD: Tensor, gate: Stack, up: Stack, by_expert: Sorted, activation: Mapping[str, Any],
    biases: Biases, settings: Settings, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T N, I] by place: the activation of both products of each place's token. Rows without a place stay undefined.

    scales: f32 [ceil(D / 128), places and as many behind them as a tile has], which multiply x's values by block and
    place; plain stacks with scales are not run in parts. ValueError where one of gate and up is packed otherwise than
    the other."""
    bits, inner, num_rows = bits_of(gate), gate.shape[2], gate.shape[1]
    if bits_of(up) != bits:
        raise ValueError(f"gate has codes of {bits} bits and up of {bits_of(up)} (0: plain); give both in one form")
    slots, split = by_expert.num_slots, settings["SPLIT"]
    hidden = torch.empty(slots, num_rows, dtype=x_TD.dtype, device=x_TD.device)
    out = hidden if split == 1 else hidden.new_empty(split, 2, slots, num_rows, dtype=torch.float32)
    (gates, gate_exponents, gate_shifts), (ups, up_exponents, up_shifts) = _parts(gate), _parts(up)
    gate_bias, up_bias = (None, None) if biases is None else biases[:2]
    kind, numbers = activation_of(activation)
    _gate_up[ceil_div(num_rows, settings["HIGH"]), by_expert.most, split](
        x_TD, gates, ups, gate_exponents, up_exponents, gate_shifts, up_shifts, gate_bias, up_bias, out, slots,
        scales, 0 if scales is None else scales.stride(0), *by_expert.numbers, x_TD.stride(0), num_rows,
        gates.shape[1], *numbers, K=inner, KIND=kind,
        BIAS=biases is not None, BITS=bits, EVEN=_even(inner, bits, settings), PER=by_expert.chosen,
        ONE=by_expert.one, ROWS=by_expert.rows, **OVERLAP, **settings,
    )  # fmt: skip
    if split > 1:
        _activate[slots, ceil_div(num_rows, 512)](
            out, gate_bias, up_bias, hidden, by_expert.ids, by_expert.order, by_expert.ends, slots,
            by_expert.num_experts, num_rows, *numbers, KIND=kind, BIAS=biases is not None, ONE=by_expert.one,
            SPLIT=split, STEP=512, num_warps=4, **OVERLAP,
        )  # fmt: skip
    return hidden


def down_product(
    hidden: Tensor, down: Stack, by_expert: Sorted, biases: Biases, settings: Settings,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T N, D] by slot: down times the hidden row of each slot's place, plus the bias; [parts, T N, D] in f32 where the
    settings split it, to be added. Slots without a place stay undefined. scales: as in ``gate_up``."""
    bits, inner, num_rows = bits_of(down), down.shape[2], down.shape[1]
    slots, split = by_expert.num_slots, settings["SPLIT"]
    out = hidden.new_empty(slots, num_rows)
    if split > 1:
        out = hidden.new_empty(split, slots, num_rows, dtype=torch.float32)
    codes, exponents, shifts = _parts(down)
    _down[ceil_div(num_rows, settings["HIGH"]), by_expert.most, split](
        hidden, codes, exponents, shifts, None if biases is None else biases[2], out, slots, scales,
        0 if scales is None else scales.stride(0), *by_expert.numbers,
        num_rows, codes.shape[1], K=inner, BIAS=biases is not None, BITS=bits,
        EVEN=_even(inner, bits, settings), ONE=by_expert.one, ROWS=by_expert.rows, **OVERLAP, **settings,
    )  # fmt: skip
    return out
