"""Where gathering the listed records becomes faster than masked-dense attention over all of them, on this machine.

    python benchmarks/sparse_attention.py [--heads 4 --rank 48 --shared 16]

Both variants on the same inputs, median of five after one to warm up, for chunks of 256 queries and for one query.
The crossover is the length over top-k up to which masked-dense was faster for chunks; it goes into ``ops/tiles.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import load_text
from dayzero.ops.sparse_attention import sparse_gather, sparse_masked, whole
from dayzero.view import Paged, Span

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


def seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _attend(variant: Callable[..., object], q_THD: Tensor, keys: Paged, listed_TN: Tensor, value_dim: int) -> object:
    return variant(q_THD, keys, None, listed_TN, scale=0.1, value_dim=value_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("heads", 4), ("rank", 48), ("shared", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    print(load_text(), f"{torch.get_num_threads()} threads, {given.heads} heads, {given.rank}+{given.shared}")
    draw = torch.Generator().manual_seed(0)
    for width in (256, 2048):
        for queries in (256, 1):
            for ratio in RATIOS:
                rows = int(width * ratio)
                cache = torch.randn(rows, 1, given.rank + given.shared, generator=draw)
                q = torch.randn(queries, given.heads, given.rank + given.shared, generator=draw)
                listed = torch.rand(queries, rows, generator=draw).topk(width, dim=1).indices.sort(-1).values
                start = max(0, rows - queries)
                keys = replace(whole(cache), spans=(Span(0, 0, queries, start),))
                attend = partial(_attend, q_THD=q, keys=keys, listed_TN=listed, value_dim=given.rank)
                gather, masked = seconds(partial(attend, sparse_gather)), seconds(partial(attend, sparse_masked))
                print(
                    f"top {width:5} rows {rows:6} ({ratio:4.1f}) queries {queries:4}: "
                    f"gather {1e3 * gather:8.2f} ms  masked {1e3 * masked:8.2f} ms"
                )


if __name__ == "__main__":
    main()
