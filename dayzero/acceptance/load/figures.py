"""Figures of a level: from outcomes to numbers, and from repeats to medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dayzero.acceptance.load.drive import LevelRun


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one level. Times in milliseconds, rates in a second of the whole level, prefill included.

    ttft: request sent (in an open loop: due) to its first token. tpot: of each request, (last - first token) over the
    tokens behind the first. itl: between one chunk with tokens and the next, over all requests. None: nothing to
    measure it on (no answer, or answers of one token). requests counts those that were answered as asked; only these
    have times and tokens. cached_tokens: prompt tokens the server found in its cache, None when it does not say.
    late_ms: how far the client fell behind the arrivals. client_cpu: cores that the client took.
    """

    requests: int
    errors: int
    seconds: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    tpot_mean_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    output_tok_s: float
    total_tok_s: float
    requests_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    late_ms: float
    client_cpu: float


NAMES = Figures.__struct_fields__


def percentile(values: Sequence[float], share: float) -> float | None:
    """With ``share`` of the values below it, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(run: LevelRun) -> Figures:
    good = [out for out in run.outcomes if out.error is None]
    ttft = [1e3 * out.ttft for out in good]
    tpot = [1e3 * value for out in good if (value := out.tpot) is not None]
    gaps = [1e3 * gap for out in good for gap in out.gaps]
    output = sum(out.output_tokens or 0 for out in good)
    prompt = sum(out.prompt_tokens or 0 for out in good)
    cached = [out.cached_tokens for out in good if out.cached_tokens is not None]
    seconds = max(run.seconds, 1e-9)
    return Figures(
        requests=len(good),
        errors=len(run.outcomes) - len(good),
        seconds=run.seconds,
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p90_ms=percentile(ttft, 0.9),
        ttft_p99_ms=percentile(ttft, 0.99),
        tpot_mean_ms=statistics.fmean(tpot) if tpot else None,
        tpot_p50_ms=percentile(tpot, 0.5),
        tpot_p99_ms=percentile(tpot, 0.99),
        itl_p50_ms=percentile(gaps, 0.5),
        itl_p99_ms=percentile(gaps, 0.99),
        output_tok_s=output / seconds,
        total_tok_s=(output + prompt) / seconds,
        requests_s=len(good) / seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        late_ms=1e3 * run.late_seconds,
        client_cpu=run.client_cpu_seconds / seconds,
    )


def values_of(runs: Iterable[Figures], name: str) -> list[float]:
    """One figure of all runs that have it."""
    return [value for run in runs if (value := getattr(run, name)) is not None]


def medians(runs: Sequence[Figures]) -> dict[str, Any]:
    """name -> median over the runs, None where none has the figure."""
    return {name: statistics.median(found) if (found := values_of(runs, name)) else None for name in NAMES}


def spreads(runs: Sequence[Figures]) -> dict[str, float]:
    """name -> (largest - smallest) / median over the runs: what a repeat of the same thing can differ by."""
    out = {}
    for name in NAMES:
        found = values_of(runs, name)
        middle = statistics.median(found) if found else 0
        if len(found) > 1 and middle:
            out[name] = (max(found) - min(found)) / abs(middle)
    return out
