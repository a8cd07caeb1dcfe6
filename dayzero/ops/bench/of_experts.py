"""Routed experts: the turn of MXFP4 into e4m3, the 4-bit grouped product, whole layers of four models, the router.

T tokens, N chosen a token, E experts, D width, I intermediate width. Stacks repeat a few experts that are drawn at
random, each copy in memory of its own; rows go to experts as random logits send them. A layer is checked on its last
two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import FP8_SIZE, Fp8Blocks, Mxfp4
from dayzero.ops import experts_mxfp4
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import num_rotated
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.experts_fp8 import experts_fp8_128, rounded_to_fp8_128
from dayzero.ops.experts_tables import settings_of
from dayzero.ops.fp8_blocks import widened
from dayzero.ops.moe import experts as plain_experts
from dayzero.ops.moe import route as route_reference
from dayzero.units import ceil_div

DRAWN = 8  # experts drawn of a stack
SILU = {"kind": "silu"}
SITU = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
CLAMPED = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}


def _four_bits(num: int, rows: int, columns: int) -> Mxfp4:
    """Random codes, and exponents as those of groups of a normal distribution spread."""
    codes = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = 117 + torch.randn(num, rows, columns // 32, device="cuda").mul(0.7).round().clamp(-4, 3)
    return Mxfp4(codes, scales.to(torch.uint8))


def _eight_bits(num: int, rows: int, columns: int) -> Fp8Blocks:
    """Codes of a normal distribution whose largest fill a block, and scales as blocks of trained matrices spread."""
    codes = torch.randn(num, rows, columns, device="cuda").mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.randn(num, ceil_div(rows, FP8_SIZE), ceil_div(columns, FP8_SIZE), device="cuda")
    return Fp8Blocks(codes, torch.exp2(scales / 2) / (100 * columns**0.5))


@dataclass(frozen=True, slots=True)
class Again:
    """A stack that repeats the experts of a smaller one, as the reference asks for them."""

    drawn: Any

    def __getitem__(self, number: int) -> Any:
        return self.drawn[number % DRAWN]


def repeated(tiles: Any, num: int) -> Any:
    """A packed or plain stack of ``num`` experts."""
    if isinstance(tiles, Tensor):
        return tiles.repeat(num // DRAWN, 1, 1)
    parts = {
        name: getattr(tiles, name).repeat(num // DRAWN, *[1] * (getattr(tiles, name).dim() - 1))
        for name in tiles.__slots__ if name != "shape"
    }  # fmt: skip
    return replace(tiles, **parts, shape=(num, *tiles.shape[1:]))


@dataclass(frozen=True, slots=True)
class Layer:
    """form: as ``experts_tables`` has it."""

    name: str
    form: str
    experts: int
    chosen: int
    width: int
    inner: int
    activation: Mapping[str, Any]
    bias: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of gate, up and down."""
        return (self.inner, self.width), (self.inner, self.width), (self.width, self.inner)

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded to e4m3."""
        return self.form.endswith("a8")

    def drawn(self) -> list[Any]:
        """Stacks of a few experts."""
        if self.form == "bf16":
            return [torch.randn(DRAWN, *s, device="cuda").div(s[1] ** 0.5).bfloat16() for s in self.shapes]
        make = _eight_bits if self.form.startswith("w8") else _four_bits
        return [make(DRAWN, *s) for s in self.shapes]

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids and weights of so many tokens."""
        x = torch.randn(num_tokens, self.width, device="cuda").bfloat16()
        ids = torch.randn(num_tokens, self.experts, device="cuda").topk(self.chosen).indices
        return x, ids, torch.rand(num_tokens, self.chosen, device="cuda")


EIGHT = Layer("256 experts 7168 x 2048", "w8", 256, 8, 7168, 2048, SILU)
LAYERS = (
    Layer("256 experts 2304 x 1024", "bf16", 256, 8, 2304, 1024, SILU),
    Layer("32 experts 2880 x 2880", "w4", 32, 4, 2880, 2880, CLAMPED, True),
    Layer("896 experts 3584 x 3072", "w4", 896, 16, 3584, 3072, SITU),
    Layer("896 experts 3584 x 3072", "w4a8", 896, 16, 3584, 3072, SITU),
    EIGHT,
    replace(EIGHT, form="w8a8"),
)


def _layer(layer: Layer, num_tokens: int) -> Prepared:
    from dayzero.ops.triton import experts, experts_fp8

    drawn, shapes = layer.drawn(), layer.shapes
    module = experts_fp8 if layer.rounds else experts
    contract = experts_fp8_128 if layer.rounds else plain_experts
    stacks = [repeated(module.pack(stack), layer.experts) for stack in drawn]
    biases = tuple(torch.randn(layer.experts, s[0], device="cuda").bfloat16() for s in shapes) if layer.bias else None
    x, ids, weights = layer.rows(num_tokens)
    few = slice(-2, None)

    def call() -> Tensor:
        out: Tensor = module.experts(x, ids, weights, *stacks, layer.activation, biases)
        return out

    def check() -> Mapping[str, tuple[float, float]]:
        want = contract.body(x[few], ids[few], weights[few], *map(Again, drawn), layer.activation, biases)
        return {"last two tokens": (relative_l2(call()[few], want), CONTRACTS[contract.name].bound["bf16"].value)}

    expert_bytes = sum(stack.nbytes for stack in stacks) // layer.experts
    num_bytes = len(ids.unique()) * expert_bytes + 2 * x.nbytes
    flops = {"bf16": 6.0 * ids.numel() * layer.width * layer.inner}
    peers = {}
    if layer.form == "bf16":
        peers["torch._grouped_mm"] = [lambda: _grouped(x, ids, weights, stacks, layer.activation)]
    if layer.form == "w8":  # what it replaces: the same decoded, which are twice the bytes
        wide = [repeated(torch.stack([widened(stack[e]).bfloat16() for e in range(DRAWN)]), layer.experts)
                for stack in drawn]  # fmt: skip
        peers["decoded"] = [lambda: experts.experts(x, ids, weights, wide[0], wide[1], wide[2], layer.activation)]
    return Prepared([call], check, num_bytes, flops, peers)


def _grouped(x: Tensor, ids: Tensor, weights: Tensor, stacks: list[Any], activation: Mapping[str, Any]) -> Tensor:
    """A layer of torch's own parts, without reading anything back."""
    by_expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(len(stacks[0]), device="cuda"), right=True).int()
    rows = x[order // ids.shape[1]]
    gate, up, down = (stack.transpose(1, 2) for stack in stacks)
    g, u = torch._grouped_mm(rows, gate, offs=ends), torch._grouped_mm(rows, up, offs=ends)
    assert activation["kind"] == "silu"
    y = torch._grouped_mm(torch.nn.functional.silu(g) * u, down, offs=ends).float()
    y = y * weights.flatten()[order, None]
    return torch.empty_like(y).index_copy_(0, order, y).unflatten(0, ids.shape).sum(1).bfloat16()


def _conversion() -> Prepared:
    from dayzero.ops.triton.mxfp4 import to_e4m3, top_exponents

    stack = _four_bits(64, 3584, 3072)
    top = top_exponents(stack)
    out = torch.empty(stack.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(top.shape, device="cuda")

    def check() -> Mapping[str, tuple[float, float]]:
        to_e4m3(stack, top, out, scale)
        codes, scales = torch.empty_like(out[-1]), torch.empty_like(scale[-1])
        experts_mxfp4.to_e4m3(stack[63], codes, scales)
        wrong = (codes.view(torch.uint8) != out[-1].view(torch.uint8)).sum() + (scales != scale[-1]).sum()
        return {"bits of the last expert": (float(wrong), 0.0)}

    num_bytes = stack.nbytes + top.nbytes + out.nbytes + scale.nbytes
    return Prepared([lambda: to_e4m3(stack, top, out, scale)], check, num_bytes)


def _product(form: str, rows: int) -> Prepared:
    """64 experts of 3,584 x 6,144, each with so many rows: the product alone. Rows are in the order of the experts. The
    peer multiplies the same matrices, widened before: what it takes less is what conversion costs."""
    from dayzero.ops.triton.experts_fp8 import quantise
    from dayzero.ops.triton.experts_matmul import down_product
    from dayzero.ops.triton.experts_rows import sort_by_expert
    from dayzero.ops.triton.machine import hardware_word
    from dayzero.ops.triton.mxfp4 import pack

    num, tall, wide = 64, 3584, 6144
    drawn = _four_bits(DRAWN, tall, wide)
    x = torch.randn(num * rows, wide, device="cuda").bfloat16()
    ids = torch.arange(num, device="cuda").repeat_interleave(rows)[:, None]
    run = settings_of(form, ids.numel(), num, hardware_word(ids.device))
    by_expert = sort_by_expert(ids, num, run.rows)
    tiles = repeated(pack(drawn), num)
    codes, scales = quantise(x) if form == "w4a8" else (x, None)

    def call() -> Tensor:
        return down_product(codes, tiles, by_expert, None, run.down, scales)

    def check() -> Mapping[str, tuple[float, float]]:
        place = int(by_expert.order[0])
        given = x[:1] if form == "w4" else rounded_to_fp8_128(x[:1], torch.float64)
        want = given.double() @ experts_mxfp4.widen(drawn[0], torch.float32).double().T
        return {"first row": (relative_l2(call()[place][None], want), 2.0**-8)}

    ends = torch.arange(1, num + 1, device="cuda", dtype=torch.int32) * rows
    plain = repeated(torch.stack([experts_mxfp4.widen(drawn[i], torch.bfloat16) for i in range(DRAWN)]), num)
    plain = plain.transpose(1, 2)
    peers = {"torch._grouped_mm": [lambda: torch._grouped_mm(x, plain, offs=ends)]}
    num_bytes = tiles.nbytes + x.nbytes + num * rows * tall * 2
    return Prepared([call], check, num_bytes, {"bf16": 2.0 * num * rows * tall * wide}, peers)


def _routed(num_tokens: int) -> Prepared:
    """896 experts, 16 chosen, by sigmoid and a bias."""
    from dayzero.ops.triton.route import route

    bias = 7 + torch.rand(896, device="cuda") / 4
    options: dict[str, Any] = {"score": "sigmoid", "bias_E": bias, "scale": 2.5, "eps": 1e-20}
    sets = num_rotated(num_tokens * 896 * 4, 16)
    logits = [torch.randn(num_tokens, 896, device="cuda") for _ in range(sets)]

    def check() -> Mapping[str, tuple[float, float]]:
        ids, weights = route(logits[0], 16, **options)
        want_ids, want_weights = route_reference.body(logits[0], 16, **options)
        bound = CONTRACTS["moe.route"].bound["f32"].value
        return {"ids": (float((ids != want_ids).sum()), 0.0), "weights": (relative_l2(weights, want_weights), bound)}

    calls = [partial(route, one, 16, **options) for one in logits]
    return Prepared(calls, check, num_tokens * (896 * 4 + 16 * 12))


def entries() -> Iterator[Entry]:
    yield Entry("moe.experts_fp8_128", "to_e4m3", "64 experts 3584 x 3072", _conversion)
    for form, contract in (("w4", "moe.experts"), ("w4a8", "moe.experts_fp8_128")):
        for rows in (1, 16, 64, 512):
            name = f"product alone, 64 experts 3584 x 6144, {rows} rows each"
            yield Entry(contract, "triton", name, partial(_product, form, rows))
    for layer in LAYERS:
        contract = "moe.experts_fp8_128" if layer.rounds else "moe.experts"
        for num_tokens in (1, 16, 64, 256, 8192):
            shape = f"{layer.form} {layer.name} top {layer.chosen} T={num_tokens}"
            yield Entry(contract, "triton", shape, partial(_layer, layer, num_tokens))
    for num_tokens in (1, 64, 8192):
        yield Entry("moe.route", "triton", f"896 experts top 16 T={num_tokens}", partial(_routed, num_tokens))
