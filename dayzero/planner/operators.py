"""The three-way list: operators that can be reused, those that must be extended, and those to build."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from dayzero.arch.raw import BOOKKEEPING, NEUTRAL
from dayzero.arch.traits import KEY_TRAITS
from dayzero.decl import OpUse
from dayzero.ops.catalog import CATALOG, Catalog

Operators = dict[str, list[dict[str, Any]]]


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


def from_keys(config: Mapping[str, Any], known: Iterable[str], catalog: Catalog = CATALOG) -> Operators:
    """The list for a config that no recipe reads, by its keys alone.

    known: dotted keys that the nearest family reads. A key that neither it nor the table knows is listed under build.
    """
    read = set(known)
    found: dict[tuple[str, str], tuple[dict[str, object], list[str], str]] = {}
    unknown = []
    for path, key in _keys(config):
        rows = [row for row in KEY_TRAITS if any(fnmatch.fnmatchcase(key, p) for p in row.keys)]
        for row in rows:
            kept = found.setdefault((row.contract, str(sorted(row.traits.items()))), (dict(row.traits), [], row.about))
            kept[1].append(path)
        if not rows and path not in read and key not in BOOKKEEPING and key not in NEUTRAL and "token_id" not in key:
            unknown.append(path)
    out: Operators = {"reuse": [], "extend": [], "build": []}
    for (contract, _), (traits, keys, about) in sorted(found.items()):
        _place(out, catalog, contract, traits, {"keys": keys, "about": about})
    for path in unknown:
        out["build"].append(
            {"contract": None, "keys": [path], "about": f"unknown key {path}: no operator is known to need it"}
        )
    return out


def _keys(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted path, key) of all keys that mean something; a quantisation config, and towers, are not looked into."""
    out = []
    for key, value in config.items():
        if value in (None, False, 0, "", [], {}) or key in ("quantization_config", "compression_config"):
            continue
        path = f"{prefix}{key}"
        out.append((path, key))
        if isinstance(value, Mapping) and key not in (
            "vision_config",
            "audio_config",
            "auto_map",
            "id2label",
            "label2id",
        ):
            out += _keys(value, f"{path}.")
    return out
