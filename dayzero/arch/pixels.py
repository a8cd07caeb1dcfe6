"""From an image's size to the pixels that a vision tower sees, and the tokens they become: rules as data. Paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class ImageSize(NamedTuple):
    """Of one image, in pixels but for the last. width, height: as it is resized. padded_width, padded_height: with
    what is added at the right and at the bottom. tokens: placeholders it takes in a prompt."""

    width: int
    height: int
    padded_width: int
    padded_height: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FitAndPad:
    """Shrink to fit, never enlarge, then pad with black to whole tokens (Moonshot's MoonViT processor).

    patch: pixels a side; merge: patches a side of one token. max_patches: of a whole image; max_side_patches: along
    one side; both before padding. The factor of both sides is min(1, sqrt(max_patches / (columns * rows)),
    max_side_patches * patch / width, … / height), columns and rows being whole patches of the original, at least 1;
    new sizes are cut off to whole pixels, at least 1.
    """

    patch: int
    merge: int
    max_patches: int
    max_side_patches: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def most_patches(self) -> int:
        """No image has more, padding included."""
        other = self.max_patches // self.max_side_patches
        return self.max_patches + self.merge * (self.max_side_patches + other + self.merge)

    def size(self, width: int, height: int) -> ImageSize:
        """ValueError for a size that cannot be."""
        _check(width, height)
        columns, rows = max(1, width // self.patch), max(1, height // self.patch)
        side = self.max_side_patches * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / (columns * rows)), side / width, side / height)
        new_width, new_height = (min(side, max(1, int(n * scale))) for n in (width, height))
        whole = self.patch * self.merge
        across, down = -(-new_width // whole), -(-new_height // whole)
        return ImageSize(new_width, new_height, across * whole, down * whole, across * down)


@dataclass(frozen=True, slots=True)
class RoundToGrid:
    """Both sides to the nearest whole token, then as much smaller or larger as bounds on the area ask for, with nothing
    added (Qwen's "smart resize").

    patch, merge: as in FitAndPad. min_pixels, max_pixels: area of the resized image. max_ratio: longer side to the
    shorter one; ValueError beyond it. Halves round to even, as in the publisher's Python.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    max_ratio: float = 200.0

    @property
    def most_patches(self) -> int:
        """No image has more."""
        return self.max_pixels // self.patch**2

    def size(self, width: int, height: int) -> ImageSize:
        """ValueError for a size that cannot be, or an image too narrow for its length."""
        _check(width, height)
        if max(width, height) / min(width, height) > self.max_ratio:
            raise ValueError(
                f"an image of {width}x{height} pixels is more than {self.max_ratio:g} times as long as it is wide"
            )
        whole = self.patch * self.merge
        new_width, new_height = (round(n / whole) * whole for n in (width, height))
        if new_width * new_height > self.max_pixels:
            factor = math.sqrt(width * height / self.max_pixels)
            new_width, new_height = (max(whole, math.floor(n / factor / whole) * whole) for n in (width, height))
        elif new_width * new_height < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (width * height))
            new_width, new_height = (math.ceil(n * factor / whole) * whole for n in (width, height))
        tokens = (new_width // whole) * (new_height // whole)
        return ImageSize(new_width, new_height, new_width, new_height, tokens)


PixelRule = FitAndPad | RoundToGrid


def _check(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels has nothing to show")
