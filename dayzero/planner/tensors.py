"""The tensor ledger as findings: what is missing, unknown, renamed, of the wrong shape, or narrowed; and the tie."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dayzero.arch.spec import ModelSpec, Tie
from dayzero.checkpoint.coverage import Coverage
from dayzero.checkpoint.header import TensorEntry
from dayzero.checkpoint.likeness import folded, rooted, unpacked
from dayzero.checkpoint.rules import Expansion, Filling, RuleLike
from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError
from dayzero.finding import Finding
from dayzero.planner.layer_text import numbers_text
from dayzero.units import MIB

MAX_EVIDENCE = 40
COMPARE_WHOLE_BYTES = 64 * MIB  # a tied head up to this size is compared whole, a larger one in samples
NUM_SAMPLES, SAMPLE_BYTES = 16, MIB


def tensors_json(coverage: Coverage | None, num_files: int) -> dict[str, Any]:
    """used, extra (of layers that the plain forward does not run): counts. ignored: one object a reason. unknown,
    missing: every name. The others: name -> what is wrong."""
    if coverage is None:
        return {
            "used": 0,
            "extra": 0,
            "ignored": [],
            "unknown": [],
            "missing": [],
            "misfit": {},
            "narrowed": {},
            "roots": {},
            "aliases": {},
            "filled": {},
            "files": num_files,
        }
    by_reason: dict[str, list[str]] = {}
    for name, why in coverage.ignored.items():
        by_reason.setdefault(why, []).append(name)
    return {
        "used": len(coverage.used),
        "extra": len(coverage.extra),
        "ignored": [{"why": why, "count": len(names), "names": names} for why, names in by_reason.items()],
        "unknown": list(coverage.unknown),
        "missing": list(coverage.missing),
        "misfit": coverage.misfit,
        "narrowed": coverage.narrowed,
        "roots": coverage.roots,
        "aliases": coverage.aliases,
        "filled": {decl.name: rule.why for decl, rule in coverage.filled.items()},
        "files": num_files,
    }


def recipe_findings(expansion: Expansion, *, given: bool) -> list[Finding]:
    """Faults of the recipe itself: parameters that no rule fills, or two do; tensors that two rules read.

    given: the caller named the recipe. Its rules are for this model, so one that fills nothing is told; a built-in
    recipe has rules for further members of its family.
    """
    out = []
    for kind, names, word in (
        ("recipe.without_rule", expansion.without_rule, "no rule of the recipe fills"),
        ("recipe.filled_twice", expansion.filled_twice, "two rules of the recipe fill"),
    ):
        if names:
            out.append(_fail(kind, f"{word} {len(names)} parameter(s)", names, "mend the recipe's RULES", len(names)))
    if expansion.used_twice:
        claim = f"two rules of the recipe read the same {len(expansion.used_twice)} tensor(s)"
        names = expansion.used_twice
        out.append(_fail("recipe.used_twice", claim, names, "name each tensor in one rule; Split parts it", len(names)))
    if given and expansion.dead:
        claim = f"{len(expansion.dead)} rule(s) of the recipe fill no parameter that its spec declares"
        remedy = "if that is not meant, compare the rule's parameter with the declared names"
        out.append(
            Finding(
                "recipe.dead_rule", "weights", "note", claim, measured=len(expansion.dead),
                evidence=_cut(expansion.dead), remedy=remedy,
            )
        )  # fmt: skip
    return out


def _fail(
    kind: str, claim: str, names: Iterable[str], remedy: str, measured: Any = None, layer: str = "weights"
) -> Finding:
    return Finding(kind, layer, "fail", claim, measured=measured, bound=0, evidence=_cut(names), remedy=remedy)


def _cut(names: Iterable[str]) -> tuple[str, ...]:
    listed = list(names)
    return (
        (*listed[:MAX_EVIDENCE], f"and {len(listed) - MAX_EVIDENCE} more")
        if len(listed) > MAX_EVIDENCE
        else tuple(listed)
    )


def _beside(near: Mapping[str, str]) -> list[str]:
    return [f"{name} (nearest: {match})" if match else name for name, match in near.items()]


def coverage_findings(
    coverage: Coverage, spec: ModelSpec, rules: Iterable[RuleLike], entries: Mapping[str, TensorEntry]
) -> list[Finding]:
    """Every left-over of the coverage, worst first."""
    out = [*_layer_count(coverage, spec, rules, entries), *_renamed(coverage)]
    head = [g.name for g in coverage.groups if any(t.decl.name == "head" for t in g.targets)]
    lost_head = {rooted(name, coverage.roots) for name in head} & set(coverage.missing)
    if lost_head:
        out.append(_lost_head(sorted(lost_head), spec.tie))
    missing = {name: near for name, near in coverage.missing.items() if name not in lost_head}
    if missing:
        remedy = "find the shard that holds them, or correct the config or the recipe's rules"
        out.append(
            _fail(
                "tensors.missing",
                f"{len(missing)} tensor(s) that the model needs are in no file",
                _beside(missing),
                remedy,
                len(missing),
            )
        )
    if coverage.unknown:
        remedy = "add a Rule, or an Ignore with the reason, for each; an unread tensor is a trait that is not computed"
        out.append(
            _fail(
                "tensors.unknown",
                f"{len(coverage.unknown)} tensor(s) in the files are used by nothing",
                _beside(coverage.unknown),
                remedy,
                len(coverage.unknown),
            )
        )
    if coverage.misfit:
        told = [f"{name}: {what}" for name, what in coverage.misfit.items()]
        out.append(
            _fail(
                "tensors.misfit",
                f"{len(told)} tensor(s) do not have the shape or dtype that the config implies",
                told,
                "check the config's sizes against the files; never reshape to fit",
                len(told),
                "config" if _of_the_config(coverage, entries) else "weights",
            )
        )
    if coverage.narrowed:
        told = [f"{name}: {what}" for name, what in coverage.narrowed.items()]
        out.append(
            _fail(
                "tensors.narrowed",
                f"{len(told)} tensor(s) were rounded below the precision they are published in",
                told,
                "take the publisher's own files; a rounded router bias chooses other experts",
                len(told),
            )
        )
    return out + _roots(coverage)


def _roots(coverage: Coverage) -> list[Finding]:
    if not coverage.roots:
        return []
    said = [f"{old!r} in the recipe is {new!r} in the files" for old, new in coverage.roots.items()]
    if coverage.complete:
        claim = (
            "the tensors' names begin differently than the recipe says; everything matches under the other beginning"
        )
        return [Finding("tensors.root", "weights", "note", claim, measured=dict(coverage.roots), evidence=tuple(said))]
    claim = "the tensors' names begin differently than the recipe says, and not all match under the proposed beginning"
    return [
        _fail(
            "tensors.root",
            claim,
            said,
            "rename the rules' beginning in the recipe as proposed, then look at what is left",
            dict(coverage.roots),
        )
    ]


def _of_the_config(coverage: Coverage, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether the misfits are what a wrong size in the config makes of sound files: all tensors of a name have the same
    shape, in every layer, and it is another one. Of a damaged or converted tensor its siblings fit."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    wrong = Counter(folded(name) for name in coverage.misfit)
    for name, entry in entries.items():
        if folded(name) in wrong:
            shapes.setdefault(folded(name), []).append(tuple(entry.shape))
    return coverage.resized.issuperset(coverage.misfit) and all(
        len(of_name) == wrong[name] > 1 and len(set(of_name)) == 1 for name, of_name in shapes.items()
    )


def _renamed(coverage: Coverage) -> list[Finding]:
    """Pairs of a missing and an unknown pattern that look like one tensor under two names."""
    pairs = Counter(
        (folded(name), folded(near))
        for name, near in coverage.missing.items()
        if near in coverage.unknown and unpacked(name) != unpacked(near)
    )
    if not pairs:
        return []
    told = [f"{lost} ↔ {found} ({count} times)" for (lost, found), count in pairs.most_common()]
    claim = f"{len(pairs)} missing name(s) and unknown name(s) look like the same tensors"
    return [
        _fail(
            "tensors.renamed",
            claim,
            told,
            "if they are the same, name the stored form in the recipe's rules",
            len(pairs),
        )
    ]


def _lost_head(names: list[str], tie: Tie) -> Finding:
    claim = (
        f"the config says that the head is not tied to the embedding ({tie.source}), but the files hold no {names[0]}"
    )
    remedy = "set tie_word_embeddings to true if the publisher ties them, or find the file that holds the head"
    return _fail("tie.head_missing", claim, names, remedy, 0, "config")


def _layer_count(
    coverage: Coverage, spec: ModelSpec, rules: Iterable[RuleLike], entries: Mapping[str, TensorEntry]
) -> list[Finding]:
    """The config's layer count against the layers that the files hold, when they differ."""
    prefixes = _layer_prefixes(rules, coverage.roots)
    if not prefixes or not (coverage.missing or coverage.unknown):
        return []
    pattern = re.compile("|".join(rf"(?:{re.escape(p)})(\d+)\." for p in prefixes))
    found: set[int] = set()
    for name in entries:
        hit = pattern.match(name)
        if hit and name not in coverage.ignored and name not in coverage.extra:
            found.add(int(next(n for n in hit.groups() if n is not None)))
    wanted = set(range(len(spec.layers)))
    if not found or found == wanted:
        return []
    claim = f"config says {len(wanted)} layers, files hold {len(found)}"
    if wanted - found:
        claim += f"; no tensor of layer {numbers_text(wanted - found)}"
    if found - wanted:
        claim += f"; nothing uses layer {numbers_text(found - wanted)}"
    remedy = "correct num_hidden_layers, find the missing shard, or let the recipe claim draft layers (extra_rules)"
    return [
        Finding(
            "config.layer_count",
            "config",
            "fail",
            claim,
            measured=len(found),
            bound=len(wanted),
            evidence=prefixes,
            remedy=remedy,
        )
    ]


def _layer_prefixes(rules: Iterable[RuleLike], roots: Mapping[str, str]) -> tuple[str, ...]:
    out: dict[str, None] = {}
    for rule in rules:
        if isinstance(rule, Filling) and hasattr(rule, "tensor") and "{i}" in rule.tensor:
            params = rule.params if hasattr(rule, "params") else (rule.param,)
            if params[0].startswith("layers."):
                out[rooted(rule.tensor[: rule.tensor.index("{i}")], roots)] = None
    return tuple(out)


def alias_findings(
    source: Source, entries: Mapping[str, TensorEntry], coverage: Coverage, spec: ModelSpec
) -> list[Finding]:
    """A tied head that is in the file all the same must be the embedding, byte for byte."""
    stored = {t.decl.name: s for g, s in zip(coverage.groups, coverage.sources, strict=True) for t in g.targets}
    out = []
    for name, param in coverage.aliases.items():
        others = stored.get(param)
        if not others or name not in entries:
            continue
        other = others[0].parts[0][1]
        try:
            differs, how = _bytes_differ(source, entries[name], entries[other])
        except CheckpointError as error:
            out.append(_fail("tie.unreadable", str(error), (name,), "download the file again"))
            continue
        said = f"the config ties the head to the embedding ({spec.tie.source})"
        if differs:
            claim = f"{said}, but {name} is in the files and differs from {other} ({how})"
            out.append(
                _fail(
                    "tie.contradiction",
                    claim,
                    (name, other),
                    "set tie_word_embeddings to false if the head is its own matrix",
                    how,
                    "config",
                )
            )
        else:
            out.append(
                Finding(
                    "tie.copy",
                    "config",
                    "note",
                    f"{said}, and {name} is in the files as a copy of it ({how})",
                    evidence=(name, other),
                )
            )
    return out


def _bytes_differ(source: Source, one: TensorEntry, other: TensorEntry) -> tuple[bool, str]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True, f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
    size = one.nbytes
    if size <= COMPARE_WHOLE_BYTES:
        places = [(at, min(SAMPLE_BYTES, size - at)) for at in range(0, size, SAMPLE_BYTES)]
        how = "all bytes compared"
    else:
        places = [((size - SAMPLE_BYTES) * k // (NUM_SAMPLES - 1), SAMPLE_BYTES) for k in range(NUM_SAMPLES)]
        how = f"{NUM_SAMPLES} samples of {SAMPLE_BYTES} bytes compared"
    for at, length in places:
        if source.read(one.file, one.start + at, length) != source.read(other.file, other.start + at, length):
            return True, f"first difference within bytes {at} to {at + length}"
    return False, how
