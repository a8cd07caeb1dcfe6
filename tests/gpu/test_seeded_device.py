"""Made weights are the same numbers wherever they are made: what a GPU is measured on is what a CPU is checked on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from test_seeded import NAMES, loader_of, small

pytestmark = pytest.mark.gpu


FLOAT32 = ("gpt_oss_20b", "kimi_k3_1")  # stands for all: values are rounded to the type at the end
CASES = [(name, torch.bfloat16) for name in NAMES] + [(name, torch.float32) for name in FLOAT32]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_a_gpu_makes_what_a_cpu_makes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    here, there = loader_of(small(name, tmp_path), dtype), loader_of(small(name, tmp_path), dtype)
    there.place("cuda")
    packed = 0
    for parameter in here.names():
        want, got = here.piece(parameter), there.piece(parameter)
        assert got.is_cuda and torch.equal(want, got.cpu()), parameter
        if here.packs(parameter):
            packed += 1
            kept = here.packed_piece(parameter), there.packed_piece(parameter)
            assert torch.equal(kept[0].codes.view(torch.uint8), kept[1].codes.cpu().view(torch.uint8))
            assert torch.equal(kept[0].scales, kept[1].scales.cpu())
    assert packed or ("gpt_oss" not in name and "k3" not in name)


@pytest.mark.parametrize(("name", "cut"), [("qwen3_8b", "layers=1"), ("kimi_k3", "layers=2&experts=16")])
def test_at_full_width_too(name: str, cut: str) -> None:
    """The last rows of the largest parameters, made alone on a CPU and with all others on a GPU."""
    from test_seeded import CONFIGS

    where = f"seeded:{CONFIGS / f'{name}.json'}?{cut}"
    here, there = loader_of(where), loader_of(where)
    there.place("cuda")
    for parameter in sorted(here.names(), key=lambda one: -here.stored_bytes([one]))[:3]:
        whole = there.piece(parameter)
        first, *others = whole.shape
        box = (range(first - 1, first), *(range(n) for n in others))
        assert torch.equal(here.piece(parameter, box), whole[-1:].cpu()), parameter
