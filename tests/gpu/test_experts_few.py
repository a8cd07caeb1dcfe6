"""Routed experts of very few tokens in CUDA C++: odd sizes, ids that are none or stand twice, strides, graphs, and that
a token's numbers follow from nothing but its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.moe import experts as reference

pytestmark = pytest.mark.gpu
BOUND = CONTRACTS["moe.experts"].bound["bf16"].value
BF16, F32 = torch.bfloat16, torch.float32
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "silu"}, {"kind": "gelu_tanh"}, {"kind": "clamped", "limit": 0.7, "alpha": 1.702},
    {"kind": "silu_clamped", "limit": 0.5}, {"kind": "situ", "beta": 4.0, "linear_beta": 25.0},
)  # fmt: skip
SIZES = (  # experts, chosen, width, inner
    (1, 1, 8, 8), (7, 3, 264, 40), (6, 4, 320, 192), (12, 8, 40, 264), (9, 6, 1016, 520), (33, 32, 96, 24),
    (20, 16, 3584, 136),
)  # fmt: skip
TRUE = ((256, 8, 2304, 1024), (128, 8, 2048, 768), (32, 4, 2880, 2880))


def _module() -> Any:
    from dayzero.ops.cuda import experts_few

    return experts_few


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed), device="cuda").to(dtype)


def _ids(tokens: int, num: int, chosen: int, seed: int = 0) -> Tensor:
    return torch.rand(tokens, num, generator=_generator(seed), device="cuda").argsort(-1)[:, :chosen]


def _given(
    tokens: int, size: tuple[int, int, int, int], activation: dict[str, Any] = KINDS[0],
    bias: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Biases, where there are any, of this type. Stacks of many experts repeat a few."""
    num, chosen, width, inner = size
    drawn = next(n for n in range(min(num, 8), 0, -1) if num % n == 0)
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = [(_normal(drawn, *s, seed=i) / s[1] ** 0.5).repeat(num // drawn, 1, 1) for i, s in enumerate(shapes)]
    biases = tuple(_normal(num, s[0], seed=5 + i, dtype=bias) for i, s in enumerate(shapes)) if bias else None
    return {
        "x_TD": _normal(tokens, width, seed=9), "ids_TN": _ids(tokens, num, chosen),
        "weights_TN": torch.rand(tokens, chosen, generator=_generator(3), device="cuda"), "gate_EID": stacks[0],
        "up_EID": stacks[1], "down_EDI": stacks[2], "activation": activation, "biases": biases,
    }  # fmt: skip


def _check(given: dict[str, Any]) -> Tensor:
    """By the kernels here, each row within the bound of the reference."""
    module = _module()
    stacks = given["gate_EID"], given["up_EID"], given["down_EDI"]
    assert module._way(given["x_TD"], given["ids_TN"], stacks) == 0
    got: Tensor = module.experts(**given)
    want = reference.body(**given)
    assert got.dtype == want.dtype and got.shape == want.shape
    for one, other in zip(got, want, strict=True):
        assert relative_l2(one, other) <= BOUND
    return got


@pytest.mark.parametrize("bias", [None, BF16, F32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_odd_sizes(size: tuple[int, int, int, int], tokens: int, bias: torch.dtype | None) -> None:
    _check(_given(tokens, size, KINDS[(tokens + size[1]) % len(KINDS)], bias))


@pytest.mark.parametrize("activation", KINDS, ids=lambda kind: kind["kind"])
def test_every_activation_with_large_products(activation: dict[str, Any]) -> None:
    given = _given(2, SIZES[2], activation, BF16)
    given["x_TD"] = given["x_TD"] * 6
    _check(given)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("size", TRUE, ids=str)
def test_sizes_of_models(size: tuple[int, int, int, int], tokens: int) -> None:
    _check(_given(tokens, size))


def test_ids_that_are_no_expert_and_experts_that_stand_twice() -> None:
    given = _given(4, (12, 8, 320, 192), KINDS[4], F32)
    ids = given["ids_TN"]
    ids[0, :7] = -1
    ids[1] = -1
    ids[2] = ids[3].flip(0)  # both tokens chose the same experts
    ids[3, 5] = ids[3, 0]  # one token chose an expert twice
    for name in ("gate_EID", "up_EID", "down_EDI"):
        chosen = ids.unique()
        unchosen = torch.ones(12, dtype=torch.bool, device="cuda")
        unchosen[chosen[chosen >= 0]] = False
        given[name][unchosen] = float("nan")  # is not to be read
    got = _check(given)
    assert not got[1].any()
    beyond = torch.where(ids == -1, 12, ids)
    assert torch.equal(_module().experts(**{**given, "ids_TN": beyond}), got)


def test_a_sum_runs_in_ascending_id() -> None:
    """Of 2^31 + 64 - 2^31 nothing is left in f32, in another order 64."""
    given = _given(1, (5, 3, 64, 64))
    for name, value in (("gate_EID", 1 / 8), ("up_EID", 1 / 8), ("down_EDI", 1 / 64)):
        given[name].fill_(value)
    given["x_TD"].fill_(1.0)
    for order in ([4, 0, 2], [2, 4, 0], [0, 2, 4]):
        given["ids_TN"] = torch.tensor([order], device="cuda")
        by_id = {0: 2.0**25, 2: 1.0, 4: -(2.0**25)}
        given["weights_TN"] = torch.tensor([[by_id[e] for e in order]], device="cuda")
        assert torch.equal(_module().experts(**given), reference.body(**given))


@pytest.mark.parametrize("size", [SIZES[3], SIZES[4], TRUE[0]], ids=str)
def test_a_token_gets_the_same_alone_and_however_launches_are_cut(size: tuple[int, int, int, int]) -> None:
    module = _module()
    given = _given(4, size, KINDS[2], BF16)
    whole = _check(given)
    for t in range(4):
        alone = {name: given[name][t : t + 1] for name in ("x_TD", "ids_TN", "weights_TN")}
        assert torch.equal(module.experts(**{**given, **alone})[0], whole[t])
    rows = given["x_TD"], given["ids_TN"], given["weights_TN"]
    stacks = given["gate_EID"], given["up_EID"], given["down_EDI"]
    for first, second in (((4, 3, 1), (4, 2, 2)), ((2, 2, 5), (16, 4, 6)), ((16, 5, 1), (8, 12, 18))):
        how = module.Launch(*first), module.Launch(*second)
        assert torch.equal(module.few(rows, stacks, given["activation"], given["biases"], how), whole)


def test_rows_and_stacks_with_gaps() -> None:
    size = 9, 4, 264, 136
    packed = _given(3, size, KINDS[3], BF16)
    want = _check(packed)
    num, _, width, inner = size
    both = torch.full((num, 2 * inner + 3, width + 8), float("nan"), dtype=BF16, device="cuda")
    both[:, :inner, :width], both[:, inner : 2 * inner, :width] = packed["gate_EID"], packed["up_EID"]
    down = torch.full((num, width, inner + 16), float("nan"), dtype=BF16, device="cuda")
    down[:, :, 8:-8] = packed["down_EDI"]
    wide = torch.full((3, 2 * width + 1), float("nan"), dtype=BF16, device="cuda")
    wide[:, 1 : 2 * width : 2] = packed["x_TD"]  # of which no row begins at 16 bytes
    loose = {
        "x_TD": wide[:, 1 : 2 * width : 2], "gate_EID": both[:, :inner, :width],
        "up_EID": both[:, inner : 2 * inner, :width], "down_EDI": down[:, :, 8:-8],
        "ids_TN": packed["ids_TN"].t().contiguous().t(), "weights_TN": packed["weights_TN"].t().contiguous().t(),
        "biases": tuple(b.t().contiguous().t() for b in packed["biases"]),
    }  # fmt: skip
    assert torch.equal(_check({**packed, **loose}), want)
    shifted = wide.flatten()[3 : 3 + width][None]
    shifted.copy_(packed["x_TD"][:1])
    alone = {"x_TD": shifted, "ids_TN": packed["ids_TN"][:1], "weights_TN": packed["weights_TN"][:1]}
    assert torch.equal(_check({**packed, **alone}), want[:1])


@pytest.mark.parametrize("tokens, width, inner", [(5, 64, 64), (2, 68, 64), (2, 64, 36)])
def test_what_does_not_fit_goes_the_other_way(tokens: int, width: int, inner: int) -> None:
    module = _module()
    given = _given(tokens, (6, 2, width, inner))
    stacks = given["gate_EID"], given["up_EID"], given["down_EDI"]
    assert module._way(given["x_TD"], given["ids_TN"], stacks) is None
    assert relative_l2(module.experts(**given), reference.body(**given)) <= BOUND
    none = {name: given[name][:0] for name in ("x_TD", "ids_TN", "weights_TN")}
    assert module.experts(**{**given, **none}).shape == (0, width)


@pytest.mark.parametrize("poisoned", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", [SIZES[3], TRUE[0]], ids=str)
def test_a_graph_gives_what_eager_gives_and_follows_its_ids(
    size: tuple[int, int, int, int], tokens: int, poisoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a step: behind a router, before a product that starts early, several layers in one graph, whose launches
    overlap. What is read too soon are the ids, or hidden rows, of the replay before. To poison memory takes launches of
    its own, which part those that would overlap."""
    from dayzero.ops.cuda import linear
    from dayzero.ops.triton.route import route

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", poisoned)
    module, num = _module(), size[0]
    given = _given(tokens, size)
    logits = _normal(3, tokens, num, seed=20, dtype=F32)
    more = _normal(size[2], size[2], seed=21) / size[2] ** 0.5

    def layers() -> list[Tensor]:
        x, seen = given["x_TD"], []
        for layer in range(3):
            ids, weights = route(logits[layer], size[1], score="sigmoid")
            x = linear.matmul(module.experts(**{**given, "x_TD": x, "ids_TN": ids, "weights_TN": weights}), more)
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
    for seed in range(20):
        logits.copy_(_normal(3, tokens, num, seed=30 + seed, dtype=F32))
        given["x_TD"].copy_(_normal(tokens, size[2], seed=60 + seed))
        for one in found:
            one.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(found, layers(), strict=True):
            assert torch.equal(one, other), seed
