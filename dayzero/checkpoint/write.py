"""Writing safetensors shards: header first, then one tensor after another, so that memory holds one tensor at a time.

Format: 8-byte little-endian header length, JSON header, data. Files appear under their name only when complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dayzero.checkpoint.files import write_whole
from dayzero.checkpoint.formats import DTYPE_BITS


class Bytes(Protocol):
    """Anything with the buffer protocol that a file can write."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor to write: safetensors element code and shape as in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            bits *= size
        return bits // 8


def header_bytes(tensors: Sequence[ShardTensor]) -> bytes:
    """Length prefix and header for tensors laid out one after another; padded with spaces to 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        table[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.num_bytes]}
        at += t.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: Sequence[ShardTensor], data: Callable[[ShardTensor], Bytes]) -> None:
    """Write one shard. ``data(tensor)`` is called once for each, in order, and must give exactly its bytes."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as out:
        out.write(header_bytes(tensors))
        for tensor in tensors:
            piece = data(tensor)
            assert len(piece) == tensor.num_bytes, f"{tensor.name}: {len(piece)} bytes, header says {tensor.num_bytes}"
            out.write(piece)  # type: ignore[arg-type]
    os.replace(partial, path)


def write_sparse_shard(path: Path, tensors: Sequence[ShardTensor]) -> None:
    """Write the header and set the file's full size without writing data: holes read as zeros."""
    partial = path.with_name(path.name + ".partial")
    head = header_bytes(tensors)
    with open(partial, "wb") as out:
        out.write(head)
        out.truncate(len(head) + sum(t.num_bytes for t in tensors))
    os.replace(partial, path)


def split_shards(tensors: Iterable[ShardTensor], num_shards: int, total_bytes: int) -> list[list[ShardTensor]]:
    """Runs of tensors of about equal bytes, in order; exactly ``num_shards`` of them, none empty where possible."""
    items = list(tensors)
    out: list[list[ShardTensor]] = [[] for _ in range(num_shards)]
    at = 0
    for position, tensor in enumerate(items):
        by_bytes = min(num_shards - 1, at * num_shards // max(1, total_bytes))
        # Never let a shard stay empty because one large tensor jumped over it.
        reached = max(i for i in range(num_shards) if i == 0 or out[i - 1])
        out[min(by_bytes, reached) if position else 0].append(tensor)
        at += tensor.num_bytes
    return [shard for shard in out if shard]


def write_index(folder: Path, shards: Sequence[tuple[str, Sequence[ShardTensor]]], name: str) -> None:
    """model.safetensors.index.json: which shard holds each tensor, and the bytes of all."""
    weight_map = {t.name: file for file, tensors in shards for t in tensors}
    total = sum(t.num_bytes for _, tensors in shards for t in tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=0)
    write_whole(folder / name, text.encode())
