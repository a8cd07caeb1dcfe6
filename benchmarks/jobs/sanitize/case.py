"""One group of small launches.

    python3 case.py GROUP [--sync 0|1|2] [--compare]

From the repository's root. A sanitizer runs it with only the group's kernels watched (``--kernels`` prints their
names). --compare, without a sanitizer: the results of the build under SYNC_BOTH have the bits of the ordinary one. Each
group reaches the branches of its kernels: numbers of parts, odd tiles, an empty list, ends of rows within a tile, both
records, float32 queries.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import LATENT_PARTS, packed_row
from dayzero.ops.cases import CASES
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.catalog import CATALOG
from dayzero.ops.cuda.build import compiled_with
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.records import packed
from tests.parity import check_parity, fits, moved, tensors

BF16, F32 = torch.bfloat16, torch.float32
RESULTS: list[Tensor] = []


def latent_keys(rows: Any, record: str, page: int = 64, heads: int = 64) -> dict[str, Any]:
    made = paged_inputs(Inputs(0), rows, (heads, 1), (576, 512), BF16, page=page)
    if record:
        row = packed_row(record, (576,), LATENT_PARTS)
        made["keys"] = packed(replace(made["keys"], rows=made["keys"].rows[:, :, 0]), row).headed()
    return moved({"q": made["q_THD"], "keys": made["keys"]}, "cuda")


def sparse(record: str) -> None:
    from dayzero.ops.cuda import sparse_attention as module

    rows = ((700, 1), (80, 1), (64, 1), (400, 2))
    given = latent_keys(rows, record, heads=96)
    lengths = (330, 0, 65, 64, 129)  # of the lists; five parts of eight are empty for 65
    listed = torch.full((5, 384), -1, dtype=torch.int64)
    for query, length in enumerate(lengths):
        history = (701, 81, 65, 401, 402)[query]
        listed[query, :length] = torch.randperm(history)[:length].sort().values
    sinks = torch.randn(96, device="cuda")
    runs = [((8, 8), BF16, True), ((4, 1), BF16, False), *([((4, 4), F32, True)] if record else [])]
    for split, dtype, whole in runs:  # whole: queries in pieces of 16 bytes
        out = module._listed(
            lambda tasks, split=split: split,
            (given["q"].contiguous() if whole else given["q"]).to(dtype),
            given["keys"],
            None,
            listed.cuda(),
            scale=192**-0.5,
            value_dim=512,
            sinks_H=sinks,
        )
        RESULTS.extend(out)


def latent(record: str) -> None:
    from dayzero.ops.cuda.latent_decode import latent as attend

    for page, rows in ((64, ((700, 1), (0, 1), (63, 1), (127, 2))), (16, ((330, 1), (64, 1)))):
        given = latent_keys(rows, record, page, heads=96)
        for parts in (1, 3):
            for dtype in (BF16, F32) if record else (BF16,):
                RESULTS.extend(attend(given["q"].to(dtype), given["keys"], scale=192**-0.5, parts=parts))


def paged(variant_rows: Any, widths: Any, heads: Any, **more: Any) -> None:
    from dayzero.ops.bind import bind

    run = bind("attention.paged", "check", {"attention.paged": "cuda"})
    sinks = more.pop("sinks", False)
    made = paged_inputs(Inputs(0), variant_rows, heads, widths, BF16, page=64, **more)
    if sinks:
        made["sinks_H"] = torch.randn(heads[0])
    RESULTS.extend(run(**moved(made, "cuda")))


def prefill() -> None:
    rows = ((0, 130), (640, 64), (100, 33))
    paged(rows, (128, 128), (8, 2))
    paged(rows, (64, 64), (16, 2), sinks=True)
    paged(rows, (64, 64), (16, 2), sinks=True, window=128)


def decode(**tried: int) -> None:
    from dayzero.ops.cuda import paged_decode

    paged_decode.TRIED.update(tried)
    rows = ((1040, 1), (0, 1), (300, 1), (700, 1))
    for _ in range(2):  # what is counted has to be 0 again
        paged(rows, (128, 128), (8, 2))
        paged(rows, (64, 64), (16, 2), sinks=True)
        paged(rows, (64, 64), (16, 2), sinks=True, window=128)


def parity(contract: str, variant: str, only: tuple[str, ...] = ()) -> None:
    """The contract's own cases, against the reference."""
    line = CATALOG.lines[contract, variant]
    for case in CASES[contract]:
        if fits(line, case.make(0)) and (not only or any(word in case.name for word in only)):
            check_parity(line, case, 0, "cuda")


def index(maxima: bool = False) -> None:
    from dayzero.ops.cuda import sparse_index, top_k

    sparse_index.MAXIMA, top_k.FINE = maxima, int(maxima)
    parity("sparse_index.tokens", "cuda", ("single rows",))
    parity("sparse_index.top_k", "cuda")


def linear() -> None:
    parity("linear.matmul_glu", "few_rows")
    parity("linear.matmul_add", "few_rows")
    for name in ("matmul", "matmul_f32"):
        parity(f"linear.{name}", "few_rows")


GROUPS: dict[str, tuple[str, Any]] = {
    "sparse_bf16": ("sparse_attention", partial(sparse, "")),
    "sparse_fp8": ("sparse_attention", partial(sparse, "mla_fp8_656")),
    "latent_bf16": ("latent_", partial(latent, "")),
    "latent_fp8": ("latent_", partial(latent, "mla_fp8_656")),
    "paged_prefill": ("paged_prefill", prefill),
    "paged_decode": ("paged_decode", decode),
    "paged_decode_tried": ("paged_decode", partial(decode, NEAREST=1, FUSED=1, OVERLAP=1)),
    "linear": ("few_rows", linear),
    "latent_attend": ("latent_prefill", partial(parity, "latent.attend", "cuda_chunks")),
    "heads_write": ("_kernel", partial(parity, "attention.norm_rope_write", "triton")),
    "router": ("_product", partial(parity, "moe.matmul_route", "triton")),
    "route": ("_route", partial(parity, "moe.matmul_route", "triton")),
    "delta_decode": ("delta_decode", partial(parity, "recurrence.paged", "cuda", ("wide, single",))),
    "index_score": ("score_single", index),
    "top_k": ("top_k", index),
    "index_score_tried": ("score_single", partial(index, True)),
    "top_k_tried": ("top_k", partial(index, True)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=[*GROUPS, "all"])
    parser.add_argument("--sync", type=int, default=0)
    parser.add_argument("--widen-once", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    if given.kernels:
        print("\n".join(f"{name} {kernels}" for name, (kernels, _) in GROUPS.items()))
        return
    run = GROUPS[given.group][1]
    options = ["-lineinfo", f"-DSYNC_BOTH={given.sync}", f"-DWIDEN_ONCE={int(given.widen_once)}"]
    torch.manual_seed(0)
    with torch.inference_mode():
        if given.compare:
            run()
            want = list(RESULTS)
            RESULTS.clear()
            torch.manual_seed(0)
        with compiled_with(*options):
            run()
        torch.cuda.synchronize()
    if given.compare:
        same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(want, RESULTS, strict=True)]
        assert all(same), same
    assert all(not x.isnan().any() for x in tensors(RESULTS)), "a result is NaN"
    print(f"{given.group}: {len(RESULTS)} results")


if __name__ == "__main__":
    main()
