"""Bytes of an expert's matrices in e4m3, and of the ring they are converted in. No torch: the planner counts the
workspace with the same numbers that the operators use."""

from __future__ import annotations

from dayzero.units import ceil_div, round_up

BLOCK = 128  # columns that share a scale of the e4m3 form
ALIGNMENT = 16  # bytes; of a slice's start
SLICES = 4  # of a ring: one is filled while another is read, with room for both products of a pair


def e4m3_row_bytes(num_columns: int) -> int:
    """A row in e4m3 with its f32 scales."""
    return num_columns + 4 * ceil_div(num_columns, BLOCK)


def e4m3_expert_bytes(inner: int, width: int) -> int:
    """Gate and up [inner, width] and down [width, inner] in e4m3, scales included."""
    return 2 * inner * e4m3_row_bytes(width) + width * e4m3_row_bytes(inner)


def ring_bytes(inner: int, width: int) -> int:
    """A ring for experts of these sizes: each slice holds any one of their three matrices, so that four of them are
    about 4/3 of an expert, always less than two experts' elements."""
    return SLICES * round_up(max(inner * e4m3_row_bytes(width), width * e4m3_row_bytes(inner)), ALIGNMENT)
