"""Bytes, counts and alignment, as people read them."""

from __future__ import annotations

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def bytes_text(num_bytes: float) -> str:
    """1536 -> '1.50 KiB'. Binary units, three significant digits."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def count_text(count: float) -> str:
    """104_200_000_000 -> '104.20 B' (decimal: thousand, million, billion, trillion)."""
    value = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if abs(value) < 1000 or unit == "T":
            return f"{value:.0f}" if unit == "" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def counted(count: int, noun: str) -> str:
    """1, file -> '1 file'; 1200, file -> '1,200 files'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below value / divisor."""
    return -(-value // divisor)


def round_up(value: int, unit: int) -> int:
    """Smallest multiple of ``unit`` that is not below ``value``."""
    return ceil_div(value, unit) * unit
