"""Numbers as a page shows them, and scales with ticks that people would choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST, SMALLEST = 1e300, 1e-300  # beyond, differences and powers of ten overflow
SIGNIFICANT = 1e-12  # of the magnitude; values closer than this are one place on a scale
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_STEPS = (1.0, 2.0, 5.0, 10.0)
_SHORT = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: Any) -> float | None:
    """``value`` as a place on a scale; None for what is none: null, text, NaN and infinities (also as JSON text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        value = float(max(-(10**301), min(10**301, value)))
    return max(-LARGEST, min(LARGEST, value)) if math.isfinite(value) else None


def numbers(values: Iterable[Any]) -> list[float | None]:
    return [number(value) for value in values]


def value_text(value: Any, digits: int = 4) -> str:
    """A measured value in at most ``digits`` digits: 0.8312, 12,345, 3.2e-05; what is no number as it is, null as a
    dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = number(value)
    if found is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else f"{found:.3e}"
    if found != 0 and not 1e-3 <= abs(found) < 1e6:
        return f"{found:.{digits - 1}g}"
    return f"{found:,.0f}" if abs(found) >= 10**digits else f"{found:.{digits}g}"


def tick_text(value: float, step: float = 0.0) -> str:
    """Label of a tick on a linear scale whose ticks are ``step`` apart: 0.25, 1500, 20k, 3M, 2e20."""
    size = abs(value)
    if size < SIGNIFICANT * abs(step):
        return "0"
    if size >= 1e15 or (step and abs(step) < 1e-4):
        return f"{value:.3g}"
    for unit, letter in _SHORT:
        if size >= max(unit, 1e4):
            return f"{value / unit:.6g}{letter}"
    digits = max(0, -math.floor(math.log10(abs(step)) + 1e-9)) if step else 6
    return f"{value:.{digits}f}" if step else f"{value:.6g}"


def power_text(exponent: int) -> str:
    """10 to ``exponent``: 0.01 to 1000 in plain digits, others as 10⁻⁵."""
    return f"{10.0**exponent:g}" if -2 <= exponent <= 3 else f"10{str(exponent).translate(_SUPERSCRIPT)}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` on places (user units of a picture) from ``start`` to ``end``.

    log: by powers of ten. floor: place of what a logarithm has no room for (zero and below); None: there is none.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    floor: float | None = None

    def at(self, value: float) -> float:
        """Place of ``value``; outside the scale, its nearer end."""
        if self.log:
            if value <= 0:
                return self.start if self.floor is None else self.floor
            low, high, here = math.log10(self.low), math.log10(self.high), math.log10(max(value, SMALLEST))
        else:
            low, high, here = self.low, self.high, value
        share = min(1.0, max(0.0, (here - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """(place, label), about ``most`` of them; the floor of a logarithm is labelled 0."""
        if not self.log:
            return [(self.at(value), text) for value, text in _linear_ticks(self.low, self.high, most)]
        found = [(self.at(value), text) for value, text in _log_ticks(self.low, self.high, most)]
        return found if self.floor is None else [(self.floor, "0"), *found]


FLOOR_ROOM = 22.0  # user units between the place of zero and the start of a logarithmic scale


def scale_of(
    values: Iterable[float | None], start: float, end: float, *, log: bool = False, zero: bool = False, pad: float = 0.0
) -> Scale:
    """A scale that holds all ``values``. zero: it begins (or ends) there. pad: share of its length left free at the
    far end. Equal values and none at all get room around them."""
    held = [value for value in values if value is not None]
    if log:
        return _log_scale(held, start, end)
    low, high = (min(held), max(held)) if held else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= SIGNIFICANT * max(abs(low), abs(high)):
        room = abs(high) * 0.5 or 1.0
        low, high = (low, high + 2 * room) if zero else (low - room, high + room)
    length = high - low
    if pad:
        high += pad * length if high > 0 or not zero else 0.0
        low -= pad * length if low < 0 or not zero else 0.0
    return Scale(low, high, start, end)


def _log_scale(held: Sequence[float], start: float, end: float) -> Scale:
    above = [max(value, SMALLEST) for value in held if value > 0]
    low, high = (min(above), max(above)) if above else (1e-1, 1.0)
    # Powers of ten below three decades would leave most of the picture empty.
    if math.log10(high / low if high / low < LARGEST else LARGEST) >= 3:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    else:
        low, high = low / 1.3, high * 1.3
    if len(above) == len(held):
        return Scale(low, high, start, end, log=True)
    inner = start + math.copysign(FLOOR_ROOM, end - start)
    return Scale(low, high, inner, end, log=True, floor=start)


def _linear_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    rough = (high - low) / max(1, most)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in _STEPS if factor * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [(number * step, tick_text(number * step, step)) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 1:
        stride = -(-(last - first + 1) // max(2, most))
        return [(10.0**power, power_text(power)) for power in range(last, first - 1, -stride)][::-1]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in decades for factor in (1.0, 2.0, 5.0)]
    inside = [value for value in found if low <= value <= high]
    if len(inside) < 2:
        return [(value, text) for value, text in _linear_ticks(low, high, 4) if value > 0]
    return [(value, f"{value:g}" if 1e-3 <= value < 1e4 else f"{value:.0e}".replace("e-0", "e-")) for value in inside]
