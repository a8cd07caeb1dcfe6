"""Ways to launch products with weights in 8 bits, each checked and then timed by turns.

    python3 sweep.py few|tiles|meet|rounded [N,K ...]

From the repository's root. few: settings of the kernel for few rows; tiles: those of the tiles; meet: tiles against the
library, where the two meet; rounded: inputs in 8 bits too. N,K: shapes of weights; else all of the benchmark.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from dayzero.decl import Fp8Blocks
from dayzero.errors import MachineError
from dayzero.ops.bench.of_linear_fp8 import GATED, MATRICES, weight_of
from dayzero.ops.bench.timing import Time, measured, num_rotated
from dayzero.ops.contract import relative_l2
from dayzero.ops.cuda import linear, linear_fp8
from dayzero.ops.cuda.linear import Setting as Few
from dayzero.ops.linear import matmul
from dayzero.ops.linear_rounded import matmul_fp8_128
from dayzero.ops.triton.experts_fp8 import quantise
from dayzero.ops.triton.linear_fp8 import Rounded, Setting, product, setting

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BYTES_A_SECOND, PROCESSORS = 4.2e12, 132
MOST_ERROR = 8e-3
CHECKED = 32  # rows that are compared
MOST_SETTINGS = 24

Size = tuple[int, int]
Call = Callable[[Tensor, Fp8Blocks], Tensor]
Bound = list[Callable[[], Tensor]]
Sets = Sequence[tuple[Tensor, Fp8Blocks]]


def sets_of(size: Size, rows: int, most: int = 8) -> Sets:
    count = min(most, num_rotated(size[0] * size[1], 8))
    return [(torch.randn(rows, size[1], device="cuda", dtype=BF16), weight_of(*size)) for _ in range(count)]


def right(sides: Mapping[str, Call], sets: Sets, references: Mapping[str, Call]) -> dict[str, Bound]:
    """The calls of what gives the reference's numbers; what does not, or does not fit the machine, is told."""
    x, weight = sets[0]
    wanted = {name: reference(x[:CHECKED], weight) for name, reference in references.items()}
    good = {}
    for name, call in sides.items():
        try:
            error = relative_l2(call(x, weight)[:CHECKED].float(), wanted.get(name, wanted[""]).float())
        except (MachineError, TritonError, RuntimeError) as failure:  # more shared memory or registers than there are
            print(f"   FAILED {name}: {type(failure).__name__}: {' '.join(str(failure).split())[:160]}", flush=True)
            continue
        if error > MOST_ERROR:
            print(f"   WRONG {name}: {error:.2e}", flush=True)
        else:
            good[name] = [partial(call, *one) for one in sets]
    return good


def timed(good: Mapping[str, Bound]) -> list[tuple[str, Time]]:
    """The fastest first."""
    return sorted(measured(good, rounds=5, least_seconds=0.004).items(), key=lambda one: one[1].seconds)


def tell(what: str, rows: int, size: Size, sides: Mapping[str, Call], sets: Sets) -> None:
    outputs, inputs = size
    times = timed(right(sides, sets, {"": matmul.body}))
    now = [name for name, _ in times[8:] if name.startswith("now")]
    floor = (outputs * inputs + 2 * rows * (outputs + inputs)) / BYTES_A_SECOND
    shown = [f"{name} {time.seconds * 1e6:.1f}" for place, (name, time) in enumerate(times) if place < 8 or name in now]
    print(f"{what} T={rows} N={outputs} K={inputs} floor {floor * 1e6:.1f} us: {', '.join(shown)}", flush=True)


def named(chosen: tuple[int, ...], now: tuple[int, ...]) -> str:
    return ("now " if chosen == now else "") + ".".join(map(str, chosen))


def tiled(x: Tensor, weight: Fp8Blocks, how: Setting | None = None) -> Tensor:
    return product(x, weight, None, BF16, how)


def by_few(x: Tensor, weight: Fp8Blocks, how: Few) -> Tensor:
    return linear._few(x, weight, None, BF16, how)


def few(size: Size) -> None:
    for rows in (1, 4, 8, 16):
        now = linear._of_fp8(rows, *size)
        settings = {now} | {
            Few(warps, tiles, unroll, stages)
            for warps, tiles, unroll, stages in itertools.product((8, 16), (1, 2), (1, 2), (3, 4, 6))
            if warps * tiles * unroll * stages * 1024 <= 200 * 1024 and not (warps == 16 and tiles == 2 and rows > 8)
        }
        sides: dict[str, Call] = {named(how, now): partial(by_few, how=how) for how in sorted(settings)}
        tell("few", rows, size, {**sides, "tiles": tiled}, sets_of(size, rows))


def tiles(size: Size) -> None:
    outputs, inputs = size
    blocks = -(-inputs // 128)

    def sensible(high: int, split: int, warps: int, width: int, rows: int) -> bool:
        empty = -(-blocks // -(-blocks // split)) != split
        programs = -(-outputs // high) * -(-rows // width) * split
        return not (empty or (high == 64 and warps == 8)) and split <= blocks // 2 and programs <= 5 * PROCESSORS

    for rows in (16, 32, 64, 128, 256):
        now, width = setting(rows, *size, PROCESSORS), min(128, max(16, rows))
        settings = [
            Setting(width, high, split, warps, stages)
            for high, split, warps, stages in itertools.product((64, 128), (1, 2, 3, 4, 6, 8), (4, 8), (3, 4))
            if sensible(high, split, warps, width, rows)
        ]
        chosen = sorted({*settings[:: -(-len(settings) // MOST_SETTINGS) or 1], now})
        tell("tiles", rows, size, {named(how, now): partial(tiled, how=how) for how in chosen}, sets_of(size, rows))


def meet(size: Size) -> None:
    for rows in (96, 128, 192, 256, 384, 512, 1024):
        tell("meet", rows, size, {"tiles": tiled, "library": linear_fp8.by_library}, sets_of(size, rows, 2))


def in_8_bits(x: Tensor, weight: Fp8Blocks, how: Setting | None = None) -> Tensor:
    return product(Rounded(*quantise(x, E4M3)), weight, None, BF16, how)


def as_bf16(x: Tensor, weight: Fp8Blocks) -> Tensor:
    return product(Rounded(*quantise(x)), weight, None, BF16)


def scaled_mm(x: Tensor, weight: Fp8Blocks) -> Tensor:
    codes, scales = quantise(x, E4M3)
    rows = scales[:, : len(x)].contiguous().T
    return torch._scaled_mm(codes, weight.codes.T, rows, weight.scales.T, out_dtype=BF16)


def rounded(size: Size) -> None:
    for rows in (16, 64, 128, 256, 1024, 8192):
        sides: dict[str, Call] = {
            "8 bits": in_8_bits,
            "8 bits, 4 stages": partial(in_8_bits, how=Setting(128, 128, 1, 8, 4)),
            "scaled_mm": scaled_mm,
            "library bf16": linear_fp8.by_library,  # of inputs that are not rounded
        } | ({"bf16 tiles": as_bf16} if rows <= 256 else {})
        sets = sets_of(size, rows, 2)
        times = timed(right(sides, sets, {"": matmul_fp8_128.body, "library bf16": matmul.body}))
        done = 2 * rows * size[0] * size[1]
        shown = [f"{name} {time.seconds * 1e6:.1f} us {done / time.seconds / 1e12:.0f} TF" for name, time in times]
        print(f"rounded T={rows} N={size[0]} K={size[1]}: {', '.join(shown)}", flush=True)


WAYS: Mapping[str, Callable[[Size], None]] = {"few": few, "tiles": tiles, "meet": meet, "rounded": rounded}


def size_of(text: str) -> Size:
    outputs, inputs = map(int, text.split(","))
    return outputs, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("sizes", nargs="*", type=size_of, metavar="N,K")
    given = parser.parse_args()
    sizes: Iterable[Size] = given.sizes or [*MATRICES.values(), *GATED.values()]
    for size in sizes:
        WAYS[given.what](size)


if __name__ == "__main__":
    main()
