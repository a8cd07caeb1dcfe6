"""Grammars as masks: what is allowed next, where an answer may end, and what is said of a grammar that is none."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from dayzero.engine import grammar as grammar_module
from dayzero.engine.grammar import GrammarError, Grammars, Guard, check_grammar, read_tokenizer, start_matcher
from dayzero.engine.grammar_words import TOO_COMPLEX
from dayzero.engine.request import Grammar, GrammarKind, NewRequest, SamplingParams
from tests.paper.small_tokenizer import END, PAD, THINK, THOUGHT, small_tokenizer, small_tokenizer_json

VOCAB = 331  # rows of the head: more than the tokenizer's 270, no multiple of 32
ENDS = (END, 300)  # 300: an id that ends an answer, and that the tokenizer does not know


def guard(
    kind: GrammarKind, text: str = "", after: int | None = None, vocab: int = VOCAB, ends: tuple[int, ...] = ENDS
) -> Guard:
    tokenizer = read_tokenizer(small_tokenizer_json(), vocab)
    matcher = start_matcher(Grammar(kind=kind, text=text), tokenizer)
    return Guard(matcher, tokenizer, after, vocab, ends)


def allowed(one: Guard) -> set[int]:
    mask = one.mask()
    assert mask is not None and len(mask) == 4 * -(-VOCAB // 32)
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def ids(text: str) -> list[int]:
    return small_tokenizer().encode(text).ids


def accepts(one: Guard, text: str) -> bool:
    """Whether the grammar lets the text through token by token and may end behind it."""
    for token in ids(text):
        if token not in allowed(one):
            return False
        one.advance([token])
    return allowed(one) >= set(ENDS)


SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["the", "th"]}}, "required": ["a"],
    "additionalProperties": False,
})  # fmt: skip
CHOICES = ["ab", "abc", 'q"uo\\te', "new\nline", "é/ü 中", "{a}", " x", "a\u2028b", "12"]


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ["{}", '{"a":{"b":[1,2.5,null,true]}}', '{ "x" : "é\\n" }'], ["[]", "1", "{", '{"a"}']),
        ("json_schema", SCHEMA, ['{"a":12}', '{"a":-1,"b":"the"}', '{\n "a": 0}'], ['{"b":"the"}', '{"a":1,"c":2}']),
        ("json_schema", "true", ["12", "{}", '[null, "x"]'], ["", "}"]),
        ("regex", r"[ab]{2,3}\d", ["ab1", "bab0"], ["a1", "abab1", "ab"]),
        ("regex", "^ab$", ["ab"], ["xab", "abx"]),
        ("choice", json.dumps(CHOICES), CHOICES, ["a", "abcd", ""]),
        ("lark", 'start: "the" (" " WORD)*\nWORD: /[a-c]+/', ["the", "the ab c"], ["a", "the d"]),
    ],
)
def test_a_grammar_lets_its_own_texts_through(kind: GrammarKind, text: str, good: list[str], bad: list[str]) -> None:
    assert [t for t in good if not accepts(guard(kind, text), t)] == []
    assert [t for t in bad if accepts(guard(kind, text), t)] == []


def test_an_answer_ends_exactly_when_the_grammar_is_complete() -> None:
    one = guard("regex", "ab?")
    (a,), (b,), (ab,) = ids("a"), ids("b"), ids("ab")
    assert allowed(one) == {a, ab}
    one.advance([a])
    assert allowed(one) == {b, *ENDS}
    one.advance([b])
    assert allowed(one) == set(ENDS)
    one.advance([END])  # an answer that goes on behind it (ignore_eos, min_tokens)
    assert allowed(one) == set(ENDS)


def test_ids_beyond_the_tokenizer_and_special_tokens_are_never_allowed() -> None:
    found = allowed(guard("regex", "(?s:.*)"))
    assert found - set(ENDS) == {i for i in found if 4 <= i < 270} and len(found) > 150
    assert not found & {PAD, THINK, THOUGHT}


def test_a_head_with_fewer_rows_than_the_tokenizer() -> None:
    one = guard("regex", "(?s:.*)", vocab=201)
    mask = one.mask()
    assert mask is not None and len(mask) == 28
    assert max(i for i in range(224) if mask[i // 8] >> i % 8 & 1) == 200


def test_the_grammar_sleeps_until_its_token() -> None:
    one = guard("json_object", after=THOUGHT)
    assert one.mask() is None
    one.advance([*ids("some thought } {"), END])
    assert one.mask() is None
    one.advance([THOUGHT, *ids('{"a":1}')])
    assert allowed(one) == set(ENDS)


def test_a_grammar_may_close_with_a_token_that_ends_the_answer() -> None:
    one = guard("lark", f'start: "ab" <[{END}]>')
    one.advance(ids("ab"))
    assert allowed(one) == {END}
    one.advance([END])  # it goes on all the same (min_tokens)
    assert allowed(one) == set(ENDS)


def test_an_end_that_is_letters_is_allowed_at_the_end_only() -> None:
    (a,) = ids("a")
    one = guard("regex", "b[ab]{2}", ends=(a,))
    one.advance(ids("b"))
    assert a not in allowed(one) and ids("b")[0] in allowed(one)
    one.advance(ids("bb"))
    assert allowed(one) == {a}


def test_white_space_has_an_end() -> None:
    one = guard("json_object")
    one.advance(ids("{"))
    space = ids(" ")[0]
    count = 0
    while space in allowed(one):
        one.advance([space])
        count += 1
    assert count == 64 and allowed(one)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type":"object","properties":{"a":{"type":"foo"}}}', "Invalid type: foo"),
        ("json_schema", '{"type":"string","minLength":5,"maxLength":2}', "minLength (5) is greater"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json_schema", '{"$ref":"http://x/y"}', "http://x/y"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", "{nope", "property name"),
        ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "recursion"),
        ("json_schema", "false", "no text fits"),
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a^b", "an anchor or a look-around inside of it"),
        ("regex", "[a&&b]", "no text fits it"),
        ("regex", r"(a)\1", "backreferences"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", "start: <nope>", "unknown special token"),
        ("lark", "", "it is empty"),
        ("choice", "[]", "one or more texts"),
        ("choice", '["a", 1]', "one or more texts"),
        ("choice", '["\\ud800"]', "surrogate pair"),
        ("regex", "\ud800", "surrogate pair"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_sentence(kind: GrammarKind, text: str, said: str) -> None:
    sentence = check_grammar(Grammar(kind=kind, text=text), small_tokenizer_json())
    assert sentence is not None and said in sentence
    assert "\n" not in sentence and len(sentence) < 400 and "cannot be used: " in sentence
    assert not re.search(r"NoExtension|Bias|TooComplex|codec|consume_token|at \d+\(", sentence)


def test_check_passes_what_works_and_says_what_tokenizers_do_not() -> None:
    good = Grammar(kind="json_schema", text=SCHEMA)
    assert check_grammar(good, small_tokenizer_json()) is None
    for text in ("{bad", "[]", "{}", "some/path", ""):
        sentence = check_grammar(good, text)
        assert sentence is not None and "tokenizer.json" in sentence and "\n" not in sentence
    assert "no tokenizer.json" in (check_grammar(good, None) or "")


def requested(name: str, grammar: Grammar) -> NewRequest:
    return NewRequest(id=name, prompt=[5], params=SamplingParams(grammar=grammar, stop_token_ids=(THOUGHT,)))


def grammars(text: str | None = small_tokenizer_json()) -> Grammars:
    return Grammars(text, VOCAB, ENDS, lambda: None)


def test_grammars_come_back_compiled_or_with_a_reason() -> None:
    book = grammars()
    book.begin(requested("good", Grammar(kind="regex", text="ab")))
    book.begin(requested("bad", Grammar(kind="regex", text="(")))
    book.begin(requested("gone", Grammar(kind="regex", text="b")))
    assert book.coming == 3 and book.cancel("gone") and not book.cancel("gone")
    found: dict[str, str | None] = {}
    while book.coming:
        found |= {request.id: why for request, why in book.ready(wait=True)}
    assert found.keys() == {"good", "bad"}
    assert found["good"] is None and "unclosed group" in (found["bad"] or "")
    book.advance("good", ids("ab"))
    mask = book.mask("good")
    assert mask is not None and mask[0] == 1 << END | 1 << THOUGHT  # the request's own stop id may end it, too
    assert book.mask("nobody") is None
    book.close()


def test_a_failure_in_flight_is_told_for_its_request_only() -> None:
    book = grammars()
    for name in ("left", "stays"):
        book.begin(requested(name, Grammar(kind="regex", text="ab+")))
    while book.coming:
        book.ready(wait=True)
    book.advance("left", ids("x"))
    book.advance("left", ids("ab"))
    with pytest.raises(GrammarError, match="left its grammar") as said:
        book.mask("left")
    assert "\n" not in str(said.value)
    assert book.mask("stays") is not None
    book.end("left")
    assert book.mask("left") is None
    book.close()


def test_a_grammar_that_grows_beyond_the_limits_says_so() -> None:
    """The library takes it, and stops when it has to make its states."""
    book = grammars()
    book.begin(requested("much", Grammar(kind="regex", text="a{1000000}")))
    assert [why for _, why in book.ready(wait=True)] == [None]
    book.advance("much", ids("aaaa"))
    with pytest.raises(GrammarError) as said:
        book.mask("much")
    assert str(said.value) == TOO_COMPLEX
    book.close()


def test_one_schema_asked_for_by_many_is_kept_apart() -> None:
    book = grammars()
    for name in "xyz":
        book.begin(requested(name, Grammar(kind="regex", text="a[bc]", after=THOUGHT if name == "z" else None)))
    while book.coming:
        book.ready(wait=True)
    first = book.mask("y")
    book.advance("x", ids("a"))
    assert book.mask("y") == first != book.mask("x")
    assert book.mask("z") is None
    book.close()


def test_a_slow_grammar_holds_up_nobody_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiler is stuck: the others' grammars come at once, and its own request is refused in time."""
    stuck, woken = threading.Event(), threading.Event()
    start = grammar_module.start_matcher

    def sometimes_stuck(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        if grammar.text == "slow":
            stuck.wait(30)
        return start(grammar, tokenizer)

    monkeypatch.setattr(grammar_module, "start_matcher", sometimes_stuck)
    book = Grammars(small_tokenizer_json(), VOCAB, ENDS, woken.set, seconds=1.0)
    begun = time.monotonic()
    book.begin(requested("slow", Grammar(kind="regex", text="slow")))
    book.begin(requested("quick", Grammar(kind="regex", text="ab")))
    assert [(request.id, why) for request, why in book.ready(wait=True)] == [("quick", None)]
    assert time.monotonic() - begun < 0.9
    woken.clear()
    assert woken.wait(5)  # whoever sleeps is told that time is over
    ((request, why),) = book.ready()
    assert request.id == "slow" and why is not None and "not compiled within 1 seconds" in why
    assert time.monotonic() - begun > 0.9 and book.coming == 0 and book.mask("quick") is not None
    stuck.set()
    book.close()


def test_without_a_tokenizer_every_grammar_says_so() -> None:
    book = grammars(None)
    book.begin(requested("a", Grammar(kind="json_object")))
    ((request, why),) = book.ready(wait=True)
    assert request.id == "a" and "no tokenizer.json" in (why or "")
    book.close()
