"""What a seeded parameter is drawn from, as tables for ``picks``: values, and codes with scales.

So that a model of true width behaves as a trained one does where that decides its speed: activations keep their size
from layer to layer (matrices N(0, 1/fan_in), norms 1, biases 0), experts are chosen about evenly (a router without
bias), decays lie where papers put them, scales spread over some eight exponents.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dayzero.arch.mixers import Delta, Mixer
from dayzero.checkpoint.dequant import E4M3_MAX, INT4_MAX, e2m1_table, e4m3_table, e8m0_table, int4_table, round_to_e2m1
from dayzero.decl import Format, ParamDecl
from dayzero.rehearse.picks import QUANTILES, normal, uniform
from dayzero.rehearse.values import BLOCK_OCTAVES as GROUP_OCTAVES

# Standard deviation of elements in units of their scale: the largest of a group of 32 lies about 2.1 deviations out, of
# a block of 128 x 128 about 4, and publishers put it near the largest code.
ELEMENT_STD = {"e2m1": 2.1, "int4": INT4_MAX / 2.1, "e4m3": E4M3_MAX / 4}
# Deviation of a scale's exponent: the largest of a whole block varies little; groups along a row differ as a twin's do.
BLOCK_OCTAVES = 0.25
TYPICAL_SCALE = 32.0  # of e4m3 scales below a tensor scale: in the middle of their range


class Draw(NamedTuple):
    """kind: ``constant`` of that size; ``normal`` with that deviation; ``log_rate``, ``step_bias``, ``bounded_step``:
    of decays."""

    kind: Literal["constant", "normal", "log_rate", "step_bias", "bounded_step"]
    size: float = 1.0


def draw_of(decl: ParamDecl, mixer: Mixer | None, tied: bool) -> Draw:
    """mixer: what the parameter belongs to, where it is a mixer's. tied: the embedding is the head."""
    word = decl.name.rsplit(".", 1)[-1]
    bounded = isinstance(mixer, Delta) and mixer.lower is not None
    if word == "a_log":
        return Draw("normal", 0.3) if bounded else Draw("log_rate")
    if word == "dt_bias":
        return Draw("bounded_step" if bounded else "step_bias")
    if decl.role == "norm":
        return Draw("constant", 1.0 if decl.center is None else decl.center)
    if decl.role == "bias":
        return Draw("constant", 0.0)
    if decl.role == "scalar":
        return Draw("normal")
    if decl.name == "embed" and not tied:
        return Draw("normal")  # a lookup's fan-in is 1; smaller, it would drown in what attention averages of others
    return Draw("normal", decl.shape[-1] ** -0.5)


@lru_cache(maxsize=64)
def quantiles(draw: Draw) -> Tensor:
    """float64 [65536]. Decays as in ``values``: rates e^A in [1, 16] and steps in [1e-3, 0.1] (Mamba-2, KDA), for
    bounded ones steps up to 10."""
    part = uniform()
    if draw.kind == "constant":
        return torch.full_like(part, draw.size)
    if draw.kind == "normal":
        return draw.size * normal()
    if draw.kind == "log_rate":
        return torch.log(1 + 15 * part)
    if draw.kind == "bounded_step":
        return math.log(1e-3) + part * math.log(1e4)
    step = torch.exp(math.log(1e-3) + part * math.log(1e2))
    return step + torch.log(-torch.expm1(-step))  # inverse of softplus


class Coded(NamedTuple):
    """Tables of a stored format. codes: uint8 [65536], one byte: a code of e4m3, or two of 4 bits, the first in the low
    half. values: f32 [65536, n], what its n codes stand for. scales: as they are stored; scale_values: f32. whole: the
    tensor scale, a power of two; None: the format has none."""

    codes: Tensor
    values: Tensor
    scales: Tensor
    scale_values: Tensor
    whole: float | None

    @property
    def per_byte(self) -> int:
        return self.values.shape[1]


@lru_cache(maxsize=64)
def coded(fmt: Format, deviation: float) -> Coded:
    """Tables of a matrix whose elements have this deviation. The mean squares of codes and scales multiply to its
    square, up to what steps of scales allow (about a thousandth)."""
    assert fmt.block is not None and fmt.scale is not None, f"{fmt.name} has no scales"
    codes, elements = _elements(fmt.element)
    wanted = deviation / float(elements.double().square().mean().sqrt())
    whole = None
    if fmt.tensor_scale is not None:
        whole = 2.0 ** round(math.log2(wanted / TYPICAL_SCALE))
    octaves = (GROUP_OCTAVES if fmt.block[0] == 1 else BLOCK_OCTAVES) * normal()
    return Coded(codes, elements, *_scales(fmt.scale, wanted / (whole or 1.0), octaves), whole)


@lru_cache(maxsize=8)
def _elements(element: str) -> tuple[Tensor, Tensor]:
    std = ELEMENT_STD[element]
    if element == "e4m3":
        codes = (normal() * std).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, e4m3_table()[codes.int()][:, None]
    few = torch.tensor([NormalDist(0, std).inv_cdf((i + 0.5) / 256) for i in range(256)], dtype=torch.float64)
    if element == "e2m1":
        code, table = round_to_e2m1(few), e2m1_table()
    else:
        code, table = (torch.round(few).clamp(-8, INT4_MAX) + 8).to(torch.uint8), int4_table()
    number = torch.arange(QUANTILES)
    first, second = code[number & 255], code[number >> 8]
    return first | second << 4, torch.stack([table[first.int()], table[second.int()]], dim=1)


def _scales(kind: str, size: float, octaves: Tensor) -> tuple[Tensor, Tensor]:
    """(as stored, f32 values) of scales whose root mean square is ``size``. octaves: what their exponents differ by."""
    if kind == "e8m0":
        exponents = _exponents(octaves, math.log2(size))
        stored = (exponents + 127).to(torch.uint8)
        return stored, e8m0_table()[stored.int()]
    spread = torch.exp2(octaves)
    exact = spread * (size / float(spread.square().mean().sqrt()))
    if kind == "e4m3":
        stored = exact.clamp(2.0**-6, E4M3_MAX).float().to(torch.float8_e4m3fn)
        return stored.view(torch.uint8), stored.float()
    stored = exact.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return stored, stored.float()


def _exponents(octaves: Tensor, wanted: float) -> Tensor:
    """Whole exponents, spread as ``octaves`` are, whose powers of two have the root mean square 2^wanted."""
    low, high = wanted - 16, wanted + 16
    for _ in range(60):
        middle = (low + high) / 2
        mean_square = float(torch.exp2(2 * torch.floor(octaves + middle)).mean())
        low, high = (middle, high) if mean_square < 4.0**wanted else (low, middle)
    return torch.floor(octaves + high).clamp(-126, 127)
