"""Routed experts of few tokens: Triton against CUDA by turns in CUDA graphs, then settings of the CUDA kernels.

Each call of a graph chooses experts of its own, at random, in stacks that are whole; so L2 holds nothing of use. With
``behind a router`` each call has ``moe.matmul_route`` ahead, as a step has; times of the router alone stand beside it.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from dayzero.decl import Fp8Blocks, Mxfp4
from dayzero.ops.bench.timing import ceilings, measured
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.cuda import experts_few as few
from dayzero.ops.cuda import experts_few_tiles as tiles
from dayzero.ops.moe import experts as reference
from dayzero.ops.router import Choosing
from dayzero.ops.triton import experts as triton_experts
from dayzero.ops.triton.router import matmul_route

SILU = {"kind": "silu"}
SITU = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
CLAMPED = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}
SHAPES = {  # experts, chosen, width, inner, activation, biases, bits of codes (0: plain)
    "kimi_linear": (256, 8, 2304, 1024, SILU, False, 0),
    "qwen3_30b": (128, 8, 2048, 768, SILU, False, 0),
    "gpt_oss_bf16": (32, 4, 2880, 2880, CLAMPED, True, 0),
    "gpt_oss_4_bits": (32, 4, 2880, 2880, CLAMPED, True, 4),
    "kimi_k3_4_bits": (224, 16, 3584, 3072, SITU, False, 4),
    "deepseek_8_bits": (64, 8, 7168, 2048, SILU, False, 8),
}
CALLS = 8
BOUND = CONTRACTS["moe.experts"].bound["bf16"].value
CHOOSING = ("sigmoid", (1, 1), True, 2.5, 1e-20)


class Layer:
    def __init__(self, name: str) -> None:
        self.num, self.chosen, self.width, self.inner, self.activation, biased, self.bits = SHAPES[name]
        g = torch.Generator("cuda").manual_seed(1)
        shapes = ((self.inner, self.width), (self.inner, self.width), (self.width, self.inner))
        self.stored = [self._stack(g, *shape) for shape in shapes]
        self.stacks = [triton_experts.pack(stack) for stack in self.stored]
        self.biases = None
        if biased:
            self.biases = tuple(torch.randn(self.num, s[0], generator=g, device="cuda").bfloat16() for s in shapes)
        self.router = (torch.randn(self.num, self.width, generator=g, device="cuda") / self.width**0.5).bfloat16()
        self.g = g

    def _stack(self, g, rows: int, columns: int):
        """Experts drawn one by one, as they are stored."""
        if self.bits == 4:
            shape, groups = (self.num, rows, columns // 2), (self.num, rows, columns // 32)
            codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8, device="cuda")
            return Mxfp4(codes, torch.randint(115, 120, groups, generator=g, dtype=torch.uint8, device="cuda"))
        dtype = torch.float8_e4m3fn if self.bits else torch.bfloat16
        stack = torch.empty(self.num, rows, columns, dtype=dtype, device="cuda")
        for one in stack:
            wide = torch.randn(rows, columns, generator=g, device="cuda")
            one.copy_((wide * 100).clamp(-448, 448) if self.bits else wide / columns**0.5)
        if not self.bits:
            return stack
        blocks = self.num, -(-rows // 128), -(-columns // 128)
        return Fp8Blocks(stack, (torch.rand(blocks, generator=g, device="cuda") + 0.5) / (100 * columns**0.5))

    def rows(self, tokens: int):
        x = torch.randn(tokens, self.width, generator=self.g, device="cuda").bfloat16()
        ids = torch.rand(tokens, self.num, generator=self.g, device="cuda").argsort(-1)[:, : self.chosen]
        return x, ids, torch.rand(tokens, self.chosen, generator=self.g, device="cuda")

    def num_bytes(self, distinct: int) -> int:
        return distinct * sum(stack.nbytes for stack in self.stacks) // self.num


def check(layer: Layer, given) -> None:
    want = reference.body(*given, *layer.stored, layer.activation, layer.biases)
    for module in (few, triton_experts):
        error = relative_l2(module.experts(*given, *layer.stacks, layer.activation, layer.biases), want)
        assert error <= BOUND, (module.__name__, error)


def turns(layer: Layer, ceiling: float, tokens: int) -> dict:
    sets = [layer.rows(tokens) for _ in range(CALLS)]
    check(layer, sets[0])
    rest = (*layer.stacks, layer.activation, layer.biases)
    choosing = Choosing(layer.chosen, *CHOOSING)

    def routed(module, x):
        return module.experts(x, *matmul_route(x, layer.router, choosing=choosing), *rest)

    sides = {
        "triton": [partial(triton_experts.experts, *one, *rest) for one in sets],
        "cuda": [partial(few.experts, *one, *rest) for one in sets],
        "router": [partial(matmul_route, one[0], layer.router, choosing=choosing) for one in sets],
        "router + triton": [partial(routed, triton_experts, one[0]) for one in sets],
        "router + cuda": [partial(routed, few, one[0]) for one in sets],
    }
    found = {name: time.seconds * 1e6 for name, time in measured(sides).items()}
    floor = sum(layer.num_bytes(len(one[1].unique())) for one in sets) / CALLS / ceiling * 1e6
    return {"tokens": tokens, "floor": floor, **found}


FIRST = [few.Launch(*one) for one in (
    (8, 6, 2), (8, 6, 1), (8, 5, 2), (8, 4, 1), (8, 4, 2), (8, 8, 2), (8, 9, 4), (8, 12, 4), (4, 6, 1), (4, 6, 2),
    (4, 8, 2), (4, 12, 4), (16, 4, 1), (16, 6, 1), (16, 6, 2), (4, 10, 1), (8, 10, 1),
)]  # fmt: skip
SECOND = [few.Launch(*one) for one in (
    (8, 8, 6), (8, 4, 2), (8, 5, 2), (8, 6, 2), (8, 6, 4), (8, 8, 4), (8, 9, 6), (8, 8, 8), (8, 12, 8), (8, 12, 10),
    (8, 16, 18), (8, 24, 18), (8, 24, 16), (4, 8, 2), (4, 12, 4), (16, 4, 4), (16, 6, 6), (16, 12, 18), (8, 8, 12),
)]  # fmt: skip


RINGS = {  # warps, stages; of gate and up, and of down
    4: ([(8, 3), (8, 2), (8, 4), (4, 3), (4, 4), (4, 6), (16, 2), (16, 3)],
        [(8, 5), (8, 3), (8, 4), (8, 6), (8, 8), (4, 4), (4, 6), (4, 8), (16, 3), (16, 4)]),
    8: ([(8, 3), (8, 2), (8, 4), (4, 3), (4, 4), (4, 6), (16, 2), (16, 3)],
        [(8, 4), (8, 3), (8, 6), (8, 8), (4, 4), (4, 6), (4, 8), (16, 3), (16, 4)]),
}  # fmt: skip
NAMES = ("gate_up", "down_sum")


def ways(layer: Layer):
    """(default, choices of both launches, the function of rows and a pair of those, its module)."""
    rest = (tuple(layer.stacks), layer.activation, layer.biases)
    if layer.bits:
        first, second = ([tiles.Ring(*one) for one in some] for some in RINGS[layer.bits])
        return tiles.RINGS[layer.bits], (first, second), lambda rows, how: tiles.few_tiles(rows, *rest, how), tiles
    base = few.launches_of(layer.chosen, layer.width, layer.inner, 132)
    choices = tuple([base[i], *(one for one in some if one != base[i])] for i, some in enumerate((FIRST, SECOND)))
    return base, choices, lambda rows, how: few.few(rows, *rest, how), few


def sweep(layer: Layer, tokens: int = 1) -> dict:
    """Each launch by itself, the other not launched, and both together with the best of each."""
    sets = [layer.rows(tokens) for _ in range(CALLS)]
    base, choices, call, module = ways(layer)
    want = call(sets[0], base)
    found: dict[str, dict[str, float]] = {}
    kernel_of, best = module._kernel, list(base)

    def only(name: str):
        return lambda asked, *more: kernel_of(asked, *more) if asked == name else (lambda *a, **k: None)

    for part, name in enumerate(NAMES):
        hows = {one: tuple(one if i == part else base[i] for i in range(2)) for one in choices[part]}
        for one, how in hows.items():
            # Warps share an expert's columns where stacks are packed, so their number is in the order of the sums.
            assert relative_l2(call(sets[0], how), want) <= 2.0**-8, one
            assert layer.bits or torch.equal(call(sets[0], how), want), one
        sides = {str(tuple(one)): [partial(call, given, how) for given in sets] for one, how in hows.items()}
        module._kernel = only(name)
        found[name] = {key: time.seconds * 1e6 for key, time in measured(sides, rounds=7).items()}
        module._kernel = kernel_of
        best[part] = min(hows, key=lambda one: found[name][str(tuple(one))])
    hows = {"default": base, "best of each": tuple(best), "best first": (best[0], base[1])}
    sides = {name: [partial(call, given, how) for given in sets] for name, how in hows.items()}
    found["both"] = {key: time.seconds * 1e6 for key, time in measured(sides).items()}
    capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    alone = measured({"default": sides["default"]})
    found["both, launches not overlapped"] = {key: time.seconds * 1e6 for key, time in alone.items()}
    torch.cuda.is_current_stream_capturing = capturing
    return found


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "both"
    names = sys.argv[2:] or list(SHAPES)
    ceiling = ceilings()["copy"]
    told: dict = {"copy": ceiling, "device": torch.cuda.get_device_name()}
    print(f"copy {ceiling / 1e9:.0f} GB/s, times in us")
    out = Path(os.environ.get("JOB_OUT", "."), "experts_few.json")
    for name in names:
        layer = Layer(name)
        for tokens in (1, 2, 4) if what in ("turns", "both") else ():
            row = turns(layer, ceiling, tokens)
            told.setdefault(name, []).append(row)
            print(f"{name} T={tokens}", " | ".join(f"{k} {v:.1f}" for k, v in row.items() if k != "tokens"), flush=True)
            out.write_text(json.dumps(told, indent=1))
        for tokens in ((1, 4) if name == "kimi_linear" else (1,)) if what in ("sweep", "both") else ():
            found = told[f"{name} settings T={tokens}"] = sweep(layer, tokens)
            for part, values in found.items():
                ordered = sorted(values.items(), key=lambda item: item[1])
                print(f"{name} T={tokens} {part}", " | ".join(f"{k}: {v:.1f}" for k, v in ordered), flush=True)
            out.write_text(json.dumps(told, indent=1))
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
