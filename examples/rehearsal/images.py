"""Made pictures: one to five shapes of one kind and colour on a background, with noise. numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import phrases
from numpy.typing import NDArray

SIDE, CELL = 96, 32
CELLS = SIDE // CELL  # a shape stands in a cell of a 3x3 grid, so that none touches another

Pixels = NDArray[np.uint8]
Grid = NDArray[np.float64]


@dataclass(frozen=True)
class Picture:
    """pixels: uint8 [SIDE, SIDE, 3]; what it shows, and in which cells of the grid, numbered row by row."""

    pixels: Pixels
    count: int
    colour: str
    shape: str
    cells: tuple[int, ...]

    @property
    def answer(self) -> str:
        return phrases.picture_answer(self.count, self.colour, self.shape)


def draw(random: np.random.Generator) -> Picture:
    count = int(random.integers(1, len(phrases.COUNTS) + 1))
    colour = str(random.choice(list(phrases.COLOURS)))
    shape = str(random.choice(phrases.SHAPES))
    ink = np.array(phrases.COLOURS[colour], np.float64)
    canvas = np.broadcast_to(background(random, ink), (SIDE, SIDE, 3)).copy()
    cells = tuple(map(int, random.choice(CELLS * CELLS, count, replace=False)))
    for cell in cells:
        radius = random.uniform(9.0, 14.0)
        room = CELL / 2 - radius
        middle = CELL / 2 + random.uniform(-room, room, 2)
        cover = coverage(shape, middle, radius, random.uniform(0, 2 * np.pi))[..., None]
        top, left = (CELL * place for place in divmod(cell, CELLS))
        part = canvas[top : top + CELL, left : left + CELL]
        part[:] = part * (1 - cover) + (ink + random.normal(0, 8, 3)) * cover
    canvas += random.normal(0, random.uniform(0, 10), canvas.shape)
    return Picture(np.clip(np.round(canvas), 0, 255).astype(np.uint8), count, colour, shape, cells)


def background(random: np.random.Generator, ink: Grid) -> Grid:
    """A colour that is far enough from the shapes' own."""
    while True:
        paper = random.uniform(0, 255, 3)
        if np.abs(paper - ink).sum() > 180:
            return paper


_Y, _X = np.mgrid[0:CELL, 0:CELL].astype(np.float64) + 0.5


def coverage(shape: str, middle: Grid, radius: float, turn: float) -> Grid:
    """How much of each pixel of a cell a shape covers, in [0, 1], from the distance to its edge: [CELL, CELL]."""
    y, x = _Y - middle[0], _X - middle[1]
    distance = np.hypot(x, y)
    if shape == "circle":
        edge = radius - distance
    elif shape == "ring":
        edge = radius * 0.28 - np.abs(distance - radius * 0.72)
    elif shape == "cross":
        a, b = np.abs(x), np.abs(y)  # upright: turned by an eighth it would be an x
        edge = np.maximum(_box(a, b, radius, radius * 0.32), _box(a, b, radius * 0.32, radius))
    elif shape == "star":
        angle = np.arctan2(y, x) + turn
        wave = np.abs(((angle * 5 / (2 * np.pi)) % 1.0) - 0.5) * 2  # 1 at five points, 0 between
        edge = radius * (0.38 + 0.62 * wave**1.5) - distance
    else:
        corners, slant = (4, turn) if shape == "square" else (3, turn)
        angle = (np.arctan2(y, x) + slant) % (2 * np.pi / corners) - np.pi / corners
        edge = radius * np.cos(np.pi / corners) - distance * np.cos(angle)
    return np.clip(edge + 0.5, 0, 1)


def _box(a: Grid, b: Grid, half_width: float, half_height: float) -> Grid:
    return np.minimum(half_width - a, half_height - b)
