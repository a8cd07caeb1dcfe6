"""Rotary embedding as numbers: which dims turn, how fast, with what scaling. Pure Python, so that inspect can show it.

Formulas: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071) in the form DeepSeek and gpt-oss use; Llama 3.1's
frequency smoothing; linear and dynamic-free NTK are refused unless listed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from dayzero.arch.raw import Raw
from dayzero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Yarn:
    """factor: stretch; original: trained length in tokens; fast, slow: rotations at the ramp's ends.

    truncate: round the ramp's ends to whole dims. magnitude: what multiplies cos and sin (1 when the softmax scale
    carries the correction instead).
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class BandScaling:
    """Llama 3.1: wavelengths beyond original/low are divided by factor, up to original/high kept, smooth between."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """dims: how many of a head's dims turn (even). style: ``half`` pairs (i, i+dims/2), ``interleaved`` (2i, 2i+1).

    place: whether the first or the last ``dims`` of the head turn. sections: m-rope, pairs per (time, height, width).
    """

    dims: int
    theta: float
    style: Literal["half", "interleaved"] = "half"
    place: Literal["first", "last"] = "first"
    scaling: Yarn | BandScaling | LinearScaling | None = None
    sections: tuple[int, ...] | None = None

    def inv_freq(self) -> tuple[float, ...]:
        """dims/2 angular frequencies in radians per token."""
        base = [self.theta ** (-2.0 * i / self.dims) for i in range(self.dims // 2)]
        scaling = self.scaling
        if scaling is None:
            return tuple(base)
        if isinstance(scaling, LinearScaling):
            return tuple(f / scaling.factor for f in base)
        if isinstance(scaling, BandScaling):
            return tuple(_banded(f, scaling) for f in base)
        return _yarn(base, self.dims, self.theta, scaling)

    def magnitude(self) -> float:
        """What multiplies cos and sin."""
        return self.scaling.magnitude if isinstance(self.scaling, Yarn) else 1.0


def _banded(freq: float, s: BandScaling) -> float:
    wavelength = 2 * math.pi / freq
    if wavelength < s.original / s.high:
        return freq
    if wavelength > s.original / s.low:
        return freq / s.factor
    smooth = (s.original / wavelength - s.low) / (s.high - s.low)
    return (1 - smooth) * freq / s.factor + smooth * freq


def _yarn(base: list[float], dims: int, theta: float, s: Yarn) -> tuple[float, ...]:
    def dim_of(rotations: float) -> float:
        return dims * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(s.fast), dim_of(s.slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    out = []
    for i, freq in enumerate(base):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(freq / s.factor * ramp + freq * (1 - ramp))
    return tuple(out)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: YaRN's temperature, on cos and sin or squared in the softmax scale."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What the config says about rope, spelled old or new, before a family turns it into a Rope.

    mscale, mscale_all_dim: DeepSeek's YaRN keys, None when absent; attention_factor likewise.
    """

    theta: float
    scaling: Yarn | BandScaling | LinearScaling | None
    partial: float | None
    sections: tuple[int, ...] | None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


def read_rope(
    raw: Raw, *, max_positions: int, theta_default: float | None = None, partial: bool = False, sections: bool = False
) -> RopeConfig:
    """Read rope_theta/rope_scaling (old) or rope_parameters (new). An unknown rope_type is refused by name.

    theta_default: the class's default, used (and recorded) when no spelling gives one; None makes it an error.
    partial, sections: whether the family turns a part of a head, or by (time, height, width). Where it does not, a
    config that asks for it is refused: the caller would have no use for the value, and so ignore it.
    """
    new = raw.sub_or_none("rope_parameters") if raw.has("rope_parameters") else None
    old = raw.sub_or_none("rope_scaling") if raw.has("rope_scaling") else None
    for key in ("rope_scaling", "rope_parameters"):
        if not raw.has(key):
            raw.ignore(key, why="null: no scaling")
    nested = next((s for s in (new, old) if s is not None), None)
    thetas = [s.float("rope_theta") for s in (new, old, raw) if s is not None and s.has("rope_theta")]
    if len(set(thetas)) > 1:
        raise ConfigError(f"config.json contradicts itself: rope_theta is given as {thetas}.")
    if thetas:
        theta = thetas[0]
    elif theta_default is None:
        theta = raw.float("rope_theta")
    else:
        theta = raw.float("rope_theta", default=theta_default)
    holders = [s for s in (new, raw) if s is not None and s.has("partial_rotary_factor")]
    partials = [s.float("partial_rotary_factor") for s in holders]
    if len(set(partials)) > 1:
        raise ConfigError(f"config.json contradicts itself: partial_rotary_factor is given as {partials}.")
    extra = _read_scaling(nested, max_positions) if nested is not None else {}
    found = extra.pop("sections", None)
    if partials and partials[0] != 1 and not partial:
        raise ConfigError(f"config.json: partial_rotary_factor is {partials[0]:g}, but this family turns whole heads.")
    if found is not None and not sections:
        raise ConfigError("config.json has an mrope_section, but this family knows one kind of position.")
    return RopeConfig(theta, extra.pop("scaling", None), partials[0] if partials else None, found, **extra)


def _read_scaling(s: Raw, max_positions: int) -> dict[str, Any]:
    kind = s.one_of("rope_type", "type", allowed=("default", "linear", "llama3", "yarn", "mrope"), default="default")
    out: dict[str, Any] = {}
    if s.has("mrope_section"):
        out["sections"] = s.ints("mrope_section")
        s.one_of("mrope_interleaved", allowed=(True,), default=True)
    if kind in ("default", "mrope"):
        return out
    factor = s.float("factor")
    if kind == "linear":
        out["scaling"] = LinearScaling(factor)
    elif kind == "llama3":
        out["scaling"] = BandScaling(
            factor, s.float("low_freq_factor"), s.float("high_freq_factor"), s.int("original_max_position_embeddings")
        )
    else:
        for key in ("mscale", "mscale_all_dim", "attention_factor"):
            out[key] = s.float(key) if s.has(key) else None
            s.ignore(key, why="null")
        original = s.int("original_max_position_embeddings", default=max_positions)
        magnitude = out["attention_factor"]
        if magnitude is None:
            magnitude = _cos_sin_magnitude(factor, out["mscale"], out["mscale_all_dim"])
        out["scaling"] = Yarn(
            factor,
            original,
            s.float("beta_fast", default=32.0),
            s.float("beta_slow", default=1.0),
            s.bool("truncate", default=True),
            float(magnitude),  # type: ignore[arg-type]
        )
    return out


def _cos_sin_magnitude(factor: float, mscale: object, mscale_all_dim: object) -> float:
    # DeepSeek's ratio: with equal mscales nothing is left for cos and sin, the softmax scale carries it all.
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, float(mscale)) / yarn_magnitude(factor, float(mscale_all_dim))  # type: ignore[arg-type]
    return yarn_magnitude(factor)
