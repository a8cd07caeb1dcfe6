"""What tests with images share: a twin with a tower, pixels, the plain forward of a tower read from its own file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import dayzero

ORACLES = Path(dayzero.__file__).parent / "oracles"


def oracle_file(name: str) -> ModuleType:
    """A plain forward, as a module: it imports nothing of the package."""
    found = importlib.util.spec_from_file_location(name, ORACLES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def random_pixels(rows: int, columns: int, patch: int, seed: int) -> Tensor:
    """uint8 [rows * patch, columns * patch, 3], black and white included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows * patch, columns * patch, 3), generator=generator, dtype=torch.uint8)


def normalised(pixels_YXC: Tensor) -> Tensor:
    """[1, 3, height, width] float32 in [-1, 1], as a publisher's processor hands one frame to its model."""
    return ((pixels_YXC.float() / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]


TOWERS = ("kimi_k3", "kimi_k31", "qwen3_5_vl")  # small models that take images
