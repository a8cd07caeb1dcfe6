"""Images among the tokens that both sides read: seeded pixels, so that a vision tower is compared with the text model.

A trace keeps the pixels as ``images.{n}`` [height, width, 3], whole numbers up to 255; where they stand is told by the
placeholders among its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dayzero.acceptance.prompt import Ids
from dayzero.acceptance.trace import Trace
from dayzero.arch.vision import Vision
from dayzero.chat.media import Picture, placed

SIZES = ((3, 2), (1, 5))  # tokens down and across: higher than wide and wider than high, odd in one direction each
SEED = 11


def add_pictures(ids: Ids, tower: Vision, vocab: int) -> tuple[Ids, tuple[Tensor, ...]]:
    """As many ids as given, the first of them, with the placeholders of two images among them, and the pixels.

    Without images, and the ids as they are, when fewer than half of the tokens would be text. Ids of the text that are
    the placeholder by chance become their neighbour.
    """
    num_rows = [down * across for down, across in SIZES]
    num_text = len(ids.tokens) - sum(num_rows)
    if num_text < sum(num_rows):
        return ids, ()
    text = [(i + 1) % vocab if i == tower.pad_id else i for i in ids.tokens[:num_text]]
    runs = [[tower.pad_id] * count for count in num_rows]
    cut, later = num_text // 3, num_text // 2
    tokens = text[:cut] + runs[0] + text[cut:later] + runs[1] + text[later:]
    draw, side = torch.Generator().manual_seed(SEED), tower.patch * tower.merge
    shapes = [(down * side, across * side, 3) for down, across in SIZES]
    pixels = tuple(torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8) for shape in shapes)
    return Ids(tokens, f"{ids.source} and {len(pixels)} seeded images"), pixels


def has_pictures(trace: Trace) -> bool:
    return "images.0" in trace


def pictures_of(trace: Trace) -> list[Tensor]:
    """The images that the oracle saw, uint8 [height, width, 3], in the order of their placeholders."""
    out: list[Tensor] = []
    while f"images.{len(out)}" in trace:
        out.append(trace.get(f"images.{len(out)}").to(torch.uint8))
    return out


def where(tokens: Sequence[int], tower: Vision, pixels: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each image. UsageError when they are not those of the placeholders."""
    side = tower.patch * tower.merge
    sizes = [(image.shape[1], image.shape[0]) for image in pixels]
    pictures = [Picture(w, h, (w // side) * (h // side)) for w, h in sizes]
    return [(at.first, at.picture.tokens) for at in placed(tokens, tower.pad_id, pictures)]
