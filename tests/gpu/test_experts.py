"""Routed experts on a GPU beyond the cases: sizes of models, empty and full experts, graphs, repeats, exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.decl import FP8_SIZE, Fp8Blocks, Mxfp4
from dayzero.ops import experts_mxfp4
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.moe import experts as reference
from dayzero.ops.moe import route as reference_route
from dayzero.units import ceil_div

pytestmark = pytest.mark.gpu
SILU, SITU = {"kind": "silu"}, {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
CLAMPED = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}
BOUND = CONTRACTS["moe.experts"].bound["bf16"].value


def _variant() -> Any:
    from dayzero.ops.triton import experts

    return experts


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _four_bits(num: int, rows: int, columns: int, seed: int = 0) -> Mxfp4:
    """Codes of a normal distribution with the exponents its groups get, a few groups dead, a few far below."""
    g = _generator(seed)
    codes = torch.randint(0, 256, (num, rows, columns // 2), generator=g, device="cuda", dtype=torch.uint8)
    scales = torch.randint(115, 122, (num, rows, columns // 32), generator=g, device="cuda", dtype=torch.uint8)
    far = torch.rand(scales.shape, generator=g, device="cuda")
    scales[far < 0.01] = 98  # outside of e4m3's reach
    dead = (far > 0.99).repeat_interleave(16, -1)
    codes[dead] &= 0x88
    scales[far > 0.995] = 250  # of dead groups: it must not matter
    return Mxfp4(codes, scales)


def _eight_bits(num: int, rows: int, columns: int, seed: int = 0) -> Fp8Blocks:
    """Every code there is but NaN, blocks up to 2^6 apart, one of zeros below a large scale, one with a scale of 0."""
    g = _generator(seed)
    codes = torch.randint(0, 255, (num, rows, columns), generator=g, device="cuda", dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    codes[-1, :FP8_SIZE, :FP8_SIZE] &= 0x80
    blocks = ceil_div(rows, FP8_SIZE), ceil_div(columns, FP8_SIZE)
    scales = 1 + torch.rand(num, *blocks, generator=g, device="cuda")
    scales *= torch.exp2(torch.randint(-4, 3, scales.shape, generator=g, device="cuda").float()) / (100 * columns**0.5)
    scales[0, -1, -1], scales[-1, 0, 0] = 0, 1e30
    return Fp8Blocks(codes.view(torch.float8_e4m3fn), scales)


def _plain(num: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    wide = torch.randn(num, rows, columns, generator=_generator(seed), device="cuda") / columns**0.5
    return wide.to(torch.bfloat16)


def _inputs(
    tokens: int, num: int, chosen: int, width: int, inner: int, *, form: str, activation: dict[str, Any],
    biases: bool = False, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = _generator(seed + 7)
    make: Callable[..., Any] = {"bf16": _plain, "w4": _four_bits, "w8": _eight_bits}[form]
    ids = torch.rand(tokens, num, generator=g, device="cuda").argsort(-1)[:, :chosen]
    many = tuple(_plain(num, n, 1, seed + n)[..., 0] for n in (inner, inner, width)) if biases else None
    return {
        "x_TD": torch.randn(tokens, width, generator=g, device="cuda", dtype=torch.bfloat16), "ids_TN": ids,
        "weights_TN": torch.rand(tokens, chosen, generator=g, device="cuda"),
        "gate_EID": make(num, inner, width, seed + 1), "up_EID": make(num, inner, width, seed + 2),
        "down_EDI": make(num, width, inner, seed + 3), "activation": activation, "biases": many,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["bf16", "w4", "w8"])
@pytest.mark.parametrize(
    "tokens, num, chosen, width, inner",
    [
        (1, 1, 1, 128, 64),
        (3, 7, 2, 192, 96),
        (65, 32, 4, 288, 320),
        (300, 5, 3, 256, 160),
        (257, 96, 16, 128, 64),
        (40, 3, 1, 1472, 2880),
        (700, 3, 2, 1472, 704),
    ],
)
def test_sizes(tokens: int, num: int, chosen: int, width: int, inner: int, form: str) -> None:
    given = _inputs(tokens, num, chosen, width, inner, form=form, activation=CLAMPED, biases=True)
    assert relative_l2(_variant().experts(**given), reference.body(**given)) <= BOUND


@pytest.mark.parametrize("form", ["bf16", "w4", "w8"])
def test_all_tokens_at_one_expert_and_none_at_most(form: str) -> None:
    given = _inputs(200, 40, 3, 256, 128, form=form, activation=SITU)
    given["ids_TN"][:, 0], given["ids_TN"][:, 1], given["ids_TN"][:, 2] = 33, -1, 0
    given["ids_TN"][5:, 2] = -1
    given["ids_TN"][17] = -1
    got = _variant().experts(**given)
    assert relative_l2(got, reference.body(**given)) <= BOUND
    assert not got[17].any()


def test_no_tokens_and_no_choices() -> None:
    given = _inputs(4, 8, 2, 128, 64, form="w4", activation=SILU)
    given["ids_TN"][:] = -1
    assert not _variant().experts(**given).any()
    none = {**given, "x_TD": given["x_TD"][:0], "ids_TN": given["ids_TN"][:0], "weights_TN": given["weights_TN"][:0]}
    assert _variant().experts(**none).shape == (0, 128)


@pytest.mark.parametrize("tokens", [1, 64, 700])
@pytest.mark.parametrize("form", ["bf16", "w4", "w8"])
def test_a_graph_gives_what_eager_gives_and_again_the_same(tokens: int, form: str) -> None:
    """700 tokens of 8 choices are more than one program sorts."""
    module = _variant()
    given = _inputs(tokens, 64, 8, 256, 192, form=form, activation=SITU)
    for name in ("gate_EID", "up_EID", "down_EDI"):
        given[name] = module.pack(given[name])
    eager = module.experts(**given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module.experts(**given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.experts(**given)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
    given["ids_TN"].copy_(torch.rand(tokens, 64, generator=_generator(3), device="cuda").argsort(-1)[:, :8])
    graph.replay()
    assert torch.equal(out, module.experts(**given))


@pytest.mark.parametrize("form", ["w4", "w8"])
def test_tokens_do_not_depend_on_their_neighbours(form: str) -> None:
    given = _inputs(48, 16, 4, 256, 192, form=form, activation=SILU)
    whole = _variant().experts(**given)
    part = {name: given[name][:5] for name in ("x_TD", "ids_TN", "weights_TN")}
    assert torch.equal(_variant().experts(**{**given, **part}), whole[:5])


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1700])
@pytest.mark.parametrize("rounds", [False, True])
def test_experts_in_8_bits_at_a_models_size(tokens: int, rounds: bool) -> None:
    """7,168 x 2,048, eight chosen, of 64 experts: every row of the table."""
    from dayzero.ops.experts_fp8 import experts_fp8_128
    from dayzero.ops.triton import experts_fp8

    given = _inputs(tokens, 64, 8, 7168, 2048, form="w8", activation=SILU)
    last = {name: given[name][-2:] for name in ("x_TD", "ids_TN", "weights_TN")}
    module, contract = (experts_fp8, experts_fp8_128) if rounds else (_variant(), reference)
    tiles = {name: module.pack(given[name]) for name in ("gate_EID", "up_EID", "down_EDI")}
    got = module.experts(**{**given, **tiles})
    assert relative_l2(got[-2:], contract.body(**{**given, **last})) <= CONTRACTS[contract.name].bound["bf16"].value
    assert torch.equal(got, module.experts(**{**given, **tiles}))


def test_a_code_that_is_nan_makes_sums_nan() -> None:
    """As a decoded one would, where bits alone would read 480."""
    given = _inputs(5, 4, 2, 256, 192, form="w8", activation=SILU)
    given["ids_TN"][:] = torch.tensor([0, 1], device="cuda")
    given["ids_TN"][3:] = torch.tensor([2, 3], device="cuda")
    given["up_EID"].codes.view(torch.uint8)[1, 150, 200] = 0xFF
    got = _variant().experts(**given)
    assert got[:3].isnan().any(1).all() and got[3:].isfinite().all()


def test_a_row_of_a_wide_pool_beyond_31_bits() -> None:
    """The last of the experts begins beyond 2^31 elements."""
    num, width, inner = 40, 8192, 8192
    gate = torch.empty(num, inner, width, dtype=torch.bfloat16, device="cuda")
    gate[-1] = _plain(1, inner, width)[0]
    down = gate.transpose(1, 2).new_empty(num, width, inner)
    down[-1] = _plain(1, width, inner, 5)[0]
    x = torch.randn(2, width, generator=_generator(), device="cuda", dtype=torch.bfloat16)
    ids, weights = torch.full((2, 1), num - 1, device="cuda"), torch.ones(2, 1, device="cuda")
    got = _variant().experts(x, ids, weights, gate, gate, down, SILU)
    want = reference.body(x, torch.zeros_like(ids), weights, gate[-1:], gate[-1:], down[-1:], SILU)
    assert relative_l2(got, want) <= BOUND


@pytest.mark.parametrize("form", ["w4", "w8"])
@pytest.mark.parametrize("tokens, num, chosen", [(1, 12, 4), (7, 12, 4), (90, 6, 2), (400, 5, 3)])
def test_rows_in_e4m3(tokens: int, num: int, chosen: int, form: str) -> None:
    """Rows for each size of tile; one of the groups far below its row's largest is rounded."""
    from dayzero.ops.experts_fp8 import experts_fp8_128
    from dayzero.ops.triton import experts_fp8

    given = _inputs(tokens, num, chosen, 288, 192, form=form, activation=CLAMPED, biases=True)
    given["ids_TN"][-1, 0] = -1
    want = experts_fp8_128.body(**given)
    assert relative_l2(experts_fp8.experts(**given), want) <= CONTRACTS["moe.experts_fp8_128"].bound["bf16"].value


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("form", ["bf16", "w4", "w8"])
def test_a_product_in_parts_is_the_whole_one(form: str, parts: int) -> None:
    """Parts of K that are no whole steps, of a token alone and of some."""
    from dayzero.ops.experts_tables import settings_of
    from dayzero.ops.triton import experts_matmul
    from dayzero.ops.triton.experts_rows import combine, sort_by_expert

    for tokens in (1, 5):
        given = _inputs(tokens, 9, 3, 352, 160, form=form, activation=CLAMPED, biases=True)
        gate, up, down = (_variant().pack(given[name]) for name in ("gate_EID", "up_EID", "down_EDI"))
        run = settings_of(form, 3 * tokens, 9)
        by_expert = sort_by_expert(given["ids_TN"], 9, run.rows)
        biases, settings = given["biases"], {**run.gate_up, "SPLIT": parts}
        hidden = experts_matmul.gate_up(given["x_TD"], gate, up, by_expert, CLAMPED, biases, settings)
        y = experts_matmul.down_product(hidden, down, by_expert, biases, settings)
        got = combine(y, by_expert, given["weights_TN"], torch.bfloat16)
        assert relative_l2(got, reference.body(**given)) <= BOUND


@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 70, 160), (2, 128, 3072)])
def test_e4m3_is_the_references_bit_for_bit(shape: tuple[int, ...]) -> None:
    from dayzero.ops.triton import mxfp4

    stack = _four_bits(*shape)
    top = mxfp4.top_exponents(stack)
    out = torch.full(shape, float("nan"), dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.full(top.shape, float("nan"), device="cuda")
    mxfp4.to_e4m3(stack, top, out, scale)
    for number in range(shape[0]):
        codes, scales = torch.empty_like(out[0]), torch.empty_like(scale[0])
        experts_mxfp4.to_e4m3(stack[number], codes, scales)
        assert torch.equal(out[number].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scale[number], scales)


@pytest.mark.parametrize("tokens", [1, 63, 8192])
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "softmax_topk"])
@pytest.mark.parametrize("num, chosen, groups", [(896, 16, (1, 1)), (256, 8, (8, 4)), (32, 4, (1, 1))])
def test_routes(tokens: int, score: str, num: int, chosen: int, groups: tuple[int, int]) -> None:
    from dayzero.ops.triton.route import route

    logits = torch.randn(tokens, num, generator=_generator(tokens), device="cuda") * 2
    logits[:, 1::7] = logits[:, ::7][:, : logits[:, 1::7].shape[1]]  # ties
    bias = torch.rand(num, generator=_generator(1), device="cuda") / 4 + 7
    options: dict[str, Any] = {"score": score, "bias_E": bias, "groups": groups, "scale": 2.5, "eps": 1e-20}
    ids, weights = route(logits, chosen, **options)
    want_ids, want_weights = reference_route.body(logits, chosen, **options)
    assert torch.equal(ids, want_ids)
    assert relative_l2(weights, want_weights) <= CONTRACTS["moe.route"].bound["f32"].value
