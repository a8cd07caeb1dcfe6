"""The three-way list: operators that can be reused, those that must be extended, and those to build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dayzero.arch.traits import KEY_TRAITS, KIND_TRAITS, KeyTrait, is_layer_list, names_layers, rows_of
from dayzero.decl import OpUse
from dayzero.models.reading import Reading
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.planner.reading_facts import refused_kinds, told_refusals

Operators = dict[str, list[dict[str, Any]]]

STORAGE_KEYS = ("dtype", "torch_dtype")  # how weights are stored: no operator's business
CLAIMS = ("quantization_config", "compression_config")
TOWERS = ("vision_config", "audio_config", "auto_map", "id2label", "label2id")


def from_contracts(uses: Iterable[OpUse], catalog: Catalog = CATALOG) -> Operators:
    """reuse: some variant has all traits. extend: the contract exists, a trait does not. build: no such contract.

    One entry for each (contract, traits): how often it is used, its first sites, its variants, and what is lacking.
    """
    grouped: dict[tuple[str, tuple[tuple[str, object], ...]], list[str]] = {}
    for use in uses:
        grouped.setdefault((use.contract, use.traits), []).append(use.site)
    out: Operators = {"reuse": [], "extend": [], "build": []}
    for (contract, traits), sites in sorted(grouped.items(), key=lambda kv: (kv[0][0], str(kv[0][1]))):
        _place(out, catalog, contract, dict(traits), {"uses": len(sites), "sites": sites[:3]})
    return out


def _place(out: Operators, catalog: Catalog, contract: str, traits: dict[str, object], more: dict[str, Any]) -> None:
    fits, lacks = catalog.supports(contract, traits)
    variants = [line.variant for line in catalog.lookup(contract)]
    word = "reuse" if fits else "extend" if variants else "build"
    entry = {"contract": contract, "traits": traits, **more}
    if variants:
        entry["variants"] = variants
    if not fits:
        entry["lacks"] = lacks
        entry["nearest"] = catalog.nearest(contract)
    out[word].append(entry)


def from_reading(
    reading: Reading, config: Mapping[str, Any], left: Iterable[str], catalog: Catalog = CATALOG
) -> Operators:
    """The list for a config that a recipe does not fully cover: its reading's operators, then what it leaves over.

    left: dotted keys that nothing reads; they speak by the table of key traits, or are listed under build as unknown.
    A list of layer kinds that nothing reads, and a kind that the recipe refuses, speak by the table of kinds; a kind
    that is in no table is no operator by itself: it stands with the layer kinds (``nearest_family``).
    Another value that the recipe refuses is listed under extend. What it reads or ignores else is not asked about.
    """
    out = from_contracts(_uses(reading), catalog)
    found: dict[tuple[str, str], tuple[dict[str, object], list[str], str]] = {}
    unknown = []
    speaking = [(path, kind) for path, kinds in refused_kinds(reading).items() for kind in kinds.values()]
    for path, key, known in _keys(config, left):
        value, _ = value_at(config, path)
        if is_layer_list(key, value):
            speaking += [(path, kind) for kind in value]
            continue
        rows = rows_of(key, KEY_TRAITS)
        _speak(found, path, rows)
        if not rows and not known and "token_id" not in key and not names_layers(key):
            unknown.append(path)
    for path, kind in dict.fromkeys(speaking):
        _speak(found, path, rows_of(kind, KIND_TRAITS))
    for (contract, _), (traits, keys, about) in sorted(found.items()):
        _place(out, catalog, contract, traits, {"keys": keys, "about": about})
    for path in unknown:
        out["build"].append(
            {"contract": None, "keys": [path], "about": f"unknown key {path}: no operator is known to need it"}
        )
    _place_refused(out, reading, catalog)
    return out


def _speak(
    found: dict[tuple[str, str], tuple[dict[str, object], list[str], str]], path: str, rows: Iterable[KeyTrait]
) -> None:
    """Enter the key at ``path`` with each contract that it speaks of."""
    for row in rows:
        _, keys, _ = found.setdefault(
            (row.contract, str(sorted(row.traits.items()))), (dict(row.traits), [], row.about)
        )
        if path not in keys:
            keys.append(path)


def _uses(reading: Reading) -> list[OpUse]:
    """Operators of the reading's model, whatever was guessed."""
    if reading.spec is None or reading.vague:
        return []
    uses = reading.spec.contracts()
    for other in reading.others:
        both = {(use.contract, use.traits) for use in other.contracts()}
        uses = [use for use in uses if (use.contract, use.traits) in both]
    return uses


def _place_refused(out: Operators, reading: Reading, catalog: Catalog) -> None:
    """Values of the right kind that the recipe does not know: each may be an option that an operator lacks.

    It is listed under extend, or under reuse where an option of the operator has just this word.
    """
    seen = set(refused_kinds(reading))
    for refusal in told_refusals(reading):
        key = refusal.key.rpartition(".")[2]
        if refusal.key in seen or not refusal.of_kind or key in STORAGE_KEYS or is_contradiction(refusal.said):
            continue
        seen.add(refusal.key)
        entries = reading.entries.get(refusal.key)
        stated = list(dict.fromkeys(map(repr, entries.values()))) if entries else [repr(refusal.stated)[:80]]
        row = next((row for row in rows_of(key, KEY_TRAITS) if catalog.lookup(row.contract)), None)
        traits = catalog.lookup(row.contract)[0].traits if row is not None else {}
        lacks = f"the recipe {reading.recipe.name} does not know {', '.join(stated)} of {refusal.key}"
        if row is not None and traits:
            has = ", ".join(f"{option} of {list(allowed)}" for option, allowed in traits.items())
            lacks += f"; {row.contract} has {has}"
        word = refusal.stated if isinstance(refusal.stated, str) else None
        known = word is not None and any(word in allowed for allowed in traits.values())
        about = row.about if row is not None else ""
        contract = row.contract if row is not None else None
        entry: dict[str, Any] = {"contract": contract, "traits": {}, "keys": [refusal.key]}
        if known:
            out["reuse"].append({**entry, "about": f"{about}: {lacks}"})
        else:
            out["extend"].append({**entry, "about": about, "lacks": [lacks]})


def is_contradiction(said: str) -> bool:
    """Whether a refusal is about two statements of the config that differ, not about one that the recipe lacks."""
    return "contradicts itself" in said or "and they differ" in said


def _keys(config: Mapping[str, Any], paths: Iterable[str], within: bool = False) -> list[tuple[str, str, bool]]:
    """(dotted path, key, whether an object above it is listed) of the keys at ``paths`` that mean something, and of
    all keys below them; a quantisation config is not looked into, nor is a tower's."""
    out = []
    for path in paths:
        value, key = value_at(config, path)
        key = next((part for part in path.split(".") if part in TOWERS), key)
        if value in (None, False, 0, "", [], {}) or key in CLAIMS:
            continue
        out.append((path, key, within))
        if isinstance(value, Mapping) and key not in TOWERS:
            out += _keys(config, [f"{path}.{inner}" for inner in value], within=True)
    return out


def value_at(config: Mapping[str, Any], path: str) -> tuple[Any, str]:
    """(value, last key) at a dotted path; a key may itself hold dots."""
    value: Any = config
    rest = path
    while isinstance(value, Mapping):
        if rest in value:
            return value[rest], rest
        key = max((k for k in value if isinstance(k, str) and rest.startswith(f"{k}.")), key=len, default=None)
        if key is None:
            break
        value, rest = value[key], rest[len(key) + 1 :]
    return None, rest
