"""A trace: what an oracle computed, site by site, in one safetensors file that is read one site at a time.

Sites: ``embed``; ``layers.{i}.mixer`` and ``.channel`` (outputs before the residual), ``layers.{i}`` (stream after the
layer), ``layers.{i}.carry.{part}`` (further parts of the carry), ``layers.{i}.experts`` and ``.index`` (ids);
``final_norm``; ``logits``. With images: ``images.{n}`` (pixels), ``vision.embed`` and ``vision.blocks.{i}`` (patches of
all images), ``vision`` (rows). Values are float32, tokens first. ``dayzero_trace`` in the metadata holds a JSON object:
version, tokens, dtype, oracle {kind, name, versions}, unused, num_unused, peak_rss_bytes, model {fingerprint, source,
aligned}.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dayzero.checkpoint.index import Index
from dayzero.checkpoint.source import Source
from dayzero.errors import UsageError

VERSION = 1
KEY = "dayzero_trace"
_DTYPES = {"F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
_MOST_HEADER_BYTES = 100_000_000
_SAMPLED_TENSORS = 64
_SAMPLE_BYTES = 4096


class Trace:
    """A trace file, opened: header only. UsageError when it is none, with what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._begin = _read_header(path)
        text = str((header.pop("__metadata__", None) or {}).get(KEY, ""))
        try:
            self.meta: dict[str, Any] = json.loads(text)
            version, tokens = self.meta["version"], self.meta["tokens"]
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{path} is no trace of an oracle: its header holds no {KEY}.") from error
        if version != VERSION:
            raise UsageError(f"{path} is a trace of version {version}, this program reads {VERSION}; record it again.")
        self.tokens: list[int] = list(tokens)
        self._table = header

    def sites(self) -> list[str]:
        return list(self._table)

    def __contains__(self, site: str) -> bool:
        return site in self._table

    def get(self, site: str) -> Tensor:
        """The values at ``site``, a fresh tensor. UsageError when the trace has no such site or is cut short."""
        entry = self._table.get(site)
        if entry is None:
            raise UsageError(f"{self.path} has no values for {site}; it was recorded by another oracle or version.")
        try:
            first, last = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            data = bytearray(last - first)
            with open(self.path, "rb") as file:
                file.seek(self._begin + first)
                got = file.readinto(data)
            if got != len(data):
                raise UsageError(f"{self.path} ends inside {site}: it is cut short; copy or record it again.")
            return torch.frombuffer(data, dtype=dtype).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{self.path} has a damaged header: {site} does not fit ({error}).") from error

    def check(self, fingerprint: str, tokens: list[int] | None) -> None:
        """UsageError when the trace was made from another checkpoint, or for other tokens than asked for."""
        made = (self.meta.get("model") or {}).get("fingerprint")
        if made != fingerprint:
            raise UsageError(
                f"{self.path} was recorded from another checkpoint (fingerprint {str(made)[:12]}, "
                f"this one has {fingerprint[:12]}); record one from this checkpoint with --record."
            )
        if tokens is not None and tokens != self.tokens:
            raise UsageError(
                f"{self.path} was recorded for other token ids ({len(self.tokens)} of them, {len(tokens)} are asked "
                "for); leave the text options out to use the trace's own."
            )


def add_meta(path: Path, more: Mapping[str, Any]) -> None:
    """Add keys to the metadata of a trace, in place, within the room its header has."""
    header, begin = _read_header(path)
    meta = json.loads(header["__metadata__"][KEY])
    header["__metadata__"][KEY] = json.dumps(meta | dict(more))
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= begin - 8, "the writer leaves room for what is added here"
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(text.ljust(begin - 8))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(header, position of the first value)."""
    if not path.is_file():
        raise UsageError(f"{path} is no file; give a trace that --record wrote.")
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("no object")
    except (ValueError, struct.error, RecursionError) as error:
        raise UsageError(f"{path} is no trace: its header cannot be read ({error}).") from error
    return header, 8 + length


def fingerprint(source: Source, index: Index, config: Mapping[str, Any]) -> str:
    """SHA-256 over the config, every tensor's name, dtype and shape, and the ends of 64 tensors spread over them."""
    names = sorted(index.entries)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":"), default=str).encode())
    for name in names:
        entry = index.entries[name]
        digest.update(f"{name} {entry.dtype} {tuple(entry.shape)}\n".encode())
    for name in _spread(names):
        entry = index.entries[name]
        size = min(entry.nbytes, _SAMPLE_BYTES)
        ends = [(entry.start, size), (entry.start + entry.nbytes - size, size)]
        for part in source.read_ranges(entry.file, ends):
            digest.update(part)
    return digest.hexdigest()


def _spread(names: list[str]) -> Iterable[str]:
    step = max(1, len(names) // _SAMPLED_TENSORS)
    return names[::step][:_SAMPLED_TENSORS]
