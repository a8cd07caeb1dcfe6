"""What this machine is, as a Hardware record. The one place that asks a device anything; torch is imported late."""

from __future__ import annotations

import os
from dataclasses import replace

from dayzero.hardware import HARDWARE, Hardware

HERE = "here"


def detect() -> tuple[Hardware, int]:
    """(record, number of devices) of this machine: its accelerators when torch sees any, else its CPU and memory.

    An accelerator whose name holds that of a known record takes that record's rates with the memory it really has;
    an unknown one takes the rates of the slowest known record and says so in its name.
    """
    return _accelerators() or (_cpu(), 1)


def _cpu() -> Hardware:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(HARDWARE["cpu"], name="this CPU", memory_bytes=memory, reserved_bytes=memory // 8)


def _accelerators() -> tuple[Hardware, int] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    word = properties.name.lower().replace(" ", "")
    known = next((h for name, h in HARDWARE.items() if name in word), None)
    base = known or HARDWARE["h100"]
    name = base.name if known else f"{properties.name} (rates of {base.name})"
    return replace(base, name=name, memory_bytes=properties.total_memory), torch.cuda.device_count()
