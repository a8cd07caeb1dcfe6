"""Numbers of a step in one run of bytes, so that they go to the device in one copy. Parts lie one behind another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from dayzero.units import round_up

ALIGN = 16  # bytes at which each part begins: the widest load of a kernel
_DTYPES = {"i8": torch.int64, "i4": torch.int32, "f8": torch.float64}


@dataclass(frozen=True, slots=True)
class Part:
    """kind: ``i8`` int64, ``i4`` int32, ``f8`` float64."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * int(self.kind[1])


class Packed:
    """Where each part lies. num_bytes: of all of them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = {part.name: part for part in parts}
        assert len(self.parts) == len(parts), "two parts have one name"
        self.offsets: dict[str, int] = {}
        at = 0
        for part in parts:
            self.offsets[part.name] = at
            at = round_up(at + part.num_bytes, ALIGN)
        self.num_bytes = at

    def host(self, device: torch.device) -> Tensor:
        """Bytes to write the parts into; where they are to be copied to an accelerator, pinned."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def arrays(self, host: Tensor) -> dict[str, np.ndarray]:
        """The parts in ``host``, to be written."""
        whole = host.numpy()
        return {
            name: whole[at : at + part.num_bytes].view(part.kind).reshape(part.shape)
            for (name, part), at in zip(self.parts.items(), self.offsets.values(), strict=True)
        }

    def tensors(self, placed: Tensor) -> dict[str, Tensor]:
        """The parts in bytes on a device."""
        return {
            name: placed[at : at + part.num_bytes].view(_DTYPES[part.kind]).view(part.shape)
            for (name, part), at in zip(self.parts.items(), self.offsets.values(), strict=True)
        }

    def put(self, host: Tensor, device: torch.device) -> dict[str, Tensor]:
        """The parts on ``device``, by one copy that nobody waits for; on a CPU they stay where they are."""
        return self.tensors(host if device.type == "cpu" else host.to(device, non_blocking=True))


def put(device: torch.device, **arrays: np.ndarray) -> dict[str, Tensor]:
    """The arrays, each of a kind that parts have, on ``device``, by one copy that nobody waits for."""
    packed = Packed([Part(name, array.dtype.str[1:], array.shape) for name, array in arrays.items()])
    host = packed.host(device)
    for name, place in packed.arrays(host).items():
        place[...] = arrays[name]
    return packed.put(host, device)
