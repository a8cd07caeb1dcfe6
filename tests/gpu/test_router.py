"""Router and choice in one site: a token's choice is the same whatever comes with it, and a graph reads its buffers."""

from __future__ import annotations

import pytest
import torch

from dayzero.ops.bind import bind
from dayzero.ops.router import Choosing, matmul_route

pytestmark = pytest.mark.gpu
SHAPES = ((32, 2880, Choosing(4, "softmax_topk")), (256, 7168, Choosing(8, "sigmoid", (8, 4), scale=2.5)))


@pytest.mark.parametrize("experts, width, choosing", SHAPES)
def test_a_token_chooses_the_same_alone_and_among_many(experts: int, width: int, choosing: Choosing) -> None:
    both = bind("moe.matmul_route", "test", {"moe.matmul_route": "triton"})
    x = torch.randn(300, width, device="cuda").bfloat16()
    w = (torch.randn(experts, width, device="cuda") * width**-0.5).bfloat16()
    bias = torch.randn(experts, device="cuda").bfloat16()
    many = both(x, w, choosing, logit_bias_E=bias)
    for first, count in ((0, 1), (3, 7), (17, 16), (100, 65)):
        some = both(x[first : first + count], w, choosing, logit_bias_E=bias)
        assert all(torch.equal(a, b[first : first + count]) for a, b in zip(some, many, strict=True))


def test_many_tokens_go_through_the_library() -> None:
    """Sums of whole numbers: exact in any order."""
    both = bind("moe.matmul_route", "test", {"moe.matmul_route": "triton"})
    made = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randint(-2, 3, (n, 320), generator=made, device="cuda").bfloat16() for n in (2000, 40))
    got, want = both(x, w, Choosing(4, "softmax")), matmul_route.body(x, w, Choosing(4, "softmax"))
    assert torch.equal(got[0], want[0]) and torch.allclose(got[1], want[1], rtol=1e-5)


def test_a_graph_chooses_by_what_its_buffers_say_when_it_is_replayed() -> None:
    experts, width, choosing = SHAPES[0]
    both = bind("moe.matmul_route", "test", {"moe.matmul_route": "triton"})
    x = torch.randn(7, width, device="cuda").bfloat16()
    w = (torch.randn(experts, width, device="cuda") * width**-0.5).bfloat16()
    both(x, w, choosing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both(x * 2, w, choosing)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, both(x * 2, w, choosing), strict=True))
