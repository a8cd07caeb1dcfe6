"""Experts in 4 bits against the exact decoder: widened to the bit, and as e4m3 exactly where that is possible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dayzero.checkpoint.dequant import E2M1_VALUES, dequantize, e4m3_table
from dayzero.decl import MXFP4_PACK, Mxfp4
from dayzero.ops.activation import glu
from dayzero.ops.experts_fp8 import (
    Ring,
    experts_fp8_128,
    ring,
    rounded_to_fp8_128,
    to_fp8_128,
    widening,
)
from dayzero.ops.experts_mxfp4 import REACH, distances, groups_outside, live_groups, to_e4m3, widen, widen_e4m3
from dayzero.ops.experts_sizes import e4m3_expert_bytes, ring_bytes
from dayzero.ops.linear import matmul
from dayzero.ops.moe import experts
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.vendor.torch_cpu import moe_experts
from tests.cpu.ops_support import close, poisoned_memory  # noqa: F401

SILU = {"kind": "silu"}


def packed(codes_RC: Tensor, exponents_RG: Tensor) -> Mxfp4:
    """codes 0..15 [R, C], exponents unbiased [R, C / 32]."""
    codes = codes_RC.to(torch.uint8)
    return Mxfp4(codes[..., 0::2] | codes[..., 1::2] << 4, (exponents_RG + 127).to(torch.uint8))


def exact(matrix: Mxfp4, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(MXFP4_PACK, {"weight": matrix.codes, "scale": matrix.scales}, matrix.shape, dtype)


def drawn(rows: int, columns: int, seed: int = 0, stack: tuple[int, ...] = (), spread: int = 5) -> Mxfp4:
    inputs = Inputs(seed)
    codes = inputs.integers(0, 16, *stack, rows, columns)
    return packed(codes, inputs.integers(-8, -8 + spread, *stack, rows, columns // 32))


def as_e4m3(matrix: Mxfp4) -> tuple[Tensor, Tensor, int]:
    rows, columns = matrix.shape
    codes = torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((rows, -(-columns // 128)), torch.nan)
    return codes, scales, to_e4m3(matrix, codes, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 32), (37, 160), (700, 352)])
def test_widened_to_the_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs = Inputs(0)
    every = packed(inputs.integers(0, 16, *shape), inputs.integers(-127, 125, shape[0], shape[1] // 32))
    assert torch.equal(widen(every, dtype), exact(every, dtype))
    low = packed(Inputs(1).integers(0, 16, 3, 64), torch.full((3, 2), -127))
    assert torch.equal(widen(low, dtype), exact(low, dtype)), "subnormal scales too"
    stack = drawn(12, 64, stack=(5,))
    odd_rows = Mxfp4(stack.codes[:, 1::2], stack.scales[:, 1::2])  # as of a tensor that holds gate and up row by row
    assert torch.equal(widen(odd_rows[3], dtype), exact(stack[3], dtype)[1::2])


def test_every_code_at_every_distance() -> None:
    """One block: a group of all codes at the largest exponent, one of all codes d below it, for d from 0 to 20.

    Exact for all codes if and only if d <= 14. Beyond, each code goes where its last bit falls below 2^-9, the last
    subnormal, and is rounded to the nearest e4m3, ties to even.
    """
    all_codes = torch.arange(32) % 16
    table = e4m3_table()
    first_wrong = {0.5: 15, 1.5: 15, 1.0: 16, 3.0: 16, 2.0: 17, 6.0: 17, 4.0: 18}
    for top in (-60, 0, 70):
        for d in range(21):
            matrix = packed(torch.cat((all_codes, all_codes))[None], torch.tensor([[top, top - d]]))
            codes, scales, outside = as_e4m3(matrix)
            assert scales.tolist() == [[2.0 ** (top - 6)]]
            got, want = widen_e4m3(codes, scales), exact(matrix)
            assert torch.equal(got[:, :32], want[:, :32]) and torch.equal(got.signbit(), want.signbit())
            assert torch.equal(got, want) == (d <= REACH) == (outside == 0), d
            assert groups_outside(matrix) == outside == (d > REACH)
            wrong = {abs(E2M1_VALUES[c]) for c in range(16) if got[0, 32 + c] != want[0, 32 + c]}
            assert wrong == {code for code, at in first_wrong.items() if d >= at}, d
            for c in range(16):
                value = E2M1_VALUES[c] * 2.0 ** (6 - d)
                nearest = float((table - value).abs().nan_to_num(torch.inf).min())
                assert abs(float(codes[0, 32 + c].float()) - value) == nearest, (c, d)


def test_the_subnormals_of_e4m3_end_where_the_claim_says() -> None:
    values = e4m3_table()
    positive = values[(values > 0)].sort().values
    assert float(positive[0]) == 2.0**-9 == 0.5 * 2.0 ** (6 - REACH), "the smallest code at distance 14"
    assert float(positive[7]) == 2.0**-6 == 0.5 * 2.0 ** (6 - 11), "normal up to distance 11"
    assert float(positive[-1]) == 448 >= 6 * 2.0**6 == 384


def test_dead_groups_do_not_count() -> None:
    """A block's scale comes from its live groups; an all-zero group, of either sign, may have any exponent."""
    codes = torch.cat((torch.arange(32) % 16, torch.tensor([0, 8] * 16), torch.arange(32) % 16))[None].repeat(2, 1)
    matrix = packed(codes, torch.tensor([[0, 120, -14], [0, -120, -14]]))
    assert live_groups(matrix).tolist() == [[True, False, True]] * 2
    got, scales, outside = as_e4m3(matrix)
    assert outside == groups_outside(matrix) == 0 and scales.tolist() == [[2.0**-6]] * 2
    assert torch.equal(widen_e4m3(got, scales), exact(matrix))
    dead = packed(torch.zeros(3, 160, dtype=torch.int64), Inputs(0).integers(-90, 90, 3, 5))
    got, scales, outside = as_e4m3(dead)
    assert outside == groups_outside(dead) == 0 and not got.float().any() and (scales == 1).all()


def test_groups_outside_are_counted_by_block_and_row() -> None:
    exponents = torch.tensor([[0, 0, 0, 0, -15], [0, -15, 0, -16, 0], [-15, -15, -15, -15, 3]])
    matrix = packed(torch.full((3, 160), 3), exponents)
    assert groups_outside(matrix) == 2, "the fifth group begins a block of its own"
    assert (distances(matrix)[0] > REACH).nonzero().tolist() == [[1, 1], [1, 3]]
    assert groups_outside(drawn(9, 256, spread=15)) == 0 < groups_outside(drawn(9, 256, spread=17))


def test_large_matrices_in_tiles() -> None:
    matrix = drawn(700, 352, spread=15)
    codes, scales, outside = as_e4m3(matrix)
    assert outside == 0 and torch.equal(widen_e4m3(codes, scales), exact(matrix))
    assert torch.equal(scales[:, 2], 2.0 ** (distances(matrix)[1][:, 2].double() - 6).float())


# --- the operators ----------------------------------------------------------------------------------------------------


def case(tokens: int, dtype: torch.dtype, spread: int = 5) -> tuple[list[Tensor], list[Mxfp4]]:
    r = Inputs(tokens)
    rows = [r.normal(tokens, 352, dtype=dtype), torch.stack([r.permutation(6)[:3] for _ in range(tokens)]),
            r.uniform(tokens, 3)]  # fmt: skip
    shapes = ((416, 352), (416, 352), (352, 416))
    return rows, [drawn(*shape, seed=i, stack=(6,), spread=spread) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_that_of_decoded_experts_to_the_bit(dtype: torch.dtype) -> None:
    rows, matrices = case(9, dtype)
    decoded = [exact(m, dtype) for m in matrices]
    assert torch.equal(experts(*rows, *matrices, SILU), experts(*rows, *decoded, SILU))
    bound = 1e-6 if dtype is torch.float32 else 6 * 2**-8
    close(moe_experts(*rows, *matrices, SILU), moe_experts(*rows, *decoded, SILU), bound)


def test_scales_of_activations_are_by_token_and_128_columns() -> None:
    x = Inputs(3).normal(5, 300)
    x[1, 128:256] *= 2.0**40
    x[2, :128] = 0
    codes, scales = to_fp8_128(x)
    assert codes.shape == x.shape and scales.shape == (5, 3)
    for token in range(5):
        for block in range(3):
            part = x[token, 128 * block : 128 * block + 128]
            assert float(scales[token, block]) == float(part.abs().max().clamp(min=1e-4) / 448)
    got = rounded_to_fp8_128(x, torch.float64)
    # 3 bits behind the point: half a step is 2^-4 of the value; below 2^-6 of the scale the step is 2^-9 of it.
    step = torch.maximum(x.double().abs() * 2**-4, scales.double().repeat_interleave(128, 1)[:, :300] * 2**-10)
    assert ((got - x.double()).abs() <= step * (1 + 1e-6)).all()
    assert float((got - x).norm() / x.norm()) > 0.01
    assert rounded_to_fp8_128(torch.full((1, 32), torch.nan), torch.float32).isnan().all(), "a NaN stays one"


def test_w4a8_is_w4a16_on_rounded_inputs() -> None:
    rows, matrices = case(7, torch.float32)
    x, ids, weights = rows
    want = torch.zeros(7, 352)
    for t in range(7):
        for e, weight in sorted(zip(ids[t].tolist(), weights[t].tolist())):
            gate, up, down = (exact(m[e]) for m in matrices)
            one = rounded_to_fp8_128(x[t : t + 1], torch.float64)
            hidden = glu.body(matmul(one, gate).float(), matmul(one, up).float(), **SILU)
            want[t] += weight * matmul(rounded_to_fp8_128(hidden, torch.float64), down)[0].float()
    close(experts_fp8_128(*rows, *matrices, SILU), want, 1e-6)
    error = float((want - experts(*rows, *matrices, SILU)).norm() / want.norm())
    assert 0.01 < error < 0.1, "a quantisation error of e4m3's size, not a rounding error"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ring_gives_what_widening_gives_to_the_bit(dtype: torch.dtype) -> None:
    rows, matrices = case(9, dtype)
    workspace = Ring(ring_bytes(416, 352))
    for _ in range(3):  # slices are used again and again
        assert torch.equal(workspace.experts(*rows, *matrices, SILU), widening(*rows, *matrices, SILU))
    assert workspace.fallbacks == 0
    assert torch.equal(ring(*rows, *matrices, SILU), widening(*rows, *matrices, SILU))


def test_a_matrix_out_of_reach_goes_to_the_other_form() -> None:
    rows, matrices = case(9, torch.float32, spread=5)
    matrices[2] = drawn(352, 416, seed=2, stack=(6,), spread=40)
    workspace = Ring(ring_bytes(416, 352))
    chosen = len(rows[1].unique())
    assert torch.equal(workspace.experts(*rows, *matrices, SILU), widening(*rows, *matrices, SILU))
    assert workspace.fallbacks == chosen, "the down matrix of each expert, and no other"
    close(workspace.experts(*rows, *matrices, SILU), experts_fp8_128(*rows, *matrices, SILU), 2.0**-11)


@pytest.mark.parametrize(("inner", "width"), [(3072, 3584), (2880, 2880), (96, 64), (160, 96), (32, 32), (7, 4096)])
def test_a_ring_has_less_than_two_experts(inner: int, width: int) -> None:
    assert Ring(ring_bytes(inner, width)).nbytes == ring_bytes(inner, width)
    if inner >= 32:
        assert ring_bytes(inner, width) < 2 * 3 * inner * width < 2 * e4m3_expert_bytes(inner, width)


def test_plain_experts_have_no_ring() -> None:
    rows, matrices = case(2, torch.float32)
    with pytest.raises(ValueError, match="4 bits"):
        Ring(ring_bytes(416, 352)).experts(*rows, *(exact(m) for m in matrices), SILU)
