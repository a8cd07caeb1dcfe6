"""How much memory may still be taken: the kernel's word, a container's limit, whichever is less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dayzero.planner.memory import available_bytes

FREE = "MemTotal: 16384 kB\nMemFree: 1024 kB\nMemAvailable: 8192 kB\n"
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": FREE}, 8192 << 10),
        ({"proc/meminfo": FREE, f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "500\n"}, 8192 << 10),
        ({"proc/meminfo": FREE, f"{V2}/memory.max": "4000\n", f"{V2}/memory.current": "1500\n"}, 2500),
        ({"proc/meminfo": FREE, f"{V2}/memory.max": "4000\n", f"{V2}/memory.current": "4500\n"}, 0),
        ({"proc/meminfo": FREE, f"{V1}/memory.limit_in_bytes": "9\n", f"{V1}/memory.usage_in_bytes": "2\n"}, 7),
        ({f"{V2}/memory.max": "4000\n", f"{V2}/memory.current": "0\n"}, 4000),
        ({}, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4),
    ],
)
def test_the_least_of_what_is_said(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
