"""How grouped products of experts run, by how many rows an expert has on average: measured, per device. No torch.

A form is what a site's plan fixed: ``bf16`` (plain stacks), ``w4`` and ``w8`` (stacks in 4 and in 8 bits, rows in
bf16), ``w4a8`` and ``w8a8`` (the same with rows rounded to e4m3). Within a form every row of the table gives the same
numbers up to the order of sums in the matrix unit; only the time differs. Figures behind the rows: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Settings = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """below: for fewer rows an expert than this, on average. rows: of a tile. gate_up, down: how each product runs:
    rows of a tile that has no more (``SMALL``, 0: none), rows of the matrix (``HIGH``), parts of K (``SPLIT``),
    columns a step of plain stacks (``DEEP``), warps, stages."""

    below: float
    rows: int
    gate_up: Settings
    down: Settings


def _settings(high: int, small: int, *, warps: int = 4, stages: int = 3) -> Settings:
    return {"SMALL": small, "HIGH": high, "DEEP": 64, "SPLIT": 1, "num_warps": warps, "num_stages": stages}


def _few(below: float, rows: int) -> Run:
    """Where memory is what takes time."""
    return Run(below, rows, _settings(64, 0, stages=4), _settings(64, 0, stages=4))


def _many(below: float, rows: int, first: int, second: int) -> Run:
    """first, second: rows of the matrix for gate and up, and for down. 128 take eight warps; so do 128 of a tile."""
    both = [_settings(high, rows // 2, warps=8 if max(high, rows) > 64 else 4) for high in (first, second)]
    return Run(below, rows, *both)


def in_parts(settings: Settings, shape: tuple[int, ...], num_tiles: int, num_processors: int) -> Settings:
    """The settings with K in up to four parts, where a product of matrices of this shape [.., R, K] and so many tiles
    would otherwise leave multiprocessors idle: they want four programs each."""
    programs = -(-shape[-2] // settings["HIGH"]) * num_tiles
    return {**settings, "SPLIT": max(1, min(4, PROGRAMS * num_processors // max(1, programs)))}


ENDLESS = float("inf")
PROGRAMS = 4  # on a multiprocessor
TABLES: Mapping[str, Mapping[str, tuple[Run, ...]]] = {
    "h200": {
        "bf16": (_few(8, 16), _few(20, 32), _many(40, 64, 64, 128), _many(ENDLESS, 128, 64, 128)),
        "w4": (_few(8, 16), _few(20, 32), _many(300, 64, 64, 128), _many(ENDLESS, 128, 128, 128)),
        "w4a8": (_few(8, 16), _few(20, 32), _many(ENDLESS, 64, 64, 128)),
        # Not measured yet. A step of 128 x 128 keeps the matrix unit busy for twice as long as widening takes to issue,
        # one of 64 x 64 about as long; rows with scales of their own leave no registers for the former.
        "w8": (_few(8, 16), _few(20, 32), _many(200, 64, 64, 128), _many(ENDLESS, 128, 128, 128)),
        "w8a8": (_few(8, 16), _few(20, 32), _many(ENDLESS, 64, 64, 128)),
    },
}


def settings_of(form: str, num_slots: int, num_experts: int, device: str = "h200") -> Run:
    """The row of the table for so many choices in all. Devices without a table run as ``h200`` does."""
    mean = num_slots / max(1, num_experts)
    return next(run for run in TABLES.get(device, TABLES["h200"])[form] if mean < run.below)
