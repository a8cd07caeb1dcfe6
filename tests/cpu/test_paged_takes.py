"""Which rows the kernels of grouped heads in CUDA C++ take: those that the engine's pool holds above all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dayzero.cache.layout import lay_out
from dayzero.cache.views import PoolTokens, PoolViews
from dayzero.decl import CacheNeed
from dayzero.ops.cuda import latent_prefill, paged_decode, paged_prefill
from dayzero.ops.cuda.tensor_map import in_pieces_of_16
from dayzero.ops.latent_forms import Widths
from dayzero.ops.latent_steps import Expanded
from dayzero.view import Paged, Span


def of_a_pool(width: int, page: int = 64) -> tuple[torch.Tensor, Paged, Paged]:
    """Queries, and keys and values of the middle one of three layers; what a view says beside its rows is made up."""
    needs = [CacheNeed(f"layers.{i}.{n}", (2, width), "bf16", "kv_bf16") for i in range(3) for n in ("k", "v")]
    views = PoolViews(lay_out(needs, dtype="bf16", page_tokens=page), 4)
    some = torch.zeros(1, dtype=torch.int32)
    spans = (Span(0, 0, 5, 0),)
    keys, values = (
        Paged(store.rows, some[None], some, some, some, spans)
        for store in (views.stores[f"layers.1.{n}"] for n in ("k", "v"))
        if isinstance(store, PoolTokens)
    )
    return torch.zeros(5, 8, width, dtype=torch.bfloat16), keys, values


@pytest.mark.parametrize(
    ("width", "page", "taken"), [(64, 64, True), (128, 64, True), (128, 16, True), (128, 8, False), (96, 64, False)]
)
def test_keys_and_values_of_a_layer(width: int, page: int, taken: bool) -> None:
    q, keys, values = of_a_pool(width, page)
    assert keys.rows.shape[0] != values.rows.shape[0]  # they lie at different places of a block
    assert paged_prefill.takes(q, keys, values) is taken
    assert paged_decode.takes(q, keys)


def test_queries_of_another_type() -> None:
    q, keys, values = of_a_pool(128)
    assert not paged_prefill.takes(q.float(), keys, values)


@pytest.mark.parametrize(("heads", "taken"), [(2, True), (16, True), (18, False)])
def test_heads_on_a_key_head_of_rows_of_one_token(heads: int, taken: bool) -> None:
    """Up to eight: the kernel for chunks takes more."""
    _, keys, values = of_a_pool(64)
    q = torch.zeros(5, heads, 64, dtype=torch.bfloat16)
    assert paged_decode.takes(q, keys) is taken
    assert paged_prefill.takes(q, keys, values)


@pytest.mark.parametrize(("rows", "taken"), [(1, True), (16_384, True), (16_385, False)])
def test_more_rows_than_shared_memory_orders_are_left_to_triton(rows: int, taken: bool) -> None:
    """8 bytes a row, rounded up to a power of two, beside 17,168: 232,448 is what a block of an H200 may have."""
    q, keys, _ = of_a_pool(128)
    assert paged_decode.takes(q, replace(keys, start=torch.zeros(rows, dtype=torch.int32))) is taken


def test_queries_are_packed_where_16_bytes_cannot_be_read_at_once() -> None:
    x = torch.arange(3 * 4 * 64, dtype=torch.bfloat16).view(3, 4, 64)
    for fine in (x, x[:, 1:], x[1:]):
        assert in_pieces_of_16(fine) is fine
    wide = torch.zeros(3, 4, 65, dtype=torch.bfloat16)
    for odd in (x.transpose(1, 2), wide[..., :64], wide[..., 1:], x.flatten()[1:513].view(2, 4, 64)):
        packed = in_pieces_of_16(odd)
        assert packed.equal(odd) and packed.is_contiguous() and packed.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("rows", "joins", "taken"), [(128, True, True), (200, True, False), (200, False, True), (1, False, True)]
)
def test_expanded_keys_in_whole_tiles_where_sums_are_joined(rows: int, joins: bool, taken: bool) -> None:
    widths = Widths(3, 128, 64, 512, 128)
    q, held_LC = (torch.zeros(*sizes, dtype=torch.bfloat16) for sizes in ((5, 3, 192), (rows, 576)))
    keys = Expanded(torch.zeros(rows, 3 * 256, dtype=torch.bfloat16), held_LC[:, 512:], 0, joins, True)
    assert latent_prefill.takes(q, keys, widths) is taken
    assert not latent_prefill.takes(q.float(), keys, widths)
    assert not latent_prefill.takes(q, keys, widths._replace(value=256))
    assert not latent_prefill.takes(q, replace(keys, shared_LP=held_LC[:, 511:575]), widths)
