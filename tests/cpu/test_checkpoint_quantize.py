"""Encoders: exact ties, the parts they write, and that writing what was read changes nothing."""

from __future__ import annotations

import pytest
import torch

from dayzero.checkpoint.dequant import dequantize, e2m1_table, e8m0_table, quantize, round_to_e2m1
from dayzero.checkpoint.formats import parts
from dayzero.decl import MXFP4_INTERLEAVED, MXFP4_PACK, MXFP4_SCALE, NVFP4_MODELOPT, QUANTIZED_FORMATS

MXFP4_FORMATS = (MXFP4_SCALE, MXFP4_INTERLEAVED, MXFP4_PACK)
by_name = pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda f: f.name)


def random_weight(shape, seed=0, spread=3.0):
    """Rows of very different size, so that a scale applied to the wrong row shows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight * torch.exp(spread * torch.randn((*shape[:-1], 1), generator=generator))


def test_e2m1_rounding_at_every_midpoint_and_its_neighbours():
    grid = e2m1_table()[:8].double()
    for low in range(7):
        middle = (grid[low] + grid[low + 1]) / 2
        even = low if low % 2 == 0 else low + 1
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            at = middle.to(dtype)
            below, above = torch.nextafter(at, at * 0), torch.nextafter(at, at * 8)
            codes = round_to_e2m1(torch.stack([below, at, above])).tolist()
            assert codes == [low, even, low + 1], (low, dtype)
            codes = round_to_e2m1(-torch.stack([below, at, above])).tolist()
            assert codes == [8 | low, 8 | even, 8 | (low + 1)]
    assert round_to_e2m1(torch.tensor([6.0, 7.0, 1e30, -1e30, 0.0, -0.0])).tolist() == [7, 7, 7, 15, 0, 8]


@by_name
def test_encoded_parts_are_what_the_format_says(fmt):
    codes = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32,
             "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
    for shape in ((130, 160), (3, 64, 96)):
        held = quantize(fmt, random_weight(shape))
        wanted = {p.role: p for p in parts(fmt, "w.weight", shape) if not p.optional}
        assert held.keys() == wanted.keys()
        for role, part in wanted.items():
            assert held[role].dtype == codes[part.dtype[0]]
            assert tuple(held[role].shape) == part.shape


def hard_weights():
    yield random_weight((3, 66, 160), seed=1)
    yield random_weight((66, 160), seed=2, spread=12.0)  # block scales from the largest to below the smallest
    yield torch.zeros(66, 160)
    sparse = random_weight((66, 160), seed=3)
    sparse[:, 32:] = 0
    sparse[5:] *= 1e-6
    yield sparse
    yield torch.full((66, 160), 1e-38)
    yield torch.full((66, 160), -3e30)


@by_name
@pytest.mark.parametrize("case", range(6))
def test_encoding_what_was_decoded_gives_the_same_values(fmt, case):
    weight = list(hard_weights())[case]
    shape = tuple(weight.shape)
    once = dequantize(fmt, quantize(fmt, weight), shape)
    again = dequantize(fmt, quantize(fmt, once), shape)
    assert torch.equal(once, again)
    assert (once.sign() * weight.sign() >= 0).all()


@pytest.mark.parametrize("fmt", MXFP4_FORMATS, ids=lambda f: f.name)
def test_mxfp4_scales_put_the_group_maximum_between_3_and_6(fmt):
    weight = random_weight((64, 96))
    weight[0, :32] = 6.0  # both ends: 6 keeps scale 1, 3 takes scale 1/2
    weight[1, :32] = 3.0
    held = quantize(fmt, weight)
    scale = e8m0_table()[held["scale"].view(torch.uint8).long()]
    ratio = weight.unflatten(1, (-1, 32)).abs().amax(-1) / scale
    assert ((ratio > 3) & (ratio <= 6)).all()
    assert scale[0, 0] == 1
    assert scale[1, 0] == 0.5


@by_name
def test_encoding_error_is_at_most_half_a_step(fmt):
    weight = random_weight((130, 160), spread=0.5)
    error = (dequantize(fmt, quantize(fmt, weight), (130, 160)) - weight).abs()
    rows, columns = fmt.block
    padded = torch.nn.functional.pad(weight, (0, -160 % columns, 0, -130 % rows)).abs()
    amax = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    amax = amax.repeat_interleave(rows, 0)[:130].repeat_interleave(columns, 1)[:, :160]
    # Widest step near the top over the value at the top: e2m1 2 of 6, or of 3 when the exponent is rounded up; with
    # e4m3's 3-bit scales the top itself may lie 1/16 beyond; e4m3 32 of 448 or 224; int4 1 of 7, bf16 scales 2^-9.
    step = {"e2m1": 2 / 6, "e4m3": 32 / 448, "int4": 1 / 7}[fmt.element] * (2 if fmt.scale == "e8m0" else 1)
    slack = {"e8m0": 1.0, "f32": 1.001, "bf16": 1.06, "e4m3": 1.07}[fmt.scale]
    assert (error <= amax * step / 2 * slack).all()


def test_two_halves_keep_their_own_tensor_scale():
    weight = random_weight((2, 64, 32), spread=0.1)
    weight[1] *= 4
    held = quantize(NVFP4_MODELOPT, weight)
    assert 3 < (held["tensor_scale"][1] / held["tensor_scale"][0]).item() < 6
    out = dequantize(NVFP4_MODELOPT, held, (2, 64, 32))
    alone = dequantize(NVFP4_MODELOPT, quantize(NVFP4_MODELOPT, weight[1]), (64, 32))
    assert torch.equal(out[1], alone)


@by_name
def test_what_is_not_finite_cannot_be_stored(fmt):
    with pytest.raises(ValueError, match="finite"):
        quantize(fmt, torch.full((32, 32), torch.nan))
