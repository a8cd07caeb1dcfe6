"""Which check of an acceptance nothing has made fail. Kinds that name a length, a layer or a size count once.

What the table of mutations leaves is looked up among the faults that the stages' own tests plant, each of which must
fail the finding that is for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from dayzero.finding import LAYERS
from tests.cpu.mutations.stand import Outcome

# Families of findings whose last word is a kind of layer, a record or a size: one of them stands for all.
FAMILIES = (
    (re.compile(r"\boffers\.\w+"), "offers.*"),
    (re.compile(r"^(integrity|recipe|tie)\.\w+"), r"\1.*"),
    (re.compile(r"\btools\.(required|named)"), "tools.one"),
    (re.compile(r"\bgreedy\.(turn|repeat)(-stream)?$"), r"greedy.repeat\2"),
    (re.compile(r"\bgreedy\.stream$"), "greedy.repeat-stream"),
    (re.compile(r"^hash\.(verified|mismatch)"), "hash.verified"),
    (re.compile(r"numerics\.(twin|real)\.ladder\.\w+"), "numerics.*.ladder.*"),
    (re.compile(r"numerics\.(twin|real)\.record\.\w+"), "numerics.*.record.*"),
    (re.compile(r"numerics\.(twin|real)\."), "numerics.*."),
    (re.compile(r"equal\.(chunk|page)\.\d+"), r"equal.\1.*"),
    (re.compile(r"-(chat|completions)\b"), "-*"),
)
TESTS = Path(__file__).parents[1]
# Stage -> (its tests, what their kinds begin with where they leave it out).
OWN_TESTS = {
    "weights": ("test_accept_core", ""), "numerics": ("test_accept_numerics", "numerics.real."),
    "equalities": ("test_accept_equalities", ""), "functional": ("test_accept_functional", "functional."),
    "long_context": ("test_accept_long_context", ""), "performance": ("test_accept_performance", ""),
    "robustness": ("test_accept_robustness", ""), "contract": ("test_accept_contract", "contract."),
}  # fmt: skip
MORE_TESTS = {"functional": ("test_accept_images",)}  # further files of a stage's tests
# How tests write what fails, and by which layer.
FAILED = re.compile(rf'"([\w.*-]+)"(?:[:,]|\] ==) "(?:{"|".join(map(re.escape, LAYERS))})"')

# Families whose failing a test plants in words that the pattern does not see -> that test.
BY_NAME = {
    "recipe.*": "test_a_recipe_that_is_wrong_fails",
    "numerics.*.tensors": "test_a_tensor_that_only_the_port_uses",
    "numerics.*.experts_fp8": "test_experts_with_fp8_inputs",
    "equal.near_ties": "test_answers_part_at_near_ties_alone_and_seldom",
    "equal.recurrent_chunked": "test_a_wrong_form_fails",
    "equal.absorbed_expanded": "test_a_wrong_form_fails",
    "equal.gather_masked": "test_a_wrong_form_fails",
    "load.tokens": "test_counts_that_are_not_what_was_asked_fail",
    "load.regression": "test_a_slower_server_fails_against_the_record_of_a_faster_one",
    "performance.together": "test_requests_that_slow_each_other_down_fail",
    "robust.malformed.told": "test_malformed_requests_that_are_not_refused",
    "robust.scale.answered": "test_errors_as_load_grows_fail",
    "robust.soak.memory": "test_growth_is_told_from_noise",
    "robust.soak.fragmentation": "test_lost_room_behind_the_soak_fails",
    "robust.storm.held": "test_what_is_held_behind_a_storm_fails",
    "robust.soak.held": "test_what_is_held_behind_a_storm_fails",
    "robust.restart.same": "test_a_second_start_that_answers_otherwise_fails",
    "robust.drain.exit": "test_an_end_that_is_not_as_documented_fails",
    "robust.drain.refused": "test_an_end_that_is_not_as_documented_fails",
}
# What says something about a record or a machine, and fails nothing by design: at most a note.
NOTES = {
    "numerics.scope", "numerics.*.vision", "numerics.*.sites", "performance.speed", "performance.roofline",
    "config.defaulted", "robust.malformed.lenient", "robust.sizes.memory", "long.needle", "long.needle.length",
    "long.needle.reach",
    "quantization.acknowledged", "stop_ids.absent", "stop_ids.differ", "operators.build", "robust.left_out",
}  # fmt: skip


def family(kind: str) -> str:
    for pattern, by in FAMILIES:
        kind = pattern.sub(by, kind)
    return kind


def planted_in_tests(stage: str) -> set[str]:
    """Families of findings that some planted fault of the stage's own tests must fail."""
    module, begin = OWN_TESTS[stage]
    planted = (kind for name in (module, *MORE_TESTS.get(stage, ())) for kind in _planted(name))
    return {family(kind if kind.startswith(begin) else begin + kind) for kind in planted}


def _planted(module: str) -> Iterator[str]:
    text = (TESTS / f"{module}.py").read_text(encoding="utf-8")
    yield from (found[1] for found in FAILED.finditer(text))
    if module.rpartition("_")[2] in ("functional", "images", "contract", "core"):
        faults = import_module(module)
        yield from getattr(faults, "DAMAGE", ())
        yield from (kind for _, _, kinds in getattr(faults, "FAULTS", {}).values() for kind in kinds)


def untried(kinds: Mapping[str, str], outcomes: Iterable[Outcome]) -> list[str]:
    """kinds: of all checks that base records hold -> their stage. Lines of those that no mutation fails."""
    failed = {family(one.kind) for outcome in outcomes for one in outcome.failed}
    left: dict[str, dict[str, None]] = {}
    for kind, stage in kinds.items():
        if family(kind) not in failed:
            left.setdefault(stage, {})[family(kind)] = None
    out = []
    for stage, names in left.items():
        tests = planted_in_tests(stage) | {name for name in names if name in BY_NAME}
        names = {name: None for name in names if name not in NOTES}
        parts = ([n for n in names if n in tests], [n for n in names if n not in tests])
        for words, some in zip(("failed by a fault of the stage's own tests", "failed by nothing"), parts, strict=True):
            out += [f"{stage}, {words}: {', '.join(some)}"] if some else []
    return out


def tried(outcomes: Iterable[Outcome]) -> list[str]:
    """One line a family of checks: the mutations that fail it."""
    by: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for one in outcome.failed:
            by.setdefault(family(one.kind), {})[outcome.mutation.name] = None
    return [f"{kind}: {'; '.join(list(names)[:3])}{' and others' * (len(names) > 3)}" for kind, names in by.items()]
