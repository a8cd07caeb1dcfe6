"""Builds that a checker of races can follow (SYNC_BOTH, see ``wgmma.cuh``): they end, and give the bits of the ordinary
ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dayzero.ops.cuda.build import compiled_with
from dayzero.ops.cuda.latent_decode import latent
from tests.gpu.test_sparse_attention import OPTIONS, RECORDS, lists, records, variant

pytestmark = pytest.mark.gpu
HISTORIES = ((700, 1), (0, 1), (64, 1), (129, 2))  # of several tiles, odd and even in number; a chunk behind
LENGTHS = [650, 1, 0, 65, 64]  # of lists


def results(record: str, heads: int) -> list[Tensor]:
    keys = records(HISTORIES, record)
    q = torch.randn(5, heads, 576, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    listed = lists(LENGTHS, [start + 1 for start, _ in HISTORIES] + [131], 1024)
    found = [x for name in ("cuda", "cuda_by_load") for x in variant(name)(q, keys, None, listed, **OPTIONS)]
    for parts in (1, 3):
        found += latent(q, keys, scale=192**-0.5, parts=parts)
    return found


@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("record", RECORDS)
def test_who_goes_on_waits_as_well(record: str, level: int) -> None:
    want = results(record, 96)
    with compiled_with(f"-DSYNC_BOTH={level}"):
        got = results(record, 96)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
