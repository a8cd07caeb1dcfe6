"""What a reading that goes on past refusals comes to: facts that no guess touches, and what stood in for what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dayzero.arch.probe import Refusal
from dayzero.arch.sound import unsound
from dayzero.arch.spec import ModelSpec
from dayzero.arch.traits import is_layer_list, layer_part
from dayzero.errors import UserError
from dayzero.models.reading import Reading
from dayzero.models.recipe import RECIPE_ERRORS
from dayzero.planner.effective import effective_values
from dayzero.planner.layer_text import layer_json, numbers_text
from dayzero.planner.spec_facts import NO_CACHE, spec_facts

UNKNOWN_WORD = "?"
MAX_TEXT = 80
_MISSING = object()


def reading_facts(reading: Reading, config: Mapping[str, Any]) -> dict[str, Any]:
    """As ``spec_facts``, of a reading: what different guesses do not agree about is left open.

    Empty when the reading came to no end. Layers that stand in for a kind the recipe does not know say so.
    """
    if reading.spec is None or reading.vague:
        return {}
    facts = partial_facts(reading.spec, config)
    for other in reading.others:
        facts = _agreed(facts, partial_facts(other, config))
    _mark_layers(facts.get("layers", []), reading)
    return facts


def partial_facts(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """``spec_facts``, or as much of it as numbers that do not go together allow."""
    whole = _tried(lambda: spec_facts(spec, config))
    if whole is not None:
        return whole
    asks: dict[str, Callable[[], Any]] = {
        "layers": lambda: layer_json(spec),
        "effective": lambda: effective_values(spec, config),
        "context_tokens": lambda: spec.max_positions,
        "modality": lambda: spec.modality,
    }
    found = {name: _tried(ask) for name, ask in asks.items()}
    return {name: value for name, value in found.items() if value is not None}


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (UserError, *RECIPE_ERRORS):
        return None


def _agreed(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    out = {name: value for name, value in first.items() if name in second}
    for name, lost in (("cache", dict(NO_CACHE)), ("context_tokens", None), ("modality", None)):
        if name in out and out[name] != second[name]:
            out[name] = lost
    if "parameters" in out:
        out["parameters"] = {k: v if v == second["parameters"][k] else None for k, v in out["parameters"].items()}
    if "layers" in out:
        pairs = zip(out["layers"], second["layers"], strict=False)
        same = len(out["layers"]) == len(second["layers"])
        out["layers"] = [{k: v if v == b[k] else UNKNOWN_WORD for k, v in a.items()} for a, b in pairs] if same else []
    if "effective" in out:
        out["effective"] = _same_values(out["effective"], second["effective"])
    return out


def _same_values(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Effective values that both have: whole entries, or the equal parts of entries for the same layers."""
    out: dict[str, Any] = {}
    for name, value in first.items():
        other = second.get(name)
        if value == other:
            out[name] = value
        elif isinstance(value, list):
            paired = other if isinstance(other, list) and len(other) == len(value) else []
            entries = [_equal_parts(a, b) for a, b in zip(value, paired, strict=False)]
            out[name] = [entry for entry in entries if "layers" in entry]
        elif name == "tie":
            out[name] = {"tied": value["tied"], "source": "a stand-in: the config does not say"}
        else:
            out[name] = None
    return out


def _equal_parts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in first.items() if value == second.get(key, _MISSING)}


def _mark_layers(layers: list[dict[str, Any]], reading: Reading) -> None:
    """Say at each layer when its kind stands in for one that the config states otherwise."""
    for key, kinds in refused_kinds(reading).items():
        word = layer_part(key)
        for i, kind in kinds.items():
            if i < len(layers) and layers[i][word] != UNKNOWN_WORD:
                layers[i] = {**layers[i], word: f"{layers[i][word]}, in place of {kind!r}"}


def refused_kinds(reading: Reading) -> dict[str, dict[int, str]]:
    """Key of a list with one kind a layer -> {layer: a kind there that the recipe does not know}."""
    out = {}
    for refusal in reading.refusals:
        kinds = refusal.stated
        if reading.spec is not None and is_layer_list(refusal.key, kinds, len(reading.spec.layers)):
            entries = reading.entries.get(refusal.key, {})
            out[refusal.key] = {i: kind for i, kind in entries.items() if isinstance(kind, str)}
    return out


def told_refusals(reading: Reading) -> list[Refusal]:
    """Each thing that is absent or refused, once: not what follows from another, nor what is below a refused object."""
    keys = {r.key for r in reading.refusals}
    alone = [r for r in reading.refusals if not any(r.key.startswith(f"{key}.") for key in keys)]
    return [r for r in alone if not r.follows]


def number_faults(reading: Reading) -> list[str]:
    """Why the reading's numbers do not go together, whatever was guessed."""
    if reading.spec is None:
        return []
    faults = _tried(lambda: unsound(reading.spec)) or []  # type: ignore[arg-type]
    for other in reading.others:
        also = _tried(lambda other=other: unsound(other)) or []  # type: ignore[misc]
        faults = [fault for fault in faults if fault in also]
    return [f"config.json: {fault}." for fault in faults]


def refusal_lines(reading: Reading) -> list[str]:
    """One sentence for each difference between what the recipe needs and what the config says."""
    out = [r.said for r in told_refusals(reading)] + number_faults(reading)
    if reading.stop:
        out.append(f"the recipe stops there: {reading.stop}")
    return list(dict.fromkeys(out))


def stand_ins(reading: Reading) -> dict[str, str]:
    """Key -> what the reading used in its place, in words."""
    out: dict[str, str] = {}
    for refusal in told_refusals(reading):
        entries = reading.entries.get(refusal.key, {})
        if refusal.guessed:
            out[refusal.key] = "a guess; what follows from it is left open"
        elif entries and isinstance(refusal.used, list):
            out[refusal.key] = _entries_text(entries, refusal.used)
        elif entries and refusal.used is None:
            out[refusal.key] = f"left out, for {kinds_text(entries)}"
        elif refusal.used is None:
            out[refusal.key] = f"left out, though it is {_short(refusal.stated)}"
        elif refusal.stated is None:
            out[refusal.key] = f"{_short(refusal.used)}, though it is absent"
        else:
            out[refusal.key] = f"{_short(refusal.used)} in place of {_short(refusal.stated)}"
    return out


def _entries_text(entries: Mapping[int, Any], used: list[Any]) -> str:
    """``'full_attention' in place of 'mamba' (entries 0, 2–5)``; entries count from 0, as layers do."""
    places: dict[tuple[str, str], list[int]] = {}
    for i, entry in entries.items():
        if i < len(used):
            places.setdefault((repr(used[i]), repr(entry)), []).append(i)
    return "; ".join(f"{a} in place of {b} (entries {numbers_text(at)})" for (a, b), at in places.items())


def kinds_text(entries: Mapping[int, Any]) -> str:
    """``'mamba' (entries 0, 2–5); 'moba' (entries 1)``."""
    places: dict[str, list[int]] = {}
    for i, entry in entries.items():
        places.setdefault(repr(entry), []).append(i)
    return "; ".join(f"{entry} (entries {numbers_text(at)})" for entry, at in places.items())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def open_facts(facts: Mapping[str, Any], reading: Reading) -> list[str]:
    """One sentence for each kind of fact that hangs on a guess."""
    if not reading.guessed:
        return []
    told = list(dict.fromkeys(r.key for r in told_refusals(reading)))
    # What is guessed for a value that only follows from another hangs on that one.
    keys = ", ".join([key for key in told if key in reading.guessed] or told)
    lost = []
    if (facts.get("parameters") or {"total": None})["total"] is None:
        lost.append("parameters")
    if (facts.get("cache") or NO_CACHE) == NO_CACHE:
        lost.append("cache")
    if not facts.get("layers") or any(UNKNOWN_WORD in layer.values() for layer in facts["layers"]):
        lost.append("layers")
    if facts.get("context_tokens") is None:
        lost.append("context")
    return [f"{', '.join(lost)}: not known, because they hang on {keys}"] if lost else []
