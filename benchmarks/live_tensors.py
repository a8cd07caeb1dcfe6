"""How many bytes of tensors are alive at once while something runs, and which is the largest that an operator makes.

Python's own memory tools do not see tensors; this looks at the result of every operator instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Counts storages that operators make inside the ``with``. What was alive before does not count.

    peak_bytes: most bytes alive at once. largest: (bytes, shape, operator) of the largest result. most_numbers: most
    elements of a result. peak_shapes: what was alive at the peak, largest first, where ``keep_shapes``.
    """

    def __init__(self, *known: torch.Tensor, keep_shapes: bool = False) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[int, tuple[int, ...], str]] = {}
        self._keep_shapes = keep_shapes
        self.live_bytes = self.peak_bytes = self.most_numbers = 0
        self.largest: tuple[int, tuple[int, ...], str] = (0, (), "")
        self.peak_shapes: list[tuple[int, tuple[int, ...], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in _stored((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in _stored(out):
            storage = leaf.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self.most_numbers = max(self.most_numbers, storage.nbytes() // leaf.element_size())
                self._made(storage, tuple(leaf.shape), str(func))
        return out

    def _made(self, storage: torch.UntypedStorage, shape: tuple[int, ...], name: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or size == 0:
            return
        self._alive[key] = (size, shape, name)
        weakref.finalize(storage, self._gone, key)
        self.live_bytes += size
        self.largest = max(self.largest, self._alive[key])
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            if self._keep_shapes:
                self.peak_shapes = sorted(self._alive.values(), reverse=True)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key)[0]


def _stored(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among ``values`` whose bytes torch itself holds: packed weights are a library's own.

    torch's own walk of a tree takes as long as a small operator; arguments and results nest in these ways only.
    """
    if isinstance(values, torch.Tensor):
        if not values.is_mkldnn:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _stored(value)
    elif isinstance(values, dict):
        yield from _stored(tuple(values.values()))
