"""Whether Triton kernels can run here, and what the wrappers around them share."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from dayzero.errors import MachineError
from dayzero.hardware import record_named

# Triton's interpreter runs kernels on a CPU, in numpy; tests use it. A constant of the library, read once at import.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def check_machine() -> None:
    """Raise MachineError where no kernel can run: without an accelerator that Triton has a backend for."""
    if not (INTERPRETED or torch.cuda.is_available()):
        raise MachineError("variants in Triton need an NVIDIA GPU, and torch sees none; bind others to these sites")


def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; 4 in the interpreter, so that loops over a grid are walked there too."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def hardware_word(device: torch.device) -> str:
    """The record of ``hardware`` that the device is, whose tables its kernels run by; that of the H200, on which they
    were measured, where there is none, and in the interpreter."""
    return (None if INTERPRETED else record_named(torch.cuda.get_device_name(device))) or "h200"


def counts_fit(*tensors: Tensor) -> None:
    """Assert that element numbers of each tensor fit 31 bits: for kernels that count in int32."""
    for one in tensors:
        assert one.numel() < 2**31, f"{tuple(one.shape)} has more elements than int32 can count"
