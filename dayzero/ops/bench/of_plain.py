"""Norms, rope, activations, residuals, sampling and products with few rows, at the sizes of a decode step and a prompt.

T tokens, H model width, B bank rows, V vocabulary, N output width, K input width. What reads and writes each number
once is held to the rate of a copy; of a handful of tokens, to the time of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import num_rotated
from dayzero.ops.bind import resolve
from dayzero.ops.catalog import CATALOG, REFERENCE
from dayzero.ops.contract import CONTRACTS, relative_l2

BF16, F32 = torch.bfloat16, torch.float32
Inputs = dict[str, Any]
Peer = Callable[..., object]
CHECKED_ROWS = 1024  # of a prompt: the reference works in f64


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Seeded by the order of calls; on the device."""
    return torch.randn(*shape, device="cuda", dtype=F32).to(dtype)


def prepared(
    names: tuple[str, str],
    make: Callable[[], Inputs],
    num_bytes: int,
    *,
    rows: Mapping[str, int],
    peers: Mapping[str, Peer] | None = None,
    flops: float = 0.0,
    most: int = 64,
) -> Prepared:
    """names: contract and variant. make: inputs of one call. rows: argument -> its dimension that counts tokens, of
    which the reference sees the first ``CHECKED_ROWS``; results count them along their first dimension."""
    contract, variant = names
    call, body = (resolve(CATALOG.lines[contract, v]) for v in (variant, REFERENCE))
    sets = [make() for _ in range(num_rotated(num_bytes, most))]
    first = sets[0]
    element = "bf16" if any(isinstance(v, Tensor) and v.dtype == BF16 for v in first.values()) else "f32"

    def check() -> dict[str, tuple[float, float]]:
        few = {
            k: v.narrow(rows[k], 0, min(CHECKED_ROWS, v.shape[rows[k]])) if k in rows else v for k, v in first.items()
        }
        gots, wants = call(**first), body(**few)
        pairs = list(zip(gots, wants)) if isinstance(wants, tuple) else [(gots, wants)]
        bound = CONTRACTS[contract].bound[element].value
        return {f"out {i}": (relative_l2(got[: len(want)], want), bound) for i, (got, want) in enumerate(pairs)}

    return Prepared(
        [partial(call, **one) for one in sets], check, num_bytes, {"bf16": flops} if flops else {},
        {name: [partial(peer, **one) for one in sets] for name, peer in (peers or {}).items()},
    )  # fmt: skip


def _norms() -> Iterator[Entry]:
    def rms(tokens: int, width: int) -> Prepared:
        peer = {"torch": lambda x, weight_D, eps, scale_in: F.rms_norm(x, (width,), weight_D, eps)}
        return prepared(
            ("norm.rms", "triton"),
            lambda: {"x": normal(tokens, width), "weight_D": normal(width), "eps": 1e-6, "scale_in": "dtype"},
            4 * tokens * width, rows={"x": 0}, peers=peer,
        )  # fmt: skip

    def add(tokens: int, width: int) -> Prepared:
        def apart(stream_TH: Tensor, out_TH: Tensor, weight_H: Tensor, eps: float, scale_in: str) -> Tensor:
            return F.rms_norm(stream_TH + out_TH, (width,), weight_H, eps)

        return prepared(
            ("residual.add_norm", "triton"),
            lambda: {
                "stream_TH": normal(tokens, width) * 8, "out_TH": normal(tokens, width), "weight_H": normal(width),
                "eps": 1e-6, "scale_in": "dtype",
            },
            8 * tokens * width, rows={"stream_TH": 0, "out_TH": 0}, peers={"torch apart": apart},
        )  # fmt: skip

    def heads(tokens: int, count: int, width: int) -> Prepared:
        return prepared(
            ("norm.rms_gated", "triton"),
            lambda: {
                "x": normal(tokens, count, width), "gate": normal(tokens, count, width), "act": "sigmoid",
                "weight_D": normal(width, dtype=F32), "eps": 1e-6,
            },
            6 * tokens * count * width, rows={"x": 0, "gate": 0},
        )  # fmt: skip

    for tokens in (1, 16, 256, 8192):
        for width in (4096, 7168):
            yield Entry("norm.rms", "triton", f"T={tokens} H={width}", partial(rms, tokens, width))
            yield Entry("residual.add_norm", "triton", f"T={tokens} H={width}", partial(add, tokens, width))
        yield Entry("norm.rms_gated", "triton", f"T={tokens} 32 heads of 128", partial(heads, tokens, 32, 128))
    yield Entry("norm.rms", "triton", "T=262144 H=128", partial(rms, 262144, 128))


def _others() -> Iterator[Entry]:
    def rope(tokens: int, heads: int, style: str) -> Prepared:
        def inputs() -> Inputs:
            freq = 1e6 ** (-torch.arange(64, device="cuda") / 64)
            return {
                "x_THD": normal(tokens, heads, 128), "positions": torch.arange(tokens, device="cuda") + 30_000,
                "inv_freq_F": freq, "style": style,
            }  # fmt: skip

        size = 4 * tokens * heads * 128
        return prepared(("rope.apply", "triton"), inputs, size, rows={"x_THD": 0, "positions": 0})

    def glu(tokens: int, width: int, options: Inputs) -> Prepared:
        def inputs() -> Inputs:  # halves of one product, as a block passes them
            gate, up = (normal(tokens, 2 * width) * 2).split(width, dim=-1)
            return {"gate_TI": gate, "up_TI": up, **options}

        peers = {"torch": lambda gate_TI, up_TI, **_: F.silu(gate_TI) * up_TI}
        size = 6 * tokens * width
        return prepared(("activation.glu", "triton"), inputs, size, rows={"gate_TI": 0, "up_TI": 0}, peers=peers)

    situ = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
    for tokens in (1, 16, 256, 8192):
        for style in ("half", "interleaved"):
            yield Entry("rope.apply", "triton", f"T={tokens} 32 heads {style}", partial(rope, tokens, 32, style))
        yield Entry("activation.glu", "triton", f"T={tokens} I=12288", partial(glu, tokens, 12288, {"kind": "silu"}))
        yield Entry("activation.glu", "triton", f"T={tokens} I=3072 situ", partial(glu, tokens, 3072, situ))


def _tokens() -> Iterator[Entry]:
    def greedy(rows: int, vocab: int) -> Prepared:
        return prepared(
            ("sample.greedy", "triton"), lambda: {"logits_TV": normal(rows, vocab, dtype=F32)}, 4 * rows * vocab,
            rows={"logits_TV": 0}, peers={"torch.argmax": lambda logits_TV: logits_TV.argmax(-1)},
        )  # fmt: skip

    def draw(rows: int, spread: float, options: tuple[int, float, float]) -> Prepared:
        def inputs() -> Inputs:
            one = torch.ones(rows, dtype=torch.float64, device="cuda")
            whole = one.long()
            return {
                "logits_SV": normal(rows, 151936, dtype=F32) * spread, "temperature_S": one,
                "top_k_S": whole * options[0], "top_p_S": one * options[1], "min_p_S": one * options[2],
                "seed_S": torch.arange(rows, device="cuda"), "index_S": whole,
            }  # fmt: skip

        def sorted_whole(logits_SV: Tensor, top_p_S: Tensor, **_: Tensor) -> Tensor:
            values, ids = logits_SV.softmax(-1).sort(-1, descending=True)
            kept = values * (values.cumsum(-1) - values < top_p_S[:, None])
            return ids.gather(-1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

        names = ("logits_SV", "temperature_S", "top_k_S", "top_p_S", "min_p_S", "seed_S", "index_S")
        return prepared(
            ("sample.draw", "block_per_row"), inputs, 4 * rows * 151936, rows=dict.fromkeys(names, 0),
            peers={"torch sort": sorted_whole},
        )  # fmt: skip

    def embed(tokens: int, width: int) -> Prepared:
        table = normal(151936, width)
        return prepared(
            ("embed.lookup", "triton"),
            lambda: {"ids_T": torch.randint(0, 151936, (tokens,), device="cuda"), "table_VH": table},
            4 * tokens * width, rows={"ids_T": 0},
        )  # fmt: skip

    for rows, vocab in ((1, 151936), (1, 262144), (16, 151936), (256, 151936)):
        yield Entry("sample.greedy", "triton", f"T={rows} V={vocab}", partial(greedy, rows, vocab))
    filters = {"none": (0, 1.0, 0.0), "top-k 50, top-p 0.95": (50, 0.95, 0.0), "top-p 0.95": (0, 0.95, 0.0)}
    for rows in (1, 16, 256):
        for word, options in filters.items():
            yield Entry("sample.draw", "block_per_row", f"T={rows} V=151936 {word}", partial(draw, rows, 2.5, options))
    yield Entry("embed.lookup", "triton", "T=8192 H=4096", partial(embed, 8192, 4096))


def _depth() -> Iterator[Entry]:
    def mix(contract: str, tokens: int, bank: int) -> Prepared:
        width = 7168

        def inputs() -> Inputs:
            out = {
                "partial_TH": normal(tokens, width), "bank_BTH": normal(bank, tokens, width) * 3,
                "norm_weight_H": 1 + normal(width) / 8, "proj_weight_H": normal(1, width) / 64, "eps": 1e-5,
            }  # fmt: skip
            return out if contract == "residual.attn_mix" else out | {"weight_H": normal(width), "scale_in": "dtype"}

        size = 2 * (bank + 2) * tokens * width
        return prepared((contract, "triton"), inputs, size, rows={"partial_TH": 0, "bank_BTH": 1})

    for contract in ("residual.attn_mix", "residual.attn_mix_norm"):
        for tokens, bank in ((1, 8), (16, 8), (256, 8), (8192, 1), (8192, 4), (8192, 8)):
            yield Entry(contract, "triton", f"T={tokens} B={bank} H=7168", partial(mix, contract, tokens, bank))


def _products() -> Iterator[Entry]:
    def product(contract: str, variant: str, rows: int, outputs: int, inputs: int) -> Prepared:
        size = 2 * (outputs * inputs + rows * (inputs + outputs))
        return prepared(
            (contract, variant),
            lambda: {"x_TK": normal(rows, inputs), "w_NK": normal(outputs, inputs) / inputs**0.5}, size,
            rows={"x_TK": 0}, peers={"F.linear": lambda x_TK, w_NK: F.linear(x_TK, w_NK)},
            flops=2.0 * rows * outputs * inputs, most=24,
        )  # fmt: skip

    dense = ((4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (2304, 4096), (4608, 2304))
    for outputs, inputs in dense:
        for rows in (1, 4, 8):
            make = partial(product, "linear.matmul", "few_rows", rows, outputs, inputs)
            yield Entry("linear.matmul", "few_rows", f"M={rows} N={outputs} K={inputs}", make)
    wide = ((1, 151936, 4096), (8, 151936, 4096), (1, 163840, 2304), (1, 256, 2304), (1, 384, 7168))
    for rows, outputs, inputs in wide:
        make = partial(product, "linear.matmul_f32", "few_rows", rows, outputs, inputs)
        yield Entry("linear.matmul_f32", "few_rows", f"M={rows} N={outputs} K={inputs}", make)
    for rows, outputs, inputs in ((8192, 256, 2304), (8192, 384, 7168)):
        make = partial(product, "linear.matmul_f32", "torch_cuda", rows, outputs, inputs)
        yield Entry("linear.matmul_f32", "torch_cuda", f"M={rows} N={outputs} K={inputs}", make)


def entries() -> Sequence[Entry]:
    """Everything this file measures."""
    return [*_norms(), *_others(), *_tokens(), *_depth(), *_products()]
