"""The inputs and results of recorded steps, at addresses that never change. All rows have one token.

B rows of a step, those that pad it included; V vocabulary. A padding row's number among those of its step is p: it has
token ``pad_id`` at position p of a sequence that lies in the scratch blocks of each group, so that no two of them write
to one place and none reads what no row of this step has written. It has no state and no slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dayzero.cache.views import PoolViews
from dayzero.engine.graphs import Mark, pinned
from dayzero.engine.packed import Packed, Part
from dayzero.engine.slots import fill, group_parts, spans_of, where_of
from dayzero.engine.step import Step
from dayzero.errors import MachineError
from dayzero.view import Beside, OnHost, Span, StepView

NO_STATE = -1  # the block of a row without a state
LATE = -1  # in the place of an id: the slot's newest token
BUFFERS = 2  # on the host, one for each step that may be in flight
UNREAD = 1 << 30  # debug: the number of a block that is not to be read


class HiddenSpan:
    """A span of which only the place in the step is known: what is recorded may not ask where its row stands in its
    sequence, as that is another place at each replay. MachineError where it does."""

    __slots__ = ("count", "first", "row")

    def __init__(self, row: int) -> None:
        self.row, self.first, self.count = row, row, 1

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + 1)

    @property
    def start(self) -> int:
        raise MachineError(
            "An operator asks the host where a row stands in its sequence while a step is recorded, and would find "
            "another place at each replay: start with --graphs off, or bind another variant of it."
        )


@cache
def hidden_spans(rows: int) -> tuple[Span, ...]:
    return tuple(cast(Span, HiddenSpan(row)) for row in range(rows))


@dataclass(frozen=True, slots=True)
class Outputs:
    """logits [B, V] f32; best [B] int64, V where there is none; bad, lost [B] bool: whether a row's logits, its hidden
    state are no numbers."""

    logits: Tensor
    best: Tensor
    bad: Tensor
    lost: Tensor

    @classmethod
    def of(cls, rows: int, vocab: int, device: torch.device) -> Outputs:
        return cls(
            torch.zeros(rows, vocab, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def poison(self) -> None:
        self.logits.fill_(torch.nan)
        self.best.fill_(-1)
        self.bad.fill_(True)
        self.lost.fill_(True)

    def first(self, rows: int) -> Outputs:
        return Outputs(self.logits[:rows], self.best[:rows], self.bad[:rows], self.lost[:rows])


class Inputs:
    """newest: as in ``Slots``, one place longer. most_rows: of the largest recorded step. widths: as in
    ``buckets.table_widths``. axes: 3 where positions are those of a grid, else 1. debug: poison what is not to be read.

    tells_padding: the view says which rows pad the step. pad_id: the token of these.
    """

    def __init__(
        self, views: PoolViews, newest: Tensor, most_rows: int, widths: Mapping[str, int], *, axes: int = 1,
        debug: bool = False, tells_padding: bool = False,
    ) -> None:  # fmt: skip
        self.views, self.newest, self.widths, self.debug = views, newest, dict(widths), debug
        self.tells_padding, self._no_slot = tells_padding, newest.shape[0] - 1
        self.pad_id = 0
        positions = (3, most_rows) if axes == 3 else (most_rows,)
        parts = group_parts(views, most_rows, most_rows, widths)
        shapes = {"ids": (most_rows,), "slots": (most_rows,), "positions": positions}
        packed = Packed([*(Part(name, "i8", shape) for name, shape in shapes.items()), *parts])
        # A step copies all up to its rows of the last part, the widest table: the other parts are small.
        self._last, self._packed = parts[-1], packed
        device = newest.device
        self._hosts = [pinned(packed.num_bytes, device.type) for _ in range(BUFFERS)]
        self._arrays = [packed.arrays(host) for host in self._hosts]
        self._used: list[Mark | None] = [None] * BUFFERS
        self._turn = 0
        self._placed = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = packed.tensors(self._placed)
        self._query_start = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._where = where_of(views, self.tensors)

    def put(self, step: Step | None, bucket: int, positions: np.ndarray | None = None) -> None:
        """Copy the numbers of ``step`` (None: of padding rows alone) to their addresses. positions [3, rows]: where the
        rows' are not those of their sequences."""
        self._turn = (self._turn + 1) % BUFFERS
        used, arrays = self._used[self._turn], self._arrays[self._turn]
        if used is not None:
            used.wait()  # long ago: two steps have been asked for since
        if self.debug:
            for name in self.views.groups:
                arrays[f"{name}.table"][...] = UNREAD
        num = 0
        if step is not None:
            num = len(step.rows)
            fill(self.views, arrays, step)
            arrays["ids"][:num] = [LATE if row.late else row.tokens[0] for row in step.rows]
            arrays["slots"][:num] = [row.slot for row in step.rows]
            if positions is not None:
                arrays["positions"][:, :num] = positions
        self._pad(arrays, num, bucket)
        last = self._packed.offsets[self._last.name] + bucket * self._last.num_bytes // self._last.shape[0]
        self._placed[:last].copy_(self._hosts[self._turn][:last], non_blocking=True)
        self._used[self._turn] = Mark(self.newest.device.type)

    def spans(self, step: Step | None, bucket: int) -> tuple[Span, ...]:
        """Of all rows, for work that is told where they stand."""
        own = () if step is None else spans_of(step.rows)
        return own + tuple(Span(row, row, 1, row - len(own)) for row in range(len(own), bucket))

    def _pad(self, arrays: Mapping[str, np.ndarray], num: int, bucket: int) -> None:
        places = np.arange(bucket - num)
        arrays["ids"][num:bucket] = self.pad_id
        arrays["slots"][num:bucket] = self._no_slot
        arrays["positions"][..., num:bucket] = places
        arrays["start"][num:bucket] = places
        for name, group in self.views.groups.items():
            arrays[f"{name}.first"][num:bucket] = 0
            if group.unit == "state":
                arrays[f"{name}.table"][num:bucket] = NO_STATE
                continue
            blocks = self.views.scratch[name]
            pages = -(-(bucket - num) // group.page_tokens)
            arrays[f"{name}.table"][num:bucket, :pages] = blocks[:pages]
            arrays[f"{name}.blocks"][num:bucket] = blocks[places // group.page_tokens]
            arrays[f"{name}.offsets"][num:bucket] = places % group.page_tokens

    def view(self, bucket: int, spans: Sequence[Span], on_host: OnHost, beside: Beside) -> StepView:
        """What blocks see of the first ``bucket`` rows. Asked for while a step is recorded: late tokens are read by
        what it records."""
        ids_B, slots_B = self.tensors["ids"][:bucket], self.tensors["slots"][:bucket]
        tokens_B = torch.where(ids_B == LATE, self.newest.index_select(0, slots_B), ids_B)
        return StepView(
            tokens_B, self.tensors["positions"][..., :bucket], tuple(spans),
            query_start=self._query_start[: bucket + 1], start=self.tensors["start"][:bucket],
            stores=self.views.stores,
            where={name: where.first_rows(bucket) for name, where in self._where.items()},
            scratch={}, on_host=on_host, beside=beside, real=slots_B < self._no_slot if self.tells_padding else None,
        )  # fmt: skip
