"""Bytes of files on their way to a device: read into pinned host memory in large pieces, copied from there.

A piece is read straight into its buffer, so that the bytes are copied once on the host, and the copy to the device runs
while the next piece is read. Host memory is the buffers, whatever is loaded; between loads there need be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor

from dayzero.checkpoint.ranges import merge_extents
from dayzero.checkpoint.source import Source

PIECE_BYTES = 32 * 2**20  # large enough for the host's link and for a disk, small enough to overlap within a layer
NUM_BUFFERS = 6
NUM_READERS = 4  # threads: one copies out of the page cache at less than what the link to a device takes
WIDEST = 8  # bytes of an element: a view of bytes as elements begins at a multiple of their size


class _Buffer:
    """Pinned host memory, and when the last copy out of it is done."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.copied = torch.cuda.Event() if pinned else None

    def free(self) -> memoryview:
        """The memory, once nothing is read from it any more."""
        if self.copied is not None:
            self.copied.synchronize()
        return memoryview(self.memory.numpy())  # type: ignore[arg-type]  # an array is one; its stub does not say so


class Staging:
    """For several reading threads. device: where bytes go. Copies are queued on the device's stream that was current
    when ``begin`` was called, so that what its caller queues behind them finds them there. Buffers are made when they
    are first used, and again after ``free``.

    MachineError is not raised here: memory that the device lacks is torch's OutOfMemoryError, as everywhere.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self.device, self.piece_bytes = device, piece_bytes
        self._pinned, self._num = device.type == "cuda", num_buffers
        self._stream: torch.cuda.Stream | None = None
        self._free: SimpleQueue[_Buffer | None] = SimpleQueue()  # None: one that is not made yet
        for _ in range(num_buffers):
            self._free.put(None)

    def begin(self) -> None:
        """Call in the thread that computes with what is brought, before others read."""
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def free(self) -> None:
        """Let go of the buffers. Waits for those that are in use."""
        for one in [self._free.get() for _ in range(self._num)]:
            if one is not None:
                one.free()
            self._free.put(None)
        one = None
        if self._pinned:
            torch._C._host_emptyCache()  # torch keeps pinned memory for later; nobody else needs pieces of this size

    def bring(self, source: Source, file: str, start: int, size: int) -> Tensor:
        """Bytes [start, start + size) of a file as uint8 [size] on the device, not yet there for the host to see.

        Errors: as ``Source.read``.
        """
        with self.queued():
            out = torch.empty(size, dtype=torch.uint8, device=self.device)
            for first in range(0, size, self.piece_bytes):
                length = min(self.piece_bytes, size - first)
                buffer = self._free.get()
                try:
                    buffer = buffer or _Buffer(self.piece_bytes, self._pinned)
                    source.read_into(file, start + first, buffer.free()[:length])
                    out[first : first + length].copy_(buffer.memory[:length], non_blocking=True)
                    if buffer.copied is not None:
                        buffer.copied.record()
                finally:
                    self._free.put(buffer)
        return out

    def bring_together(self, source: Source, extents: Sequence[tuple[str, int, int]]) -> list[Tensor]:
        """Bytes of each (file, start, length), in the order asked, as ``bring`` gives them; those that touch in a file
        come as views of one piece of memory, of exactly their bytes."""
        out: dict[int, Tensor] = {}
        for file, start, end, places in merge_extents(extents, 0):
            whole = self.bring(source, file, start, end - start)
            for place in places:
                first, length = extents[place][1] - start, extents[place][2]
                part = whole[first : first + length]
                out[place] = part if first % WIDEST == 0 else self._aligned(part)
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return [out.get(place, empty) for place in range(len(extents))]

    def queued(self) -> AbstractContextManager[object]:
        """Around what is to run behind the copies, in whichever thread."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _aligned(self, part: Tensor) -> Tensor:
        with self.queued():
            return part.clone()
