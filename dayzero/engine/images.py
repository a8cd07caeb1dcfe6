"""Images of running requests: encoded when a step first needs them, kept by content, put in place of placeholders.

T tokens of a step, M tokens of an image, D model width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dayzero.arch.vision import PatchTower
from dayzero.engine.packed import put
from dayzero.engine.request import Image
from dayzero.engine.step import NewSlot, Step
from dayzero.view import Inserted, StepView

Encode = Callable[[Tensor], Tensor]  # uint8 pixels [height, width, 3] -> rows [M, D]


@dataclass(slots=True)
class _Held:
    """rows: of images of which a part is still to come, by number."""

    images: tuple[Image, ...]
    rows: dict[int, Tensor] = field(default_factory=dict)


class Images:
    """budget_bytes: rows that are kept for later requests, least recently used out; those of an image that is not yet
    wholly computed are kept beside them. queries, hits: images looked up and found since the last ``take_counts``; an
    image is looked up when a request first computes a part of it, and not when the prefix cache spares that."""

    def __init__(self, tower: PatchTower, encode: Encode, budget_bytes: int) -> None:
        self._tower, self._encode, self._budget = tower, encode, budget_bytes
        self._slots: dict[int, _Held] = {}
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.kept_bytes = 0
        self.queries = self.hits = 0

    def begin(self, new: NewSlot) -> None:
        """A request starts or comes back in a slot."""
        self.release(new.slot)
        if new.media:
            self._slots[new.slot] = _Held(new.media)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def take_counts(self) -> dict[str, float]:
        """queries and hits since the last call, under the names of the engine's counters."""
        counts = {"mm_queries": float(self.queries), "mm_hits": float(self.hits)}
        self.queries = self.hits = 0
        return counts

    def stands_in(self, step: Step) -> bool:
        """Whether rows of an image stand in the step."""
        return any(
            row.start < image.first + image.tokens and image.first < row.start + row.count
            for row in step.rows
            for image in self._of(row.slot)
        )

    def positions(self, step: Step) -> np.ndarray | None:
        """[3, T] of the step's tokens, where the tower's places ask for them; None where all are those in sequences."""
        if self._tower.place != "grid" or not any(row.slot in self._slots for row in step.rows):
            return None
        parts = [grid_positions(self._of(row.slot), row.start, row.count) for row in step.rows]
        return np.concatenate(parts, axis=1)

    def _of(self, slot: int) -> tuple[Image, ...]:
        return self._slots[slot].images if slot in self._slots else ()

    def placed(self, step: Step, view: StepView) -> StepView:
        """The view with rows of images in it, and with positions [3, T] where the tower's places ask for them."""
        inserted: list[Inserted] = []
        for row, span in zip(step.rows, view.spans, strict=True):
            held = self._slots.get(row.slot)
            for number, image in enumerate(self._of(row.slot)):
                begin = max(row.start, image.first)
                end = min(row.start + row.count, image.first + image.tokens)
                if held is not None and begin < end:
                    rows_MD = self._rows(held, number, done=end == image.first + image.tokens)
                    part = rows_MD[begin - image.first : end - image.first]
                    inserted.append(Inserted(span.first + begin - row.start, part))
        found = self.positions(step)
        positions = view.positions if found is None else put(view.positions.device, at=found)["at"]
        return replace(view, inserted=tuple(inserted), positions=positions)

    def _rows(self, held: _Held, number: int, done: bool) -> Tensor:
        """Rows of an image of a request; done: it needs them for the last time."""
        rows_MD = held.rows.pop(number, None)
        if rows_MD is None:
            rows_MD = self._found(held.images[number])
        if not done:
            held.rows[number] = rows_MD
        return rows_MD

    def _found(self, image: Image) -> Tensor:
        self.queries += 1
        kept_MD = self._kept.get(image.key)
        if kept_MD is not None:
            self.hits += 1
            self._kept.move_to_end(image.key)
            return kept_MD
        whole = self._tower.patch * self._tower.merge
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        rows_MD = self._encode(pixels.view(image.rows * whole, image.columns * whole, 3))
        assert rows_MD.shape[0] == image.tokens, f"{rows_MD.shape[0]} rows for an image of {image.tokens} tokens"
        self._keep(image.key, rows_MD)
        return rows_MD

    def _keep(self, key: bytes, rows_MD: Tensor) -> None:
        if rows_MD.nbytes > self._budget:
            return
        self._kept[key] = rows_MD
        self.kept_bytes += rows_MD.nbytes
        while self.kept_bytes > self._budget:
            _, old_MD = self._kept.popitem(last=False)
            self.kept_bytes -= old_MD.nbytes


def grid_positions(images: Sequence[Image], start: int, count: int) -> np.ndarray:
    """[3, count] int64: (time, height, width) of the tokens from ``start`` on of a prompt with these images, in order.

    Text counts on from what is before it, alike on all three axes. The tokens of an image that begins at position p
    have time p, height p + row and width p + column, and what follows begins at p + the larger of its two sides, in
    tokens (Qwen2-VL, arXiv 2409.12191, 2.1).
    """
    at = np.arange(start, start + count, dtype=np.int64)
    out = np.stack((at, at, at))
    shift = 0
    for image in images:
        end = image.first + image.tokens
        inside = (at >= image.first) & (at < end)
        number = at[inside] - image.first
        begin = image.first + shift
        out[:, inside] = np.stack((np.zeros_like(number), number // image.columns, number % image.columns)) + begin
        shift += max(image.rows, image.columns) - image.tokens
        out[:, at >= end] = at[at >= end] + shift
    return out
