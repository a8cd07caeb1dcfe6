"""The record of an acceptance: one JSON object that says what was judged, how, and what was found. Paper.

    {"schema": 1, "verdict", "complete": all eight stages were asked for, "digest", "outcome",
     "subject": {"source", "url", "model", "recipe", "serve": [options]}, "profile", "seed",
     "counts": {"pass", "note", "fail", "not applicable"}, "began", "ended": UTC, "seconds",
     "protocol": see ``protocol.py``,
     "stages": [{"name", "title", "verdict", "counts", "began", "seconds", "taken": from an earlier run, "findings",
                 "figures", "facts", "samples"}]}

Findings, figures, facts and samples are as ``finding.Finding`` and ``stage.py`` have them; a stage that could check
nothing has the verdict "not applicable". A record of another schema is refused, never guessed at.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dayzero.acceptance.accept.digest import digest_of, outcome_of
from dayzero.errors import UsageError
from dayzero.finding import VERDICTS, Finding, Verdict, worst

SCHEMA = 1
RECORD = "record.json"


class StageEntry(msgspec.Struct):
    """What every stage of a record has."""

    name: str
    title: str
    verdict: str
    counts: dict[str, int]
    began: str
    seconds: float
    taken: bool
    findings: list[dict[str, Any]]
    figures: list[dict[str, Any]]
    facts: dict[str, Any]
    samples: dict[str, dict[str, float | bool]]


class Protocol(msgspec.Struct):
    """What of a protocol is read again; the rest is for people."""

    package: dict[str, Any]
    machine: dict[str, Any]
    subject: dict[str, Any]
    left_out: list[str]


class Record(msgspec.Struct):
    """What a record must have to be shown or compared. Further keys are left alone."""

    verdict: str
    subject: dict[str, Any]
    profile: str
    seed: int
    counts: dict[str, int]
    protocol: Protocol
    stages: list[StageEntry]
    digest: str
    outcome: str


def findings_of(entries: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings out of their JSON form."""
    return [Finding(**{**entry, "evidence": tuple(entry["evidence"])}) for entry in entries]


def counts_of(findings: Iterable[Finding]) -> dict[str, int]:
    """Verdict -> how many, every verdict named."""
    found = Counter(finding.verdict for finding in findings)
    return {verdict: found[verdict] for verdict in VERDICTS}  # type: ignore[index]


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Of one stage. Where nothing could be checked, "pass" would say more than was seen."""
    return "not applicable" if all(f.verdict == "not applicable" for f in findings) else worst(findings)


def all_findings(record: Mapping[str, Any]) -> list[Finding]:
    """Those of all stages, in order."""
    return [found for stage in record["stages"] for found in findings_of(stage["findings"])]


def record_of(
    protocol: Mapping[str, Any], stages: Sequence[Mapping[str, Any]], began: str, ended: str, seconds: float
) -> dict[str, Any]:
    """The record of a run. stages: as ``resume.Kept`` keeps them, with ``taken``; began, ended: UTC; seconds: of this
    run. What the subject is called, profile and seed are the protocol's."""
    listed = [found for stage in stages for found in findings_of(stage["findings"])]
    named = {key: protocol["subject"].get(key) for key in ("source", "url", "model", "recipe", "serve")}
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "verdict": worst(listed),
        "complete": not protocol["left_out"],
        "subject": named,
        "profile": protocol["profile"],
        "seed": protocol["seed"],
        "counts": counts_of(listed),
        "began": began,
        "ended": ended,
        "seconds": seconds,
        "protocol": dict(protocol),
        "stages": [_stage(stage) for stage in stages],
    }
    return record | {"digest": digest_of(record), "outcome": outcome_of(record)}


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    listed = findings_of(stage["findings"])
    keys = ("began", "seconds", "taken", "findings", "figures", "facts", "samples")
    head = {"name": stage["name"], "title": stage["title"], "verdict": verdict_of(listed), "counts": counts_of(listed)}
    return head | {key: stage[key] for key in keys}


def read_record(where: Path) -> dict[str, Any]:
    """The record at ``where``: its file, or the folder that holds it. UsageError when it is none that is read here."""
    path = where / RECORD if where.is_dir() else where
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist; give the folder of a finished acceptance, or its {RECORD}."
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON, so no record: {str(error)[:120]}.") from error
    if not isinstance(record, dict) or "stages" not in record or "protocol" not in record:
        raise UsageError(f"{path} is no record of an acceptance; give the {RECORD} that dayzero accept wrote.")
    if record.get("schema") != SCHEMA:
        raise UsageError(f"{path} has schema {record.get('schema')}, this version reads {SCHEMA}; accept anew.")
    try:
        msgspec.convert(record, Record)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}; accept anew, or give the file as it was written.") from error
    try:
        all_findings(record)
    except (KeyError, TypeError, AssertionError) as error:
        raise UsageError(f"{path} is damaged: a finding in it lacks a part ({error!r}); accept anew.") from error
    return record
