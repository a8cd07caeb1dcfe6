"""The JUnit file of a record: well-formed whatever the findings hold, with the counts that CI systems add up."""

from __future__ import annotations

import xml.etree.ElementTree as tree
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dayzero.acceptance.accept.junit import clean_xml, junit_xml
from dayzero.acceptance.accept.record import record_of
from dayzero.finding import Finding
from tests.paper.test_accept_digest import PROTOCOL, stage

FOUND = (
    Finding("a.one", "weights", "pass", "one holds", measured=3),
    Finding("a.one", "weights", "fail", 'two <holds> & "more"', 5, 3, ("x", "y"), "mend it"),
    Finding("a.three", "server", "note", "three is odd", remedy="look"),
    Finding("a.four", "server", "not applicable", "four holds", measured="there is no server"),
)


def xml_of(*findings: Finding, **more: Any) -> tree.Element:
    record = record_of(PROTOCOL, [stage("weights", *findings, **more), stage("contract", FOUND[0])], "", "", 2)
    return tree.fromstring(junit_xml(record))


def test_each_finding_is_a_case_of_its_verdict() -> None:
    root = xml_of(*FOUND)
    assert root.tag == "testsuites" and [s.tag for s in root] == ["testsuite", "testsuite"]
    first = root[0]
    cases = first.findall("testcase")
    assert [case.get("name") for case in cases] == ["a.one", "a.one #2", "a.three", "a.four"]
    assert {case.get("classname") for case in cases} == {"dayzero.accept.weights"}
    assert [[part.tag for part in case] for case in cases] == [[], ["failure"], ["system-out"], ["skipped"]]
    failure = cases[1].find("failure")
    assert failure is not None and failure.get("message") == FOUND[1].claim and failure.get("type") == "weights"
    for words in ("measured: 5", "bound: 3", "evidence: x, y", "remedy: mend it", "layer: weights"):
        assert failure.text and words in failure.text
    skipped = cases[3].find("skipped")
    assert skipped is not None and "there is no server" in str(skipped.get("message"))


def test_counts_add_up() -> None:
    root = xml_of(*FOUND, seconds=2.25)
    counts = [{key: s.get(key) for key in ("tests", "failures", "errors", "skipped", "time")} for s in (root[0], root)]
    assert counts[0] == {"tests": "4", "failures": "1", "errors": "0", "skipped": "1", "time": "2.250"}
    assert counts[1] == {"tests": "5", "failures": "1", "errors": "0", "skipped": "1", "time": "3.750"}
    properties = {p.get("name"): p.get("value") for p in root[0].iter("property")}
    assert properties["verdict"] == "fail" and len(properties["digest"] or "") == 64
    assert properties["subject"] == "models/nova"


def test_control_characters_are_written_out() -> None:
    assert clean_xml("a\x00\x1b[31m\ud800\uffff\tb\n") == "a\\x00\\x1b[31m\\ud800\\uffff\tb\n"


@given(st.text(st.characters(), max_size=20), st.text(st.characters(), max_size=20))
def test_any_text_makes_a_well_formed_file(claim: str, measured: str) -> None:
    for verdict in ("fail", "note", "not applicable"):
        found = Finding(f"k.{claim}", "server", verdict, claim, measured, measured, (claim,), measured)  # type: ignore[arg-type]
        case = xml_of(found, title=measured)[0].find("testcase")
        assert case is not None and case.get("name") == clean_xml(f"k.{claim}")
