"""The config ledger: keys that nothing read, defaults nobody stated, and what a model without a recipe needs."""

from __future__ import annotations

from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.finding import Finding
from dayzero.planner.nearest_family import Nearest
from dayzero.planner.operators import Operators
from dayzero.planner.tokenizer_files import TokenizerFiles


def config_json(raw: Raw, nearest: Nearest | None, effective: dict[str, Any]) -> dict[str, Any]:
    """unread: keys nothing read. defaulted: key -> the value used. ignored: key -> why. read: keys. effective: values.

    Without a recipe these are the nearest family's.
    """
    unread = nearest.unread if nearest is not None else raw.unread()
    kept = nearest.ledger if nearest is not None else raw.ledger
    return {
        "unread": unread,
        "defaulted": dict(sorted(kept.defaulted.items())),
        "ignored": dict(sorted(kept.ignored.items())),
        "read": sorted(kept.read),
        "effective": effective,
    }


def config_findings(
    raw: Raw, nearest: Nearest | None, spec: ModelSpec | None, files: TokenizerFiles, operators: Operators
) -> list[Finding]:
    """Findings about the config as a whole, once everything has been read."""
    if nearest is not None:
        return [_unknown_family(nearest, operators)]
    if spec is None:
        return []  # the fault that stopped the recipe is told already; what it would have read next is not known
    out = []
    unread = raw.unread()
    if unread:
        told = tuple(f"{key} = {_value(raw, key)}" for key in unread)
        out.append(
            Finding(
                "config.unread", "config", "fail", f"{len(unread)} key(s) of config.json are read by nothing",
                measured=len(unread), bound=0, evidence=told,
                remedy="read each in the recipe, or ignore it there with the reason: it may be a trait",
            )
        )  # fmt: skip
    if raw.ledger.defaulted:
        told = tuple(f"{key} = {value!r}" for key, value in sorted(raw.ledger.defaulted.items()))
        out.append(
            Finding(
                "config.defaulted", "config", "note",
                f"{len(told)} key(s) are absent from config.json, or null, so the family's defaults were used",
                measured=len(told), evidence=told, remedy="check that the publisher means these values",
            )
        )  # fmt: skip
    return out + _ids(spec, files) + _operators(operators)


def _value(raw: Raw, dotted: str) -> str:
    value: Any = raw
    for part in dotted.split("."):
        value = value.peek(part) if isinstance(value, Raw) else value.get(part) if isinstance(value, dict) else None
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _ids(spec: ModelSpec, files: TokenizerFiles) -> list[Finding]:
    """Ids that the embedding has no row for."""
    out = []
    beyond = [i for i in sorted({*files.stop, *spec.stop_ids}) if not 0 <= i < spec.vocab]
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
        if operators[word]:
            told = tuple(f"{entry['contract']} {entry['traits'] or ''}".strip() for entry in operators[word])
            out.append(
                Finding(
                    f"operators.{word}", "operator", "note",
                    f"{len(told)} operator(s) must be {done} before this model can run",
                    measured=len(told), evidence=told, remedy="see docs/new-operator.md",
                )
            )  # fmt: skip
    return out


def _unknown_family(nearest: Nearest, operators: Operators) -> Finding:
    told = [f"unread key: {key}" for key in nearest.unread]
    told += [f"{nearest.name} needs: {fault}" for fault in nearest.absent]
    told += [f"tensors only here: {pattern}" for pattern in nearest.tensors["only_here"]]
    told += [f"tensors {nearest.name} would need: {pattern}" for pattern in nearest.tensors["only_there"]]
    told += [f"operator to build: {e['contract'] or e['about']}" for e in operators["build"]]
    return Finding(
        "family.unknown", "config", "fail", nearest.why, measured=f"{len(told)} differences", evidence=tuple(told),
        remedy="write a recipe from the differences listed (docs/new-model.md) and pass it with --recipe; meanwhile "
        "run the model behind the publisher's own code",
    )  # fmt: skip
