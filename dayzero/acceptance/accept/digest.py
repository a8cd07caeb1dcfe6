"""Two digests of a record: one that any change breaks, one that two runs with the same outcome share.

``digest`` is SHA-256 over the canonical JSON of the whole record but for NOT_COVERED: when and how long it ran, which
stages were taken from an earlier run, and the digests themselves. Everything else is covered: subject, protocol, every
finding with what was measured, figures, facts, samples, counts and verdicts.

``outcome`` is SHA-256 over what a run on another day, or another machine, must come to again: the hashes of what was
judged, profile, seed, and for each stage the kinds of its findings with their verdicts, in order. No measured value and
no version is in it.

Canonical JSON: keys sorted, no white space, all but ASCII escaped, numbers as Python's ``repr`` writes them, which a
reader of the file gets back bit for bit; NaN and infinities as text (``console.plain``). Paper.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dayzero.console import plain

NOT_COVERED = frozenset({"digest", "outcome", "began", "ended", "seconds", "taken"})
WEIGHT_HASHES = ("config_sha256", "headers_sha256", "tokenizer_sha256")
TEMPLATE_HASH, RECIPE_HASH = "template_sha256", "recipe_sha256"
HASHES = (*WEIGHT_HASHES, TEMPLATE_HASH, RECIPE_HASH)


def canonical(value: object) -> bytes:
    """The one spelling of ``value`` as JSON."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_of(value: object) -> str:
    """SHA-256 in hex over ``canonical(value)``."""
    return hashlib.sha256(canonical(value)).hexdigest()


def digest_of(record: Mapping[str, Any]) -> str:
    """The digest of a record, whatever its own says."""
    covered = {key: value for key, value in record.items() if key not in NOT_COVERED}
    covered["stages"] = [
        {key: value for key, value in stage.items() if key not in NOT_COVERED} for stage in record["stages"]
    ]
    return sha256_of(covered)


def outcome_of(record: Mapping[str, Any]) -> str:
    """The outcome of a record, whatever its own says."""
    subject = record["protocol"]["subject"]
    stages = [
        {"name": stage["name"], "findings": [[found["kind"], found["verdict"]] for found in stage["findings"]]}
        for stage in record["stages"]
    ]
    judged = {name: subject.get(name) for name in HASHES}
    return sha256_of({"judged": judged, "profile": record["profile"], "seed": record["seed"], "stages": stages})


def verify_digest(record: Mapping[str, Any]) -> bool:
    """Whether a record, as read from its file, is the one that was written: both digests fit its content."""
    try:
        return bool(record["digest"] == digest_of(record) and record["outcome"] == outcome_of(record))
    except (KeyError, TypeError, AttributeError):
        return False
