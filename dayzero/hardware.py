"""What a device can hold and how fast it is, as data. A record by name, or a TOML file for any other device.

Figures are vendors' dense peak rates; a plan's floors use them as they are and say so. Sources: vendors' public data
sheets for H100 SXM, H200 SXM, B200, B300 (HGX) and MI355X.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dayzero.errors import UsageError

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. memory_bytes: what the data sheet says; bandwidth: bytes/s of its memory; link: bytes/s one way to a
    peer in the same node; flops: element type of the operands -> dense FLOP/s; node: devices that share fast links.
    features: words a variant may need, e.g. ``sm90``, ``fp8``, ``block_scaled``. target: which variants may be bound.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    link: float
    flops: Mapping[str, float]
    node: int = 8
    target: str = "cuda"
    features: frozenset[str] = frozenset()
    reserved_bytes: int = 2 * GB

    def rate(self, element: str) -> float:
        """FLOP/s for operands of ``element``; the bf16 rate where the device has no faster unit."""
        return self.flops.get(element, self.flops["bf16"])


def _record(
    name: str, memory_gb: float, bandwidth_tb: float, link_gb: float, flops: Mapping[str, float], **more: Any
) -> Hardware:
    rates = {element: tflops * TFLOPS for element, tflops in flops.items()}
    return Hardware(name, int(memory_gb * GB), bandwidth_tb * TB, link_gb * GB, rates, **more)


HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        _record("h100", 80, 3.35, 450, {"bf16": 989, "e4m3": 1979}, features=frozenset({"sm90", "fp8"})),
        _record("h200", 141, 4.8, 450, {"bf16": 989, "e4m3": 1979}, features=frozenset({"sm90", "fp8"})),
        _record(
            "b200", 180, 7.7, 900, {"bf16": 2250, "e4m3": 4500, "e2m1": 9000},
            features=frozenset({"sm100", "fp8", "fp4", "block_scaled"}),
        ),
        _record(
            "b300", 288, 8.0, 900, {"bf16": 2250, "e4m3": 4500, "e2m1": 13500},
            features=frozenset({"sm103", "fp8", "fp4", "block_scaled"}),
        ),
        _record(
            "mi355x", 288, 8.0, 538, {"bf16": 2300, "e4m3": 4600, "e2m1": 9200}, target="rocm",
            features=frozenset({"gfx950", "fp8", "fp4", "block_scaled"}),
        ),
        _record("cpu", 24, 0.05, 10, {"bf16": 0.5, "f32": 0.2}, node=1, target="cpu", features=frozenset({"avx512"})),
    )
}  # fmt: skip

_COUNTED = re.compile(r"(?P<name>.+?)(?:x(?P<count>\d+))?")


def parse_hardware(text: str, known: Mapping[str, Hardware] = HARDWARE) -> tuple[Hardware, int]:
    """``h200x8`` -> (record, 8); a path to a TOML file (optionally ``file.tomlx8``) -> (its record, 8).

    UsageError names what is known when the name is not.
    """
    if text in known:
        return known[text], 1
    found = _COUNTED.fullmatch(text.strip())
    name, count = (found["name"], int(found["count"] or 1)) if found else (text, 1)
    if count < 1:
        raise UsageError(f"--hardware {text}: the number of devices must be at least 1.")
    if name in known:
        return known[name], count
    if name.endswith(".toml"):
        return load_hardware(Path(name)), count
    raise UsageError(f"--hardware {text}: {name} is not known; known are {', '.join(sorted(known))}, or give a .toml file.")


def load_hardware(path: Path) -> Hardware:
    """A record from a TOML file with the fields of Hardware; memory_bytes, bandwidth, link and [flops] are needed."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--hardware {path}: there is no such file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--hardware {path} is not TOML: {error}.") from error
    return hardware_from(data, str(path), default_name=path.stem)


def hardware_from(data: Mapping[str, Any], where: str, *, default_name: str) -> Hardware:
    """A record from a mapping, checked field by field."""
    known = {f.name for f in fields(Hardware)}
    extra = sorted(set(data) - known)
    if extra:
        raise UsageError(f"{where}: unknown field {extra[0]}; a device has {', '.join(sorted(known))}.")
    values = {"name": default_name, **data}
    for key in ("memory_bytes", "bandwidth", "link"):
        if not isinstance(values.get(key), (int, float)) or isinstance(values[key], bool) or values[key] <= 0:
            raise UsageError(f"{where}: {key} must be a positive number (bytes, bytes/s), but is {values.get(key)!r}.")
    rates = values.get("flops")
    if not isinstance(rates, Mapping) or not isinstance(rates.get("bf16"), (int, float)):
        raise UsageError(f"{where}: [flops] must give at least bf16 = FLOP/s.")
    values["flops"] = {str(k): float(v) for k, v in rates.items()}
    values["features"] = frozenset(values.get("features", ()))
    values["memory_bytes"] = int(values["memory_bytes"])
    return Hardware(**values)
