"""Layers as people write them: 0–2, 7, and the map of a whole model in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dayzero.arch.spec import LayerSpec, ModelSpec, channel_word, mixer_word

MAX_RUNS = 6


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Rising numbers as (first, last) of runs without gaps."""
    runs: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs


def numbers_text(numbers: Iterable[int], most: int = MAX_RUNS) -> str:
    """[0, 1, 2, 7] -> '0–2, 7'. More than ``most`` runs are cut in the middle: '3, 7, … 91'."""
    runs = runs_of(numbers)
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{texts[0]}, {texts[1]}, … {texts[-1]}"


def layer_json(spec: ModelSpec) -> list[dict[str, Any]]:
    """One object a layer: index, mixer, channel, residual, each in words."""
    return [
        {"index": i, **dict(zip(("mixer", "channel", "residual"), _words(layer), strict=True))}
        for i, layer in enumerate(spec.layers)
    ]


def _words(layer: LayerSpec) -> tuple[str, str, str]:
    residual = layer.residual
    word = residual.kind + (" sandwich" if getattr(residual, "sandwich", False) else "")
    return mixer_word(layer.mixer), channel_word(layer.channel), word


def map_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str, str, str]]:
    """(layers, how many, mixer, channel, residual) for each kind of layer: run by run while they are few."""
    words = [(str(x["mixer"]), str(x["channel"]), str(x["residual"])) for x in layers]
    runs: list[tuple[list[int], tuple[str, str, str]]] = []
    for i, word in enumerate(words):
        if runs and runs[-1][1] == word:
            runs[-1][0].append(i)
        else:
            runs.append(([i], word))
    if len(runs) > MAX_RUNS:
        by_kind: dict[tuple[str, str, str], list[int]] = {}
        for i, word in enumerate(words):
            by_kind.setdefault(word, []).append(i)
        runs = [(numbers, word) for word, numbers in by_kind.items()]
    return [(numbers_text(numbers), len(numbers), *word) for numbers, word in runs]


def map_text(layers: Sequence[Mapping[str, Any]]) -> str:
    """``0–2 latent / glu 18432; 3–60 latent / moe 256 top 8``."""
    return "; ".join(f"{where} {mixer} / {channel}" for where, _, mixer, channel, _ in map_rows(layers))
