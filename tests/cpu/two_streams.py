"""Streams of a device in a test's own process: what is asked for runs at once, in the order in which it is asked for,
and is checked against all that a device might do instead, where no stream waits for another unless it is told to.

Each storage lies at an address. What is let go of is taken again by the next allocation on its stream, whatever its
size, as an allocator would do at worst. ``Device.races`` has a line for each access that comes neither behind nor ahead
of another one to the same address, of which one writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dayzero.arch.channels import MoE
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec

Stamp = tuple["Stream", int]


def forks(spec: ModelSpec) -> int:
    """Of a step: layers with a shared expert, and layers with an index of their own."""
    shared = sum(isinstance(layer.channel, MoE) and layer.channel.shared is not None for layer in spec.layers)
    indexes = [layer.mixer.index for layer in spec.layers if isinstance(layer.mixer, MLA)]
    return shared + sum(isinstance(one, Index) and not one.shared for one in indexes)


class Stream:
    """done: of each stream, how much of what it was asked for comes before what this one is asked for next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: dict[Stream, int] = {self: 0}

    def wait_stream(self, other: Stream) -> None:
        for stream, count in other.done.items():
            self.done[stream] = max(self.done.get(stream, 0), count)

    def stamp(self) -> Stamp:
        self.done[self] += 1
        return self, self.done[self]

    def follows(self, stamp: Stamp) -> bool:
        return self.done.get(stamp[0], 0) >= stamp[1]


@dataclass(slots=True)
class Address:
    wrote: Stamp | None = None
    what: str = ""
    read: dict[Stream, int] = field(default_factory=dict)


class Device(TorchDispatchMode):
    """Operators are those of the stream that is current."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = Stream("main"), Stream("side")
        self.current = self.main
        self.races: list[str] = []
        self.asked: dict[str, int] = {"main": 0, "side": 0}
        self._at: dict[int, tuple[StorageWeakRef, Address, Stream | None]] = {}
        self._free: dict[Stream, list[Address]] = {self.main: [], self.side: []}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def placed(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        """In the place of CUDA's streams."""
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._collect()
        schema = func._schema
        given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | (kwargs or {})
        changed = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        self.asked[self.current.name] += 1
        stamp = self.current.stamp()
        inputs = {name: [x for x in tree_leaves(value) if isinstance(x, Tensor)] for name, value in given.items()}
        places = {name: [self._address(x, None) for x in some] for name, some in inputs.items()}
        out = func(*args, **(kwargs or {}))
        if not is_view:
            for name, some in places.items():
                for place in some:
                    (self._writes if name in changed else self._reads)(place, stamp, str(func))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._at:
                place = self._address(one, self.current)
                if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                    self._writes(place, stamp, str(func))
        return out

    def _address(self, x: Tensor, taken_on: Stream | None) -> Address:
        """Of the tensor's storage. taken_on: where it was allocated; None: it was there before."""
        storage = x.untyped_storage()
        known = self._at.get(storage._cdata)
        if known is None:
            free = self._free[taken_on] if taken_on is not None else []
            known = StorageWeakRef(storage), free.pop() if free else Address(), taken_on
            self._at[storage._cdata] = known
        return known[1]

    def _collect(self) -> None:
        for key in [key for key, (storage, _, _) in self._at.items() if storage.expired()]:
            _, place, stream = self._at.pop(key)
            if stream is not None:
                self._free[stream].append(place)

    def _reads(self, place: Address, stamp: Stamp, what: str) -> None:
        if place.wrote is not None and not self.current.follows(place.wrote):
            self.races.append(f"{what} on {self.current.name} reads what {place.what} writes on {place.wrote[0].name}")
        place.read[stamp[0]] = stamp[1]

    def _writes(self, place: Address, stamp: Stamp, what: str) -> None:
        if place.wrote is not None and not self.current.follows(place.wrote):
            self.races.append(f"{what} on {self.current.name} writes where {place.what} writes")
        for stream, count in place.read.items():
            if not self.current.follows((stream, count)):
                self.races.append(f"{what} on {self.current.name} writes what {stream.name} still reads")
        place.wrote, place.what, place.read = stamp, what, {}
