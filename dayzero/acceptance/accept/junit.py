"""A record as a JUnit file, which CI systems show: a suite a stage, a test case a finding. Paper.

A fail is a failure, what is not applicable is skipped, a note passes with its text as output. Cases are named by the
finding's kind, which stays the same from run to run; of several findings of one kind the second is ``kind #2``.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.acceptance.accept.record import findings_of
from dayzero.console import short_list
from dayzero.finding import Finding

# What XML 1.0 has no way to write, not even as a character reference.
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(record: Mapping[str, Any]) -> bytes:
    """The whole file, UTF-8. Properties of the suites: verdict, digest, profile, and what was judged."""
    subject = record["subject"]
    root = tree.Element("testsuites", {"name": "dayzero accept", "time": _seconds(record["stages"])})
    totals: Counter[str] = Counter()
    for stage in record["stages"]:
        listed = findings_of(stage["findings"])
        counts = {
            "tests": len(listed),
            "failures": sum(f.verdict == "fail" for f in listed),
            "errors": 0,
            "skipped": sum(f.verdict == "not applicable" for f in listed),
        }
        totals.update(counts)
        suite = tree.SubElement(
            root, "testsuite", {"name": clean_xml(stage["title"]), **_texts(counts), "time": _seconds([stage])}
        )
        suite.set("timestamp", clean_xml(str(stage["began"])[:19]))
        properties = tree.SubElement(suite, "properties")
        for name, value in (
            ("verdict", record["verdict"]), ("digest", record["digest"]), ("profile", record["profile"]),
            ("subject", subject["source"] or subject["url"]),
        ):  # fmt: skip
            tree.SubElement(properties, "property", {"name": name, "value": clean_xml(str(value))})
        for name, found in zip(_names(listed), listed, strict=True):
            _case(suite, f"dayzero.accept.{stage['name']}", name, found)
    for key, value in _texts(totals).items():
        root.set(key, value)
    tree.indent(root)
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + tree.tostring(root, encoding="utf-8") + b"\n"


def clean_xml(text: str) -> str:
    """``text`` with what XML cannot hold written out, as ``\\x1b``."""
    return NO_XML.sub(lambda found: ascii(found.group())[1:-1], text)


def _texts(counts: Mapping[str, int]) -> dict[str, str]:
    return {key: str(value) for key, value in counts.items()}


def _seconds(stages: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(stage['seconds'] for stage in stages):.3f}"


def _names(findings: Sequence[Finding]) -> list[str]:
    seen: Counter[str] = Counter()
    names = []
    for found in findings:
        seen[found.kind] += 1
        names.append(found.kind if seen[found.kind] == 1 else f"{found.kind} #{seen[found.kind]}")
    return names


def _case(suite: tree.Element, where: str, name: str, found: Finding) -> None:
    case = tree.SubElement(suite, "testcase", {"name": clean_xml(name), "classname": clean_xml(where)})
    if found.verdict == "not applicable":
        tree.SubElement(case, "skipped", {"message": clean_xml(f"{found.claim}: {found.measured}")})
    elif found.verdict == "fail":
        failure = tree.SubElement(case, "failure", {"message": clean_xml(found.claim), "type": found.layer})
        failure.text = clean_xml(_text(found))
    elif found.verdict == "note":
        tree.SubElement(case, "system-out").text = clean_xml(f"note: {_text(found)}")


def _text(found: Finding) -> str:
    """The finding for a person, a line a part."""
    rows = [
        ("layer", found.layer), ("measured", found.measured), ("bound", found.bound),
        ("evidence", short_list(found.evidence)), ("remedy", found.remedy),
    ]  # fmt: skip
    return "\n".join([found.claim, *(f"{name}: {value}" for name, value in rows if value not in (None, ""))])
