"""Editing the folder of a twin: shards tensor by tensor as plain bytes, the index, and JSON files. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.paper.files import write_index, write_safetensors

Tensor = tuple[str, tuple[int, ...], bytes]  # element code, shape, bytes
Shards = dict[str, dict[str, Tensor]]  # file -> name -> tensor
INDEX = "model.safetensors.index.json"


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(header object, position of the first data byte)."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def read_shards(folder: Path) -> Shards:
    """Every tensor of the folder, in file order."""
    out: Shards = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, begin = read_header(path)
        header.pop("__metadata__", None)
        data = path.read_bytes()
        out[path.name] = {
            name: (e["dtype"], tuple(e["shape"]), data[begin + e["data_offsets"][0] : begin + e["data_offsets"][1]])
            for name, e in header.items()
        }
    return out


def write_shards(folder: Path, shards: Shards) -> None:
    """Write all shards and the index anew, sound ones under their old names."""
    for file, tensors in shards.items():
        write_safetensors(folder / f"{file}.new", tensors, {"format": "pt"})
        os.replace(folder / f"{file}.new", folder / file)
    write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})


def each_tensor(change: Callable[[str, Tensor], Mapping[str, Tensor]]) -> Callable[[Path], None]:
    """Replace every tensor by what ``change(name, tensor)`` gives. It must change something."""

    def edit(folder: Path) -> None:
        before = read_shards(folder)
        after: Shards = {}
        for file, tensors in before.items():
            after[file] = {}
            for name, tensor in tensors.items():
                after[file].update(change(name, tensor))
        assert after != before, "the edit changed nothing"
        write_shards(folder, after)

    return edit


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    return each_tensor(lambda name, tensor: {change(name): tensor})


def replace_in_names(old: str, new: str, only: str = "") -> Callable[[Path], None]:
    """Rename ``old`` to ``new`` wherever the name also contains ``only``."""
    return rename(lambda name: name.replace(old, new) if only in name else name)


def drop(*parts: str) -> Callable[[Path], None]:
    """Drop every tensor whose name contains one of ``parts``."""
    return each_tensor(lambda name, tensor: {} if any(p in name for p in parts) else {name: tensor})


def alter(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Change every tensor whose name contains ``part``."""
    return each_tensor(lambda name, tensor: {name: change(tensor) if part in name else tensor})


def add(name: str, tensor: Tensor) -> Callable[[Path], None]:
    """Put one further tensor into the last shard."""

    def edit(folder: Path) -> None:
        shards = read_shards(folder)
        shards[sorted(shards)[-1]][name] = tensor
        write_shards(folder, shards)

    return edit


def copied(name: str, new: str, change: Callable[[bytes], bytes] = lambda data: data) -> Callable[[Path], None]:
    """Store tensor ``name`` a second time as ``new``, its bytes changed."""

    def edit(folder: Path) -> None:
        found = {n: t for tensors in read_shards(folder).values() for n, t in tensors.items()}
        code, shape, data = found[name]
        add(new, (code, shape, change(data)))(folder)

    return edit


def read_json(folder: Path, file: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / file).read_text())
    return content


def write_json(folder: Path, content: Mapping[str, Any], file: str = "config.json") -> None:
    (folder / file).write_text(json.dumps(content, indent=1))


def config(file: str = "config.json", /, **changes: Any) -> Callable[[Path], None]:
    """Set keys of a JSON file; ``text_config__x`` is the key x inside text_config, a callable changes the value."""

    def edit(folder: Path) -> None:
        content = read_json(folder, file)
        for dotted, value in changes.items():
            *path, last = dotted.split("__")
            part = content
            for key in path:
                part = part[key]
            part[last] = value(part[last]) if callable(value) else value
        write_json(folder, content, file)

    return edit


def without(*keys: str, file: str = "config.json") -> Callable[[Path], None]:
    """Remove keys of a JSON file."""

    def edit(folder: Path) -> None:
        content = read_json(folder, file)
        for key in keys:
            del content[key]
        write_json(folder, content, file)

    return edit


def both(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def header(change: Callable[[dict[str, Any]], str | None], shard: str = "") -> Callable[[Path], None]:
    """Change the header of a shard (the first) by hand. A string that ``change`` returns is written in its place."""

    def edit(folder: Path) -> None:
        path = folder / shard if shard else sorted(folder.glob("*.safetensors"))[0]
        content, begin = read_header(path)
        data = path.read_bytes()[begin:]
        text = (change(content) or json.dumps(content)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    return edit


def resize(shard: str, num_bytes: int) -> Callable[[Path], None]:
    """Cut a file short by ``num_bytes``, or let it grow when positive."""
    return lambda folder: os.truncate(folder / shard, (folder / shard).stat().st_size + num_bytes)


def bf16_of_f32(data: bytes) -> bytes:
    """f32 to bf16 by dropping the lower half, which is what narrow casts in the field do, ties apart."""
    return b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))


def shaped(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The same bytes under another shape."""
    return lambda tensor: (tensor[0], tuple(shape), tensor[2])


def transposed(tensor: Tensor) -> Tensor:
    """A matrix of 4-byte elements, really transposed."""
    code, (rows, columns), data = tensor
    cells = [data[4 * i : 4 * i + 4] for i in range(rows * columns)]
    return code, (columns, rows), b"".join(cells[r * columns + c] for c in range(columns) for r in range(rows))
