"""Which records a plan keeps tokens in: ``bf16``, ``fp8``, or a record for each kind of rows. Paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA, Attention, Mixer
from dayzero.arch.records import RECORDS, Kind
from dayzero.arch.spec import ModelSpec
from dayzero.decl import LATENT_PARTS
from dayzero.errors import UsageError

KINDS: tuple[Kind, ...] = ("latent", "index", "kv")
PLAIN, NARROW = "bf16", "fp8"
_NARROW: Mapping[Kind, str] = {"latent": "mla_fp8_656", "index": "idx_fp8_128", "kv": "kv_fp8"}
_NAMES: Mapping[Kind, str] = {"latent": "latent rows", "index": "index keys", "kv": "keys and values"}


def parse_records(text: str) -> dict[Kind, str]:
    """``latent=mla_fp8_656,index=idx_fp8_128,kv=kv_fp8``, some of these, or ``bf16`` -> record by kind of rows; what is
    not named stays bf16. ``fp8`` names the first fp8 record of every kind. UsageError for anything else."""
    if text in (PLAIN, NARROW):
        return dict(_NARROW) if text == NARROW else {}
    out: dict[Kind, str] = {}
    for part in text.split(","):
        word, _, record = part.partition("=")
        kind = next((k for k in KINDS if k == word), None)
        known = [r.name for r in RECORDS.values() if r.kind is not None and r.kind == kind]
        if kind is None or record not in known or kind in out:
            what = f"{word}= is given twice" if kind in out else f"{part!r} is none of"
            some = ", ".join(f"{word}={name}" for name in known) or "latent=RECORD, index=RECORD, kv=RECORD"
            raise UsageError(f"--cache {text}: {what} {some}; or give bf16 or fp8 for all rows.")
        out[kind] = record
    return out


def with_records(spec: ModelSpec, text: str) -> ModelSpec:
    """The spec with tokens' rows kept as ``text`` says. Layers of other packages stay as they are.

    UsageError, besides those of ``parse_records``: for a kind of rows the model does not keep, and for a record that
    its rows do not fit.
    """
    asked = parse_records(text)
    if not asked:
        return spec
    layers = [replace(layer, mixer=_kept(layer.mixer, asked, text)) for layer in spec.layers]
    made = replace(spec, layers=type(spec.layers)(layers))
    kept = {RECORDS[need.record].kind for need in made.cache() if need.record in RECORDS}
    absent = [kind for kind in asked if kind not in kept]
    if absent and text != NARROW:
        raise UsageError(f"--cache {text}: {spec.family} keeps no {_NAMES[absent[0]]}; leave {absent[0]}= out.")
    return made


def _kept(mixer: Mixer, asked: Mapping[Kind, str], text: str) -> Mixer:
    if isinstance(mixer, Attention):
        return replace(mixer, record=asked.get("kv", mixer.record))
    if not isinstance(mixer, MLA):
        return mixer
    record, index = asked.get("latent", mixer.record), mixer.index
    parts = (mixer.kv_rank, mixer.shared)
    if record == "mla_fp8_656" and parts != LATENT_PARTS:
        if text != NARROW:
            raise UsageError(
                f"--cache {text}: mla_fp8_656 is for rows of {LATENT_PARTS[0]} + {LATENT_PARTS[1]}, this model's are "
                f"{parts[0]} + {parts[1]}; give latent=mla_fp8_tiled."
            )
        record = "mla_fp8_tiled"
    if isinstance(index, Index):
        index = replace(index, record=asked.get("index", index.record))
    return replace(mixer, record=record, index=index)


def records_text(spec: ModelSpec) -> str:
    """The records of a spec's tokens, each once: ``mla_fp8_656, idx_fp8_128``."""
    return ", ".join(dict.fromkeys(need.record for need in spec.cache() if need.unit == "token"))
