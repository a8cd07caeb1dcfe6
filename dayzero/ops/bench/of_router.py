"""Figures of the choice of experts from the router's input: product and choice. Bytes: the weight, inputs, what is
chosen. The peer is the operators in turn, as they are bound where none does both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call, num_rotated
from dayzero.ops.bind import bind
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.router import Choosing

TOKENS = (1, 16, 64, 256)
ROUTERS = (  # experts, width, how they are chosen
    (32, 2880, Choosing(4, "softmax_topk")),
    (128, 2048, Choosing(8, "softmax")),
    (256, 7168, Choosing(8, "sigmoid", (8, 4), scale=2.5, eps=1e-20)),
)


def prepare(experts: int, width: int, choosing: Choosing, tokens: int) -> Prepared:
    num_bytes = 2 * width * (experts + tokens) + 12 * choosing.top_k * tokens
    made = torch.Generator("cuda").manual_seed(0)
    sets = []
    for _ in range(num_rotated(num_bytes)):
        x, w = (torch.randn(n, width, generator=made, device="cuda").bfloat16() for n in (tokens, experts))
        sets.append((x, w * width**-0.5))
    names = {"moe.matmul_route": "triton", "linear.matmul_f32": "few_rows", "moe.route": "triton"}
    both, product, route = (bind(name, "bench", {name: variant}) for name, variant in names.items())

    def apart(x_TD: Tensor, w_ED: Tensor, how: Choosing) -> tuple[Tensor, Tensor]:
        return route(product(x_TD, w_ED), how.top_k, **{k: v for k, v in how._asdict().items() if k != "top_k"})

    def check() -> Mapping[str, tuple[float, float]]:
        (ids, weights), want = both(*sets[0], choosing), CONTRACTS["moe.matmul_route"].body(*sets[0], choosing)
        bound = CONTRACTS["moe.matmul_route"].bound["bf16"].value
        return {"ids": (float((ids != want[0]).sum()), 0.0), "weights": (relative_l2(weights, want[1]), bound)}

    def calls(function: Callable[..., object]) -> list[Call]:
        return [partial(function, x, w, choosing) for x, w in sets]

    return Prepared(calls(both), check, num_bytes, peers={"apart": calls(apart)})


def entries() -> Iterator[Entry]:
    for experts, width, choosing in ROUTERS:
        for tokens in TOKENS:
            said = f"{experts} experts top {choosing.top_k} D={width} T={tokens}"
            yield Entry("moe.matmul_route", "triton", said, partial(prepare, experts, width, choosing, tokens))
