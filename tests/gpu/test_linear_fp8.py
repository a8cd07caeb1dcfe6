"""Products with weights in blocks of 8 bits at true sizes: few rows by CUDA, more by Triton, many by the library."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from dayzero.decl import Fp8Blocks
from dayzero.engine import load as engine_load
from dayzero.engine.request import SamplingParams
from dayzero.models.blueprint import require_recipe
from dayzero.ops.bench.of_linear_fp8 import weight_of
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.cuda import linear, linear_fp8, linear_fused
from dayzero.ops.cuda import linear_rounded as few_rounded
from dayzero.ops.cuda.linear import Setting
from dayzero.ops.fp8_blocks import joined, packed_rows, widened
from dayzero.ops.linear import matmul, matmul_add, matmul_f32, matmul_glu
from dayzero.ops.linear_rounded import matmul_fp8_128
from dayzero.ops.triton import linear_fp8 as tiles
from dayzero.ops.triton import linear_rounded
from dayzero.rehearse.shrink import shrink
from tests.cpu.engine_support import Engine, prompt_ids
from tests.gpu.graph import replayed

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
# q_a; q_a and kv_a; q_b; o; the index's queries and key; down, gate and up of the dense layer and the shared expert
SIZES = (
    (1536, 7168), (2112, 7168), (24576, 1536), (7168, 16384), (8192, 1536), (128, 7168), (7168, 18432), (7168, 2048),
    (36864, 7168), (4096, 7168),
)  # fmt: skip
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 100, 256, 257)


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=F32).to(dtype)


def near(got: Tensor, want: Tensor, contract: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert relative_l2(got, want) <= CONTRACTS[contract].bound["bf16"].value


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_its_reference_at_every_number_of_rows(size: tuple[int, int]) -> None:
    weight, bias = packed_rows(weight_of(*size)), normal(size[0])
    for rows in ROWS:
        x = normal(rows, size[1])
        near(linear.matmul(x, weight), matmul.body(x, weight), "linear.matmul")
        near(linear.matmul(x, weight, bias), matmul.body(x, weight, bias), "linear.matmul")
        near(linear.matmul_f32(x, weight, bias), matmul_f32.body(x, weight, bias), "linear.matmul_f32")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_ways_for_more_rows_are_the_reference(size: tuple[int, int]) -> None:
    weight = packed_rows(weight_of(*size))
    for rows in (16, 64, 300, 1000):
        x = normal(rows, size[1])
        want = matmul.body(x, weight)
        near(tiles.product(x, weight, None, BF16), want, "linear.matmul")
        near(linear_fp8.by_library(x, weight), want, "linear.matmul")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_rounded_inputs_are_the_reference(size: tuple[int, int]) -> None:
    """The 8-bit unit's own sums included."""
    weight, bias = packed_rows(weight_of(*size)), normal(size[0])
    for rows in (1, 5, 9, 16, 64, 128, 129, 300, 1000):
        x = normal(rows, size[1])
        want = matmul_fp8_128.body(x, weight, bias)
        near(linear_rounded.matmul(x, weight, bias), want, "linear.matmul_fp8_128")
        near(few_rounded.matmul(x, weight, bias), want, "linear.matmul_fp8_128")


def test_a_prompt_of_8192_rows_is_the_reference_in_its_first_ones() -> None:
    for outputs, inputs in ((24576, 1536), (36864, 7168)):
        weight, x = packed_rows(weight_of(outputs, inputs)), normal(8192, inputs)
        near(linear.matmul(x, weight)[:64], matmul.body(x[:64], weight), "linear.matmul")


SETTINGS = (
    Setting(4, 1, 1, 4), Setting(16, 1, 1, 6), Setting(8, 1, 1, 4), Setting(8, 2, 1, 4), Setting(8, 1, 2, 4),
    Setting(8, 1, 2, 3), Setting(16, 2, 1, 3), Setting(8, 2, 2, 2),
)  # fmt: skip


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 11])
def test_every_setting_of_the_kernel_for_few_rows(how: Setting, rows: int) -> None:
    for outputs, inputs in ((2112, 7168), (300, 1040), (33, 16), (1536, 336)):
        weight, x = packed_rows(weight_of(outputs, inputs)), normal(rows, inputs)
        near(linear._few(x, weight, None, F32, how), matmul_f32.body(x, weight), "linear.matmul_f32")
        if outputs == 1536:
            got = linear._few(x, weight, None, BF16, how, activation={"kind": "silu"})
            near(got, matmul_glu.body(x, weight, {"kind": "silu"}), "linear.matmul_glu")


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 300])
def test_what_is_fused_is_its_reference(rows: int) -> None:
    x = normal(rows, 7168)
    for inner in (18432, 2048):
        gate_up, down = packed_rows(weight_of(2 * inner, 7168)), packed_rows(weight_of(7168, inner))
        silu = {"kind": "silu"}
        hidden = matmul_glu.body(x, gate_up, silu)
        near(linear_fused.matmul_glu(x, gate_up, silu), hidden, "linear.matmul_glu")
        added = normal(rows, 7168)
        near(linear_fused.matmul_add(hidden, down, added), matmul_add.body(hidden, down, added), "linear.matmul_add")


@pytest.mark.parametrize("rows", [1, 12, 70, 300])
def test_weights_side_by_side_give_what_each_gives(rows: int) -> None:
    parts, x = [weight_of(1536, 7168), weight_of(576, 7168)], normal(rows, 7168)
    whole = linear.matmul(x, packed_rows(joined(parts)))
    for part, got in zip(parts, whole.split([1536, 576], dim=-1), strict=True):
        near(got.contiguous(), matmul.body(x, part), "linear.matmul")


@pytest.mark.parametrize("rows", [1, 12, 70, 300])
def test_rows_of_something_wider_and_a_weight_within_another(rows: int) -> None:
    x, weight = normal(rows, 2112)[:, 576:], weight_of(24576, 1536)
    near(linear.matmul(x, weight), matmul.body(x, weight), "linear.matmul")
    wide = weight_of(640, 4096)
    part = Fp8Blocks(wide.codes[:, 1024:2560], wide.scales[:, 8:20])
    near(linear.matmul(x, packed_rows(part)), matmul.body(x, part), "linear.matmul")


def test_all_codes_are_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    numbers = codes.float().nan_to_num(0.0)
    weight = Fp8Blocks(numbers.to(torch.float8_e4m3fn).view(2, 128).contiguous(), torch.ones(1, 1, device="cuda"))
    one = torch.eye(128, dtype=BF16, device="cuda")
    for rows in (8, 16, 128):
        for first in range(0, 128, rows):
            got = linear.matmul_f32(one[first : first + rows], weight)
            assert torch.equal(got.T, numbers.view(2, 128)[:, first : first + rows])
    assert torch.equal(tiles.widen(weight, 0, torch.empty(2, 128, dtype=BF16, device="cuda")).float(), widened(weight))


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_code_that_is_nan_is_told_by_nan(rows: int) -> None:
    weight = weight_of(256, 512)
    weight.codes.view(torch.uint8)[130, 300] = 0x7F
    got = linear.matmul(normal(rows, 512), packed_rows(weight))
    assert got[:, 130].isnan().all() and got[:, :128].isfinite().all()


@pytest.mark.parametrize("rows", [2, 16, 40, 300])
def test_a_row_with_nan_stays_one_where_inputs_are_rounded_and_spoils_no_other(rows: int) -> None:
    """A machine's smaller and larger of two numbers are the other one where one is NaN."""
    x = normal(rows, 512)
    x[1, 300] = torch.nan
    for multiply in (linear_rounded.matmul, few_rounded.matmul):
        got = multiply(x, packed_rows(weight_of(256, 512)))
        assert got[1].isnan().all() and torch.cat((got[:1], got[2:])).isfinite().all()


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_a_chain_of_products_in_a_graph_is_the_chain(rows: int) -> None:
    """Kernels that may begin before those ahead of them have ended wait for what those write."""
    sizes = ((4096, 4096), (4096, 2048), (4096, 4096), (4096, 4096))
    gate_up, one, two, last = (packed_rows(weight_of(*size)) for size in sizes)
    x = normal(rows, 4096)

    def chain() -> Tensor:
        y = x
        for _ in range(20):
            hidden = linear.matmul(linear_fused.matmul_glu(y, gate_up, {"kind": "silu"}), one)
            y = linear_fused.matmul_add(linear.matmul(hidden, two), last, x)
        return y

    assert torch.equal(replayed(chain), chain())


# --- a whole model ----------------------------------------------------------------------------------------------------

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "deepseek_v32.json"
DENSE = {
    "hidden_size": 1024, "q_lora_rank": 384, "intermediate_size": 768, "num_hidden_layers": 4,
    "first_k_dense_replace": 4, "index_topk": 64,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# Of the standard deviation of logits: four layers round some ten times each to 2^-9 of what passes, which adds up by
# its root, 6.3 * 2^-9; the largest of some hundred logits lies at three times that, and both sides round.
BOUND = 2 * 3 * 6.3 * 2**-9


def engine(where: str, bindings: tuple[tuple[str, str], ...], kept: dict[str, Any], **options: Any) -> Engine:
    before = engine_load._placed

    def placed(*args: Any) -> Mapping[str, Any]:
        values = before(*args)
        kept.update({name: value for name, value in values.items() if isinstance(value, Fp8Blocks)})
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_load, "_placed", placed)
        return Engine(
            where, device="cuda", dtype="bfloat16", bindings=bindings, debug=False, record=True, pool_bytes=1 << 30,
            max_model_len=1024, **options,
        )  # fmt: skip


def test_a_model_answers_as_with_decoded_weights(tmp_path: Path) -> None:
    """Without experts, whose choice turns with a last bit; of prompts that the index takes whole."""
    config = json.loads(CONFIG.read_text())
    small = shrink(config, require_recipe(config).twin, keep_vocab=False, changes=DENSE)
    (tmp_path / "config.json").write_text(json.dumps(small))
    where, packed, none = f"seeded:{tmp_path}", {}, {}
    mine = engine(where, (), packed)
    other = engine(where, (("linear.matmul", "torch_cuda"),), none)
    assert {"layers.0.mixer.q_a", "layers.3.mixer.o", "layers.1.channel.gate", "layers.1.channel.down"} <= set(packed)
    assert not none
    for length in (3, 20):
        got, want = (one.one(prompt_ids(length, length, small["vocab_size"]), GREEDY) for one in (mine, other))
        for i, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
            assert float((a - b).abs().max()) <= BOUND * float(b.std()), (length, i)
            if got.tokens[i] != want.tokens[i]:
                break


def test_a_model_whose_inputs_are_rounded_parts_by_about_that(tmp_path: Path) -> None:
    """A last bit before a rounding to 4 bits is one of them behind it: no bound of the other kind holds."""
    config = json.loads(CONFIG.read_text())
    small = shrink(config, require_recipe(config).twin, keep_vocab=False, changes=DENSE)
    (tmp_path / "config.json").write_text(json.dumps(small))
    where, prompt = f"seeded:{tmp_path}", prompt_ids(20, 1, small["vocab_size"])
    plain = engine(where, (), {}).one(prompt, GREEDY).logits[0]
    own, body = (
        engine(where, bindings, {}, linear_inputs="fp8_128").one(prompt, GREEDY).logits[0]
        for bindings in ((), (("linear.matmul_fp8_128", "reference"),))
    )
    by_rounding = relative_l2(body, plain)
    assert 0.005 < by_rounding < 0.5 and 0.005 < relative_l2(own, plain) < 2 * by_rounding
    assert relative_l2(own, body) < by_rounding
