"""Tokens to experts and back on the device: rows in the order of their experts, tiles of them, and the weighted sum.

T tokens, N chosen experts a token, E experts, D width. A slot is a token's choice: number t * N + n. A place is a
slot's number among all that chose some expert, ordered by expert. The host knows shapes only:
kernels that work tile by tile are launched for as many tiles as there could be, and those beyond the last return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import INTERPRETED
from dayzero.units import ceil_div, round_up

AT_ONCE = 4096  # slots that one program sorts alone
# How kernels here are launched: each may begin while the one before it ends, and waits for it before it reads anything.
OVERLAP: dict[str, Any] = {} if INTERPRETED else {"launch_pdl": True}
_SLOW = tl.constexpr(INTERPRETED)
_STEP = 1024  # slots of a program where several sort


@dataclass(frozen=True, slots=True)
class Sorted:
    """ids: int64 [T, N], as given. order: int32 [T N], the slot at each place. ends: int32 [E], the place behind an
    expert's last. tiles: int32 [2, most], expert and first place of each tile; num_tiles: int32 [1]; a tile has up to
    ``rows`` places, of one expert. most: how many tiles there can be. one: of a single token, each of whose choices is
    a tile and a place of its own: nothing is sorted, and all four are its ids."""

    ids: Tensor
    order: Tensor
    ends: Tensor
    tiles: Tensor
    num_tiles: Tensor
    rows: int
    most: int
    num_experts: int
    one: bool = False

    @property
    def num_slots(self) -> int:
        return self.ids.numel()

    @property
    def chosen(self) -> int:
        """Choices a token."""
        return self.ids.shape[1]

    @property
    def numbers(self) -> tuple[Tensor | int, ...]:
        """As kernels take them."""
        return self.tiles, self.num_tiles, self.ends, self.order, self.most, self.num_experts


def most_tiles(num_slots: int, num_experts: int, rows: int) -> int:
    """At most this many tiles: one a slot, or the full ones and a last one of each expert."""
    return min(num_slots, num_slots // rows + num_experts)


def sort_by_expert(ids_TN: Tensor, num_experts: int, rows: int) -> Sorted:
    """Places and tiles of the choices in ids [T, N]. Ids outside 0..E - 1 (-1: none) have no place. Equal experts keep
    no order among themselves: no result may depend on it."""
    num_slots, device = ids_TN.numel(), ids_TN.device
    ids = ids_TN.contiguous()
    if len(ids) == 1:
        return Sorted(ids, ids, ids, ids, ids, rows, num_slots, num_experts, one=True)
    most = most_tiles(num_slots, num_experts, rows)
    sizes = [num_slots, num_experts, num_experts, 2 * most, 1]
    room = [round_up(size, 4) for size in sizes]  # so that each begins at 16 bytes
    ints = torch.empty(sum(room), dtype=torch.int32, device=device).split(room)
    order, ends, counts, tiles, num_tiles = (part[:size] for part, size in zip(ints, sizes, strict=True))
    padded = triton.next_power_of_2(num_experts)
    args = (ids, counts, order, ends, tiles, num_tiles)
    numbers = (num_slots, num_experts, most)
    if num_slots <= AT_ONCE:
        step = max(32, triton.next_power_of_2(num_slots))
        warps = max(1, min(8, step // 128))
        _sort_alone[1,](*args, *numbers, ROWS=rows, STEP=step, EXPERTS=padded, num_warps=warps, **OVERLAP)
    else:
        counts.zero_()
        ranks = torch.empty(num_slots, dtype=torch.int32, device=device)
        grid = (ceil_div(num_slots, _STEP),)
        _count[grid](ids, counts, ranks, num_slots, num_experts, STEP=_STEP, num_warps=4, **OVERLAP)
        _place[grid](*args, ranks, *numbers, ROWS=rows, STEP=_STEP, EXPERTS=padded, num_warps=4, **OVERLAP)
    return Sorted(ids, order, ends, tiles, num_tiles, rows, most, num_experts)


@triton.jit
def begun():
    """Wait for the kernel before this one, and let the next one begin to do so."""
    if not _SLOW:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def nearest(y, dtype: tl.constexpr):
    """f32 as ``dtype``, rounded to the nearest also in the interpreter, which otherwise cuts off."""
    if _SLOW and dtype == tl.bfloat16:
        bits = y.to(tl.int32, bitcast=True)
        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return y.to(dtype)


@triton.jit
def _ids_of(ids, slots, num_slots, num_experts):
    expert = tl.load(ids + slots, mask=slots < num_slots, other=-1).to(tl.int32)
    return expert, (expert >= 0) & (expert < num_experts)


@triton.jit
def _place_slots(
    expert, chosen, rank, slots, counts, order, ends, tiles, num_tiles, num_experts, most, lead,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Give the slots their places, and each ROWS-th of an expert the tile that begins with it. ``ends`` and
    ``num_tiles`` are written by the leading program."""
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0, cache_modifier=".cg")
    end = tl.cumsum(count, 0)
    num = (count + ROWS - 1) // ROWS
    last = tl.cumsum(num, 0)
    tl.store(ends + experts, end, mask=(experts < num_experts) & lead)
    tl.store(num_tiles, tl.sum(num), mask=lead)
    before = tl.where(chosen, expert, 0)
    place = tl.gather(end - count, before, 0) + rank
    tile = tl.gather(last - num, before, 0) + rank // ROWS
    tl.store(order + place, slots, mask=chosen)
    begins = chosen & (rank % ROWS == 0)
    tl.store(tiles + tile, expert, mask=begins)
    tl.store(tiles + most + tile, place, mask=begins)


@triton.jit(do_not_specialize=["num_slots", "most"])  # else compiled anew for multiples of 16
def _sort_alone(
    ids, counts, order, ends, tiles, num_tiles, num_slots, num_experts, most,
    ROWS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    begun()
    slots = tl.arange(0, STEP)
    expert, chosen = _ids_of(ids, slots, num_slots, num_experts)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts + experts, tl.zeros((EXPERTS,), tl.int32), mask=experts < num_experts)
    tl.debug_barrier()
    rank = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.debug_barrier()
    _place_slots(expert, chosen, rank, slots, counts, order, ends, tiles, num_tiles, num_experts, most, True, ROWS,
                 EXPERTS)  # fmt: skip


@triton.jit
def _count(ids, counts, ranks, num_slots, num_experts, STEP: tl.constexpr):
    begun()
    slots = tl.program_id(0) * STEP + tl.arange(0, STEP)
    expert, chosen = _ids_of(ids, slots, num_slots, num_experts)
    rank = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.store(ranks + slots, rank, mask=chosen)


@triton.jit
def _place(
    ids, counts, order, ends, tiles, num_tiles, ranks, num_slots, num_experts, most,
    ROWS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    begun()
    slots = tl.program_id(0) * STEP + tl.arange(0, STEP)
    expert, chosen = _ids_of(ids, slots, num_slots, num_experts)
    rank = tl.load(ranks + slots, mask=chosen, other=0)
    lead = tl.program_id(0) == 0
    _place_slots(expert, chosen, rank, slots, counts, order, ends, tiles, num_tiles, num_experts, most, lead, ROWS,
                 EXPERTS)  # fmt: skip


def combine(y_SD: Tensor, by_expert: Sorted, weights_TN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, D] in ``dtype``: for each token the sum over n, in this order and in f32, of weight * y of its slot; slots
    without an expert are not read. y: [T N, D], or [parts, T N, D] whose sum is rounded to ``dtype`` first."""
    num_tokens, num_chosen = by_expert.ids.shape
    width = y_SD.shape[-1]
    out_TD = torch.empty(num_tokens, width, dtype=dtype, device=y_SD.device)
    step = 512 if num_tokens >= 64 else 256
    _combine[num_tokens, ceil_div(width, step)](
        y_SD, by_expert.ids, weights_TN.contiguous(), out_TD, width, by_expert.num_experts, by_expert.num_slots,
        CHOSEN=num_chosen, PARTS=y_SD.shape[0] if y_SD.dim() == 3 else 1, STEP=step, num_warps=step // 128, **OVERLAP,
    )  # fmt: skip
    return out_TD


@triton.jit
def _combine(
    y, ids, weights, out, width, num_experts, slots, CHOSEN: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr
):
    begun()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = columns < width
    total = tl.zeros((STEP,), tl.float32)
    for n in tl.static_range(CHOSEN):
        slot = token * CHOSEN + n
        expert = tl.load(ids + slot)
        chosen = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights + slot).to(tl.float32)
        row = tl.load(y + slot * width + columns, mask=inside & chosen, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            row += tl.load(y + (part * slots + slot) * width + columns, mask=inside & chosen, other=0.0)
        if PARTS > 1:
            row = nearest(row, out.dtype.element_ty).to(tl.float32)
        total += tl.where(chosen, weight * row, 0.0)
    tl.store(out + token * width + columns, nearest(total, out.dtype.element_ty), mask=inside)
