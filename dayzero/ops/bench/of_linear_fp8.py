"""Products with weights in blocks of 8 bits, at the matrices of DeepSeek-V3.2, against the same weights in bf16 by
cuBLAS and against each way that the variant could have gone.

M rows of x, N output width, K input width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.decl import FP8_SIZE, Fp8Blocks
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.of_plain import BF16, Inputs, Peer, normal, prepared
from dayzero.ops.fp8_blocks import widened
from dayzero.units import ceil_div

MATRICES = {
    "q_a and kv_a": (2112, 7168), "q_b": (24576, 1536), "o": (7168, 16384), "index q": (8192, 1536),
    "index k": (128, 7168), "dense down": (7168, 18432), "shared down": (7168, 2048),
}  # fmt: skip
GATED = {"dense gate and up": (36864, 7168), "shared gate and up": (4096, 7168)}
ROWS = (1, 4, 8, 16, 64, 256, 8192)
MOST_TILED = 512  # rows up to which tiles are worth a look


def weight_of(outputs: int, inputs: int) -> Fp8Blocks:
    """Of values with a deviation of K ** -0.5."""
    codes = (torch.randn(outputs, inputs, device="cuda") * 32).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = ceil_div(outputs, FP8_SIZE), ceil_div(inputs, FP8_SIZE)
    return Fp8Blocks(codes, (0.5 + torch.rand(blocks, device="cuda")) / 32 / inputs**0.5)


def _product(contract: str, rows: int, outputs: int, inputs: int) -> Prepared:
    from dayzero.ops.cuda import linear_fp8
    from dayzero.ops.triton import linear_fp8 as tiles

    decoded: dict[int, Tensor] = {}
    gated = contract == "linear.matmul_glu"

    def make() -> Inputs:
        weight = weight_of(outputs, inputs)
        decoded[weight.codes.data_ptr()] = widened(weight, dtype=BF16)
        more = {"activation": {"kind": "silu"}} if gated else {}
        return {"x_TK": normal(rows, inputs), "w_NK": weight, **more}

    def cublas(x_TK: Tensor, w_NK: Fp8Blocks, **_: object) -> Tensor:
        return F.linear(x_TK, decoded[w_NK.codes.data_ptr()])

    def library(x_TK: Tensor, w_NK: Fp8Blocks, **_: object) -> Tensor:
        return linear_fp8.by_library(x_TK, w_NK)

    def tiled(x_TK: Tensor, w_NK: Fp8Blocks, **_: object) -> Tensor:
        return tiles.product(x_TK, w_NK, None, BF16)

    peers: dict[str, Peer] = {"cuBLAS bf16": cublas, "widened, cuBLAS": library}
    if rows <= MOST_TILED:
        peers["tiles"] = tiled
    size = outputs * inputs + 2 * rows * (inputs + outputs // (2 if gated else 1))
    return prepared(
        (contract, "few_rows"), make, size, rows={"x_TK": 0}, peers=peers, flops=2.0 * rows * outputs * inputs, most=12
    )


def _rounded(rows: int, outputs: int, inputs: int) -> Prepared:
    """Peers: cuBLAS in bf16; of many rows torch's product by scales of 1 x 128 and 128 x 128, with x rounded before."""
    from dayzero.ops.triton.experts_fp8 import quantise

    kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def make() -> Inputs:
        weight, x = weight_of(outputs, inputs), normal(rows, inputs)
        codes, scales = quantise(x, torch.float8_e4m3fn)
        kept[weight.codes.data_ptr()] = codes, scales[:, :rows].contiguous().T, widened(weight, dtype=BF16)
        return {"x_TK": x, "w_NK": weight}

    def scaled(x_TK: Tensor, w_NK: Fp8Blocks) -> Tensor:
        codes, scales, _ = kept[w_NK.codes.data_ptr()]
        return torch._scaled_mm(codes, w_NK.codes.T, scales, w_NK.scales.T, out_dtype=BF16)

    def cublas(x_TK: Tensor, w_NK: Fp8Blocks) -> Tensor:
        return F.linear(x_TK, kept[w_NK.codes.data_ptr()][2])

    size = outputs * inputs + 2 * rows * (inputs + outputs)
    return prepared(
        ("linear.matmul_fp8_128", "few_rows"), make, size, rows={"x_TK": 0}, flops=2.0 * rows * outputs * inputs,
        peers={"cuBLAS bf16": cublas, **({"torch._scaled_mm": scaled} if rows >= MOST_TILED else {})}, most=12,
    )  # fmt: skip


def _entries() -> Iterator[Entry]:
    for contract, matrices in (("linear.matmul", MATRICES), ("linear.matmul_glu", GATED)):
        for name, (outputs, inputs) in matrices.items():
            for rows in ROWS:
                make = partial(_product, contract, rows, outputs, inputs)
                yield Entry(contract, "few_rows", f"fp8 M={rows} N={outputs} K={inputs} {name}", make)
    for name, (outputs, inputs) in (MATRICES | GATED).items():
        for rows in ROWS:
            make = partial(_rounded, rows, outputs, inputs)
            yield Entry("linear.matmul_fp8_128", "few_rows", f"M={rows} N={outputs} K={inputs} {name}", make)


def entries() -> Sequence[Entry]:
    """Everything this file measures."""
    return list(_entries())
