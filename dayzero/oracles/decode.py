"""A second, independent reader of checkpoints, for the oracle's process.

It shares no code with the rest of the package, not even constants: it parses safetensors headers itself, finds out
from the tensors that are there how a matrix is stored, and computes values from bit fields instead of tables. Agreement
with the package's own decoders is therefore evidence. Every call opens a file, reads the bytes of one tensor, closes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BITS_TO_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_ELEMENTS_AT_ONCE = 1 << 20

Codes = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where a tensor's bytes are: file, dtype code, shape, absolute first and last-plus-one byte."""

    file: Path
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_checkpoint(folder: str | Path) -> Reader:
    """A reader over all ``*.safetensors`` files of a folder. Only headers and config.json are read here."""
    return Reader(Path(folder))


class Reader:
    """Physical and logical tensors of one checkpoint folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, Place] = {}
        for file in _listed_files(folder):
            for name, place in _header(file).items():
                if name in self.places:
                    raise ValueError(f"{name} is in {self.places[name].file.name} and in {file.name}")
                self.places[name] = place
        if not self.places:
            raise ValueError(f"{folder} holds no safetensors file")
        self.block = _fp8_block(folder / "config.json")

    def names(self) -> list[str]:
        """Names of all physical tensors, sorted."""
        return sorted(self.places)

    def spare(self, *names: str) -> None:
        """Told by a forward: logical tensors it has a use for, but not with these tokens (experts nobody chose)."""

    def raw(self, name: str) -> Tensor:
        """A physical tensor as stored; a fresh copy. KeyError when there is none."""
        place = self.places[name]
        data = bytearray(place.end - place.begin)
        with open(place.file, "rb", buffering=0) as stream:
            stream.seek(place.begin)
            view, got = memoryview(data), 0
            while got < len(data):
                count = stream.readinto(view[got:])
                if not count:
                    raise ValueError(f"{place.file.name} ends inside {name}")
                got += count
        dtype = _BITS_TO_TORCH[place.code]
        if not data:
            return torch.empty(place.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(place.shape)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The logical tensor ``name`` ([out, in] or [experts, out, in]), dequantised if it is stored quantised.

        The value is the f32 nearest to the exact one, then rounded to ``dtype``. KeyError when nothing holds it.
        """
        have = self.places
        stem = name.removesuffix("weight") if name.endswith(".weight") else name + "_"
        if name + "_blocks" in have:
            blocks = self.raw(name + "_blocks")
            return _grouped(_e2m1(blocks.flatten(-2)), self._scale(name + "_scales"), None, dtype)
        if name + "_packed" in have:
            return self._packed(name, dtype)
        if name not in have:
            raise KeyError(f"{name}: neither the tensor nor a packed form of it is in {self.folder}")
        if name + "_scale_2" in have:
            whole = self.raw(name + "_scale_2").double()
            return _grouped(_e2m1(self.raw(name)), self._scale(name + "_scale"), whole, dtype)
        code = have[name].code
        scale = next((s for s in (name + "_scale_inv", name + "_scale", stem + "scale") if s in have), None)
        if code == "F8_E4M3" and scale is not None:
            return _blocked(self.raw(name), self._scale(scale), self.block, dtype)
        if code in ("I8", "U8") and scale is not None:
            return _grouped(_e2m1(self.raw(name)), self._scale(scale), None, dtype)
        if not code.startswith(("F32", "F16", "BF16", "F64")):
            raise KeyError(f"{name} is stored as {code}, and no scale tensor stands beside it")
        return self.raw(name).to(dtype)

    def _scale(self, name: str) -> Tensor:
        try:
            return _scales(self.raw(name))
        except ValueError as error:
            raise ValueError(f"{name} in {self.places[name].file.name}: {error}") from error

    def _packed(self, name: str, dtype: torch.dtype) -> Tensor:
        packed, scale = self.raw(name + "_packed"), self._scale(name + "_scale")
        if packed.dtype == torch.int32:
            shape = tuple(self.raw(name + "_shape").tolist())
            return _grouped(_int4(packed)[..., : shape[-1]], scale, None, dtype)
        whole = name + "_global_scale"
        if whole not in self.places:
            return _grouped(_e2m1(packed), scale, None, dtype)
        return _grouped(_e2m1(packed), scale, self.raw(whole).double(), dtype, divide=True)


def _listed_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / shard for shard in shards]
    return sorted(folder.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Place]:
    """Name to place. The first eight bytes give the length of the JSON that follows, little endian."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{file.name} is too short for a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise ValueError(f"{file.name}: its header claims {length} bytes, the file has {size}")
        table = json.loads(stream.read(length))
    places = {}
    for name, entry in table.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            place = Place(file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, 8 + length + last)
            if not 8 + length <= place.begin <= place.end <= size:
                raise ValueError(f"{file.name}: the bytes of {name} lie outside the file")
            places[name] = place
    return places


def _fp8_block(config_file: Path) -> tuple[int, int]:
    """Rows and columns that share an fp8 scale, from whichever key of the config says so; 128 x 128 without one."""
    if not config_file.exists():
        return 128, 128
    config = json.loads(config_file.read_text())
    for holder in (config, config.get("text_config") or {}):
        claim: dict[str, Any] = holder.get("quantization_config") or holder.get("compression_config") or {}
        sizes = claim.get("weight_block_size")
        for group in (claim.get("config_groups") or {}).values():
            sizes = sizes or (group.get("weights") or {}).get("block_structure")
        if sizes:
            return int(sizes[0]), int(sizes[1])
    return 128, 128


def _float_from_bits(bits: Codes) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def _scales(stored: Tensor) -> Tensor:
    """f32 values of block scales of any stored type, by assembling f32 bit patterns for the 8-bit ones."""
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = stored.view(torch.uint8).numpy().astype(np.uint32)
        # Exponent field 0 would mean zero or subnormal: 2^-127 is the subnormal with only the top mantissa bit.
        bits = np.where(exponent == 0, 1 << 22, exponent << 23)
        values = _float_from_bits(np.where(exponent == 255, 0x7FC00000, bits))
    elif stored.dtype == torch.float8_e4m3fn:
        values = _e4m3(stored)
    else:
        values = stored.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a scale is NaN or infinite")
    return values


def _e4m3(stored: Tensor) -> Tensor:
    byte = stored.contiguous().view(torch.uint8).numpy().astype(np.uint32)
    sign, exponent, mantissa = (byte & 0x80) << 24, (byte >> 3) & 15, byte & 7
    normal = sign | ((exponent + 120) << 23) | (mantissa << 20)
    small = sign | (mantissa.astype(np.float32) * np.float32(1 / 512)).view(np.uint32)
    bits = np.where(exponent == 0, small, normal)
    return _float_from_bits(np.where((byte & 0x7F) == 0x7F, 0x7FC00000, bits))


def _e2m1(packed: Tensor) -> Codes:
    """int8 twice the value, [.., 2 x bytes], the low half of each byte first; minus zero is kept apart as -128."""
    byte = packed.contiguous().view(torch.uint8).numpy()
    code = np.empty((*byte.shape[:-1], byte.shape[-1] * 2), dtype=np.uint8)
    code[..., 0::2], code[..., 1::2] = byte & 15, byte >> 4
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = np.where(exponent == 0, mantissa, (2 + mantissa) << exponent >> 1).astype(np.int8)
    return np.where(code & 8, np.where(doubled == 0, np.int8(-128), -doubled), doubled).astype(np.int8)


def _int4(words: Tensor) -> Codes:
    """int8 twice the value, so that both 4-bit kinds share one path. Eight codes a word, the lowest bits first."""
    byte = words.contiguous().view(torch.uint8).numpy()
    code = np.empty((*byte.shape[:-1], byte.shape[-1] * 2), dtype=np.int8)
    code[..., 0::2], code[..., 1::2] = byte & 15, byte >> 4
    return (code - 8) * np.int8(2)


def _grouped(doubled: Codes, scale: Tensor, whole: Tensor | None, dtype: torch.dtype, divide: bool = False) -> Tensor:
    """value / 2 x scale of the group, times or over ``whole``.

    The group's length is the row's length over the number of scales. Float64 holds products exactly, and a quotient
    closely enough that rounding it to f32 gives what rounding the exact quotient gives.
    """
    shape = doubled.shape
    rows, group = doubled.reshape(-1, shape[-1]), shape[-1] // scale.shape[-1]
    scale_rows = scale.reshape(len(rows), -1)
    factors = torch.ones(len(rows), 1, dtype=torch.float64)
    if whole is not None:
        factors = whole.reshape(-1, 1).repeat_interleave(len(rows) // whole.numel(), 0)
    out = torch.empty(rows.shape, dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // shape[-1])
    for at in range(0, len(rows), step):
        part = torch.from_numpy(rows[at : at + step])
        half = torch.where(part == -128, -0.0, part.double() / 2)
        product = half.view(len(part), -1, group) * scale_rows[at : at + step, :, None].double()
        factor = factors[at : at + step]
        exact = product.flatten(1) / factor if divide else product.flatten(1) * factor
        out[at : at + step] = exact.float()
    return out.reshape(shape)


def _blocked(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Each element times the scale at (row // block rows, column // block columns), gathered by index."""
    if scale.ndim != weight.ndim:
        raise ValueError(f"an fp8 tensor of shape {list(weight.shape)} has scales of shape {list(scale.shape)}")
    *_, num_rows, num_columns = weight.shape
    column_of = torch.arange(num_columns) // block[1]
    out = torch.empty(weight.shape, dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // num_columns)
    for at in range(0, num_rows, step):
        row_of = torch.arange(at, min(at + step, num_rows)) // block[0]
        factor = scale[..., row_of, :][..., column_of]
        out[..., at : at + step, :] = (_e4m3(weight[..., at : at + step, :]).double() * factor.double()).float()
    return out
