"""Default against candidate, by turns in one run, each behind its check.

    python3 compare.py [GROUP ...]

From the repository's root. GROUPS: index, sparse, latent, delta, decode; else all. A line for each side; JSON in
$JOB_OUT/kernels.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dayzero.errors import MachineError
from dayzero.ops.bench import of_attention, of_delta_decode, of_sparse_attention, of_sparse_index
from dayzero.ops.bench.entry import Prepared
from dayzero.ops.bench.timing import ceilings, measured
from dayzero.ops.cuda import delta_decode, paged_decode, sparse_index, top_k
from dayzero.ops.cuda.build import compiled_with
from dayzero.ops.cuda.latent_decode import latent

Sides = Mapping[str, Callable[[], Any]]
FOUND: dict[str, Any] = {}


@contextlib.contextmanager
def having(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes, or keys of a dictionary, for as long."""
    get = owner.get if isinstance(owner, dict) else partial(getattr, owner)
    put = owner.__setitem__ if isinstance(owner, dict) else partial(setattr, owner)
    before = {name: get(name) for name in values}
    try:
        for name, value in values.items():
            put(name, value)
        yield
    finally:
        for name, value in before.items():
            put(name, value)


def under(settings: Callable[[], Any], call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with settings():
            return call()

    return run


def bits(x: Any) -> list[torch.Tensor]:
    return [t.nan_to_num() if t.is_floating_point() else t.clone() for t in (x if isinstance(x, tuple) else (x,))]


def compare(
    name: str, prepared: Prepared, sides: Sides, *, equal: Sequence[str] = (), more: Mapping[str, Any] = {}
) -> None:
    """equal: sides whose results have to have the default's bits. more: other calls that are timed beside."""
    began, good = time.monotonic(), {"default": contextlib.nullcontext}
    wrong = {k: e for k, (e, bound) in prepared.check().items() if not e <= bound}
    if wrong:
        print(f"{name}: WRONG as it is: {wrong}", flush=True)
        return
    want = bits(prepared.calls[0]())
    for side, settings in sides.items():
        try:
            with settings():
                errors = {} if side in equal else prepared.check()
                wrong = {k: e for k, (e, bound) in errors.items() if not e <= bound}
                same = side not in equal or all(map(torch.equal, want, bits(prepared.calls[0]())))
        except (MachineError, RuntimeError) as error:  # a candidate that does not run ends no other
            print(f"   {side:<24} DOES NOT RUN: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if wrong or not same:
            print(f"   {side:<24} WRONG: {wrong}{'' if same else ' other bits'}", flush=True)
        else:
            good[side] = settings
    times = measured({**{s: [under(settings, c) for c in prepared.calls] for s, settings in good.items()}, **more})
    base, floor = times["default"].seconds, prepared.floor(CEILING)
    print(f"{name}: floor {floor * 1e6:.1f} us  [{time.monotonic() - began:.0f} s]", flush=True)
    for side, t in times.items():
        print(
            f"   {side:<24} {t.seconds * 1e6:9.2f} us ±{t.spread * 1e6:.2f}  {t.seconds / base - 1:+7.1%}", flush=True
        )
    FOUND[name] = {s: [t.seconds, t.spread] for s, t in times.items()} | {"floor": floor}
    torch.cuda.empty_cache()


def index() -> None:
    sides: dict[str, Any] = {
        "fine": lambda: having(top_k, FINE=1),
        "maxima": lambda: having(sparse_index, MAXIMA=True),
        "maxima, fine": lambda: both(having(sparse_index, MAXIMA=True), having(top_k, FINE=1)),
    }
    for rows, length in ((16, 131_072), (1, 1_048_576), (1, 131_072)):
        sets = of_sparse_index._sets("idx_fp8_128", rows, 1, length)
        prepared = of_sparse_index._prepared("cuda", "idx_fp8_128", rows, 1, length)
        prepared = Prepared(prepared.calls, prepared.check, prepared.num_bytes, prepared.flops)
        scores = torch.empty(rows, length, device="cuda")
        alone = [
            partial(sparse_index.score_queries, one["q_THD"], one["weights_TH"], one["keys"], scores,
                    scale=one["scale"], first_query=0)
            for one in sets
        ]  # fmt: skip
        alone[0]()
        lists = torch.empty(rows, of_sparse_index.K, dtype=torch.int64, device="cuda")
        places = top_k.Queries(query_start=sets[0]["keys"].query_start, start=sets[0]["keys"].start)
        choice = partial(top_k.choose, scores, lists, places)
        more = {
            "scores alone": alone,
            "choice alone": [choice] * 4,
            "choice alone, fine": [under(sides["fine"], choice)] * 4,
        }
        compare(f"index B={rows} L={length}", prepared, sides, equal=tuple(sides), more=more)


def sparse() -> None:
    sides = {"widen once": lambda: compiled_with("-DWIDEN_ONCE=1")}
    for rows in (16, 1, 64, 256):
        shape = ("decode", rows, 128, "mla_fp8_656")
        compare(f"sparse B={rows}", of_sparse_attention._prepare("cuda_by_load", shape), sides, equal=tuple(sides))


def latent_dense() -> None:
    for rows in (1, 16, 64):
        keys = of_sparse_attention.pool(rows, 8192, "mla_fp8_656")
        q = torch.randn(rows, 128, 576, device="cuda").bfloat16()
        call = partial(latent, q, keys, scale=192**-0.5)
        prepared = Prepared([call] * 2, dict, rows * 8192 * 656, {"bf16": 2.0 * rows * 8192 * 128 * 1088})
        sides = {"widen once": lambda: compiled_with("-DWIDEN_ONCE=1")}
        compare(f"latent decode, coded, B={rows} L=8192", prepared, sides, equal=tuple(sides))


def delta() -> None:
    def tried(**values: int) -> Callable[[], Any]:
        return lambda: having(delta_decode.TRIED, **values)

    sides = {"stream": tried(STREAM=1), "16 warps": tried(RULE_WARPS=16), "both": tried(STREAM=1, RULE_WARPS=16)}
    for rows in (1, 4, 16, 64):
        prepared = of_delta_decode._prepare(of_delta_decode.Shape(rows, 96, 96, lower=-5.0), "cuda")
        compare(f"delta B={rows}", Prepared(prepared.calls, prepared.check, prepared.num_bytes), sides)


def decode() -> None:
    def tried(**values: int) -> Callable[[], Any]:
        return lambda: having(paged_decode.TRIED, **values)

    sides = {
        "nearest": tried(NEAREST=1), "fused": tried(FUSED=1), "overlap": tried(OVERLAP=1),
        "nearest, fused": tried(NEAREST=1, FUSED=1), "nearest, overlap": tried(NEAREST=1, OVERLAP=1),
        "all": tried(NEAREST=1, FUSED=1, OVERLAP=1),
    }  # fmt: skip
    for least in (128, 192):
        sides[f"all, parts of {least}"] = lambda least=least: both(
            having(paged_decode, LEAST=least), having(paged_decode.TRIED, NEAREST=1, FUSED=1, OVERLAP=1)
        )
    lengths = ((1, 1040), (16, 1040), (64, 1040), (256, 1040), (16, 8192), (1, 32768), (1, 300))
    for width, heads, sinks in ((128, 32, False), (64, 64, True)):
        for rows, length in lengths if width == 128 else lengths[:4]:
            shape = of_attention.Shape(rows, length, heads, 8, width, width, sinks=sinks)
            prepared = of_attention.prepare("cuda", shape)
            other = of_attention.prepare("triton", shape)
            prepared = Prepared(prepared.calls, prepared.check, prepared.num_bytes, prepared.flops)
            name = f"decode {heads}/8 x {width} B={rows} L={length}"
            compare(name, prepared, sides, equal=("fused", "overlap"), more={"triton": other.calls})


def both(*given: Any) -> Any:
    stack = contextlib.ExitStack()
    for one in given:
        stack.enter_context(one)
    return stack


GROUPS = {"index": index, "sparse": sparse, "latent": latent_dense, "delta": delta, "decode": decode}
CEILING = {"copy": 4.2e12, "bf16": 7.2e14}

if __name__ == "__main__":
    CEILING = ceilings()
    print(torch.cuda.get_device_name(), {k: f"{v:.3g}" for k, v in CEILING.items()}, flush=True)
    to = Path(os.environ.get("JOB_OUT", "."), "kernels.json")
    with torch.inference_mode():
        for word in sys.argv[1:] or GROUPS:
            GROUPS[word]()
            to.write_text(json.dumps(FOUND, indent=1))
