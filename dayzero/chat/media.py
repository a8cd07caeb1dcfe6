"""Images in a conversation: how many placeholders each takes, and where they stand in a prompt. Paper.

A prompt holds, for each image, one placeholder id for every token that the vision tower makes of it; the engine puts
the tower's rows in their place. An encoding writes ``part.image.tokens`` placeholders for an ``ImagePart``, or a single
one for ``spread``, and nothing else decides that number; ``placed`` then holds the prompt to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dayzero.arch.pixels import ImageSize, PixelRule
from dayzero.errors import UsageError


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that was read and made ready. width, height: as it is seen, in pixels, before any resizing: what a
    prompt says of it. tokens: placeholders it takes; grid: of them, (down, across). pixels: uint8 RGB row by row,
    resized and padded. key: hash of the pixels and their shape; equal keys mean equal images."""

    width: int
    height: int
    tokens: int
    grid: tuple[int, int] = (0, 0)
    pixels: bytes = b""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a picture stands in a prompt: its placeholders are the ids from ``first`` on."""

    picture: Picture
    first: int


def image_tokens(width: int, height: int, rule: PixelRule) -> ImageSize:
    """(new width, new height, padded width, padded height, tokens) of an image. ValueError for impossible sizes."""
    return rule.size(width, height)


def spread(ids: Sequence[int], pad_id: int, pictures: Sequence[Picture]) -> list[int]:
    """A prompt with one placeholder for each token, where it has only one for each picture, as templates write it; else
    as it is."""
    if sum(token == pad_id for token in ids) != len(pictures):
        return list(ids)
    out: list[int] = []
    left = iter(pictures)
    for token in ids:
        out += [pad_id] * next(left).tokens if token == pad_id else [token]
    return out


def placed(ids: Sequence[int], pad_id: int, pictures: Sequence[Picture]) -> tuple[Placed, ...]:
    """The pictures of a conversation, in order, where their placeholders stand in its prompt.

    UsageError when the prompt's placeholders are not exactly theirs, each picture's in one run.
    """
    at = [i for i, token in enumerate(ids) if token == pad_id]
    wanted = sum(picture.tokens for picture in pictures)
    if len(at) != wanted:
        raise UsageError(
            f"the prompt has {len(at)} image placeholders, but its {len(pictures)} images make {wanted} tokens; the "
            "chat format and the image processor of this model do not agree."
        )
    out, used = [], 0
    for picture in pictures:
        first = at[used]
        used += picture.tokens
        if at[used - 1] - first != picture.tokens - 1:
            raise UsageError("the chat format splits the placeholders of an image; send it in a format that does not.")
        out.append(Placed(picture, first))
    return tuple(out)
