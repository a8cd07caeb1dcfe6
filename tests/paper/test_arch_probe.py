"""A probe answers every question, remembers what it made up, and says nothing else than Raw where Raw answers."""

from __future__ import annotations

from typing import Any

import pytest

from dayzero.arch.probe import INVENTED, Probe, Session
from dayzero.arch.raw import Raw


def refused(probe: Probe) -> list[tuple[str, Any, Any, bool]]:
    return [(r.key, r.stated, r.used, r.guessed) for r in probe.session.refusals]


def test_where_raw_answers_the_probe_answers_alike() -> None:
    data = {"n": 3, "f": 2, "b": True, "s": "x", "l": [1], "o": {"k": 1}, "null": None}
    raw, probe = Raw(data), Probe(data)
    for one in (raw, probe):
        one.int("n"), one.float("f"), one.bool("b"), one.str("s"), one.ints("l"), one.sub("o").int("k")
        one.int("absent", default=7), one.one_of("s", allowed=("x", "y")), one.int_or_none("null")
    assert probe.ledger == raw.ledger and probe.unread() == raw.unread() == []
    assert probe.session.refusals == []


@pytest.mark.parametrize(
    ("data", "ask", "answer", "guessed"),
    [
        ({"n": "4096"}, lambda p: p.int("n"), 4096, False),
        ({"n": "4096.5"}, lambda p: p.int("n", default=8), 8, False),
        ({"n": "1e-5"}, lambda p: p.float("n"), 1e-5, False),
        ({"n": "9" * 40}, lambda p: p.int("n", default=8), 8, False),
        ({"num_layers": "20000"}, lambda p: p.int("num_layers", default=8), 8, False),
        ({"n": -1}, lambda p: p.int("n", default=8, least=1), 8, False),
        ({"num_heads": True}, lambda p: p.int("num_heads"), 2, True),
        ({}, lambda p: p.int("width"), 256, True),
        ({}, lambda p: p.int("width", least=1000), 1000, True),
        ({}, lambda p: p.float("f"), 2.0, True),
        ({"b": "yes"}, lambda p: p.bool("b"), False, True),
        ({"b": None}, lambda p: p.bool("b", default=True), True, False),
        ({"s": "gelu_new"}, lambda p: p.one_of("s", allowed=("silu", "gelu")), "gelu", False),
        ({"s": "gelu_new"}, lambda p: p.one_of("s", allowed=("silu", "gelu"), default="silu"), "silu", False),
        ({"s": 5}, lambda p: p.one_of("s", allowed=(1, 4, 9)), 4, False),
        ({}, lambda p: p.one_of("s", allowed=("silu",)), "silu", False),
        ({}, lambda p: p.one_of("s", allowed=("a", "b")), "a", True),
        ({"a": 1, "b": 2}, lambda p: p.int("a", "b"), 1, False),
        ({"a": "x", "b": 2}, lambda p: p.int("a", "b"), 2, False),
        ({"l": 5.5}, lambda p: p.list("l"), [], True),
        ({"l": ["x"]}, lambda p: p.ints("l", default=(1,)), (1,), False),
    ],
)  # fmt: skip
def test_what_stands_in(data: dict[str, Any], ask: Any, answer: Any, guessed: bool) -> None:
    probe = Probe(data)
    assert ask(probe) == answer
    (refusal,) = probe.session.refusals
    assert (refusal.used, refusal.guessed) == (answer, guessed)
    assert refusal.key in (*data, "width", "f", "s") and refusal.key in refusal.said
    assert set(data) <= probe.ledger.read | set(probe.unread())


def test_a_second_reading_guesses_otherwise() -> None:
    first, second = Probe({}), Probe({}, session=Session(second=True))
    for ask in (lambda p: p.int("num_heads"), lambda p: p.int("dim"), lambda p: p.float("eps"), lambda p: p.bool("b")):
        assert ask(first) != ask(second)
    # Counts stay below widths, so that a width still divides into heads.
    assert second.int("hidden_size") // second.int("num_heads") >= 2


def test_objects_that_are_none() -> None:
    probe = Probe({"o": 5})
    assert probe.sub("o").int("k", default=3) == 3
    assert probe.sub("gone").one_of("type", allowed=("a", "b"), default="a") == "a"
    assert refused(probe) == [
        ("o", 5, None, True), ("gone", None, None, True),
        # In an object that is not there a default is a guess like any other.
        ("gone.type", None, "a", True),
    ]  # fmt: skip


def test_invented_keys_are_there_and_have_no_value() -> None:
    probe = Probe({"x": INVENTED, "o": INVENTED})
    assert probe.has("x") and probe.int("x") == 2 and probe.list("x") == ["?"]
    assert probe.sub("o").keys() == ()
    assert probe.session.refusals == []


def test_a_pick_stands_in_for_what_is_refused_only() -> None:
    probe = Probe({"a": "odd", "b": "x"}, session=Session(picks={"a": "y", "b": "y"}))
    assert probe.one_of("a", allowed=("x", "y")) == "y" and probe.one_of("b", allowed=("x", "y")) == "x"


def test_keys_of_another_object_keep_their_place() -> None:
    probe = Probe({"n": 1, "m": 2, "o": {"k": 1}}, places={"n": "text_config.n", "o": "text_config.o"})
    probe.int("n")
    assert probe.unread() == ["m", "text_config.o"]
    probe.sub("o")
    assert probe.unread() == ["m", "text_config.o.k"]
