"""What an oracle process writes: a trace, site by site, and how far it is. Imports nothing of the package around it.

A trace is one safetensors file whose ``__metadata__`` holds ``dayzero_trace``, a JSON object. Tensors are appended as
they come; the header's room is reserved first and filled in last, so that a trace is never in memory as a whole.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

VERSION = 1
_CODES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
_NAMES_KEPT = 400


class TraceWriter:
    """Appends named tensors to ``path``; ``close(meta)`` makes the file valid. Before that it has no header.

    room_bytes: what the header may take. A name is written once; a second time is an error.
    """

    def __init__(self, path: Path, room_bytes: int) -> None:
        self._room = -(-room_bytes // 8) * 8
        self._table: dict[str, Any] = {}
        self._at = 0
        self._file = open(path, "wb")  # noqa: SIM115 - held open between calls; close() or __exit__ closes it
        self._file.seek(8 + self._room)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def names(self) -> list[str]:
        return list(self._table)

    def put(self, name: str, value: Tensor) -> None:
        """Write ``value`` (floats as float32, whole numbers as int32 or int64) under ``name``."""
        if name in self._table:
            raise ValueError(f"site {name} came twice: its module ran more than once in one forward")
        value = value.detach().to("cpu")
        value = value.float() if value.is_floating_point() else value
        if value.dtype not in _CODES:
            value = value.long()
        data = value.contiguous().numpy().tobytes()
        self._table[name] = {
            "dtype": _CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [self._at, self._at + len(data)],
        }
        self._file.write(data)
        self._at += len(data)

    def close(self, meta: dict[str, Any]) -> None:
        """Write the header and close the file."""
        header = {"__metadata__": {"dayzero_trace": json.dumps(meta)}, **self._table}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room:
            raise ValueError(f"the trace's header takes {len(text)} bytes, {self._room} were reserved")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + text.ljust(self._room))
        self._file.close()


def header_room(num_layers: int, num_tokens: int) -> int:
    """Bytes that the header of a trace may need: ten sites a layer, the token ids, names of unused tensors."""
    return (1 << 18) + 4096 * num_layers + 16 * num_tokens


def read_tokens(path: str) -> list[int]:
    """Token ids from a JSON list."""
    ids = json.loads(Path(path).read_text())
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError(f"{path} is no JSON list of token ids")
    return ids


def shorten(names: list[str]) -> list[str]:
    """At most 400 names, so that the header's room suffices; how many there are is written beside them."""
    return names[:_NAMES_KEPT]


def base_meta(tokens: list[int], oracle: dict[str, Any], unused: list[str]) -> dict[str, Any]:
    """What every trace says about itself. unused: tensors of the checkpoint that this forward never took."""
    return {
        "version": VERSION,
        "tokens": tokens,
        "dtype": "float32",
        "oracle": oracle,
        "unused": shorten(unused),
        "num_unused": len(unused),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """Most memory this process ever held. getrusage also counts the parent's before exec, so /proc comes first."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def report(done: int, total: int, text: str) -> None:
    """One line of progress for the process that started this one."""
    print(json.dumps({"done": done, "total": total, "text": text}), flush=True)


def quiet_environment() -> None:
    """No network, no chatter, no reading of settings that this process was not given. For this process alone."""
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip


def end_with_stdin() -> None:
    """End this process when its stdin does: a parent that is killed cannot end its child, but its pipes close.

    A thread waits at the pipe, so nothing depends on the operating system. In stdin's place comes an empty one.
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="stdin").start()
