"""What an earlier failure explains of later ones, as data. Paper.

A gate is a rung that a model has to pass before the next one can be judged: whole files before a config that is read
right, tensors that are all there before operators that compute with them. Its failures are failing
findings of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dayzero.acceptance.accept.registry import NAMES

# Stages in order. The first and the last two are not an acceptance's: what doctor looks at itself.
MACHINE, PLAN, SERVICE = "machine", "plan", "server"
STAGES = (MACHINE, *NAMES[:1], PLAN, *NAMES[1:], SERVICE)
ANSWERS = frozenset({"numerics", "functional", "long_context"})  # what comes out is judged, against an oracle or a text
SERVED = frozenset({"functional", "long_context", "performance", "robustness", "contract", SERVICE})
TEXTS = frozenset({"functional", "long_context"})  # prompts are made from text
PAPER = frozenset({"weights", PLAN})
ALL = frozenset(STAGES)


@dataclass(frozen=True, slots=True)
class Gate:
    """layer: of the findings it holds. kinds: how their kinds begin; empty: all others of the layer. opens: what is
    known once it is passed. command: what to run next; {source}, {url}, {stage}, {recipe} are filled in. black_box: the
    same where only the address of a server is known. why: what that command shows."""

    name: str
    layer: str
    opens: str
    command: str
    black_box: str
    why: str
    kinds: tuple[str, ...] = ()


_JUDGED = "dayzero accept --url {url} --stages {stage}"
GATES: tuple[Gate, ...] = (
    Gate("machine", "hardware", "this machine has what is needed",
         "dayzero doctor", "dayzero doctor", "it names what this machine lacks"),
    Gate("files", "weights", "the files are whole and the publisher's",
         "dayzero inspect {source} --hash{recipe}", _JUDGED, "it reads every byte, and names the files to fetch again",
         ("integrity.", "hash.", "weights.absent", "weights.read")),
    Gate("config", "config", "the config is read as the publisher means it",
         "dayzero inspect {source} --all{recipe}", _JUDGED, "it accounts for every key of the config"),
    Gate("tensors", "weights", "every parameter is filled, once, from the right tensor",
         "dayzero inspect {source} --all{recipe}", _JUDGED, "it accounts for every tensor, with the nearest matches"),
    Gate("tokenizer", "tokenizer+template", "prompts are the ids that the model was trained on",
         "dayzero inspect {source} --all{recipe}", _JUDGED, "it compares tokenizer, template and stop ids"),
    Gate("kernels", "compiler", "what is bound can be built and started here",
         "dayzero plan {source} --hardware here{recipe}", "dayzero doctor", "it says which variants can run here"),
    Gate("operators", "operator", "every module computes what the publisher's code computes",
         "dayzero align {source}{recipe}", _JUDGED, "it names the first module that differs from the oracle"),
    Gate("ranks", "parallel", "several ranks compute what one does",
         "dayzero plan {source} --hardware here{recipe}", "dayzero doctor", "it shows each rank's cuts and bytes"),
    Gate("cache", "cache", "what is kept between steps is what was computed",
         "dayzero accept {source} --stages equalities{recipe} -- --check-engine", _JUDGED,
         "it holds pages, chunks and prefixes against each other, with the engine's own checks on"),
    Gate("scheduler", "scheduler", "an answer does not depend on what else is running",
         "dayzero accept {source} --stages equalities,robustness{recipe} -- --check-engine", _JUDGED,
         "it holds requests alone against requests under load, with the engine's own checks on"),
    Gate("server", "server", "a client gets what the engine answers",
         "dayzero accept {source} --stages contract{recipe}", _JUDGED, "it asks the API alone, as a black box"),
)  # fmt: skip
BY_NAME: Mapping[str, Gate] = {gate.name: gate for gate in GATES}
ORDER: Mapping[str, int] = {gate.name: at for at, gate in enumerate(GATES)}


@dataclass(frozen=True, slots=True)
class Link:
    """A failure at gate ``cause`` explains failures at gates ``effects`` in ``stages``, at its own stage or a later
    one. kinds: how the cause's kind must begin; empty: any. why: the reason, as a clause."""

    cause: str
    effects: tuple[str, ...]
    stages: frozenset[str]
    why: str
    kinds: tuple[str, ...] = ()
    of: tuple[str, ...] = ()


LINKS: tuple[Link, ...] = (
    Link("machine", ("kernels", "operators", "cache", "scheduler", "ranks", "server"), ALL,
         "nothing runs well on a machine that lacks something"),
    Link("files", ("config",), PAPER, "what a lost file held is missed where the config names it",
         of=("tie.", "config.layer_count")),
    Link("files", ("tensors",), ALL, "a file that is cut short or another one lacks tensors, or holds other numbers"),
    Link("files", ("operators", "cache", "ranks", "scheduler"), ANSWERS,
         "wrong numbers in the files are wrong in every output computed from them"),
    Link("config", ("tensors", "operators", "cache", "ranks"), ANSWERS | {"weights", PLAN},
         "names, shapes and operators are derived from the config"),
    Link("config", ("tokenizer",), ANSWERS | {"weights", PLAN}, "vocabulary and special ids are taken from the config"),
    Link("tensors", ("operators", "cache", "ranks", "scheduler"), ANSWERS,
         "wrong numbers in the files are wrong in every output computed from them"),
    # NaN is not equal to itself: the one fault of the numbers that breaks an equality.
    Link("tensors", ("operators", "cache", "scheduler", "ranks"), frozenset({"equalities"}),
         "NaN equals nothing, not even itself", ("weights.not_finite",)),
    Link("tokenizer", ("operators", "cache", "scheduler", "server"), TEXTS | {"contract"},
         "a prompt of other ids is answered otherwise, and an answer with other stop ids does not end"),
    Link("kernels", ("operators", "cache", "scheduler", "server"), ALL,
         "an operator whose kernel is not built, or built wrong, computes nothing right"),
    Link("operators", ("cache", "scheduler", "ranks", "server"), TEXTS,
         "outputs that are wrong for one request alone are wrong in every answer"),
    Link("ranks", ("cache", "scheduler", "server"), SERVED | {"equalities"},
         "ranks that disagree stall or spoil every request"),
    Link("cache", ("scheduler", "server"), SERVED | {"equalities"},
         "rows that are read wrong give wrong answers under every schedule"),
    Link("scheduler", ("server",), SERVED, "what the engine holds back or mixes up, a client sees as the server's"),
)  # fmt: skip


def gate_of(layer: str, kind: str) -> Gate:
    """The gate that a failing finding belongs to."""
    of_layer = [gate for gate in GATES if gate.layer == layer] or [GATES[-1]]
    return next((gate for gate in of_layer if gate.kinds and kind.startswith(gate.kinds)), of_layer[-1])


def stage_place(stage: str) -> int:
    """Place of a stage among all; one that we do not know comes last."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
