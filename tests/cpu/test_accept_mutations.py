"""The acceptance is accepted: of what is wrong with a model, a fixed few are planted, one of each layer and more, and
the record of ``dayzero accept`` must fail with the layer that is at fault. All of them: benchmarks/accept_mutations.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.cpu.mutations.catalogue import all_mutations, by_name
from tests.cpu.mutations.checks import BY_NAME, OWN_TESTS, TESTS, family, untried
from tests.cpu.mutations.mutation import KINDS, NOT_HERE
from tests.cpu.mutations.stand import Outcome, Stand

FIXED = (
    "one tensor dropped", "NaN in a matrix", "module plain though claimed quantised", "one layer more in the config",
    "value scale that nothing reads", "damaged tokenizer", "rope interleaved for half-split",
    "positions of a chunk count from its start", "quantised rows are read with scales 6 % too large",
    "all pages have one key", "a preempted request comes back with another token", "stop ids do not end an answer",
    "streamed arguments come twice", "bad input is a fault of the server", "nobody notices that a client has left",
)  # fmt: skip
# The finding's layer follows from a second question, or from what the siblings of a tensor are.
TOLD_APART = (
    "size that the files contradict", "answers are one token too long", "masks of grammars are lost",
    "reasoning of earlier answers is lost", "an echoed prompt has other log-probabilities",
    "sampling defaults win over the request",
)  # fmt: skip


def test_every_kind_is_drawn_from() -> None:
    mutations = all_mutations()
    assert len(mutations) >= 60 and {one.kind for one in mutations} == set(KINDS)
    assert set(KINDS).isdisjoint(NOT_HERE) and set(KINDS) | set(NOT_HERE) == set("ABCDEFGHIJKLMNOPQRSTU")
    assert len(FIXED) == len(set(FIXED)) == 15
    layers = {by_name(name).layer for name in FIXED}
    assert layers == {"weights", "config", "tokenizer+template", "operator", "cache", "scheduler", "server"}


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """With the base records, which must be green."""
    made = Stand(tmp_path_factory.mktemp("mutations"))
    assert not {base: bad for base, bad in made.verify(map(by_name, FIXED + TOLD_APART)) if bad}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED + TOLD_APART)
def test_the_record_fails_and_names_the_layer(name: str, stand: Stand) -> None:
    outcome = stand.judge(by_name(name))
    assert outcome.caught, f"{name} survived"
    assert outcome.right, (outcome.named, outcome.failed)


def test_checks_that_nothing_fails_are_named() -> None:
    kinds = {"equal.chunk.7": "equalities", "equal.chunk.64": "equalities", "equal.prefix": "equalities"}
    outcome = Outcome(all_mutations()[0], (), None, 0.0, 0.0)
    kinds["equal.of_nothing"] = "equalities"
    assert untried(kinds, [outcome]) == [
        "equalities, failed by a fault of the stage's own tests: equal.chunk.*, equal.prefix",
        "equalities, failed by nothing: equal.of_nothing",
    ]
    texts = "".join((TESTS / f"{module}.py").read_text(encoding="utf-8") for module, _ in OWN_TESTS.values())
    assert not [name for name in BY_NAME.values() if f"def {name}(" not in texts]
    assert family("functional.usage.n-chat") == family("functional.usage.n-completions")
    assert family("numerics.twin.ladder.attention") == family("numerics.real.ladder.glu_56")
