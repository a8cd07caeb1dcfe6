"""Local windows over a grid in a small image tower: the same entry to sparse attention, lists by position, both ways.

The second opinion runs dense attention inside each window by itself, with no lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dayzero.ops import sparse_attention, sparse_index
from dayzero.ops.contract import relative_l2

DIM, HEADS = 24, 3
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [N, H, D] -> [N, H, D]


def tower(patches_NP: Tensor, weights: dict[str, Tensor], attends: list[Attend]) -> Tensor:
    """Patches -> features [N, DIM]: per layer a norm, attention and an MLP, as image towers have them."""
    x_ND = patches_NP @ weights["embed"].T
    for number, attend in enumerate(attends):
        q, k, v = (norm(x_ND) @ weights[f"{number}.qkv"].T).unflatten(1, (3, HEADS, -1)).unbind(1)
        x_ND = x_ND + attend(q, k, v).flatten(1) @ weights[f"{number}.o"].T
        x_ND = x_ND + torch.nn.functional.gelu(norm(x_ND) @ weights[f"{number}.up"].T) @ weights[f"{number}.down"].T
    return norm(x_ND)


def norm(x_ND: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x_ND, x_ND.shape[-1:])


def weights_of(layers: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"qkv": (3 * DIM, DIM), "o": (DIM, DIM), "up": (40, DIM), "down": (DIM, 40)}
    out = {"embed": torch.randn(DIM, 48, generator=draw) / 7}
    for number, (name, shape) in itertools.product(range(layers), shapes.items()):
        out[f"{number}.{name}"] = torch.randn(shape, generator=draw) / shape[1] ** 0.5
    return out


def listed(lists_NA: Tensor, variant: Callable[..., tuple[Tensor, Tensor]]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return variant(q, sparse_attention.whole(k), sparse_attention.whole(v), lists_NA, scale=q.shape[-1] ** -0.5)[0]

    return attend


def one_by_one(groups: Iterator[tuple[list[int], list[int]]]) -> Attend:
    """Dense attention of some cells over some others, group by group."""
    pairs = list(groups)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for cells, seen in pairs:
            scores = torch.einsum("nhd,mhd->hnm", q[cells], k[seen]) * q.shape[-1] ** -0.5
            out[cells] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[seen])
        return out

    return attend


def blocks(rows: int, columns: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    for top, left in itertools.product(range(0, rows, size), range(0, columns, size)):
        cells = [
            y * columns + x
            for y in range(top, min(top + size, rows))
            for x in range(left, min(left + size, columns))
        ]  # fmt: skip
        yield cells, cells


def around(rows: int, columns: int, reach: int) -> Iterator[tuple[list[int], list[int]]]:
    for y, x in itertools.product(range(rows), range(columns)):
        seen = [
            b * columns + a
            for b in range(max(0, y - reach), min(rows, y + reach + 1))
            for a in range(max(0, x - reach), min(columns, x + reach + 1))
        ]  # fmt: skip
        yield [y * columns + x], seen


@pytest.mark.parametrize("rows, columns", [(7, 9), (8, 8), (1, 5), (13, 6)])
@pytest.mark.parametrize("variant", ["sparse", "sparse_gather", "sparse_masked", "sparse_by_length"])
def test_a_windowed_tower_equals_attention_window_by_window(variant: str, rows: int, columns: int) -> None:
    """A layer of blocks, one of windows around each cell, one over the whole image. float32 over three layers."""
    found = getattr(sparse_attention, variant)
    run = found.body if variant == "sparse" else found
    tile = sparse_index.grid.body(rows, columns, height=4, width=4, reach="block")
    near = sparse_index.grid.body(rows, columns, height=3, width=3, reach="near")
    everything = torch.arange(rows * columns).expand(rows * columns, -1)
    patches, weights = torch.randn(rows * columns, 48, generator=torch.Generator().manual_seed(1)), weights_of(3)
    got = tower(patches, weights, [listed(lists, run) for lists in (tile, near, everything)])
    whole = list(range(rows * columns))
    want = tower(
        patches,
        weights,
        [one_by_one(g) for g in (blocks(rows, columns, 4), around(rows, columns, 1), iter([(whole, whole)]))],
    )
    assert relative_l2(got, want) < 1e-5
    if rows * columns > 16:  # windows bite
        dense = tower(patches, weights, [listed(everything, run)] * 3)
        assert relative_l2(dense, want) > 1e-2
