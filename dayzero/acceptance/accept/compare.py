"""Two records side by side: what was mended or broken, what the paired items say, and what cannot be compared. Paper.

    {"schema": 1, "verdict": fail when anything is broken or a record was changed after it was written,
     "a", "b": {"where", "subject", "profile", "seed", "verdict", "counts", "digest", "sound", "began"},
     "differences": [{"what", "a", "b", "why", "stages": names or null for all, "blocks": paired items too}],
     "findings": [{"stage", "kind", "layer", "claim", "status", "a": finding or null, "b"}],
     "counts": {status: how many},
     "statistics": [{"stage", "name", "test": "mcnemar" | "bootstrap" | null, "only_a", "only_b", "why": there is none,
                     and what ``paired.py`` has, "p_adjusted"}]}

Findings meet by stage and kind; of several of one kind, those with the same claim meet first, the rest in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.digest import RECIPE_HASH, TEMPLATE_HASH, WEIGHT_HASHES, verify_digest
from dayzero.acceptance.accept.paired import bootstrap, holm, mcnemar
from dayzero.acceptance.accept.record import read_record
from dayzero.finding import Verdict

SCHEMA = 1
STATUSES = ("broken", "mended", "changed", "only in A", "only in B", "same")
TIMED = ("performance", "robustness")
MACHINE = ("cpu", "cpus", "memory_bytes", "accelerator", "num_accelerators")
# Facts of a stage that name the text it read, by how they end.
TEXT_FACTS = ("text", "text_sha256", "tokens_sha256")
WHY = {
    "digest": "the record was changed after it was written: nothing in it is evidence",
    "subject": "another checkpoint or server is judged: differences may be the model's, not only the engine's",
    "profile": "the stages try other amounts: only items that both tried are paired",
    "seed": "other items were drawn: an item of one record is not that of the other",
    "recipe": "another recipe says how the model is computed: differences may be its own",
    "template": "prompts are written otherwise: what the model is asked is not the same",
    "stages": "a stage that one record leaves out has nothing to stand beside",
    "machine": "times of one machine say nothing about those of another",
    "address": "nothing says on which machine the server at an address runs",
    "text": "another text was read: an item of one record is not that of the other",
    "options": "the servers ran with other options",
}


def compare(a: Path, b: Path) -> dict[str, Any]:
    """The comparison of two records, each given by its folder or its file. UsageError when one is no record."""
    return compare_records(read_record(a), read_record(b), str(a), str(b))


def compare_records(
    a: Mapping[str, Any], b: Mapping[str, Any], where_a: str = "A", where_b: str = "B"
) -> dict[str, Any]:
    """As ``compare``, of records that have been read."""
    found = list(_differences(a, b))
    pairs = list(_pairs(a, b))
    counts = Counter(pair["status"] for pair in pairs)
    lost = counts["broken"] > 0 or any(one["what"] == "digest" for one in found)
    rest = found or any(counts[status] for status in STATUSES if status != "same")
    verdict: Verdict = "fail" if lost else "note" if rest else "pass"
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "a": _head(a, where_a),
        "b": _head(b, where_b),
        "differences": found,
        "findings": pairs,
        "counts": {status: counts[status] for status in STATUSES},
        "statistics": _statistics(a, b, found),
    }


def _head(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    keys = ("subject", "profile", "seed", "verdict", "counts", "digest", "began")
    return {"where": where, "sound": verify_digest(record)} | {key: record.get(key) for key in keys}


# --- what is not the same --------------------------------------------------------------------------------------------


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    sound = [verify_digest(record) for record in (a, b)]
    if not all(sound):
        said = ["its digest fits" if one else "its digest does not fit" for one in sound]
        yield _difference("digest", said[0], said[1])
    one, other = a["protocol"]["subject"], b["protocol"]["subject"]
    for what, keys in (
        ("subject", ("url", "model", *WEIGHT_HASHES)), ("template", (TEMPLATE_HASH,)), ("recipe", (RECIPE_HASH,)),
    ):  # fmt: skip
        odd = [key for key in keys if one.get(key) != other.get(key)]
        if odd:
            yield _difference(what, {k: one.get(k) for k in odd}, {k: other.get(k) for k in odd})
    for key in ("profile", "seed"):
        if a[key] != b[key]:
            yield _difference(key, a[key], b[key], blocks=key == "seed")
    if one.get("serve") != other.get("serve"):
        yield _difference("options", one.get("serve"), other.get("serve"))
    names = [[stage["name"] for stage in record["stages"]] for record in (a, b)]
    if names[0] != names[1]:
        yield _difference("stages", names[0], names[1])
    yield from _of_machines(a["protocol"], b["protocol"])
    yield from _of_texts(a, b)


def _difference(what: str, a: Any, b: Any, stages: Sequence[str] | None = None, blocks: bool = False) -> dict[str, Any]:
    listed = None if stages is None else list(stages)
    return {"what": what, "a": a, "b": b, "why": WHY[what], "stages": listed, "blocks": blocks}


def _of_machines(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    addresses = [protocol["subject"].get("url") for protocol in (a, b)]
    if any(addresses):
        yield _difference("address", addresses[0], addresses[1], TIMED, blocks=addresses[0] != addresses[1])
        return
    first, second = ({key: protocol["machine"].get(key) for key in MACHINE} for protocol in (a, b))
    odd = [key for key in MACHINE if first[key] != second[key]]
    if odd:
        yield _difference("machine", {k: first[k] for k in odd}, {k: second[k] for k in odd}, TIMED, blocks=True)


def _of_texts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for stage, other in _stages_of_both(a, b):
        facts, others = stage["facts"], other["facts"]
        for key in facts:
            if key.endswith(TEXT_FACTS) and key in others and facts[key] != others[key]:
                yield _difference("text", facts[key], others[key], [stage["name"]], blocks=True)


def _stages_of_both(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    others = {stage["name"]: stage for stage in b["stages"]}
    yield from ((stage, others[stage["name"]]) for stage in a["stages"] if stage["name"] in others)


# --- findings --------------------------------------------------------------------------------------------------------


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    firsts, seconds = _by_kind(a), _by_kind(b)
    for stage, kind in dict.fromkeys((*firsts, *seconds)):
        for one, other in _meet(firsts.get((stage, kind), []), seconds.get((stage, kind), [])):
            shown = other or one
            assert shown is not None
            yield {
                "stage": stage, "kind": kind, "layer": shown["layer"], "claim": shown["claim"],
                "status": _status(one, other), "a": one, "b": other,
            }  # fmt: skip


def _by_kind(record: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    out: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for stage in record["stages"]:
        for found in stage["findings"]:
            out.setdefault((stage["name"], found["kind"]), []).append(found)
    return out


def _meet(
    a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    rest_a, rest_b = [], list(b)
    for one in a:
        same = next((other for other in rest_b if other["claim"] == one["claim"]), None)
        if same is None:
            rest_a.append(one)
        else:
            rest_b.remove(same)
            yield one, same
    for at in range(max(len(rest_a), len(rest_b))):
        yield rest_a[at] if at < len(rest_a) else None, rest_b[at] if at < len(rest_b) else None


def _status(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """broken: fails in B alone. mended: fails in A alone, and B could check it. changed: otherwise not the same.

    A fail of B with nothing in A to stand beside is broken too: not every check that passes says so under its name.
    """
    if b is None:
        return "only in A"
    if a is None:
        return "broken" if b["verdict"] == "fail" else "only in B"
    if a["verdict"] == b["verdict"]:
        return "same"
    if b["verdict"] == "fail":
        return "broken"
    return "mended" if a["verdict"] == "fail" and b["verdict"] != "not applicable" else "changed"


# --- paired items ----------------------------------------------------------------------------------------------------


def _statistics(
    a: Mapping[str, Any], b: Mapping[str, Any], differences: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    out = []
    for stage, other in _stages_of_both(a, b):
        blocking = [d for d in differences if d["blocks"] and (d["stages"] is None or stage["name"] in d["stages"])]
        for name in dict.fromkeys((*stage["samples"], *other["samples"])):
            head = {"stage": stage["name"], "name": name}
            first, second = stage["samples"].get(name), other["samples"].get(name)
            if first is None or second is None:
                out.append(head | _none(f"only {'B' if first is None else 'A'} has such items"))
            elif blocking:
                out.append(head | _none("; ".join(f"{d['what']}: {d['why']}" for d in blocking)))
            else:
                out.append(head | _paired(first, second))
    tested = [one for one in out if one["test"] == "mcnemar"]
    for one, adjusted in zip(tested, holm([one["p"] for one in tested]), strict=True):
        one["p_adjusted"] = adjusted
    return out


def _none(why: str) -> dict[str, Any]:
    return {"test": None, "why": why}


def _paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    both = [item for item in a if item in b]
    left = {"only_a": len(a) - len(both), "only_b": len(b) - len(both)}
    kinds = {type(values[item]) is bool for values in (a, b) for item in both}
    numbers = all(isinstance(values[item], bool | int | float) for values in (a, b) for item in both)
    if not both:
        return left | _none("no item is in both")
    if len(kinds) > 1 or not numbers:
        return left | _none("items are right or wrong in one record and numbers in the other, or no numbers at all")
    values_a, values_b = [a[item] for item in both], [b[item] for item in both]
    if kinds == {True}:
        return {"test": "mcnemar", **left, **asdict(mcnemar(values_a, values_b))}
    return {"test": "bootstrap", **left, **asdict(bootstrap(values_a, values_b))}
