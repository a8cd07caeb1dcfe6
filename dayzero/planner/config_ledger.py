"""The config ledger: keys that nothing read, defaults nobody stated, and what a model without a recipe needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.finding import Finding
from dayzero.models.reading import Reading
from dayzero.planner.nearest_family import Nearest
from dayzero.planner.operators import Operators, is_contradiction
from dayzero.planner.reading_facts import open_facts, stand_ins
from dayzero.planner.tokenizer_files import TokenizerFiles
from dayzero.units import counted


def config_json(raw: Raw, reading: Reading | None, effective: dict[str, Any]) -> dict[str, Any]:
    """unread: keys nothing read. defaulted: key -> the value used. ignored: key -> why. read: keys. effective: values.
    stand_ins: key -> what was used in its place.

    reading: where the recipe stopped, or none covers the model: the reading that went on; its ledger counts then.
    """
    unread = reading.unread if reading is not None else raw.unread()
    kept = reading.ledger if reading is not None else raw.ledger
    return {
        "unread": unread,
        "defaulted": dict(sorted(kept.defaulted.items())),
        "ignored": dict(sorted(kept.ignored.items())),
        "read": sorted(kept.read),
        "stand_ins": dict(sorted(stand_ins(reading).items())) if reading is not None else {},
        "effective": effective,
    }


def config_findings(
    raw: Raw,
    spec: ModelSpec | None,
    reading: Reading | None,
    facts: Mapping[str, Any],
    files: TokenizerFiles,
    operators: Operators,
) -> list[Finding]:
    """Findings about a known family's config as a whole, once everything has been read.

    spec: None where the recipe stopped; then ``reading`` is how it goes on past that, and ``facts`` follow from it.
    """
    kept, unread = raw.ledger, raw.unread()
    out = []
    if reading is not None:
        kept, unread = reading.ledger, reading.unread
        out += stand_in_findings(reading, facts)
        if reading.stop:
            return out  # what the recipe would have read next is not known
        spec = reading.spec
        if spec is None or reading.vague or any(other.vocab != spec.vocab for other in reading.others):
            spec = None
    if unread:
        told = tuple(f"{key} = {_value(raw, key)}" for key in unread)
        out.append(
            Finding(
                "config.unread", "config", "fail", f"{len(unread)} key(s) of config.json are read by nothing",
                measured=len(unread), bound=0, evidence=told,
                remedy="read each in the recipe, or ignore it there with the reason: it may be a trait",
            )
        )  # fmt: skip
    if kept.defaulted:
        told = tuple(f"{key} = {value!r}" for key, value in sorted(kept.defaulted.items()))
        out.append(
            Finding(
                "config.defaulted", "config", "note",
                f"{len(told)} key(s) are absent from config.json, or null, so the family's defaults were used",
                measured=len(told), evidence=told, remedy="check that the publisher means these values",
            )
        )  # fmt: skip
    return out + (_ids(spec, files) if spec is not None else []) + _operators(operators)


def stand_in_findings(reading: Reading, facts: Mapping[str, Any]) -> list[Finding]:
    """What the reading went on with, where there was something to go past."""
    used = stand_ins(reading)
    if not used or reading.spec is None:
        return []
    name = reading.recipe.name
    told = open_facts(facts, reading) + [f"{key}: {used[key]}" for key in sorted(used)]
    return [
        Finding(
            "config.stand_in", "config", "note",
            f"to read on, {len(used)} value(s) stand in for what the recipe {name} refuses or misses; layers, "
            "parameters, cache and effective values are those of the config so changed",
            measured=len(used), evidence=tuple(told),
            remedy="trust what is shown only as far as these values do not matter to it",
        )
    ]  # fmt: skip


def fault_findings(said: Sequence[str]) -> list[Finding]:
    """One finding for each sentence about a value that is missing, refused or contradicted."""
    return [
        Finding(
            "config.contradiction" if is_contradiction(text) else "config.value", "config", "fail", text,
            evidence=("config.json",), remedy="correct config.json, or teach the recipe this value",
        )
        for text in said
    ]  # fmt: skip


def _value(raw: Raw, dotted: str) -> str:
    value: Any = raw
    for part in dotted.split("."):
        value = value.peek(part) if isinstance(value, Raw) else value.get(part) if isinstance(value, dict) else None
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _ids(spec: ModelSpec, files: TokenizerFiles) -> list[Finding]:
    """Ids that the embedding has no row for."""
    out = []
    beyond = [i for i in sorted({*files.stop, *spec.stop_ids}) if i >= spec.vocab]  # below 0: no id at all
    if beyond:
        told = tuple(f"{i}: {', '.join(files.stop.get(i, ['config.json']))}" for i in beyond)
        out.append(
            Finding(
                "stop_ids.out_of_range", "config", "fail", "a stop id lies outside the vocabulary and can never come",
                measured=beyond, bound=spec.vocab, evidence=told,
                remedy="correct eos_token_id or vocab_size",
            )
        )  # fmt: skip
    if files.largest_id is not None and files.largest_id >= spec.vocab:
        out.append(
            Finding(
                "tokenizer.out_of_range", "tokenizer+template", "fail",
                "the tokenizer has ids that the embedding has no row for",
                measured=files.largest_id, bound=spec.vocab - 1, evidence=("tokenizer.json", "config.json: vocab_size"),
                remedy="take the tokenizer that belongs to these weights",
            )
        )  # fmt: skip
    return out


def _operators(operators: Operators) -> list[Finding]:
    out = []
    for word, done in (("extend", "extended"), ("build", "built")):
        # What is listed for a refused value is a question, not yet known to lack anything; that value has its own fail.
        told = tuple(_entry_text(entry) for entry in operators[word] if "uses" in entry)
        if told:
            out.append(
                Finding(
                    f"operators.{word}", "operator", "note",
                    f"{len(told)} operator(s) must be {done} before this model can run",
                    measured=len(told), evidence=told, remedy="see docs/new-operator.md",
                )
            )  # fmt: skip
    return out


def _entry_text(entry: Mapping[str, Any]) -> str:
    """Contract, traits and keys; for a key that no contract is known for, what is said about it."""
    lacks = "; ".join(entry.get("lacks", ()))
    if entry["contract"] is None:
        return lacks or str(entry["about"])
    said = f"{entry['contract']} {entry['traits'] or ''}".strip()
    return f"{said} ({', '.join(entry['keys'])}: {entry['about'] or lacks})" if "keys" in entry else said


def unknown_family(nearest: Nearest, facts: Mapping[str, Any], operators: Operators) -> list[Finding]:
    """No recipe covers the model: the differences from the nearest family, and whose reading the values are."""
    told = [f"unread key: {key}" for key in nearest.unread]
    told += [f"{nearest.name} needs: {fault.removesuffix('.')}" for fault in nearest.absent]
    told += [f"tensors only here: {pattern}" for pattern in nearest.tensors["only_here"]]
    told += [f"tensors {nearest.name} would need: {pattern}" for pattern in nearest.tensors["only_there"]]
    told += [f"kind of layer that no operator is known for: {kind}" for kind in nearest.foreign_kinds]
    told += [f"operator to {word}: {_entry_text(entry)}" for word in ("build", "extend") for entry in operators[word]]
    out = [
        Finding(
            "family.unknown", "config", "fail", nearest.why,
            measured=counted(len(told), "difference"), evidence=tuple(told),
            remedy="write a recipe from the differences listed (docs/new-model.md) and pass it with --recipe; "
            "meanwhile run the model behind the publisher's own code",
        )
    ]  # fmt: skip
    if facts:
        out.append(
            Finding(
                "family.reading", "config", "note",
                f"layers, parameters, cache and effective values are {nearest.name}'s reading of this config; "
                "they hold for the model only as far as it is built alike",
                remedy="settle the differences first",
            )
        )  # fmt: skip
    return out + stand_in_findings(nearest.reading, facts)
