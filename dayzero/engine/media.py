"""What the engine tells of the images it takes, and whether a request's images fit its prompt. Paper."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dayzero.arch.pixels import FitAndPad, PixelRule, RoundToGrid
from dayzero.arch.vision import PatchTower
from dayzero.chat.media import Placed
from dayzero.engine.request import Image, NewRequest


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """pad_id: the placeholder of every token of an image in a prompt. One of fit and round: how an image becomes
    pixels."""

    pad_id: int
    fit: FitAndPad | None = None
    round: RoundToGrid | None = None

    @property
    def rule(self) -> PixelRule:
        rule = self.fit or self.round
        assert rule is not None, "an engine that takes images says how they become pixels"
        return rule


def image_info(tower: PatchTower) -> ImageInfo:
    """What callers need to make images ready for this tower."""
    rule = tower.pixels
    if isinstance(rule, FitAndPad):
        return ImageInfo(pad_id=tower.pad_id, fit=rule)
    return ImageInfo(pad_id=tower.pad_id, round=rule)


def images_of(media: Iterable[Placed]) -> list[Image]:
    """Pictures in a prompt as a request carries them."""
    return [
        Image(key=at.picture.key, first=at.first, rows=down, columns=across, pixels=at.picture.pixels)
        for at in media
        for down, across in [at.picture.grid]
    ]


def why_not(request: NewRequest, info: ImageInfo | None) -> str | None:
    """Why the request's images cannot be served, None: they can. Callers make images that fit, so this is the last
    gate before a wrong length could reach a step."""
    if not request.media:
        return None
    if info is None:
        return "this engine takes no images"
    rule, behind = info.rule, 0
    whole = rule.patch * rule.merge
    for number, image in enumerate(request.media):
        height, width = image.rows * whole, image.columns * whole
        if image.rows < 1 or image.columns < 1 or len(image.pixels) != 3 * height * width:
            return f"image {number} has {len(image.pixels)} bytes for {image.rows}x{image.columns} tokens"
        if image.first < behind:
            return f"image {number} begins at token {image.first}, before the one in front of it ends"
        behind = image.first + image.tokens
        if behind > len(request.prompt) or any(t != info.pad_id for t in request.prompt[image.first : behind]):
            return f"image {number} does not stand over {image.tokens} placeholders of the prompt"
    return None
