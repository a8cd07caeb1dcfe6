"""Writing cache rows on a GPU: far into a large pool, under a captured graph, and read back by the references."""

from __future__ import annotations

import pytest
import torch

from dayzero.decl import packed_row
from dayzero.ops.bind import bind
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.records import codec_of

pytestmark = pytest.mark.gpu

UNIT_BYTES, PAGE = 256, 64
ROWS = {
    "mla_bf16": ((576,), (512, 64)), "mla_fp8_656": ((576,), (512, 64)), "idx_fp8_128": ((128,), ()),
    "idx_mxfp8_32": ((128,), ()), "kv_fp8": ((8, 128), ()),
}  # fmt: skip


@pytest.mark.parametrize("record", ROWS)
def test_a_row_beyond_4_gib_lies_where_it_belongs(record: str) -> None:
    """Blocks numbered by units of 256 bytes, as the engine's pool has them; ten tokens, the last of them far behind."""
    shape, parts = ROWS[record]
    packed = packed_row(record, shape, parts)
    dtype = torch.bfloat16 if packed is None else torch.uint8
    row = shape if packed is None else (packed.num_bytes,)
    size = PAGE * torch.Size(row).numel()
    pool = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    stride = UNIT_BYTES // dtype.itemsize
    num = (pool.numel() // dtype.itemsize - size) // stride + 1
    rows = pool.view(dtype).as_strided((num, PAGE, *row), (stride, row[-1], 1) if len(row) == 1 else
                                       (stride, row[0] * row[1], row[1], 1))  # fmt: skip
    apart = -(-size // stride)
    blocks = torch.tensor([0, apart, num - 1, num - 1 - apart, num // 2], device="cuda").repeat_interleave(2)
    offsets = torch.tensor([0, 63], device="cuda").repeat(5)
    x = torch.randn(10, *shape, device="cuda", dtype=torch.bfloat16)
    codec, body = codec_of(packed), CONTRACTS["cache.write"].body

    def kept() -> torch.Tensor:
        return rows[blocks, offsets].clone() if codec is None else codec.read(rows, blocks, offsets)

    torch.use_deterministic_algorithms(False)  # else torch copies the rows before it writes some, overlaps and all
    body(torch.zeros_like(x), rows, blocks, offsets, codec)
    bind("cache.write", "test", {"cache.write": "triton"})(x, rows, blocks, offsets, codec)
    got = kept()
    body(x, rows, blocks, offsets, codec)
    assert torch.equal(got, kept()) and bool((got != 0).any())


@pytest.mark.parametrize("record", ROWS)
def test_a_graph_writes_what_its_buffers_say_when_it_is_replayed(record: str) -> None:
    shape, parts = ROWS[record]
    codec = codec_of(packed_row(record, shape, parts))
    dtype = torch.bfloat16 if codec is None else torch.uint8
    rows = torch.zeros(40, PAGE, *(shape if codec is None else (codec.row.num_bytes,)), dtype=dtype, device="cuda")
    write = bind("cache.write", "test", {"cache.write": "triton"})
    x = torch.randn(7, *shape, device="cuda", dtype=torch.bfloat16)
    places = torch.arange(7, device="cuda")
    blocks, offsets = places + 3, places * 5
    write(x, rows, blocks, offsets, codec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write(x, rows, blocks, offsets, codec)
    rows.zero_()
    x.copy_(torch.randn_like(x))
    blocks.copy_(39 - places)
    graph.replay()
    want = torch.zeros_like(rows)
    CONTRACTS["cache.write"].body(x, want, blocks, offsets, codec)
    assert torch.equal(rows, want)
