"""A record's digests: any change breaks the one, only another outcome the other; times and durations neither."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero.acceptance.accept.digest import (
    canonical,
    digest_of,
    outcome_of,
    sha256_of,
    verify_digest,
)
from dayzero.acceptance.accept.record import RECORD, read_record, record_of
from dayzero.acceptance.files import write_json
from dayzero.errors import UsageError
from dayzero.finding import Finding

RUN = ("digest", "outcome", "began", "ended", "seconds", "taken")
SUBJECT = {
    "source": "models/nova", "url": None, "model": None, "recipe": None, "serve": ["--threads", "2"],
    "config_sha256": "a" * 64, "headers_sha256": "b" * 64, "tokenizer_sha256": "c" * 64, "template_sha256": "d" * 64,
}  # fmt: skip
PROTOCOL = {
    "package": {"name": "dayzero", "version": "1", "commit": None}, "versions": {"torch": "2"},
    "machine": {"cpu": "x", "cpus": 2}, "subject": SUBJECT, "profile": "quick", "seed": 0, "stages": ["weights"],
    "left_out": ["contract"], "baseline": None, "service": {"facts": {"bindings": {"linear": "tiled"}}},
}  # fmt: skip


def stage(name: str, *findings: Finding, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "title": name, "began": "2026-11-30T10:00:00+00:00", "seconds": 1.5, "taken": False,
        "findings": [f.to_json() for f in findings], "figures": [{"kind": "bars", "data": {"rows": [1]}}],
        "facts": {"tokens": 64}, "samples": {"found": {"a": True, "b": False}}, **more,
    }  # fmt: skip


def sample() -> dict[str, Any]:
    good = Finding("tensors.missing", "weights", "pass", "all are there", measured=12, bound=0)
    slow = Finding("perf.ttft", "server", "note", "first tokens come", 1.25, 2.0, ("level 4",), "look at the queue")
    return record_of(PROTOCOL, [stage("weights", good), stage("performance", slow)], "then", "now", 3.25)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a JSON value that is no container, and of the empty ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    yield from found or [path]


def changed(record: dict[str, Any], path: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    out = copy.deepcopy(record)
    part = out
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = change(part[path[-1]])
    return out


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def test_any_change_breaks_the_digest_and_nothing_else_does() -> None:
    record = sample()
    assert verify_digest(record)
    paths = list(leaves(record))
    assert len(paths) > 60
    for path in paths:
        runs = path[0] in RUN or (path[0] == "stages" and path[2] in RUN)
        edited = changed(record, path, other)
        assert verify_digest(edited) == (runs and path[0] not in ("digest", "outcome")), path


@pytest.mark.parametrize("what", ["a finding", "a stage", "order"])
def test_findings_cannot_be_dropped_or_moved(what: str) -> None:
    record = sample()
    edited = copy.deepcopy(record)
    if what == "a finding":
        edited["stages"][1]["findings"] = []
    elif what == "a stage":
        edited["stages"].pop()
    else:
        edited["stages"].reverse()
    assert not verify_digest(edited)


def test_what_is_no_record_is_not_verified() -> None:
    for odd in ({}, {"digest": "x", "outcome": "y", "stages": None}, {"digest": "x", "outcome": "y", "stages": [1]}):
        assert not verify_digest(odd)


def test_the_outcome_is_of_verdicts_and_hashes_alone() -> None:
    record = sample()
    first = record["stages"][0]["findings"][0]
    for path in (
        ("stages", 1, "findings", 0, "measured"), ("protocol", "versions", "torch"), ("protocol", "machine", "cpus"),
        ("stages", 0, "facts", "tokens"), ("subject", "source"), ("began",), ("stages", 0, "seconds"),
    ):  # fmt: skip
        edited = changed(record, path, other)
        assert outcome_of(edited) == outcome_of(record), path
    for path in (
        ("stages", 0, "findings", 0, "verdict"), ("stages", 0, "findings", 0, "kind"), ("seed",), ("profile",),
        ("protocol", "subject", "config_sha256"), ("protocol", "subject", "template_sha256"), ("stages", 0, "name"),
    ):  # fmt: skip
        assert outcome_of(changed(record, path, other)) != outcome_of(record), path
    assert first["verdict"] == "pass" and digest_of(record) != outcome_of(record)


def test_a_record_read_back_has_its_digest(tmp_path: Path) -> None:
    odd = Finding("a.b", "server", "fail", "half a pair \udc80, \x1b[31m, …", measured=float("nan"), bound=1e-300)
    record = record_of(
        PROTOCOL, [stage("weights", odd, facts={"x": [1.0, 0.1 + 0.2, -0.0, 2**70], "é": "ü"})], "", "", 1
    )
    write_json(tmp_path / RECORD, record)
    back = read_record(tmp_path)
    assert verify_digest(back) and back["stages"][0]["findings"][0]["measured"] == "nan"
    assert read_record(tmp_path / RECORD) == back


def test_canonical_json_is_spelled_in_one_way() -> None:
    assert canonical({"b": [1, 1.0, True, None], "a": "é\n"}) == b'{"a":"\\u00e9\\n","b":[1,1.0,true,null]}'
    assert sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1})
    assert sha256_of({"a": 1}) != sha256_of({"a": 1.0}) != sha256_of({"a": "1"})


def test_verdicts_and_counts() -> None:
    skipped = Finding("contract.ran", "server", "not applicable", "checked", measured="no server")
    bad = Finding("a.b", "server", "fail", "c")
    record = record_of(PROTOCOL, [stage("weights", skipped), stage("contract", skipped, bad)], "", "", 1)
    assert [s["verdict"] for s in record["stages"]] == ["not applicable", "fail"]
    assert record["verdict"] == "fail" and record["complete"] is False
    assert record["counts"] == {"pass": 0, "note": 0, "fail": 1, "not applicable": 2}


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "does not exist"), ("{", "is no JSON"), ("[1]", "is no record"), ('{"schema": 1}', "is no record"),
        ("schema", "has schema 99"), ("finding", "is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text == "schema":
        text = json.dumps(sample() | {"schema": 99})
    if text == "finding":
        text = json.dumps(changed(sample(), ("stages", 0, "findings", 0, "layer"), lambda _: "elsewhere"))
    if text is not None:
        (tmp_path / RECORD).write_text(text)
    with pytest.raises(UsageError, match=words):
        read_record(tmp_path)
