"""Two records side by side: which findings changed, what paired items say, and what cannot be compared."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dayzero.acceptance.accept.compare import compare, compare_records
from dayzero.acceptance.accept.digest import digest_of, outcome_of
from dayzero.acceptance.accept.paired import RESAMPLES, binomial_p, bootstrap, holm, mcnemar
from dayzero.acceptance.accept.record import RECORD, read_record, record_of
from dayzero.acceptance.accept.show import show_comparison
from dayzero.acceptance.files import write_json
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.finding import Finding
from tests.paper.test_accept_digest import PROTOCOL, stage


def found(kind: str, verdict: str, claim: str = "it holds", **more: Any) -> Finding:
    return Finding(kind, "server", verdict, claim, **more)  # type: ignore[arg-type]


def record(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """changes: dotted keys of the protocol, with __ for dots."""
    protocol = copy.deepcopy(PROTOCOL)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        part: Any = protocol
        for key in path:
            part = part[key]
        part[last] = value
    return record_of(protocol, stages, "then", "now", 1.0)


def statuses(a: list[Finding], b: list[Finding]) -> dict[str, list[str]]:
    done = compare_records(record(stage("contract", *a)), record(stage("contract", *b)))
    out: dict[str, list[str]] = {}
    for pair in done["findings"]:
        out.setdefault(pair["kind"], []).append(pair["status"])
    return out


# --- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, status",
    [
        ("pass", "pass", "same"), ("fail", "fail", "same"), ("pass", "fail", "broken"), ("note", "fail", "broken"),
        ("not applicable", "fail", "broken"), ("fail", "pass", "mended"), ("fail", "note", "mended"),
        ("fail", "not applicable", "changed"), ("pass", "note", "changed"), ("pass", "not applicable", "changed"),
    ],
)  # fmt: skip
def test_a_finding_is_same_mended_broken_or_changed(a: str, b: str, status: str) -> None:
    assert statuses([found("k", a)], [found("k", b)]) == {"k": [status]}


def test_what_stands_in_one_record_alone() -> None:
    got = statuses([found("a", "pass"), found("x", "fail")], [found("b", "pass"), found("c", "fail")])
    assert got == {"a": ["only in A"], "x": ["only in A"], "b": ["only in B"], "c": ["broken"]}


def test_findings_of_one_kind_meet_by_claim_and_then_in_order() -> None:
    a = [found("k", "pass", "one"), found("k", "fail", "two"), found("k", "pass", "3 of 4")]
    b = [found("k", "fail", "two"), found("k", "pass", "4 of 4"), found("k", "fail", "one")]
    done = compare_records(record(stage("contract", *a)), record(stage("contract", *b)))
    met = {(p["a"]["claim"], p["b"]["claim"]): p["status"] for p in done["findings"]}
    assert met == {("one", "one"): "broken", ("two", "two"): "same", ("3 of 4", "4 of 4"): "same"}


def test_the_verdict_is_fail_for_what_broke_note_for_what_differs_pass_for_the_same() -> None:
    def verdict(a: Finding, b: Finding) -> str:
        return compare_records(record(stage("contract", a)), record(stage("contract", b)))["verdict"]

    assert verdict(found("k", "pass"), found("k", "pass", measured=4)) == "pass"
    assert verdict(found("k", "fail"), found("k", "pass")) == "note"
    assert verdict(found("k", "pass"), found("k", "fail")) == "fail"


# --- what is not comparable ------------------------------------------------------------------------------------------


def samples(values: dict[str, Any], name: str = "functional", **more: Any) -> dict[str, Any]:
    return stage(name, found("k", "pass"), samples={"right": values}, **more)


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {one["what"]: one for one in compare_records(a, b)["differences"]}


ITEMS = {"one": True, "two": False, "three": True}


@pytest.mark.parametrize(
    "changes, what, blocks",
    [
        ({"profile": "long"}, "profile", False),
        ({"seed": 7}, "seed", True),
        ({"subject__template_sha256": "e" * 64}, "template", False),
        ({"subject__config_sha256": "e" * 64}, "subject", False),
        ({"subject__serve": ["--threads", "4"]}, "options", False),
        ({"machine__cpus": 64}, "machine", True),
        ({"subject__url": "http://127.0.0.1:1"}, "address", True),
    ],
)
def test_what_differs_is_told_and_why(changes: dict[str, Any], what: str, blocks: bool) -> None:
    a, b = record(samples(ITEMS)), record(samples(ITEMS), **changes)
    one = differing(a, b)[what]
    assert one["why"] and one["blocks"] is blocks
    assert not differing(a, record(samples(ITEMS)))
    assert compare_records(a, b)["verdict"] == "note"


@pytest.mark.parametrize(
    "changes, name, blocked",
    [
        ({"seed": 7}, "functional", True), ({"machine__cpus": 64}, "functional", False),
        ({"machine__cpus": 64}, "performance", True), ({"subject__url": "http://127.0.0.1:1"}, "performance", True),
        ({"profile": "long"}, "functional", False),
    ],
)  # fmt: skip
def test_items_are_not_paired_where_they_are_not_the_same_items(
    changes: dict[str, Any], name: str, blocked: bool
) -> None:
    done = compare_records(record(samples(ITEMS, name)), record(samples(ITEMS, name), **changes))
    (one,) = done["statistics"]
    assert (one["test"] is None) == blocked and (not blocked or one["why"])


def test_items_over_another_text_are_not_paired() -> None:
    a = record(samples(ITEMS, "numerics", facts={"text_sha256": "a"}), samples(ITEMS))
    b = record(samples(ITEMS, "numerics", facts={"text_sha256": "b"}), samples(ITEMS))
    done = compare_records(a, b)
    assert [one["test"] for one in done["statistics"]] == [None, "mcnemar"]
    assert [one["stages"] for one in done["differences"]] == [["numerics"]]


def test_a_record_that_was_changed_is_no_evidence() -> None:
    a, b = record(samples(ITEMS)), record(samples(ITEMS))
    b["stages"][0]["findings"][0]["measured"] = "better"
    done = compare_records(a, b)
    assert done["verdict"] == "fail" and done["a"]["sound"] and not done["b"]["sound"]
    assert [one["what"] for one in done["differences"]] == ["digest"]
    assert not compare_records(b, a)["a"]["sound"]


def test_another_set_of_stages_is_told() -> None:
    a, b = record(samples(ITEMS), samples(ITEMS, "contract")), record(samples(ITEMS))
    assert differing(a, b)["stages"]["b"] == ["functional"]


def test_items_in_one_record_only_and_of_two_kinds() -> None:
    def one(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        (found_one,) = compare_records(record(samples(a)), record(samples(b)))["statistics"]
        return dict(found_one)

    got = one(ITEMS, {"two": True, "four": True})
    assert (got["num_items"], got["only_a"], got["only_b"], got["mended"]) == (1, 2, 1, 1)
    assert one(ITEMS, {"five": True})["why"] == "no item is in both"
    assert one(ITEMS, {"one": 0.5})["test"] is None
    assert one({"one": 1.0, "two": 3}, {"one": 2.0, "two": 5})["test"] == "bootstrap"
    lone = compare_records(record(samples(ITEMS)), record(stage("functional", found("k", "pass"), samples={})))
    assert "only A" in lone["statistics"][0]["why"]
    lone = compare_records(record(stage("functional", found("k", "pass"), samples={})), record(samples(ITEMS)))
    assert "only B" in lone["statistics"][0]["why"]


# --- statistics ------------------------------------------------------------------------------------------------------


def test_mcnemar_counts_the_discordant_pairs() -> None:
    a = [True] * 10 + [False] * 3
    b = [True] * 2 + [False] * 8 + [True] + [False] * 2
    got = mcnemar(a, b)
    assert (got.num_items, got.right_a, got.right_b, got.mended, got.broken) == (13, 10, 3, 1, 8)
    assert got.p == pytest.approx(2 * (1 + 9) / 2**9, rel=1e-12)  # P(at most 1 of 9), both sides


def test_the_exact_binomial_by_hand() -> None:
    assert binomial_p(0, 0) == 1 and binomial_p(5, 5) == 1 and binomial_p(1, 0) == 1
    assert binomial_p(0, 6) == binomial_p(6, 0) == pytest.approx(2 / 64, rel=1e-12)
    assert math.isclose(binomial_p(4500, 5500), 1.6e-23, rel_tol=0.2)  # the normal approximation: z = 10


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_the_bootstrap_is_of_pairs() -> None:
    draw = np.random.default_rng(3)
    items = draw.normal(10, 5, 200)  # items differ far more than the two runs do
    shift = draw.normal(0.5, 0.2, 200)
    got = bootstrap(list(items), list(items + shift))
    standard = float(np.std(shift, ddof=1)) / math.sqrt(200)
    assert got.difference == pytest.approx(float(shift.mean()))
    assert got.low is not None and got.high is not None
    # the percentile interval of a mean is about 1.96 standard errors wide to either side; 10 % for 10,000 resamples
    assert got.high - got.low == pytest.approx(2 * 1.96 * standard, rel=0.1)
    assert got.low < got.difference < got.high
    assert bootstrap(list(items), list(items + shift)) == got


def test_a_bootstrap_of_a_constant_shift_and_of_one_item() -> None:
    got = bootstrap([1.0, 5.0, 9.0], [3.0, 7.0, 11.0])
    assert (got.difference, got.low, got.high) == (2.0, 2.0, 2.0)
    assert bootstrap([1.0], [2.0]).low is None
    many = bootstrap([0.0] * 3000, [1.0] * 3000)  # drawn in more than one piece
    assert many.low == 1.0 and RESAMPLES * 3000 > 1 << 22


def test_p_values_are_adjusted_over_all_tests() -> None:
    a = {"x": {str(i): True for i in range(6)}, "y": {str(i): True for i in range(6)}}
    b = {"x": {str(i): False for i in range(6)}, "y": {str(i): True for i in range(6)}}
    stages = [record(stage("functional", found("k", "pass"), samples=values)) for values in (a, b)]
    x, y = compare_records(*stages)["statistics"]
    assert [x["p"], x["p_adjusted"], y["p_adjusted"]] == pytest.approx([2 / 64, 4 / 64, 1], rel=1e-12)


# --- files, and what is shown ----------------------------------------------------------------------------------------


def test_records_are_read_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, verdict in (("a", "pass"), ("b", "fail")):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / RECORD, record(samples(ITEMS), stage("contract", found("api.x", verdict))))
    done = compare(tmp_path / "a", tmp_path / "b" / RECORD)
    show_comparison(done, Console())
    text = capsys.readouterr().out
    assert text.startswith("fail: B against A: 1 broken, 1 same")
    assert "api.x" in text and "p 1, 1 after Holm" in text
    show_comparison(
        compare_records(record(samples(ITEMS)), record(stage("contract", found("api.x", "pass")))), Console()
    )
    text = capsys.readouterr().out
    assert text.startswith("note: ") and "stages" in text and "api.x" not in text
    json.dumps(done, allow_nan=False)
    with pytest.raises(UsageError, match="does not exist"):
        compare(tmp_path / "a", tmp_path / "c")


LACKS = [
    (("protocol",), "is no record of an acceptance"),
    (("stages",), "is no record of an acceptance"),
    (("protocol", "subject"), "subject"),
    (("protocol", "machine"), "machine"),
    (("protocol", "package"), "package"),
    (("protocol", "left_out"), "left_out"),
    (("subject",), "subject"),
    (("digest",), "digest"),
    *((("stages", 0, key), key) for key in ("name", "verdict", "counts", "seconds", "taken", "facts", "samples")),
    (("stages", 0, "findings", 0, "claim"), "claim"),
    (("stages", 0, "findings", 0, "evidence"), "evidence"),
]


@pytest.mark.parametrize(("path", "said"), LACKS, ids=lambda value: ".".join(map(str, value)) if value else "")
@pytest.mark.parametrize("how", ["missing", "of another type"])
def test_a_record_that_lacks_a_part_is_one_sentence(path: tuple[Any, ...], said: str, how: str, tmp_path: Path) -> None:
    """Here, and not where somebody comes to read the part that is not there."""
    made = record(samples(ITEMS))
    part: Any = made
    for key in path[:-1]:
        part = part[key]
    if how == "missing":
        del part[path[-1]]
    elif "no record" in said:
        part[path[-1]], said = 5, path[-1]
    else:
        part[path[-1]] = 5 if path[-1] not in ("seconds", "evidence", "claim") else {}
    (tmp_path / RECORD).write_text(json.dumps(made))
    if how != "missing" and path[-1] in ("claim", "evidence"):
        return  # what it says is for people alone
    with pytest.raises(UsageError) as raised:
        read_record(tmp_path)
    text = str(raised.value)
    assert said in text and str(tmp_path) in text and "\n" not in text and text.endswith(".")


def test_another_recipe_is_told() -> None:
    done = compare_records(record(), record(subject__recipe_sha256="0" * 64))
    assert [one["what"] for one in done["differences"]] == ["recipe"]


def test_a_changed_record_with_a_new_digest_is_compared_as_what_it_says() -> None:
    """A digest shows accidents and careless edits; who can write the record can write a new digest too."""
    a = record(samples(ITEMS))
    b = copy.deepcopy(a)
    b["stages"][0]["findings"][0]["verdict"] = "fail"
    b |= {"digest": digest_of(b), "outcome": outcome_of(b)}
    assert compare_records(a, b)["counts"]["broken"] == 1
