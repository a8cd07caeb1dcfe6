"""Safetensors files from plain bytes, sound ones and broken ones, for tests that must not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from dayzero.checkpoint.header import DTYPE_BITS

Tensors = Mapping[str, tuple[str, Sequence[int], bytes | None]]  # name -> (dtype code, shape, bytes or None for zeros)


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * DTYPE_BITS[dtype] // 8


def header_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    """The header object of tensors laid out one after another in their order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        size = num_bytes(dtype, shape) if data is None else len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return header


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """A sound file. Tensors whose bytes are None become holes of a sparse file: full size on paper, nothing on disk."""
    raw = json.dumps(header_of(tensors, metadata), separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as handle:
        handle.write(len(raw).to_bytes(8, "little") + raw)
        for dtype, shape, data in tensors.values():
            if data is None:
                handle.seek(num_bytes(dtype, shape), 1)
            else:
                handle.write(data)
        handle.truncate(handle.tell())


def write_raw(path: Path, header: bytes | object, data: bytes = b"", length: int | None = None) -> None:
    """A file from any header (bytes, or an object to write as JSON), any data, and any stated header length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int | None = None, file: str = "") -> None:
    """model.safetensors.index.json, or another name."""
    metadata = {} if total_size is None else {"metadata": {"total_size": total_size}}
    content = {**metadata, "weight_map": dict(weight_map)}
    (folder / (file or "model.safetensors.index.json")).write_text(json.dumps(content, indent=2))


def write_checkpoint(folder: Path, shards: Mapping[str, Tensors], config: Mapping[str, object] | None = None) -> None:
    """A sound folder: config.json, the shards, and an index when there is more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "test"}))
    for shard, tensors in shards.items():
        write_safetensors(folder / shard, tensors)
    if len(shards) > 1:
        places = {name: shard for shard, tensors in shards.items() for name in tensors}
        sizes = [num_bytes(dtype, shape) for tensors in shards.values() for dtype, shape, _ in tensors.values()]
        write_index(folder, places, sum(sizes))
