"""Sizes and pixels against the processors that transformers ships, where they need no torchvision."""

from __future__ import annotations

import ast
import inspect
import math
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from dayzero.arch.pixels import FitAndPad, RoundToGrid
from dayzero.chat.images import make_picture
from tests.cpu.vision_support import normalised
from tests.paper.image_files import picture

SIDES = (1, 3, 13, 14, 27, 28, 29, 63, 447, 896, 1001, 3583, 7168, 7169, 20000)


def _sizes(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    every = [(w, h) for w in SIDES for h in SIDES]
    return every + [(draw.randint(1, 9000), draw.randint(1, 9000)) for _ in range(500)]


def _function(module: str, name: str) -> Any:
    """A function out of a module that cannot be imported here, because others in it need torchvision."""
    source = Path(inspect.getfile(transformers)).parent / "models" / module
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), str(source), "exec"), space)
    return space[name]


@pytest.mark.parametrize("limits", [(65536, 512), (16384, 512), (64, 8)])
def test_fitting_and_padding_is_the_publishers(limits: tuple[int, int]) -> None:
    theirs = _function("kimi_k25/image_processing_kimi_k25.py", "navit_resize")
    rule = FitAndPad(14, 2, *limits)
    for width, height in _sizes(1):
        (new_height, new_width), (pad_height, pad_width) = theirs(height, width, 14, 2, *limits)
        assert rule.size(width, height)[:4] == (new_width, new_height, pad_width, pad_height), (width, height)


def test_rounding_to_the_grid_is_the_publishers() -> None:
    rule = RoundToGrid(16, 2, 65536, 16777216)
    for width, height in _sizes(2):
        if max(width, height) <= 200 * min(width, height):
            want = smart_resize(height, width, 32, 65536, 16777216)
            got = rule.size(width, height)
            assert (got.height, got.width) == want, (width, height)


@pytest.mark.parametrize("size", [(100, 60), (37, 91), (640, 480), (64, 64)])
def test_pixels_are_the_publishers(size: tuple[int, int]) -> None:
    """Resized by the same library, so equal to the last bit before and within one rounding of float32 after."""
    half = [0.5, 0.5, 0.5]
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4096, "longest_edge": 65536}, patch_size=16, merge_size=2, temporal_patch_size=2,
        image_mean=half, image_std=half,
    )  # fmt: skip
    image = picture(*size)
    theirs = processor(images=[image], return_tensors="pt")
    ours = make_picture(image, RoundToGrid(16, 2, 4096, 65536))
    down, across = ours.grid
    assert theirs["image_grid_thw"].tolist() == [[1, down * 2, across * 2]]
    pixels = torch.frombuffer(bytearray(ours.pixels), dtype=torch.uint8).view(down * 32, across * 32, 3)
    grid = normalised(pixels)[0].unflatten(1, (-1, 2, 16)).unflatten(4, (-1, 2, 16)).permute(1, 4, 2, 5, 0, 3, 6)
    want = theirs["pixel_values"].view(-1, 3, 2, 256)
    assert torch.equal(want[:, :, 0], want[:, :, 1]), "two equal frames"
    got = grid.reshape(-1, 3, 256)
    assert float((got - want[:, :, 0]).abs().max()) <= 2**-22
