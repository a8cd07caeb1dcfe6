"""The operators' table: each of its rows is an entry. Here, as files of entries may need Triton to be imported."""

from __future__ import annotations

from dayzero.ops.bench.__main__ import entries, main
from dayzero.ops.bench.goals import ROWS


def test_every_row_is_an_entry() -> None:
    assert set(ROWS) <= {entry.name for entry in entries()}
    assert main(["--table", "--list"]) == 0
    assert main(["--named", "moe.route/none T=1", "--list"]) == 2
