"""Products with weights in blocks of 8 bits by Triton, in its interpreter: smallest odd sizes, every way of cutting."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")

from dayzero.decl import Fp8Blocks
from dayzero.ops.bind import resolve
from dayzero.ops.cases_fp8 import LINEAR_FP8_CASES, fp8_blocks
from dayzero.ops.catalog import CATALOG, REFERENCE
from dayzero.ops.contract import CONTRACTS, Case
from dayzero.ops.cuda import linear_fp8
from dayzero.ops.fp8_blocks import joined, packed_rows, widened
from dayzero.ops.linear import matmul
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.triton.linear_fp8 import Setting, product, widen
from dayzero.ops.triton.machine import INTERPRETED
from tests.parity import close, element_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before triton is imported")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("case", LINEAR_FP8_CASES["linear.matmul"], ids=lambda case: case.name)
@pytest.mark.parametrize("contract", ["linear.matmul", "linear.matmul_f32"])
def test_what_is_widened_within_the_product_or_before_is_the_reference(contract: str, case: Case) -> None:
    inputs = case.make(0)
    want = resolve(CATALOG.lines[contract, REFERENCE])(**inputs)
    function = linear_fp8.matmul if contract == "linear.matmul" else linear_fp8.matmul_f32
    got = function(inputs["x_TK"], packed_rows(inputs["w_NK"]), inputs["bias_N"])
    assert got.dtype == want.dtype
    close(got, want, CONTRACTS[contract].bound[element_of(inputs)].value)


SETTINGS = (Setting(16, 64, 1, 4, 2), Setting(16, 64, 3, 4, 2), Setting(32, 128, 2, 4, 2), Setting(16, 128, 5, 4, 2))


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [(1, 130, 640), (17, 65, 600), (33, 200, 129)], ids=str)
def test_every_way_to_cut_a_product_gives_its_numbers(how: Setting, size: tuple[int, int, int]) -> None:
    rows, outputs, width = size
    if (blocks := -(-width // 128)) < how.split or -(-blocks // -(-blocks // how.split)) != how.split:
        pytest.skip("a part would be empty")
    r = Inputs(3)
    weight, x, bias = (
        packed_rows(fp8_blocks(r, outputs, width)),
        strided(r.normal(rows, width, dtype=BF16)),
        r.normal(outputs),
    )
    want = matmul.body(x.double(), weight, bias)
    close(product(x, weight, bias, F32, how), want, 1e-5)


def test_all_codes_are_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float().nan_to_num(0.0)
    weight = Fp8Blocks(numbers.to(torch.float8_e4m3fn).view(2, 128).contiguous(), torch.ones(1, 1))
    one = torch.eye(128, dtype=BF16)
    assert torch.equal(product(one, weight, None, F32).T, numbers.view(2, 128))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rows_of_a_weight_are_widened_as_the_reference_does(dtype: torch.dtype) -> None:
    weight = packed_rows(fp8_blocks(Inputs(1), 300, 600))
    for first, count in ((0, 300), (100, 77), (299, 1)):
        got = widen(weight, first, torch.empty(count, 600, dtype=dtype))
        assert torch.equal(got, widened(weight, slice(first, first + count), dtype))


def test_many_rows_are_multiplied_some_rows_of_the_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Inputs(2)
    weight, x, bias = packed_rows(fp8_blocks(r, 300, 144)), r.normal(5, 144, dtype=BF16), r.normal(300, dtype=BF16)
    monkeypatch.setattr(linear_fp8, "MOST_ROWS", 4)
    for scratch in (1 << 30, 100 * 2 * 144, 1):
        monkeypatch.setattr(linear_fp8, "SCRATCH", scratch)
        for given in (bias, None):
            want = matmul.body(x, weight, given)
            close(linear_fp8.matmul(x, weight, given), want, matmul.bound["bf16"].value)


@pytest.mark.parametrize("rows", [(128, 70), (256, 128, 33), (1536, 576)], ids=str)
def test_joined_weights_give_what_each_gives(rows: tuple[int, ...]) -> None:
    r = Inputs(4)
    parts, x = [fp8_blocks(r, count, 272) for count in rows], r.normal(3, 272, dtype=BF16)
    whole = product(x, packed_rows(joined(parts)), None, F32)
    for part, got in zip(parts, whole.split(list(rows), dim=-1), strict=True):
        close(got, product(x, packed_rows(part), None, F32), 1e-5)
