"""Figures of dense attention over pages of 64 tokens, out of order in a pool: rows of one token, and whole prompts.

Bytes: keys and values (latent rows: the rows) that are seen, read once, and queries and results. FLOPs: of the products
of what is seen. The floor of bytes counts them at the rate of a copy, so reading alone may pass it by a little.
Peers are torch's libraries over keys and values that lie in one piece, where they have the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.ops import latent  # noqa: F401  its contracts
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call, num_rotated
from dayzero.ops.bind import bind
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.paged import paged
from dayzero.view import Paged, Span

PAGE, CHECKED_TOKENS = 64, 64
TABLE_PAGES = 640  # at least, as wide as a server's table is whatever its rows hold
BF16 = torch.bfloat16
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PEER_BYTES = 3 << 30  # of a copy of all keys and values in one piece


@dataclass(frozen=True, slots=True)
class Shape:
    """rows of ``count`` new tokens each, behind others, ``length`` in all. value_width 0: the keys' first 512 numbers
    are the values."""

    rows: int
    length: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    count: int = 1
    window: int | None = None
    sinks: bool = False

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in a row."""
        starts = range(self.length - self.count, self.length)
        if self.window is None:
            return sum(starts) + self.count
        return sum(min(start + 1, self.window) for start in starts)

    @property
    def num_bytes(self) -> int:
        """Of records alone."""
        seen = self.length if self.window is None else min(self.length, self.window + self.count - 1)
        return 2 * self.rows * seen * self.key_heads * (self.width + self.value_width)

    @property
    def scale(self) -> float:
        return (self.width if self.value_width else 192) ** -0.5

    def __str__(self) -> str:
        kind = f"{self.heads}/{self.key_heads} heads of {self.width}/{self.value_width or 'first 512'}"
        more = f" window {self.window}" if self.window else ""
        return f"B={self.rows} L={self.length} {'decode' if self.count == 1 else 'prefill'} {kind}{more}"


def pages_of(shape: Shape, seed: int) -> tuple[Paged, Paged | None]:
    """Keys and values of normal numbers."""
    made = torch.Generator("cuda").manual_seed(seed)
    each = -(-shape.length // PAGE)
    order = torch.randperm(shape.rows * each, generator=made, device="cuda") + 1
    zeros = torch.zeros(shape.rows, dtype=torch.int32, device="cuda")
    ends = shape.count * torch.arange(shape.rows + 1, dtype=torch.int32, device="cuda")
    start = shape.length - shape.count
    spans = tuple(Span(row, row * shape.count, shape.count, start) for row in range(shape.rows))

    def records(width: int) -> Paged:
        pool = torch.empty(shape.rows * each + 1, PAGE, shape.key_heads, width, dtype=BF16, device="cuda")
        pool.normal_(generator=made)
        table = F.pad(order.int().view(shape.rows, each), (0, max(0, TABLE_PAGES - each)))
        return Paged(pool, table, zeros, ends, zeros + start, spans)

    keys = records(shape.width)
    if not shape.value_width:
        return keys, None
    return keys, replace(records(shape.value_width), table=keys.table)


def arguments(shape: Shape, seed: int) -> dict[str, Any]:
    keys, values = pages_of(shape, seed)
    out: dict[str, Any] = {
        "q_THD": torch.randn(shape.rows * shape.count, shape.heads, shape.width, dtype=BF16, device="cuda"),
        "keys": keys, "values": values, "scale": shape.scale, "window": shape.window,
    }  # fmt: skip
    if values is None:
        out["value_dim"] = 512
    if shape.sinks:
        out["sinks_H"] = torch.randn(shape.heads, device="cuda") * 2
    return out


def _check(variant: Callable[..., Any], given: dict[str, Any], shape: Shape) -> Mapping[str, tuple[float, float]]:
    """The first and the last row; of a prompt some tokens at its end, and where a block of queries begins."""
    got = variant(**given)
    some = []
    for row in {0, shape.rows - 1}:
        for begin in {0, shape.count // 2, max(0, shape.count - CHECKED_TOKENS)}:
            count = min(CHECKED_TOKENS, shape.count - begin)
            some.append(Span(row, row * shape.count + begin, count, shape.length - shape.count + begin))
    cut = {k: replace(v, spans=tuple(some)) if isinstance(v, Paged) else v for k, v in given.items()}
    want = paged.body(**cut)
    rows = torch.cat([torch.arange(s.first, s.first + s.count, device="cuda") for s in some])
    bound = paged.bound["bf16"].value
    return {name: (relative_l2(a[rows], b[rows]), bound) for name, a, b in zip(("out", "lse"), got, want, strict=True)}


def prepare(variant: str, shape: Shape) -> Prepared:
    function = bind("attention.paged", "bench", {"attention.paged": variant})
    sets = [arguments(shape, seed) for seed in range(num_rotated(shape.num_bytes, 8) if shape.count == 1 else 1)]
    ends = 2 * shape.rows * shape.count * shape.heads * (shape.width + (shape.value_width or 512))
    flops = 2.0 * shape.rows * shape.pairs * shape.heads * (shape.width + (shape.value_width or 512))
    return Prepared(
        calls=[partial(function, **given) for given in sets],
        check=lambda: _check(function, sets[0], shape),
        num_bytes=shape.num_bytes + ends,
        flops={"bf16": flops},
        peers=_peers(shape),
    )


def _peers(shape: Shape) -> dict[str, list[Call]]:
    if shape.window or shape.sinks or not shape.value_width or shape.num_bytes > PEER_BYTES:
        return {}
    if shape.count not in (1, shape.length):
        return {}

    def heads(number: int, length: int, width: int) -> Tensor:
        return torch.randn(shape.rows, number, length, width, dtype=BF16, device="cuda")

    q, k = heads(shape.heads, shape.count, shape.width), heads(shape.key_heads, shape.length, shape.width)
    v = heads(shape.key_heads, shape.length, shape.value_width)

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.count > 1, enable_gqa=shape.heads != shape.key_heads
            )

    out: dict[str, list[Call]] = {}
    for name, backend in PEERS.items():
        if name == "flash" and shape.width != shape.value_width:
            continue  # it has one width
        out[name] = [partial(run, backend)]
    return out


def entries() -> Iterator[Entry]:
    short = tuple((rows, 1024) for rows in (1, 16, 64, 256))
    for rows, length in (*short, (1, 32768), (16, 8192), (64, 8192), (64, 32768), (256, 8192)):
        yield _entry("cuda", Shape(rows, length, 32, 8, 128, 128))
    for rows, length in (*short, (1, 32768), (16, 8192), (64, 8192), (256, 8192)):
        yield _entry("cuda", Shape(rows, length, 64, 8, 64, 64, sinks=True))
    for rows in (1, 64, 256):
        yield _entry("cuda", Shape(rows, 8192, 64, 8, 64, 64, window=128, sinks=True))
    for rows in (1, 16, 64):
        for length in (8192, 32768):
            yield _entry("cuda", Shape(rows, length, 128, 1, 576, 0))
    yield _entry("cuda", Shape(64, 8192, 32, 1, 576, 0))
    for length in (8192, 32768):
        yield _entry("cuda", Shape(1, length, 32, 8, 128, 128, count=length))
        yield _entry("cuda", Shape(1, length, 64, 8, 64, 64, count=length))
    yield _entry("cuda", Shape(1, 8192, 64, 8, 64, 64, count=8192, window=128, sinks=True))
    yield _entry("cuda", Shape(4, 32768, 32, 8, 128, 128, count=2048))
    yield _entry("cuda", Shape(1, 8192, 128, 128, 192, 128, count=8192))

    for tokens in (1, 64, 8192):
        for name in ("latent.queries", "latent.values"):
            shape = f"T={tokens} 128 heads of 128, latent 512"
            yield Entry(name, "triton", shape, partial(prepare_projection, name, tokens))


def prepare_projection(name: str, tokens: int) -> Prepared:
    """One of the products around absorbed latent attention. The peer is a batched product alone, in bf16 throughout."""
    heads, nope, rank = 128, 128, 512
    function, body = bind(name, "bench", {name: "triton"}), CONTRACTS[name].body
    num_bytes = 2 * heads * nope * rank + tokens * heads * (2 * nope + 4 * rank)
    sets: list[tuple[Any, ...]] = []
    peer: list[Call] = []
    for seed in range(num_rotated(num_bytes)):
        made = torch.Generator("cuda").manual_seed(seed)
        w = torch.randn(heads, nope, rank, generator=made, device="cuda").to(BF16) / 16
        if name == "latent.queries":
            x = torch.randn(tokens, heads, nope + 64, generator=made, device="cuda").to(BF16)
            sets.append((x, w))
            peer.append(partial(torch.bmm, x[..., :nope].transpose(0, 1), w))
        else:
            x = torch.randn(tokens, heads, rank, generator=made, device="cuda")
            sets.append((x, w, BF16))
            peer.append(partial(torch.bmm, x.to(BF16).transpose(0, 1), w.transpose(1, 2)))

    def check() -> Mapping[str, tuple[float, float]]:
        some = (sets[0][0][-CHECKED_TOKENS:], *sets[0][1:])
        got = function(*sets[0])[-CHECKED_TOKENS:]
        return {"out": (relative_l2(got, body(*some)), CONTRACTS[name].bound["bf16"].value)}

    flops = {"bf16": 2.0 * tokens * heads * nope * rank}
    return Prepared([partial(function, *one) for one in sets], check, num_bytes, flops, {"bmm": peer})


def _entry(variant: str, shape: Shape) -> Entry:
    return Entry("attention.paged", variant, str(shape), partial(prepare, variant, shape))
