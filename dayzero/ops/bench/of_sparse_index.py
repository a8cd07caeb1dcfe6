"""The sparse index: scores of all keys of a row from its pages, and the best of them.

B rows of one query each (or one row of many), H heads, D width, L keys a row, K listed rows. Keys are normal with a
magnitude for each channel, as trained ones have; queries and heads' weights are normal. The floor is a key's record
read once. Peers, on keys in one piece and in bf16, so without pages or records: torch's own operators, and
``torch.topk`` on scores that are there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import packed_row
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call, num_rotated
from dayzero.ops.bind import resolve
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import relative_l2
from dayzero.ops.records import RowCodec, encode
from dayzero.ops.sparse_index import only_near_the_cut, score, tokens, top_k
from dayzero.view import Paged, Span

HEADS, DIM, PAGE, K, SCALE = 64, 128, 64, 2048, (64 * 128) ** -0.5
_CHECKED = 16  # queries of a long step whose lists are compared: its first and its last


def entries() -> Iterator[Entry]:
    """The shapes of the issue, each with the records it can be kept in."""
    shapes = ((1, 1, 131_072), (16, 1, 131_072), (1, 1, 1_048_576), (256, 1, 8192), (1, 2048, 32_768))
    for rows, queries, length in shapes:
        words = f"B={rows} L={length}" + (f" T={queries}" if queries > 1 else "")
        for record in ("idx_fp8_128", "idx_mxfp8_32", ""):
            make = partial(_prepared, "cuda", record, rows, queries, length)
            yield Entry("sparse_index.tokens", "cuda", f"{words} {record or 'bf16'}", make)
    make = partial(_prepared, "triton", "idx_fp8_128", 16, 1, 131_072)
    yield Entry("sparse_index.tokens", "triton", "B=16 L=131072 idx_fp8_128", make)
    for rows, length in ((1, 131_072), (16, 131_072), (1, 1_048_576), (256, 8192)):
        yield Entry("sparse_index.top_k", "cuda", f"B={rows} L={length}", partial(_prepared_top_k, rows, length))


def _pool(record: str, blocks: int) -> tuple[Tensor, RowCodec | None]:
    """[N, page, …] of keys, every one in use, and how they are read."""
    size = torch.exp2(torch.randint(-3, 3, (DIM,), device="cuda").float())
    row = packed_row(record, (DIM,))
    if row is None:
        return (torch.randn(blocks, PAGE, DIM, device="cuda") * size).bfloat16(), None
    memory = torch.empty(blocks, PAGE * row.num_bytes, dtype=torch.uint8, device="cuda")
    codec, rows = RowCodec(row), memory.unflatten(1, (PAGE, row.num_bytes))
    for begin in range(0, blocks, 4096):
        some = rows[begin : begin + 4096]
        made = encode(torch.randn(some.shape[0], PAGE, DIM, device="cuda") * size, row)
        for whole, part in zip(codec.parts(some), made, strict=True):
            whole.copy_(part)
    return rows, codec


def _sets(record: str, rows: int, queries: int, length: int) -> list[dict[str, Any]]:
    """Inputs of ``sparse_index.tokens``; all sets share a pool, in which each has blocks of its own."""
    pages = -(-length // PAGE)
    nbytes = rows * length * (2 * DIM if not record else DIM + 4)
    num = num_rotated(nbytes, 16)
    pool, codec = _pool(record, num * rows * pages)
    tables = torch.randperm(num * rows * pages, device="cuda").int().view(num, rows, pages)
    start = torch.full((rows,), length - queries, dtype=torch.int32, device="cuda")
    query_start = torch.arange(rows + 1, device="cuda").int() * queries
    spans = tuple(Span(i, i * queries, queries, length - queries) for i in range(rows))
    made = []
    for table in tables:
        keys = Paged(pool, table, torch.zeros_like(start), query_start, start, spans, codec)
        q_THD = torch.randn(rows * queries, HEADS, DIM, device="cuda").bfloat16()
        weights_TH = torch.randn(rows * queries, HEADS, device="cuda")
        made.append({"q_THD": q_THD, "weights_TH": weights_TH, "keys": keys, "scale": SCALE, "k": K})
    return made


def _checked(variant: str, inputs: dict[str, Any]) -> Mapping[str, tuple[float, float]]:
    """By the rule of the contract, for some queries; and the scores they are chosen from, against the reference's."""
    from dayzero.ops.cuda.sparse_index import score_queries
    from dayzero.ops.triton.sparse_index import score_rows

    keys, total = inputs["keys"], inputs["q_THD"].shape[0]
    got_TK = resolve(CATALOG.lines["sparse_index.tokens", variant])(**inputs)
    wrong, worst = 0.0, 0.0
    scores_TL = torch.empty(total, keys.spans[0].start + keys.spans[0].count, device="cuda")
    compute = score_queries if variant == "cuda" else score_rows
    compute(inputs["q_THD"], inputs["weights_TH"], keys, scores_TL, scale=SCALE, first_query=0)
    for span in (keys.spans[0], keys.spans[-1]):
        count = min(_CHECKED, span.count)
        for offset in (0, span.count - count):
            packed = slice(span.first + offset, span.first + offset + count)
            one = replace(span, first=0, count=count, start=span.start + offset)
            part = {**inputs, "q_THD": inputs["q_THD"][packed], "weights_TH": inputs["weights_TH"][packed]}
            part["keys"] = replace(keys, spans=(one,))
            wrong += bool(only_near_the_cut(part, [got_TK[packed]], [tokens.body(**part)]))
            k_LD = keys.part(one, 0, one.start + count)
            want_TL = score.body(part["q_THD"], k_LD, part["weights_TH"], start=one.start, scale=SCALE)
            seen_TL = torch.isfinite(want_TL)
            worst = max(worst, relative_l2(scores_TL[packed, : k_LD.shape[0]][seen_TL], want_TL[seen_TL]))
    return {"lists": (wrong, 0.0), "scores": (worst, 1e-5)}


def _prepared(variant: str, record: str, rows: int, queries: int, length: int) -> Prepared:
    sets = _sets(record, rows, queries, length)
    run = resolve(CATALOG.lines["sparse_index.tokens", variant])
    seen = rows * sum(range(length - queries + 1, length + 1))  # (query, key) pairs
    nbytes = rows * length * (2 * DIM if not record else DIM + 4) + rows * queries * (HEADS * (2 * DIM + 4) + 8 * K)
    return Prepared(
        calls=[partial(run, **one) for one in sets],
        check=partial(_checked, variant, sets[0]),
        num_bytes=nbytes,
        flops={"bf16": 2.0 * HEADS * DIM * seen},
        peers=_peers(rows, queries, length) if record == "idx_fp8_128" else {},
    )


def _peers(rows: int, queries: int, length: int) -> dict[str, Sequence[Call]]:
    if queries > 1:
        return {}
    num = num_rotated(rows * length * 2 * DIM, 8)
    keys = [torch.randn(rows, length, DIM, device="cuda").bfloat16() for _ in range(num)]
    q_THD, weights_TH = torch.randn(rows, HEADS, DIM, device="cuda").bfloat16(), torch.randn(rows, HEADS, device="cuda")
    scores = [torch.randn(rows, length, device="cuda") for _ in range(num)]

    def chain(k_BLD: Tensor) -> Tensor:
        s_THL = torch.relu(q_THD @ k_BLD.transpose(1, 2)).float() * weights_TH[:, :, None]
        return s_THL.sum(1).topk(K).indices.sort(-1).values

    return {
        "torch": [partial(chain, k) for k in keys],
        "torch.topk alone": [partial(torch.topk, s, K) for s in scores],
    }


def _prepared_top_k(rows: int, length: int) -> Prepared:
    scores = [torch.randn(rows, length, device="cuda").relu_() - 1.5 for _ in range(num_rotated(4 * rows * length, 16))]
    run = resolve(CATALOG.lines["sparse_index.top_k", "cuda"])
    calls = [partial(run, s, K, start=length - 1) for s in scores]

    def check() -> Mapping[str, tuple[float, float]]:
        want_TK = top_k.body(scores[0], K, start=length - 1)
        return {"lists": (float((calls[0]() != want_TK).sum()), 0.0)}

    return Prepared(
        calls=calls, check=check, num_bytes=rows * (4 * length + 8 * K),
        peers={"torch.topk": [partial(torch.topk, s, K) for s in scores]},
    )  # fmt: skip
