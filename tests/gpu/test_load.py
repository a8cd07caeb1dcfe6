"""Weights that are decoded on a GPU: the bits that the CPU decodes, for every family and every format of storage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from small_models import NAMES, write_small

from dayzero.blocks.open import open_model
from dayzero.checkpoint.dequant import dequantize, quantize
from dayzero.checkpoint.staging import PIECE_BYTES
from dayzero.decl import QUANTIZED_FORMATS, Format, Fp8Blocks, Mxfp4

pytestmark = pytest.mark.gpu


def parts_of(value: object) -> list[Tensor]:
    return [value.codes.view(torch.uint8), value.scales] if isinstance(value, Mxfp4 | Fp8Blocks) else [value]  # type: ignore[list-item]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_the_same_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(write_small(name, tmp_path))
    host, device = (open_model(folder, dtype=dtype).loader for _ in range(2))
    device.place("cuda")
    packed = {name: form for name in host.names() if (form := host.packs(name)) is not None}
    want, got = host.load("", packed=packed), device.load("", packed=packed)
    for param, value in want.items():
        for mine, other in zip(parts_of(got[param]), parts_of(value), strict=True):
            assert mine.is_cuda and mine.dtype == other.dtype and torch.equal(mine.cpu(), other), param
    assert device.findings == host.findings and device.bytes_read == host.bytes_read


@pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda fmt: fmt.name)
def test_a_format_is_decoded_to_the_same_bits(fmt: Format) -> None:
    """In several pieces on the CPU, in one on the GPU."""
    weight = torch.randn(1536, 1024, generator=torch.Generator().manual_seed(1)) * 0.1
    stored = quantize(fmt, weight)
    there = {role: part.cuda() for role, part in stored.items()}
    for dtype in (torch.float32, torch.bfloat16):
        want = dequantize(fmt, stored, (1536, 1024), dtype)
        assert torch.equal(dequantize(fmt, there, (1536, 1024), dtype).cpu(), want)


def test_pinned_memory_is_let_go_when_all_is_loaded(tmp_path: Path) -> None:
    folder = str(write_small("llama", tmp_path))
    loader = open_model(folder, dtype=torch.bfloat16).loader
    loader.place("cuda")
    before = pinned_bytes()
    loader.load("layers.0")
    assert pinned_bytes() - before >= PIECE_BYTES, "the measure sees a buffer"
    loader.rest()
    assert pinned_bytes() <= before
    loader.load("layers.1")
    assert pinned_bytes() - before >= PIECE_BYTES, "what is loaded later takes it again"


def pinned_bytes() -> int:
    """Of pinned memory that torch holds, in use or not."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
