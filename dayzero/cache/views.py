"""The pool as tensors: one run of bytes, and for each cache need a store that reads and writes its records in it.

Block numbers on the device count in units of 256 bytes from the start of the pool, so that one number means the same
for every group and every need; ``device_numbers`` makes them from the manager's block ids.

T tokens, R rows, P pages, N block numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from dayzero.cache.layout import ALIGN_BYTES as UNIT_BYTES
from dayzero.cache.layout import Group, Layout, Place
from dayzero.decl import PackedRow
from dayzero.units import ceil_div
from dayzero.view import Codec, Paged, Span, States, StateStore, StepView, TokenStore, Write

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NOT_A_NUMBER = 0xFF  # bytes of all ones are a NaN in every float format

CodecOf = Callable[[PackedRow | None], Codec | None]


def device_numbers(layout: Layout, group: Group, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
    """Block ids of ``group`` -> numbers on the device, int32, same shape."""
    ids = np.asarray(blocks, dtype=np.int64)
    slabs, within = np.divmod(ids, group.blocks_per_slab)
    units = slabs * (layout.slab_bytes // UNIT_BYTES) + within * (group.block_bytes // UNIT_BYTES)
    return units.astype(np.int32)


class PoolTokens:
    """Records of one need in the pool, [N, page, *shape], or uint8 [N, page, bytes] with a codec. checked: refuse
    writes outside the pool (debug)."""

    def __init__(self, group: Group, place: Place, pool: Tensor, checked: bool, codec: Codec | None = None) -> None:
        self.group, self.place, self.checked, self.codec = group, place, checked, codec
        assert (codec is None) == (place.packed is None), f"{place.need}: rows and codec do not go together"
        row = place.shape if place.packed is None else (place.packed.num_bytes,)
        self.rows = _blocks_of(pool, place, (group.page_tokens, *row))

    def append(self, view: StepView, values: Tensor, write: Write | None = None) -> None:
        """Write values [T, *shape], one record for each token of the step."""
        where = view.where[self.group.name]
        if self.checked:
            self._check(view, values)
        if write is not None:
            write(values, self.rows, where.blocks, where.offsets, self.codec)
        elif self.codec is not None:
            self.codec.write(self.rows, where.blocks, where.offsets, values)
        else:
            self.rows[where.blocks, where.offsets] = values.to(self.rows.dtype)

    def pages(self, view: StepView) -> Paged:
        """All rows' records, where they lie."""
        where = view.where[self.group.name]
        return Paged(self.rows, where.table, where.first, view.query_start, view.start, view.spans, self.codec)

    def history(self, view: StepView, span: Span) -> tuple[Tensor, int]:
        """(a copy of the records [L, *shape], position of the first)."""
        return self.pages(view).history(span)

    def _check(self, view: StepView, values: Tensor) -> None:
        where, name = view.where[self.group.name], self.place.need
        assert tuple(values.shape) == (view.tokens.shape[0], *self.place.shape), f"{name}: {tuple(values.shape)}"
        slots = where.blocks * self.group.page_tokens + where.offsets
        assert slots.unique().numel() == slots.numel(), f"{name}: two tokens of a step are written to one place"
        inside = (where.blocks >= 0) & (where.blocks < self.rows.shape[0])
        inside &= (where.offsets >= 0) & (where.offsets < self.group.page_tokens)
        assert bool(inside.all()), f"{name}: a token would be written outside the pool"


class PoolStates:
    """The state of one need in the pool, [N, *shape]; ``layer`` is its layer's column in the group's table."""

    def __init__(self, group: Group, place: Place, layer: int, pool: Tensor) -> None:
        self.group, self.place, self.layer = group, place, layer
        self.rows = _blocks_of(pool, place, place.shape)

    def states(self, view: StepView) -> States:
        """All rows' states, where they lie."""
        return States(self.rows, view.where[self.group.name].table[:, self.layer])

    def read(self, view: StepView, span: Span) -> Tensor:
        """A copy of the state before the span's first token; zeros at the start of a sequence."""
        if span.start == 0:
            return self.rows.new_zeros(self.place.shape)
        return self.rows[self._block(view, span)].clone()

    def write(self, view: StepView, span: Span, value: Tensor) -> None:
        assert tuple(value.shape) == self.place.shape, f"{self.place.need}: {tuple(value.shape)}"
        self.rows[self._block(view, span)] = value.to(self.rows.dtype)

    def _block(self, view: StepView, span: Span) -> int:
        return int(view.where[self.group.name].table[span.row, self.layer])


class PoolViews:
    """The pool's memory and every store over it. poison: fill it with NaN first (debug, tests). codec_of: what reads
    and writes packed rows (``ops/records``). scratch_tokens: behind the slabs, out of the manager's reach, each token
    group has blocks for so many tokens: where rows that only pad a step are written, and read."""

    def __init__(
        self, layout: Layout, num_slabs: int, *, device: str = "cpu", poison: bool = False, checked: bool = False,
        codec_of: CodecOf = lambda packed: None, scratch_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.layout = layout
        size = num_slabs * layout.slab_bytes
        self.scratch: dict[str, np.ndarray] = {}  # group -> device numbers of its scratch blocks, int32
        for group in layout.token_groups:
            blocks = ceil_div(scratch_tokens, group.page_tokens)
            step = group.block_bytes // UNIT_BYTES
            self.scratch[group.name] = (size // UNIT_BYTES + step * np.arange(blocks)).astype(np.int32)
            size += blocks * group.block_bytes
        self._scratch_begin = num_slabs * layout.slab_bytes
        self.pool = torch.empty(size, dtype=torch.uint8, device=device)
        if poison:
            self.pool.fill_(NOT_A_NUMBER)
        self.groups = {group.name: group for group in layout.groups}
        own: dict[str, TokenStore | StateStore] = {}
        for group in layout.groups:
            own |= dict(_stores(group, self.pool, checked, codec_of))
        self.stores: Mapping[str, TokenStore | StateStore] = {
            **own, **{need: own[owner] for need, owner in layout.aliases.items()}
        }  # fmt: skip

    def poison_scratch(self) -> None:
        """Fill the scratch blocks with NaN."""
        self.pool[self._scratch_begin :].fill_(NOT_A_NUMBER)

    def copy_blocks(self, group: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks, source[i] -> target[i] (block ids of the manager)."""
        made = self.groups[group]
        begins = [device_numbers(self.layout, made, ids).astype(np.int64) * UNIT_BYTES for ids in (source, target)]
        # Slices, not an index into overlapping blocks: on some devices that writes back what lies around them. All are
        # read before any is written, as a target may be another pair's source.
        held = [self.pool[begin : begin + made.block_bytes].clone() for begin in begins[0]]
        for begin, block in zip(begins[1], held, strict=True):
            self.pool[begin : begin + made.block_bytes] = block


def _stores(
    group: Group, pool: Tensor, checked: bool, codec_of: CodecOf
) -> Iterable[tuple[str, TokenStore | StateStore]]:  # fmt: skip
    if group.unit == "token":
        for place in group.places:
            yield place.need, PoolTokens(group, place, pool, checked, codec_of(place.packed))
        return
    for layer, needs in enumerate(group.layers):
        for need, place in zip(needs, group.places, strict=True):
            yield need, PoolStates(group, place, layer, pool)


def _blocks_of(pool: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """[N, *shape]: what lies ``place.offset`` bytes behind each block number. Views overlap; numbers do not."""
    dtype = DTYPES[place.element] if place.packed is None else torch.uint8
    size = dtype.itemsize
    assert place.offset % size == 0 and UNIT_BYTES % size == 0
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    num = max(0, (pool.shape[0] - place.offset - prod(shape) * size) // UNIT_BYTES + 1)
    return pool.view(dtype).as_strided((num, *shape), (UNIT_BYTES // size, *strides), place.offset // size)
