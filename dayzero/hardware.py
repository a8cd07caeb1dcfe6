"""What a device can hold and how fast it is, as data. A record by name, or a TOML file for any other device.

Figures are vendors' dense peak rates; a plan's floors use them as they are and say so. Sources: vendors' public data
sheets for H100 SXM, H200 SXM, B200, B300 (HGX) and MI355X.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from dayzero.errors import UsageError
from dayzero.extensions import HARDWARE as GROUP
from dayzero.extensions import ask_point, load_point, points_of, refuse_twice, said_of

GB, TB, TFLOPS = 10**9, 10**12, 10**12
MAX_RATE = 1e24  # bytes or operations; beyond, a figure is a slip of the pen (or infinite) and no device
MAX_DEVICES = 1024  # for one copy of a model's layouts; more replicas are planned as one of them


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


_KERNELS = ("triton", "cuda_bindings")  # packages: a plan for a machine that is not this one supposes they are there

HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        _record("h100", 80, 3.35, 450, {"bf16": 989, "e4m3": 1979}, features=frozenset({"sm90", "fp8", *_KERNELS})),
        _record("h200", 141, 4.8, 450, {"bf16": 989, "e4m3": 1979}, features=frozenset({"sm90", "fp8", *_KERNELS})),
        _record(
            "b200", 180, 7.7, 900, {"bf16": 2250, "e4m3": 4500, "e2m1": 9000},
            features=frozenset({"sm100", "fp8", "fp4", "block_scaled", *_KERNELS}),
        ),
        _record(
            "b300", 288, 8.0, 900, {"bf16": 2250, "e4m3": 4500, "e2m1": 13500},
            features=frozenset({"sm103", "fp8", "fp4", "block_scaled", *_KERNELS}),
        ),
        _record(
            "mi355x", 288, 8.0, 538, {"bf16": 2300, "e4m3": 4600, "e2m1": 9200}, target="rocm",
            features=frozenset({"gfx950", "fp8", "fp4", "block_scaled"}),
        ),
        _record("cpu", 24, 0.05, 10, {"bf16": 0.5, "f32": 0.2}, node=1, target="cpu", features=frozenset({"avx512"})),
    )
}  # fmt: skip


def record_named(device_name: str) -> str | None:
    """``NVIDIA H200`` -> ``h200``: the record whose name stands in a device's own, None when there is none."""
    word = device_name.lower().replace(" ", "")
    return next((name for name in HARDWARE if name in word), None)


_COUNTED = re.compile(r"(?P<name>.+?)(?:x(?P<count>\d{1,9}))?")


def parse_hardware(text: str, known: Mapping[str, Hardware] = HARDWARE) -> tuple[Hardware, int]:
    """``h200x8`` -> (record, 8); a path to a TOML file (optionally ``file.tomlx8``) -> (its record, 8).

    UsageError names what is known when the name is not.
    """
    if text in known:
        return known[text], 1
    found = _COUNTED.fullmatch(text.strip())
    name, count = (found["name"], int(found["count"] or 1)) if found else (text, 1)
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"--hardware {text}: the number of devices must be from 1 to {MAX_DEVICES}.")
    if name in known:
        return known[name], count
    if name.endswith(".toml"):
        return load_hardware(Path(name)), count
    raise UsageError(
        f"--hardware {text}: {name} is not known; known are {', '.join(sorted(known))}, here, or a .toml file."
    )


def load_hardware_entry_points(found: Iterable[EntryPoint] | None = None) -> dict[str, Hardware]:
    """Every record by name: the ones above, and those of installed packages (entry points ``dayzero.hardware``).

    An entry point is a ``Hardware``, a function without arguments that returns one, or a module with ``HARDWARE`` of
    either kind. Pass the result to ``parse_hardware``; nothing global changes. UsageError, naming the package, when one
    does not load, is no record, or has a name that is taken.
    """
    points = points_of(GROUP) if found is None else tuple(found)
    records = [_record_of(point) for point in points]
    refuse_twice(points, (record.name for record in records), HARDWARE, "the accelerator")
    return {**HARDWARE, **{record.name: record for record in records}}


def _record_of(point: EntryPoint) -> Hardware:
    target = load_point(point)
    target = getattr(target, "HARDWARE", target)
    made = ask_point(point, target) if callable(target) else target
    if not isinstance(made, Hardware):
        raise UsageError(f"{said_of(point)} gives no Hardware record, but {type(made).__name__}.")
    return made


def load_hardware(path: Path) -> Hardware:
    """A record from a TOML file with the fields of Hardware; memory_bytes, bandwidth, link and [flops] are needed."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--hardware {path}: there is no such file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"--hardware {path} is not TOML: {str(error)[:200]}.") from error
    return hardware_from(data, str(path), default_name=path.stem)


def hardware_from(data: Mapping[str, Any], where: str, *, default_name: str) -> Hardware:
    """A record from a mapping, checked field by field."""
    known = {f.name for f in fields(Hardware)}
    extra = sorted(set(data) - known)
    if extra:
        raise UsageError(f"{where}: unknown field {extra[0]}; a device has {', '.join(sorted(known))}.")
    values = {"name": default_name, **data}
    for key in ("memory_bytes", "bandwidth", "link"):
        if not _is_rate(values.get(key)):
            raise UsageError(f"{where}: {key} must be a positive number (bytes, bytes/s), but is {values.get(key)!r}.")
    rates = values.get("flops")
    if not isinstance(rates, Mapping) or "bf16" not in rates:
        raise UsageError(f"{where}: [flops] must give at least bf16 = FLOP/s.")
    for element, rate in rates.items():
        if not _is_rate(rate):
            raise UsageError(f"{where}: flops.{element} must be a positive number (FLOP/s), but is {rate!r}.")
    for key, least in (("node", 1), ("reserved_bytes", 0)):
        if key in values and (type(values[key]) is not int or values[key] < least):
            raise UsageError(f"{where}: {key} must be a whole number >= {least}, but is {values[key]!r}.")
    for key in ("name", "target"):
        if not isinstance(values.get(key, ""), str):
            raise UsageError(f"{where}: {key} must be a text, but is {values[key]!r}.")
    features = values.get("features", ())
    if not isinstance(features, Iterable) or isinstance(features, str) or not all(isinstance(f, str) for f in features):
        raise UsageError(f"{where}: features must be a list of words, but is {features!r}.")
    values["flops"] = {str(k): float(v) for k, v in rates.items()}
    values["features"] = frozenset(features)
    values["memory_bytes"] = int(values["memory_bytes"])
    return Hardware(**values)


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < MAX_RATE
