"""Routed experts of very few tokens in CUDA C++, of stacks in 4 and in 8 bits as the variant in Triton has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks, Mxfp4, Packed
from dayzero.ops.cases import CASES
from dayzero.ops.contract import CONTRACTS, Case, relative_l2
from dayzero.ops.moe import experts as reference
from dayzero.units import ceil_div
from tests.parity import moved

pytestmark = pytest.mark.gpu
BOUND = CONTRACTS["moe.experts"].bound["bf16"].value
BF16, F32 = torch.bfloat16, torch.float32
MATRICES = ("gate_EID", "up_EID", "down_EDI")
ROWS = ("x_TD", "ids_TN", "weights_TN")
SITU = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
CLAMPED = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}
FORMS = {4: Mxfp4, 8: Fp8Blocks}
TRUE = (  # bits, experts, chosen, width, inner
    (4, 32, 4, 2880, 2880), (4, 24, 16, 3584, 3072), (8, 16, 8, 7168, 2048), (8, 20, 3, 1162, 390),
)  # fmt: skip


def _module() -> Any:
    from dayzero.ops.cuda import experts_few

    return experts_few


def _laid_out(given: dict[str, Any]) -> dict[str, Any]:
    from dayzero.ops.triton.experts import pack

    return {**given, **{name: pack(given[name]) for name in MATRICES}}


def _packed(bits: int, num: int, rows: int, columns: int, seed: int) -> Packed:
    g = torch.Generator("cuda").manual_seed(seed)
    if bits == 4:
        codes = torch.randint(0, 256, (num, rows, columns // 2), generator=g, device="cuda", dtype=torch.uint8)
        scales = torch.randint(115, 122, (num, rows, columns // 32), generator=g, device="cuda", dtype=torch.uint8)
        scales[0, 0, 0] = 130  # of which no bf16 power is left: the matrix is shifted
        return Mxfp4(codes, scales)
    wide = torch.randn(num, rows, columns, generator=g, device="cuda").mul(100).clamp(-448, 448)
    scales = torch.rand(num, ceil_div(rows, 128), ceil_div(columns, 128), generator=g, device="cuda") + 0.1
    return Fp8Blocks(wide.to(torch.float8_e4m3fn), scales / (100 * columns**0.5))


def _given(tokens: int, size: tuple[int, ...], bias: torch.dtype | None = None) -> dict[str, Any]:
    bits, num, chosen, width, inner = size
    g = torch.Generator("cuda").manual_seed(9)
    shapes = ((inner, width), (inner, width), (width, inner))
    biases = tuple(torch.randn(num, s[0], generator=g, device="cuda").to(bias) for s in shapes) if bias else None
    return {
        "x_TD": torch.randn(tokens, width, generator=g, device="cuda").bfloat16(),
        "ids_TN": torch.rand(tokens, num, generator=g, device="cuda").argsort(-1)[:, :chosen],
        "weights_TN": torch.rand(tokens, chosen, generator=g, device="cuda"),
        **{name: _packed(bits, num, *shape, i) for i, (name, shape) in enumerate(zip(MATRICES, shapes, strict=True))},
        "activation": CLAMPED if bias else SITU, "biases": biases,
    }  # fmt: skip


def _check(given: dict[str, Any], bits: int) -> Tensor:
    """By the kernels for few tokens, each row within the bound of the reference."""
    module, laid = _module(), _laid_out(given)
    assert module._way(given["x_TD"], given["ids_TN"], tuple(laid[name] for name in MATRICES)) == bits
    got: Tensor = module.experts(**laid)
    want = reference.body(**given)
    assert got.dtype == want.dtype and got.shape == want.shape
    for one, other in zip(got, want, strict=True):
        assert relative_l2(one, other) <= BOUND
    return got


def _cases() -> list[Any]:
    pairs = [(bits, case) for bits in FORMS for case in CASES["moe.experts"]]
    return [pytest.param(*pair, id=f"{pair[0]} of {pair[1].name}") for pair in pairs if _fits(*pair)]


def _fits(bits: int, case: Case) -> bool:
    given = case.make(0)
    x, gate = given["x_TD"], given["gate_EID"]
    even = all(size % 2 == 0 for size in gate.shape[1:])
    return isinstance(gate, FORMS[bits]) and x.dtype == BF16 and len(x) > 0 and even


def test_there_are_cases_of_both_forms() -> None:
    assert {param.values[0] for param in _cases()} == set(FORMS)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("bits, case", _cases())
def test_the_first_tokens_of_every_case(bits: int, case: Case, seed: int) -> None:
    given = moved(case.make(seed), "cuda")
    for tokens in {min(n, len(given["x_TD"])) for n in (1, 2, 4)}:
        _check({**given, **{name: given[name][:tokens] for name in ROWS}}, bits)


@pytest.mark.parametrize("bias", [None, BF16, F32])
@pytest.mark.parametrize("size", TRUE, ids=str)
def test_sizes_of_models_and_a_token_alone(size: tuple[int, ...], bias: torch.dtype | None) -> None:
    given = _given(4, size, bias)
    ids = given["ids_TN"]
    ids[0, 0] = -1
    ids[3] = ids[2].flip(0)
    whole, laid = _check(given, size[0]), _laid_out(given)
    for t in range(4):
        alone = {name: given[name][t : t + 1] for name in ROWS}
        assert torch.equal(_module().experts(**{**laid, **alone})[0], whole[t])
    ids[1] = size[1]  # beyond the last
    assert not _module().experts(**laid)[1].any()


@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("size", TRUE[-2:], ids=str)
def test_a_ring_of_any_length(size: tuple[int, ...], stages: int) -> None:
    from dayzero.ops.cuda.experts_few_tiles import Ring, few_tiles

    laid = _laid_out(_given(2, size, BF16))
    want = _module().experts(**laid)
    stacks, rows = tuple(laid[name] for name in MATRICES), tuple(laid[name] for name in ROWS)
    how = Ring(8, min(stages, 3 if size[0] == 8 else stages)), Ring(8, stages)
    assert torch.equal(few_tiles(rows, stacks, laid["activation"], laid["biases"], how), want)


@pytest.mark.parametrize("poisoned", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", TRUE[2:], ids=str)
def test_a_graph_follows_its_ids(
    size: tuple[int, ...], tokens: int, poisoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers in a row, each behind a router. To poison memory takes launches of its own, which part those that
    would overlap."""
    from dayzero.ops.triton.route import route

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", poisoned)
    module, laid = _module(), _laid_out(_given(tokens, size))
    g = torch.Generator("cuda").manual_seed(4)
    logits = torch.randn(3, tokens, size[1], generator=g, device="cuda")

    def layers() -> list[Tensor]:
        x, seen = laid["x_TD"], []
        for layer in range(3):
            ids, weights = route(logits[layer], size[2], score="sigmoid")
            x = module.experts(**{**laid, "x_TD": x, "ids_TN": ids, "weights_TN": weights})
            seen.append(x)
        return seen

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for again in range(20):
        logits.copy_(torch.randn(logits.shape, generator=g, device="cuda"))
        for one in found:
            one.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(found, layers(), strict=True):
            assert torch.equal(one, other), again
