"""What a terminal can show: how wide it is, what may be written to it, how a table fits into it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

COLUMN_GAP = 2  # blanks between the columns of a table
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 and C1 controls but tab and newline


def columns(terminal: TextIO) -> int:
    """Its width; 80 where it does not say."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def harmless(text: str) -> str:
    """``text`` of any language with control characters written out: they could move the cursor or do worse."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def column_widths(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths of a table's columns, so that together they fit into ``room``: the widest first becomes narrower as long
    as its words stay whole; where that is not enough, words are cut."""
    from rich.cells import cell_len

    each = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, column)) for column in each]
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in each]
    room -= COLUMN_GAP * (len(widths) - 1)
    while sum(widths) > room and max(widths) > 1:
        at = max(range(len(widths)), key=lambda at: (widths[at] > words[at], widths[at]))
        widths[at] -= 1
    return widths
