"""A record as the page shows it: every text cleaned, every absent key given a place, nothing dropped in silence.

A page is also made from records that were cut short, written by a newer version or changed by hand: what is not as it
should be is said on the page (``Report.warnings``) instead of ending it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dayzero.acceptance.accept.digest import verify_digest
from dayzero.acceptance.page.numbers import number, value_text
from dayzero.acceptance.page.pictures import Picture, draw
from dayzero.acceptance.page.shapes import Plot
from dayzero.console import clean, duration_text
from dayzero.finding import VERDICTS
from dayzero.units import count_text

WORST_FIRST = ("fail", "note", "pass", "not applicable")
ORDER = {verdict: at for at, verdict in enumerate(WORST_FIRST)}
UNKNOWN = "unknown"
DEEPEST = 40  # objects and lists in one another
DIGITS = 6  # of a measured number
LONGEST = 600  # characters of one value that are shown


@dataclass(frozen=True, slots=True)
class Item:
    """One finding. number: its place among all findings of the record, from 1. stage: the title of its stage."""

    number: int
    stage: str
    verdict: str
    kind: str
    layer: str
    claim: str
    measured: str
    bound: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class StagePart:
    """One stage. anchor: its id on the page. facts: (key path, value)."""

    name: str
    title: str
    anchor: str
    verdict: str
    seconds: str
    taken: bool
    items: tuple[Item, ...]
    pictures: tuple[Picture, ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def counts(self) -> Mapping[str, int]:
        return counted(self.items)


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is made from. complete: no stage was left out. judged: (what, value) of the subject. protocol:
    (key path, value)."""

    verdict: str
    complete: bool
    name: str
    judged: tuple[tuple[str, str], ...]
    stages: tuple[StagePart, ...]
    protocol: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def items(self) -> list[Item]:
        return [item for stage in self.stages for item in stage.items]

    def of(self, verdict: str) -> list[Item]:
        return [item for item in self.items if item.verdict == verdict]

    @property
    def counts(self) -> Mapping[str, int]:
        return counted(self.items)

    @property
    def layers_at_fault(self) -> list[tuple[str, int]]:
        """(layer, failing findings), most first."""
        return Counter(item.layer for item in self.of("fail")).most_common()


def counted(items: Iterable[Item]) -> dict[str, int]:
    """Verdict -> how many, worst first, every verdict named; verdicts that we do not know at the end."""
    found = Counter(item.verdict for item in items)
    return {verdict: found[verdict] for verdict in (*WORST_FIRST, *sorted(found.keys() - ORDER.keys()))}


def read(record: Mapping[str, Any]) -> Report:
    """``record`` as ``accept/record.py`` writes it, or what there is of one."""
    content = cleaned(record)
    warnings: list[str] = []
    stages: list[StagePart] = []
    first = 1
    for at, entry in enumerate(objects_of(content.get("stages"), "stages", warnings)):
        stages.append(_stage(entry, at, first, warnings))
        first += len(stages[-1].items)
    items = [item for stage in stages for item in stage.items]
    protocol = object_of(content.get("protocol"))
    _check_verdicts(content, items, warnings)
    if "digest" in record and not _is_sound(record):
        warnings.append("The digest does not fit the record: it was changed after it was written, and is no evidence.")
    left_out = protocol.get("left_out")
    if left_out and isinstance(left_out, list):
        warnings.append(f"Not all stages were asked for; left out: {', '.join(map(str, left_out))}.")
    return Report(
        verdict_of(content.get("verdict"), items),
        content.get("complete") is not False,
        _name(content, protocol),
        tuple(_judged(content, protocol)),
        tuple(stages),
        tuple(flat(protocol)),
        tuple(warnings),
    )


def _is_sound(record: Mapping[str, Any]) -> bool:
    try:
        return verify_digest(record)
    except (RecursionError, ValueError):  # nested without end, or numbers that JSON does not know
        return False


def cleaned(value: Any, levels: int = DEEPEST) -> Any:
    """``value`` with every string, keys too, free of control and steering characters; below ``levels``, a word."""
    if isinstance(value, str):
        return clean(value)
    if not levels and isinstance(value, Mapping | list | tuple):
        return "(nested too deeply to be shown)"
    if isinstance(value, Mapping):
        return {clean(str(key)): cleaned(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(item, levels - 1) for item in value]
    return value


def verdict_of(claimed: Any, items: Sequence[Item]) -> str:
    """The worse of what a record says and what its findings say; nothing found is no verdict."""
    seen = {item.verdict for item in items}
    if not seen - {"not applicable"}:
        return "fail" if claimed == "fail" else UNKNOWN
    known = [*seen, claimed] if claimed in VERDICTS else list(seen)
    return next((verdict for verdict in WORST_FIRST[:3] if verdict in known), UNKNOWN)


def _check_verdicts(content: Mapping[str, Any], items: Sequence[Item], warnings: list[str]) -> None:
    claimed, found = content.get("verdict"), verdict_of(None, items)
    if claimed != found and found != UNKNOWN:
        warnings.append(
            f"The record says “{text_of(claimed)}”, its findings come to “{found}”: the worse one is shown."
        )
    counts = content.get("counts")
    if isinstance(counts, Mapping) and {k: v for k, v in counts.items() if v} != dict(
        Counter(i.verdict for i in items)
    ):
        warnings.append("The record's counts are not those of its findings; the page counts anew.")
    odd = sorted({item.verdict for item in items} - ORDER.keys())
    if odd:
        warnings.append(f"Findings with a verdict that is none: {', '.join(odd)}.")


def _stage(entry: Mapping[str, Any], at: int, first: int, warnings: list[str]) -> StagePart:
    name = str(entry.get("name") or f"stage {at + 1}")
    title = str(entry.get("title") or name)
    anchor = f"stage-{at + 1}"
    findings = objects_of(entry.get("findings"), f"findings of {name}", warnings)
    items = tuple(item_of(finding, first + place, title) for place, finding in enumerate(findings))
    figures = objects_of(entry.get("figures"), f"figures of {name}", warnings)
    verdict = verdict_of(None, items)
    if verdict == UNKNOWN and items:
        verdict = "not applicable"
    return StagePart(
        name,
        title,
        anchor,
        verdict,
        seconds_text(entry.get("seconds")),
        bool(entry.get("taken")),
        items,
        tuple(draw(_plot(figure, f"{anchor}-figure-{place + 1}")) for place, figure in enumerate(figures)),
        tuple(flat(object_of(entry.get("facts")))),
    )


def item_of(finding: Mapping[str, Any], place: int, stage: str) -> Item:
    """A finding's JSON, every value in words."""
    evidence = finding.get("evidence")
    listed = evidence if isinstance(evidence, list) else [] if evidence is None else [evidence]
    return Item(
        place,
        stage,
        str(finding.get("verdict", UNKNOWN)),
        str(finding.get("kind", "")),
        str(finding.get("layer", "")),
        str(finding.get("claim", "")),
        "" if finding.get("measured") is None else text_of(finding["measured"]),
        "" if finding.get("bound") is None else text_of(finding["bound"]),
        tuple(text_of(one) for one in listed),
        str(finding.get("remedy") or ""),
    )


def _plot(figure: Mapping[str, Any], identity: str) -> Plot:
    return Plot(
        str(figure.get("kind", "")),
        str(figure.get("title", "")),
        object_of(figure.get("data")),
        str(figure.get("x_label") or ""),
        str(figure.get("y_label") or ""),
        bool(figure.get("log_x")),
        bool(figure.get("log_y")),
        identity,
    )


# --- what was judged -------------------------------------------------------------------------------------------------

# What the head of the page names -> where a record holds it, first found is shown. Dots go into objects.
PLACES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("Source", ("subject.source", "protocol.subject.source")),
    ("Server", ("subject.url", "protocol.subject.url")),
    ("Model", ("subject.model", "protocol.subject.model")),
    ("Family", ("facts.family", "protocol.service.family", "protocol.subject.family")),
    ("Parameters", ("facts.parameters",)),
    ("Recipe", ("subject.recipe", "protocol.subject.recipe")),
    ("Profile", ("profile", "protocol.profile")),
    ("Began", ("began", "protocol.began")),
    ("Took", ("seconds",)),
    ("Digest", ("digest",)),
    ("Outcome", ("outcome",)),
)


def _judged(content: Mapping[str, Any], protocol: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    stages = content.get("stages")
    listed = [object_of(object_of(stage).get("facts")) for stage in stages] if isinstance(stages, list) else []
    told = {key: value for facts in reversed(listed) for key, value in facts.items()}  # the first stage has the word
    whole = {**content, "protocol": protocol, "facts": told}
    for what, places in PLACES:
        value = next((found for place in places if (found := at(whole, place)) not in (None, "", [], {})), None)
        if what == "Digest":
            yield from ((name, words) for name, words in _made_with(protocol) if words)
        if value is not None:
            yield what, SPELLED[what](value) if what in SPELLED else text_of(value)


def _made_with(protocol: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The machine and the code, each in one line."""
    machine, package = object_of(protocol.get("machine")), object_of(protocol.get("package"))
    count = machine.get("num_accelerators")
    devices = f" × {text_of(count)}" if isinstance(count, int) and count > 1 else ""
    cpu = f"{text_of(machine['cpu'])}, {text_of(machine.get('cpus'))} cores" if machine.get("cpu") else ""
    accelerator = f"{text_of(machine['accelerator'])}{devices}; " if machine.get("accelerator") else ""
    yield "Hardware", accelerator + cpu
    version = text_of(package["version"]) if package.get("version") else ""
    name = text_of(package.get("name") or "dayzero")
    torch = at(protocol, "versions.torch")
    yield "Software", ", ".join(part for part in (version and f"{name} {version}", torch and f"torch {torch}") if part)
    commit = text_of(package["commit"]) if package.get("commit") else ""
    yield "Commit", commit + (" and uncommitted changes" if commit and package.get("changed") else "")


def at(content: Any, place: str) -> Any:
    """What objects in one another hold at ``a.b.c``; None where there is none."""
    for key in place.split("."):
        if not isinstance(content, Mapping):
            return None
        content = content.get(key)
    return content


def _name(content: Mapping[str, Any], protocol: Mapping[str, Any]) -> str:
    subject = object_of(content.get("subject")) or object_of(protocol.get("subject"))
    return next((str(subject[key]) for key in ("source", "model", "url") if subject.get(key)), "an unnamed subject")


# --- values ----------------------------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """Any JSON value in words; a long one is cut, and says so."""
    if isinstance(value, list) and all(not isinstance(one, list | dict) for one in value):
        text = ", ".join(value_text(one, DIGITS) for one in value) or "none"
    elif isinstance(value, Mapping) and all(not isinstance(one, list | dict) for one in value.values()):
        text = ", ".join(f"{key} {value_text(one, DIGITS)}" for key, one in value.items()) or "none"
    elif isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = value_text(value, DIGITS)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}… (cut: {len(text):,} characters, all of them in the record)"


def flat(value: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    """(key path, value in words) for each leaf of nested objects."""
    for key, item in value.items():
        path = f"{before}{key}"
        if isinstance(item, Mapping) and item:
            yield from flat(item, f"{path}.")
        else:
            yield path, text_of(item)


def moment_text(value: Any) -> str:
    """2026-07-01T09:00:00+00:00 -> 2026-07-01 09:00 UTC; what is no moment as it is."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return text_of(value)
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


def seconds_text(value: Any) -> str:
    """0.42 s below ten seconds, then minutes and hours."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        return ""
    return f"{value:.1f} s" if value < 60 else f"{duration_text(value)} {'min' if value < 3600 else 'h'}"


def parameters_text(value: Any) -> str:
    """``{"total": 4689504, "active": 2778912}`` -> 4.69 M, 2.78 M of them active."""
    total, active = (number(object_of(value).get(key)) for key in ("total", "active"))
    if total is None:
        return text_of(value)
    return count_text(total) + (f", {count_text(active)} of them active" if active and active < total else "")


SPELLED: Mapping[str, Callable[[Any], str]] = {
    "Parameters": parameters_text,
    "Began": moment_text,
    "Took": seconds_text,
}


def object_of(value: Any) -> dict[str, Any]:
    """``value`` where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def objects_of(value: Any, what: str, warnings: list[str]) -> list[dict[str, Any]]:
    """The objects of a list; what is none is said."""
    if value is None:
        return []
    if not isinstance(value, list):
        warnings.append(f"The record's {what} are no list.")
        return []
    lost = sum(not isinstance(one, dict) for one in value)
    if lost:
        warnings.append(f"Of the record's {what} {lost} are no objects, and are not shown.")
    return [one for one in value if isinstance(one, dict)]
