"""Attention to 2,048 listed rows, of 576 numbers that all heads share or of grouped heads: a decode step, and prefill
of one sequence.

T queries, H heads, K key heads, N listed rows, L rows of a sequence, C = 576, V = 512, R rows of a step. FLOPs of a
query are 2 H N (C + V): scores and the weighted sum. Bytes: each listed record once for each query; records are not
shared, as queries choose theirs apart. Rows of a decode step have histories of their own, in pages out of order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dayzero.decl import LATENT_PARTS, packed_row
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import num_rotated
from dayzero.ops.bind import resolve
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import relative_l2
from dayzero.ops.records import RowCodec
from dayzero.ops.sparse_attention import sparse
from dayzero.view import Paged, Span

CONTRACT, WIDTH, VALUE, LISTED, PAGE = "attention.sparse", 576, 512, 2048, 64
SCALE = 192**-0.5
_HISTORY = {"decode": 8192, "prefill": 32768}
_CHECKED = 16  # queries that are compared
Shape = tuple[str, int, int, str]  # decode or prefill, queries, heads, record
SHAPES: tuple[Shape, ...] = (
    *(("decode", rows, heads, record) for record in ("mla_fp8_656", "mla_bf16") for heads in (128, 64)
      for rows in (1, 16, 64, 256)),
    *(("prefill", queries, heads, "mla_bf16") for heads in (128, 64) for queries in (1024, 4096)),
    ("prefill", 4096, 128, "mla_fp8_656"),
)  # fmt: skip


def pool(rows: int, length: int, record: str) -> Paged:
    """Random records of so many sequences in pages out of order; lengths as of a decode step that ends them."""
    pages = -(-length // PAGE)
    num = rows * pages
    table = torch.randperm(num, device="cuda").view(rows, pages).int()
    spread = torch.exp(torch.randn(WIDTH, device="cuda") * 0.5)  # channels of a trained latent differ
    values = torch.empty(num, PAGE, WIDTH, device="cuda", dtype=torch.bfloat16)
    for some in values.split(4096):
        some.copy_(torch.randn(some.shape, device="cuda") * spread)
    ints = partial(torch.arange, device="cuda", dtype=torch.int32)
    spans = tuple(Span(row, row, 1, length - 1) for row in range(rows))
    shared = (table, torch.zeros(rows, device="cuda", dtype=torch.int32), ints(rows + 1))
    start = torch.full((rows,), length - 1, device="cuda", dtype=torch.int32)
    if record == "mla_bf16":
        return Paged(values[:, :, None], *shared, start, spans)
    row = packed_row(record, (WIDTH,), LATENT_PARTS)
    assert row is not None
    codec = RowCodec(row)
    packed = torch.empty(num, PAGE, row.num_bytes, device="cuda", dtype=torch.uint8)
    at = torch.arange(PAGE, device="cuda")
    for begin in range(0, num, 4096):
        blocks = torch.arange(begin, min(begin + 4096, num), device="cuda")
        codec.write(packed, blocks[:, None].expand(-1, PAGE), at.expand(len(blocks), -1), values[blocks])
    return Paged(packed, *shared, start, spans, codec).headed()


def as_one(keys: Paged, queries: int) -> Paged:
    """The pool's only sequence, whose last ``queries`` tokens are those of the step."""
    start = int(keys.start[0]) + 1 - queries
    ends = torch.tensor([0, queries], device="cuda", dtype=torch.int32)
    return replace(keys, query_start=ends, start=keys.start * 0 + start, spans=(Span(0, 0, queries, start),))


def lists(positions_T: Tensor) -> Tensor:
    """[T, N] ascending: for each query as many of the rows up to its position as fit, at random."""
    out = torch.empty(len(positions_T), LISTED, dtype=torch.int64, device="cuda")
    every = torch.arange(int(positions_T.max()) + 1, device="cuda")
    for some, positions in zip(out.split(512), positions_T.split(512), strict=True):
        keys = torch.rand(len(some), len(every), device="cuda").masked_fill(every > positions[:, None], -1.0)
        some.copy_(keys.topk(LISTED).indices.sort().values)
    return out


def made(shape: Shape, sets: int) -> tuple[Paged, list[Tensor], list[Tensor]]:
    """(records, and for each set queries [T, H, C] and lists [T, N])."""
    kind, num, heads, record = shape
    length = _HISTORY[kind]
    keys = pool(num if kind == "decode" else 1, length, record)
    keys = keys if kind == "decode" else as_one(keys, num)
    positions = torch.cat([torch.arange(s.start, s.start + s.count, device="cuda") for s in keys.spans])
    queries = [torch.randn(num, heads, WIDTH, device="cuda").bfloat16() for _ in range(sets)]
    return keys, queries, [lists(positions) for _ in range(sets)]


def errors(keys: Paged, q_THC: Tensor, listed_TN: Tensor, got: tuple[Tensor, Tensor]) -> Mapping[str, float]:
    """Of some queries, the first and the last, against the contract's body in float64."""
    num = q_THC.shape[0]
    some = sorted({*range(min(num, _CHECKED // 2)), *range(max(0, num - _CHECKED // 2), num)})
    spans = tuple(
        Span(span.row, at, 1, span.start + at - span.first)
        for at in some for span in keys.spans if span.first <= at < span.first + span.count
    )  # fmt: skip
    want = sparse.body(q_THC, replace(keys, spans=spans), None, listed_TN, scale=SCALE, value_dim=VALUE)
    return {what: relative_l2(g[some], w[some]) for what, g, w in zip(("out", "lse"), got, want, strict=True)}


def _prepare(variant: str, shape: Shape) -> Prepared:
    kind, num, heads, record = shape
    num_bytes = num * (LISTED * ((656 if "fp8" in record else 2 * WIDTH) + 8) + heads * 2 * (WIDTH + VALUE))
    keys, queries, listed = made(shape, num_rotated(num_bytes, 64 if kind == "decode" else 2))
    function = resolve(CATALOG.lines[CONTRACT, variant])
    calls = [
        partial(function, q, keys, None, at, scale=SCALE, value_dim=VALUE)
        for q, at in zip(queries, listed, strict=True)
    ]
    bound = sparse.bound["bf16"].value

    def check() -> Mapping[str, tuple[float, float]]:
        found = errors(keys, queries[0], listed[0], calls[0]())
        return {what: (error, bound) for what, error in found.items()}

    flops = {"bf16": 2.0 * num * heads * LISTED * (WIDTH + VALUE)}
    return Prepared(calls, check, num_bytes, flops)


def _prepare_grouped(kind: str, num: int) -> Prepared:
    """64 query heads of 128 numbers, 8 key heads: a decode step of ``num`` rows, or the last ``num`` of a sequence."""
    heads, key_heads, width, length = 64, 8, 128, _HISTORY["decode"]
    whole = pool(num if kind == "decode" else 1, length, "mla_bf16")
    whole = whole if kind == "decode" else as_one(whole, num)
    shape = (*whole.rows.shape[:2], key_heads, width)
    keys, values = (replace(whole, rows=torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    num_bytes = num * (LISTED * (4 * key_heads * width + 8) + heads * 4 * width)
    sets = num_rotated(num_bytes, 16)
    positions = torch.cat([torch.arange(s.start, s.start + s.count, device="cuda") for s in keys.spans])
    listed = [lists(positions) for _ in range(sets)]
    queries = [torch.randn(num, heads, width, device="cuda").bfloat16() for _ in range(sets)]
    function = resolve(CATALOG.lines[CONTRACT, "triton"])
    calls = [partial(function, q, keys, values, at, scale=width**-0.5) for q, at in zip(queries, listed, strict=True)]

    def check() -> Mapping[str, tuple[float, float]]:
        want = sparse.body(queries[0], keys, values, listed[0], scale=width**-0.5)
        found = {w: relative_l2(g, x) for w, g, x in zip(("out", "lse"), calls[0](), want, strict=True)}
        return {what: (error, sparse.bound["bf16"].value) for what, error in found.items()}

    return Prepared(calls, check, num_bytes, {"bf16": 4.0 * num * heads * LISTED * width})


def entries() -> Iterator[Entry]:
    for kind, num in (("decode", 1), ("decode", 16), ("decode", 64), ("prefill", 256)):
        words = f"{kind} kv_bf16 H=64/8 D=128 {'B' if kind == 'decode' else 'T'}={num}"
        yield Entry(CONTRACT, "triton", words, partial(_prepare_grouped, kind, num))
    for variant in ("cuda", "cuda_by_load", "triton"):
        for shape in SHAPES:
            kind, num, heads, record = shape
            split = variant == "cuda_by_load"  # chunks are not split by either
            if (split and kind == "prefill") or (variant == "triton" and (record != "mla_bf16" or heads != 128)):
                continue
            words = f"{kind} {record} H={heads} {'B' if kind == 'decode' else 'T'}={num}"
            yield Entry(CONTRACT, variant, words, partial(_prepare, variant, shape))
