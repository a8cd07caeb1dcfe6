"""Text and images with m-rope against transformers' Qwen3.5, on a tiny checkpoint that it writes itself: the tower, the
three rows of positions, and logits behind two images of odd grids and in the answer that follows.

Both sides run in float32; the bound is that of test_families.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers
from test_families import RELATIVE
from tiny_configs import COMMON, GATED_DELTA, perturb
from torch import Tensor

from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.stack import Stack
from dayzero.engine.images import grid_positions
from dayzero.engine.request import Image
from dayzero.ops.contract import relative_l2
from dayzero.view import Inserted
from tests.cpu.vision_support import normalised, random_pixels

PATCH, MERGE, PAD = 4, 2, 300
GRIDS = [(3, 7), (5, 2)]  # tokens down and across


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp("qwen35")
    return write_multimodal(folder), open_model(str(folder))


def write_multimodal(folder: Path) -> Any:
    vision = {
        "depth": 2, "hidden_size": 36, "intermediate_size": 56, "num_heads": 3, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": COMMON["hidden_size"],
        "num_position_embeddings": 25,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config={**COMMON, **GATED_DELTA}, vision_config=vision, image_token_id=PAD, video_token_id=301,
        vision_start_token_id=302, vision_end_token_id=303,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    perturb(model.float().eval(), 0)
    model.save_pretrained(folder)
    return model


def images() -> list[tuple[Image, Tensor]]:
    out, first = [], 6
    for number, (rows, columns) in enumerate(GRIDS):
        pixels = random_pixels(rows * MERGE, columns * MERGE, PATCH, number)
        key = bytes((number,))
        out.append((Image(key=key, first=first, rows=rows, columns=columns, pixels=pixels.numpy().tobytes()), pixels))
        first += rows * columns + 5
    return out


def prompt() -> list[int]:
    ids = torch.randint(3, 290, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    for image, _ in images():
        ids[image.first : image.first + image.tokens] = [PAD] * image.tokens
    return ids


def _patches(pixels: Tensor) -> Tensor:
    """As transformers' processor hands them over: block by block of merged ones, each pixel twice for two frames."""
    x = normalised(pixels)[0].unflatten(1, (-1, MERGE, PATCH)).unflatten(4, (-1, MERGE, PATCH))
    grid = x.permute(1, 4, 2, 5, 0, 3, 6)  # from [3, rows, 2, P, columns, 2, P] to rows, columns, 2, 2, 3, P, P
    return grid.unsqueeze(5).expand(*grid.shape[:5], 2, PATCH, PATCH).reshape(-1, 3 * 2 * PATCH * PATCH)


def _theirs(model: Any, ids: list[int]) -> Tensor:
    """Logits [T, V]."""
    patches = [_patches(pixels) for _, pixels in images()]
    grids = [[1, rows * MERGE, columns * MERGE] for rows, columns in GRIDS]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = model(
            input_ids=tokens, pixel_values=torch.cat(patches), image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(tokens == PAD).int(), use_cache=False,
        )  # fmt: skip
    logits: Tensor = out.logits[0]
    return logits


def _ours(stack: Stack, ids: list[int], chunk: int) -> Tensor:
    cache, hidden = LocalCache(stack.spec, torch.float32), []
    media = [image for image, _ in images()]
    rows = [stack.encode_image(pixels) for _, pixels in images()]
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        view = cache.view(part)
        inserted = []
        for image, values in zip(media, rows, strict=True):
            begin, end = max(start, image.first), min(start + len(part), image.first + image.tokens)
            if begin < end:
                inserted.append(Inserted(begin - start, values[begin - image.first : end - image.first]))
        positions = torch.from_numpy(grid_positions(media, start, len(part)))
        hidden.append(stack.forward(replace(view, positions=positions, inserted=tuple(inserted))))
    return stack.head(torch.cat(hidden))


def test_positions_are_those_of_transformers(pair: tuple[Any, LoadedModel]) -> None:
    ids = prompt()
    grids = torch.tensor([[1, rows * MERGE, columns * MERGE] for rows, columns in GRIDS])
    kinds = torch.tensor([ids]).eq(PAD).int()
    want, delta = pair[0].model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=grids)
    media = [image for image, _ in images()]
    got = grid_positions(media, 0, len(ids) + 5)
    assert got[:, : len(ids)].tolist() == want[:, 0].tolist()
    assert got[:, len(ids)].tolist() == [len(ids) + int(delta)] * 3, "an answer counts on behind the prompt"
    parts = [torch.from_numpy(grid_positions(media, start, 7)) for start in range(0, 63, 7)]
    assert torch.cat(parts, 1).tolist() == got[:, :63].tolist()


def test_the_tower_equals_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, ours = pair
    stack = Stack(ours.spec, ours.loader.load)
    for image, pixels in images():
        thw = torch.tensor([[1, image.rows * MERGE, image.columns * MERGE]])
        with torch.no_grad():
            want = model.model.visual(_patches(pixels), grid_thw=thw).pooler_output
        assert relative_l2(stack.encode_image(pixels), want) < 1e-5


@pytest.mark.parametrize("chunk", [1000, 7])
def test_logits_of_text_and_images(pair: tuple[Any, LoadedModel], chunk: int) -> None:
    model, ours = pair
    want = _theirs(model, prompt())
    got = _ours(Stack(ours.spec, ours.loader.load), prompt(), chunk)
    assert float((got - want).abs().max()) < RELATIVE * float(want.std())


def test_positions_matter(pair: tuple[Any, LoadedModel]) -> None:
    """The same rows under positions that count on token by token: far from the bound."""
    _, ours = pair
    stack = Stack(ours.spec, ours.loader.load)
    want = _ours(stack, prompt(), 1000)
    view = LocalCache(stack.spec, torch.float32).view(prompt())
    rows = [Inserted(image.first, stack.encode_image(pixels)) for image, pixels in images()]
    flat = stack.head(stack.forward(replace(view, inserted=tuple(rows))))
    assert float((flat - want).abs().max()) > 1e-2 * float(want.std())
