"""How far a variant may be from its reference, from the arithmetic of the element types. No torch.

Rounding to nearest is off by at most u = 2^-p relative to the value, p being the bits of the significand:
f32 p = 24, f16 p = 11, bf16 p = 8. The measure is the relative L2 distance over one output, so u is its worst case.
"""

from __future__ import annotations

from collections.abc import Mapping

from dayzero.ops.contract import Rel

ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def _bounds(f32: float, f32_why: str, roundings: int, why: str) -> Mapping[str, Rel]:
    """f32: a stated value; f16 and bf16: so many roundings of that type in all, counted on both sides."""
    narrow = {e: Rel(roundings * ROUNDING[e], f"{roundings} roundings of 2^-p: {why}") for e in ("f16", "bf16")}
    return {"f32": Rel(f32, f32_why), **narrow}


EXACT: Mapping[str, Rel] = {e: Rel(0.0, "only moves or selects values") for e in ROUNDING}
ELEMENTWISE = _bounds(2e-6, "about 30 roundings of 2^-24 in one element", 2, "one per side at the output")
CAST_FIRST = _bounds(2e-6, "about 30 roundings of 2^-24 in one element", 4, "one each side of the weight, twice")
NORM_ROPE = _bounds(4e-6, "about 60 roundings of 2^-24 in one element", 6, "CAST_FIRST, and one each side of a turn")
MATMUL = _bounds(1e-5, "a sum of 2^14 terms drifts by sqrt(2^14) * 2^-24 = 8e-6", 2, "one per side at the output")
MATMUL_ADD = _bounds(1e-5, "as MATMUL", 4, "as MATMUL, and one per side of the sum")
MATMUL_GLU = _bounds(2e-5, "two sums in a product", 6, "gate, up and their product are each rounded")
MATMUL_F32 = {e: Rel(1e-5, "operands are exact in f32 and the result stays f32") for e in ROUNDING}
ATTENTION = _bounds(2e-5, "two sums in a row, of scores and of values", 4, "probabilities may be rounded before P@V")
LATENT = _bounds(4e-5, "ATTENTION and two sums before or behind it", 8, "as ATTENTION, and operands of those sums")
EXPERTS = _bounds(3e-5, "three matrix products in a row", 6, "gate, up, product and down are each rounded once more")
EXPERTS_FP8 = _bounds(
    2.0**-11, "values within 2^-22 of the middle of two e4m3 numbers, 2^-18 of all, may go to either: by 2^-3 each",
    6, "gate, up, product and down are each rounded once more",
)  # fmt: skip
MATMUL_FP8 = _bounds(
    2.0**-11,
    "as EXPERTS_FP8",
    2,
    "one per side at the output; sums of 14 bits over 128 columns are off by less than that",
)
RECURRENCE = _bounds(
    5e-5, "errors of one token decay no faster than the state, so about 100 of 2^-24 add up", 4, "inputs of a tile"
)
RESIDUAL = _bounds(1e-5, "softmax of a sum over the width", 4, "the mixture is rounded once per source and side")
