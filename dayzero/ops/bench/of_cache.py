"""Figures of writing cache rows: bf16 values to places of a pool, as plain elements or as e4m3 codes with scales.

Up to 256 tokens are rows' next tokens, each in a page of its own; more are pages of prompts. Bytes: values read, rows
written, 16 a token for its place. The peer is the reference in torch: a scatter, or several passes and one. For a
latent row from its projection on (norm, turn, write) it is one launch for each operator and a concatenation; for heads
of attention one launch for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from dayzero.decl import packed_row
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call, num_rotated
from dayzero.ops.bind import bind
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.heads_write import HeadNorms, Kept
from dayzero.ops.latent_write import LatentNorm, Turn
from dayzero.ops.records import RowCodec, codec_of

HEADS: tuple[tuple[tuple[int, int], int, bool, str], ...] = (  # heads, width, whether they are normed, record
    ((32, 8), 128, True, "kv_bf16"), ((64, 8), 64, False, "kv_bf16"), ((32, 8), 128, True, "kv_fp8"),
)  # fmt: skip
PAGE, UNIT_BYTES = 64, 256
SEPARATE_TOKENS = 256  # up to so many tokens lie in pages of their own
TOKENS = (1, 64, 8192)
ROWS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "mla_bf16": ((576,), (512, 64)), "mla_fp8_656": ((576,), (512, 64)), "idx_bf16": ((128,), ()),
    "idx_fp8_128": ((128,), ()), "idx_mxfp8_32": ((128,), ()), "kv_bf16": ((8, 128), ()), "kv_fp8": ((8, 128), ()),
}  # fmt: skip


def values(tokens: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """[T, *shape] bf16, some channels 20 times as large."""
    made = torch.Generator("cuda").manual_seed(seed)
    wide = 1 + 19 * (torch.rand(shape, generator=made, device="cuda") < 0.03)
    return (torch.randn(tokens, *shape, generator=made, device="cuda") * wide).bfloat16()


def pool(num_blocks: int, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[N, page, *row] of NaN, blocks one behind the other."""
    size = PAGE * prod(row) * dtype.itemsize
    held = -(-size // UNIT_BYTES) * UNIT_BYTES
    memory = torch.full((num_blocks, held), 0xFF, dtype=torch.uint8, device="cuda")
    return memory.view(dtype)[:, : size // dtype.itemsize].unflatten(1, (PAGE, *row))


def places(tokens: int, num_blocks: int, seed: int) -> tuple[Tensor, Tensor]:
    """(blocks, offsets) [T] int64: one token a page, or pages full of tokens, pages out of order."""
    made = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(num_blocks, generator=made, device="cuda")
    if tokens <= SEPARATE_TOKENS:
        return order[:tokens], torch.randint(0, PAGE, (tokens,), generator=made, device="cuda")
    number = torch.arange(tokens, device="cuda")
    return order[number // PAGE], number % PAGE


def prepare(record: str, tokens: int) -> Prepared:
    shape, parts = ROWS[record]
    packed = packed_row(record, shape, parts)
    codec: RowCodec | None = codec_of(packed)
    row, dtype = (shape, torch.bfloat16) if packed is None else ((packed.num_bytes,), torch.uint8)
    num_bytes = tokens * (2 * prod(shape) + prod(row) * dtype.itemsize + 16)
    num_blocks = max(2048, 4 * -(-tokens // PAGE))
    sets = []
    for seed in range(num_rotated(num_bytes)):
        sets.append((values(tokens, shape, seed), *places(tokens, num_blocks, seed)))
    rows = pool(num_blocks, row, dtype)
    write, body = bind("cache.write", "bench", {"cache.write": "triton"}), CONTRACTS["cache.write"].body

    def check() -> Mapping[str, tuple[float, float]]:
        got, want = (pool(num_blocks, row, dtype) for _ in range(2))
        x, blocks, offsets = sets[0]
        write(x, got, blocks, offsets, codec)
        body(x, want, blocks, offsets, codec)
        wrong = got.view(torch.uint8) != want.view(torch.uint8)
        return {"bytes that differ": (float(wrong.sum()), 0.0)}

    def calls(function: Callable[..., object]) -> list[Call]:
        return [partial(function, x, rows, blocks, offsets, codec) for x, blocks, offsets in sets]

    return Prepared(calls(write), check, num_bytes, peers={"torch": calls(body)})


def prepare_latent(record: str, tokens: int) -> Prepared:
    """Rows of 512 + 64, positions up to 131,072."""
    packed = packed_row(record, *ROWS[record])
    codec, rank = codec_of(packed), 512
    row, dtype = ((576,), torch.bfloat16) if packed is None else ((packed.num_bytes,), torch.uint8)
    num_bytes = tokens * (2 * 576 + prod(row) * dtype.itemsize + 16 + 8)
    num_blocks = max(2048, 4 * -(-tokens // PAGE))
    rows = pool(num_blocks, row, dtype)
    norm = LatentNorm(1 + torch.randn(rank, device="cuda", dtype=torch.bfloat16) / 8, 1e-6)
    freq_F = (10_000.0 ** (-torch.arange(32, device="cuda") / 32)).float()
    sets = []
    for seed in range(num_rotated(num_bytes)):
        turn = Turn(torch.randint(0, 131_072, (tokens,), device="cuda"), freq_F, "interleaved")
        sets.append((values(tokens, (576,), seed), *places(tokens, num_blocks, seed), turn))
    names = ("cache.write_latent", "cache.write", "norm.rms", "rope.apply")
    fused, write, rms, apply = (bind(name, "bench", {name: "triton"}) for name in names)

    def apart(x: Tensor, to: Tensor, blocks: Tensor, offsets: Tensor, codec: RowCodec | None, norm: LatentNorm,
              turn: Turn) -> None:  # fmt: skip
        latent_TR, key_TP = x.split((rank, 64), dim=-1)
        latent_TR = rms(latent_TR, norm.weight_R, eps=norm.eps, scale_in=norm.scale_in)
        key_TP = apply(key_TP[:, None], turn.positions, turn.inv_freq_F, style=turn.style)[:, 0]
        write(torch.cat((latent_TR, key_TP), dim=-1), to, blocks, offsets, codec)

    def check() -> Mapping[str, tuple[float, float]]:
        got, want = (pool(num_blocks, row, dtype) for _ in range(2))
        x, blocks, offsets, turn = sets[0]
        fused(x, got, blocks, offsets, codec, norm, turn)
        CONTRACTS["cache.write_latent"].body(x, want, blocks, offsets, codec, norm, turn)
        wrong = got.view(torch.uint8) != want.view(torch.uint8)
        return {"bytes that differ": (float(wrong.sum()), 0.0)}

    def calls(function: Callable[..., object]) -> list[Call]:
        return [partial(function, x, rows, at, offsets, codec, norm, turn) for x, at, offsets, turn in sets]

    return Prepared(calls(fused), check, num_bytes, peers={"apart": calls(apart)})


def prepare_heads(heads: tuple[int, int], width: int, normed: bool, record: str, tokens: int) -> Prepared:
    """Queries, keys and values of one joint product, positions up to 131,072; all dimensions are turned."""
    (many, few), codec = heads, codec_of(packed_row(record, (heads[1], width)))
    row, dtype = ((few, width), torch.bfloat16) if codec is None else ((codec.row.num_bytes,), torch.uint8)
    num_bytes = tokens * (2 * width * (2 * many + 2 * few) + 2 * prod(row) * dtype.itemsize + 24)
    num_blocks = max(2048, 4 * -(-tokens // PAGE))
    q_D, k_D = (1 + torch.randn(width, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    norms = HeadNorms(q_D, k_D, 1e-6) if normed else None
    freq_F = (10_000.0 ** (-torch.arange(width // 2, device="cuda") / (width // 2))).float()
    k_rows, v_rows = (pool(num_blocks, row, dtype) for _ in range(2))
    sets = []
    for seed in range(num_rotated(num_bytes)):
        q, k, v = values(tokens, (many + 2 * few, width), seed).split((many, few, few), dim=1)
        turn = Turn(torch.randint(0, 131_072, (tokens,), device="cuda"), freq_F, "half")
        sets.append((q, k, v, places(tokens, num_blocks, seed), turn))
    names = ("attention.norm_rope_write", "cache.write", "norm.rms", "rope.apply")
    fused, write, rms, apply = (bind(name, "bench", {name: "triton"}) for name in names)

    def apart(
        q: Tensor, k: Tensor, v: Tensor, kept: Kept, codec: RowCodec | None, norms: HeadNorms | None, turn: Turn
    ) -> Tensor:
        if norms is not None:
            q, k = (rms(x, w, eps=norms.eps, scale_in="dtype") for x, w in ((q, norms.q_D), (k, norms.k_D)))
        q, k = (apply(x, turn.positions, turn.inv_freq_F, style=turn.style) for x in (q, k))
        write(k, kept.keys, *kept[2:], codec)
        write(v, kept.values, *kept[2:], codec)
        return q

    def check() -> Mapping[str, tuple[float, float]]:
        q, k, v, at, turn = sets[0]
        outs = []
        for function in (fused, apart):
            to = Kept(pool(num_blocks, row, dtype), pool(num_blocks, row, dtype), *at)
            out = function(q, k, v, to, codec, norms, turn)
            outs.append([x.contiguous().view(torch.uint8) for x in (out, to.keys, to.values)])
        wrong = sum(float((one != other).sum()) for one, other in zip(*outs, strict=True))
        return {"bytes that differ": (wrong, 1e-4 * num_bytes)}

    def calls(function: Callable[..., object]) -> list[Call]:
        return [partial(function, *qkv, Kept(k_rows, v_rows, *at), codec, norms, turn) for *qkv, at, turn in sets]

    return Prepared(calls(fused), check, num_bytes, peers={"apart": calls(apart)})


def entries() -> Iterator[Entry]:
    for heads, width, normed, record in HEADS:
        for tokens in TOKENS:
            said = f"{heads[0]}+2x{heads[1]}x{width} {'norm ' if normed else ''}{record} T={tokens}"
            run = partial(prepare_heads, heads, width, normed, record, tokens)
            yield Entry("attention.norm_rope_write", "triton", said, run)
    for record in ("mla_bf16", "mla_fp8_656"):
        for tokens in TOKENS:
            yield Entry("cache.write_latent", "triton", f"{record} T={tokens}", partial(prepare_latent, record, tokens))
    for record in ROWS:
        for tokens in TOKENS:
            yield Entry("cache.write", "triton", f"{record} T={tokens}", partial(prepare, record, tokens))
