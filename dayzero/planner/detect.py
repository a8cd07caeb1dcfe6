"""What this machine is, as a Hardware record. The one place that asks a device anything; torch is imported late."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from dayzero.errors import MachineError
from dayzero.hardware import HARDWARE, Hardware, record_named
from dayzero.planner.memory import available_bytes

HERE = "here"
Kind = Literal["auto", "cpu", "cuda"]
# Word that a catalog line uses -> module. Records of accelerators have them all: a plan made elsewhere supposes them.
KERNEL_PACKAGES = {"triton": "triton", "cuda_bindings": "cuda.bindings"}


def detect(kind: Kind = "auto") -> tuple[Hardware, int]:
    """(record, number of devices) of this machine: its accelerators when torch sees any, else its CPU and memory.

    kind: ``cpu`` leaves accelerators alone; ``cuda`` is a MachineError where torch sees none.

    An accelerator whose name holds that of a known record takes that record's rates with the memory it really has;
    an unknown one takes the rates of the slowest known record and says so in its name.
    """
    found = None if kind == "cpu" else _accelerators()
    if found is None and kind == "cuda":
        raise MachineError("torch sees no NVIDIA GPU here (torch.cuda.is_available() is false): use --device cpu.")
    return found or (_cpu(), 1)


def free_bytes(target: str) -> int:
    """Memory that can still be allocated on the current device of ``target`` (``cpu``, ``cuda``)."""
    if target != "cuda":
        return available_bytes()
    import torch

    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch has it, and gives it to who asks
    return torch.cuda.mem_get_info()[0] + held


def _cpu() -> Hardware:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    features = processor_features() | library_features()
    return replace(HARDWARE["cpu"], name="this CPU", memory_bytes=memory, reserved_bytes=memory // 8, features=features)


# Flags of /proc/cpuinfo that variants may need, by the word a catalog line uses.
_FLAGS = {"avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512_bf16", "amx_bf16": "amx_bf16"}


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Words for what the processor can do, from the kernel's list of its flags; empty where there is none."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return frozenset(_FLAGS[flag] for flag in flags if flag in _FLAGS)


def library_features() -> frozenset[str]:
    """``cxx``: there is a C++ compiler, for variants compiled here. ``onednn``: torch has its packed products."""
    try:
        from dayzero.ops.native.build import find_compiler
        from dayzero.ops.vendor.onednn import check_machine
    except ImportError:
        return frozenset()
    found = set()
    for word, ask in (("cxx", find_compiler), ("onednn", check_machine)):
        try:
            ask()
        except MachineError:
            continue
        found.add(word)
    return frozenset(found)


def _accelerators() -> tuple[Hardware, int] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    known = record_named(properties.name)
    base = HARDWARE[known or "h100"]
    name = base.name if known else f"{properties.name} (rates of {base.name})"
    features = base.features - KERNEL_PACKAGES.keys() | kernel_packages()
    here = replace(base, name=name, memory_bytes=properties.total_memory, features=features)
    return here, torch.cuda.device_count()


def kernel_packages() -> frozenset[str]:
    """``triton``, ``cuda_bindings``: packages that compile kernels for an accelerator, those that are installed."""
    return frozenset(word for word, name in KERNEL_PACKAGES.items() if _installed(name))


def _installed(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _installed(parent)) and find_spec(name) is not None
