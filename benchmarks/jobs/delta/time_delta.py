"""Long prompts of ``recurrence.paged``: the default, NORM and APART by turns, whole and by launch.

    python3 time_delta.py [--try]

From the repository's root. Beside them: the same work in stretches on two streams, and with --try other tile sizes of
the two Triton kernels. JSON in $JOB_OUT/delta.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dayzero.ops.contract import relative_l2
from dayzero.ops.cuda import delta_chunk
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton import delta_chunk_run, delta_prefill
from dayzero.view import Span

WIDTH, TAPS, EPS = 128, 4, 1e-5
SHAPES = ((8192, 32, None), (32768, 96, -5.0), (32768, 32, None), (4096, 96, -5.0), (8192, 12, -5.0))
STRETCHES = (1024, 2048, 4096, 8192)
SIDES = {"default": "", "norm_inside": "NORM", "apart": "APART"}
MOVED = {"convolve": 6, "local": 7, "scan": 6, "norm": 3}  # times all heads of a token in bf16, read or written

Given = tuple[Raw, Weights, Kept]


def inputs(tokens: int, heads: int) -> Given:
    """q, k, v, beta in the rows of one product, as the engine has them; z and gate packed; decays of trained models."""
    made = torch.Generator("cuda").manual_seed(tokens + heads)
    channels, f32 = heads * WIDTH, torch.float32

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, generator=made, device="cuda", dtype=dtype)

    widths = [channels, channels, channels, 256, heads]
    q, k, v, _, beta = normal(tokens, sum(widths)).split(widths, dim=1)
    rates = torch.log(1 + 15 * torch.rand(heads, generator=made, device="cuda"))
    raw = Raw(q, k, v, normal(tokens, heads, WIDTH), beta, normal(tokens, channels))
    taps = [normal(channels, TAPS, dtype=f32) / 2 for _ in range(3)]
    weights = Weights(*taps, rates, normal(heads, WIDTH, dtype=f32) - 3, torch.ones(WIDTH, device="cuda"))
    windows = [torch.zeros(1, channels, TAPS - 1, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    ints = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0], [0, tokens], [0])]
    kept = Kept(torch.zeros(1, heads, WIDTH, WIDTH, device="cuda"), *windows, *ints, (Span(0, 0, tokens, 0),))
    return raw, weights, kept


def choose(word: str) -> None:
    for name in delta_chunk.TRIED:
        delta_chunk.TRIED[name] = int(name == word)


def run(given: Given, lower: float | None, word: str = "") -> Tensor:
    choose(word)
    raw, weights, kept = given
    out_THV = raw.v_TC.new_empty(raw.v_TC.shape[0], kept.state_NHKV.shape[1], WIDTH)
    delta_chunk.prefill(out_THV, raw, weights, kept, 0, eps=EPS, act="sigmoid", lower=lower)
    return out_THV


class Stretches:
    """A row in stretches, convolve and local of one beside the scan of the one before, on two streams. To the same
    bits, since stretches end where chunks do."""

    def __init__(self, given: Given, lower: float | None, length: int, word: str) -> None:
        self.given, self.lower, self.word = given, lower, word
        self.beside, self.parts = torch.cuda.Stream(), []
        raw, _, kept = given
        tokens = raw.v_TC.shape[0]
        for first in range(0, tokens, length):
            count = min(length, tokens - first)
            part = Raw(*(getattr(raw, name)[first : first + count] for name in Raw.__slots__))
            ints = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, count], [first])]
            pools = (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS, kept.table_R)
            self.parts.append((slice(first, first + count), part, Kept(*pools, *ints, (Span(0, 0, count, first),))))

    def __call__(self) -> Tensor:
        choose(self.word)
        raw, weights, kept = self.given
        out_THV = raw.v_TC.new_empty(raw.v_TC.shape[0], kept.state_NHKV.shape[1], WIDTH)
        main, held = torch.cuda.current_stream(), []
        gate = delta_chunk_run.Gate(weights.a_log_H, weights.dt_bias, self.lower)
        self.beside.wait_stream(main)
        for tokens, part, own in self.parts:
            rows = delta_prefill._rows_of(own, 0)
            q, k, v = delta_prefill._convolved(part, weights, own, rows)
            sizes = delta_chunk_run.Sizes.of(q, k, v, part.z)
            tiles = delta_chunk.CUDA.local(q, k, part.z, part.beta_TH, sizes, rows.num_chunks, gate, rows)
            ready = main.record_event()
            held.append((q, k, v, tiles, rows))  # until both streams have met
            with torch.cuda.stream(self.beside):
                self.beside.wait_event(ready)
                finish = delta_chunk_run.Finish(part.gate_TC, weights.norm_V, EPS, False, 0)
                delta_chunk.CUDA.run_rows(tiles, v, out_THV[tokens], kept.state_NHKV, sizes, rows, finish)
        main.wait_stream(self.beside)
        return out_THV


def microseconds(call: Callable[[], Any], rounds: int = 10) -> float:
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def launches(call: Callable[[], Any], rounds: int = 5) -> dict[str, list[float]]:
    """us a call and launches a call of each kernel, by the device's clock."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:60]][0] += event.device_time_total / rounds
            found[event.name[:60]][1] += 1 / rounds
    return {name: [round(x, 2) for x in pair] for name, pair in sorted(found.items(), key=lambda one: -one[1][0])}


def host_microseconds(call: Callable[[], Any], rounds: int = 10) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        call()
    took = (time.perf_counter() - begin) / rounds * 1e6
    torch.cuda.synchronize()
    return took


def tile_sizes(given: Given, lower: float | None) -> dict[str, float]:
    """Other sizes of the two Triton kernels: the kernel's own us."""
    found = {}
    for module, name, kernel, values in (
        (delta_prefill, "_CHANNELS_AT_ONCE", "convolve", (256, 512, 1024)),
        (delta_prefill, "_CONVOLVE_REGISTERS", "convolve", (64, 72, 80, 96)),
        (delta_chunk_run, "_TOKENS_AT_ONCE", "norm_gate", (1, 2, 4)),
    ):
        before = getattr(module, name)
        for value in values:
            setattr(module, name, value)
            run(given, lower)
            by_name = launches(partial(run, given, lower), 3)
            found[f"{name}={value}"] = sum(us for key, (us, _) in by_name.items() if kernel in key)
        setattr(module, name, before)
    return found


def two_streams(given: Given, lower: float | None, want: Tensor) -> dict[str, list[Any]]:
    """Whether stretches of so many tokens have the bits of ``want``, and their us."""
    found: dict[str, list[Any]] = {}
    for length in (length for length in STRETCHES if length < len(want)):
        for word in ("", "APART"):
            one = Stretches(given, lower, length, word)
            found[f"{length} {word}".strip()] = [torch.equal(one(), want), round(microseconds(one), 1)]
    return found


def measure(tokens: int, heads: int, lower: float | None, bytes_a_second: float, tiles: bool) -> dict[str, Any]:
    given = inputs(tokens, heads)
    calls = {side: partial(run, given, lower, word) for side, word in SIDES.items()}
    want = calls["default"]()
    unit = tokens * heads * WIDTH * 2
    row: dict[str, Any] = {
        "norm_inside_error": relative_l2(calls["norm_inside"]().float(), want.float()),
        "apart_equal": torch.equal(calls["apart"](), want),
        "two_streams_equal_us": two_streams(given, lower, want),
        "floor_us": {name: round(times * unit / bytes_a_second * 1e6, 1) for name, times in MOVED.items()},
    }
    for side in (*calls, *reversed(calls), *calls):
        row.setdefault(f"{side}_us", []).append(round(microseconds(calls[side]), 1))
    for side, call in calls.items():
        row[f"{side}_host_us"] = round(host_microseconds(call), 1)
        row[f"{side}_launches"] = launches(call)
    if tiles:
        row["tile_sizes_us"] = tile_sizes(given, lower)
    return row


def wrong(row: Mapping[str, Any]) -> bool:
    apart = all(equal for equal, _ in row["two_streams_equal_us"].values())
    return not (row["apart_equal"] and apart and row["norm_inside_error"] < 2**-8)  # a bf16 number rounded once more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tiles", action="store_true", help="other tile sizes of the Triton kernels too")
    given = parser.parse_args()
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    bytes_a_second = 2 * big.numel() / (microseconds(partial(other.copy_, big)) * 1e-6)
    del big, other
    print(f"copy {bytes_a_second / 1e9:.0f} GB/s")
    record: dict[str, Any] = {"copy_bytes_a_second": bytes_a_second}
    bad = False
    for tokens, heads, lower in SHAPES:
        name = f"T={tokens} H={heads} {'softplus' if lower is None else 'bounded'}"
        record[name] = measure(tokens, heads, lower, bytes_a_second, given.tiles)
        bad |= wrong(record[name])
        Path(os.environ.get("JOB_OUT", "."), "delta.json").write_text(json.dumps(record, indent=1))
        print(name, json.dumps(record[name], indent=1), flush=True)
        torch.cuda.empty_cache()
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
