"""What a model says in XTML: read token by token, however it is cut, and held by grammars. Kinds of faults that clients
of such parsers met are tests by name here."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from dayzero.chat.conversation import Conversation, Message, NamedTool, TextPart, Tool, ToolCall
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.encoding import GrammarText
from dayzero.chat.pieces import Assembled, assemble
from dayzero.chat.xtml import XtmlEncoding
from dayzero.engine.grammar import read_tokenizer
from dayzero.errors import UsageError
from dayzero.server.generation import ParsedReader
from tests.paper.xtml_support import tokens, vocabulary

O, C, S, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
RESPOND = f"{C}think{S}{O}response{S}"
OVER = f"{C}response{S}{C}message{S}"
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": ["string", "null"]},
            "more": {"type": "object"},
        },
        "required": ["city"],
    },
)  # fmt: skip
ODD = Tool('say "&"', parameters={"type": "object", "properties": {'a"&': {"enum": ["x", 3, None]}}})
TOOLS = (WEATHER, ODD)
USER = Message.of("user", "Weather?")
ENCODING = XtmlEncoding(tokens())
MASKS = read_tokenizer(vocabulary(), 512)


def asked(thinking: bool = True, messages: tuple[Message, ...] = (USER,), **more: Any) -> Conversation:
    return Conversation(messages, **{"tools": TOOLS, "template_kwargs": {"thinking": thinking}, **more})


def call(name: str, *arguments: tuple[str, str, str], index: int = 1) -> str:
    """One call as the model writes it: (key, type, text) of each argument."""
    inner = "".join(f'{O}argument key="{k}" type="{t}"{S}{v}{C}argument{S}' for k, t, v in arguments)
    return f'{O}call tool="{name}" index="{index}"{S}{inner}{C}call{S}'


def calling(*calls: str) -> str:
    return f"{C}response{S}{O}tools{S}{''.join(calls)}{C}tools{S}{C}message{S}"


def read(text: str, conversation: Conversation, cuts: tuple[int, ...] = (10**9,), stop: int | None = None) -> Assembled:
    """Through detokenizer and parser, as the server does; cuts: sizes of the runs of tokens, again and again."""
    return read_ids(tokens().encode(text, special=True), conversation, cuts, stop)


def read_ids(
    ids: list[int], conversation: Conversation, cuts: tuple[int, ...] = (10**9,), stop: int | None = None
) -> Assembled:
    parser = ENCODING.parser(conversation, ENCODING.prompt(conversation))
    reader = ParsedReader(Detokenizer(tokens(), keep=parser.keep), parser)
    pieces, at, number = [], 0, 0
    while at < len(ids):
        run = ids[at : at + cuts[number % len(cuts)]]
        pieces += reader.push(run)[0]
        at, number = at + len(run), number + 1
    found = assemble([*pieces, *reader.finish(stop)])
    for one in found.tool_calls:
        one.id = ""
    return found


CITY = 'Paris "20e"\nnear </x> 北京 🦊'
ARGUMENTS = (
    ("city", "string", CITY),
    ("days", "number", "3"),
    ("units", "null", "null"),
    ("more", "object", '{"a": [1]}'),
)
MEANT = {"city": CITY, "days": 3, "units": None, "more": {"a": [1]}}
ANSWER = f"Hm. 🦊{RESPOND}I look.{calling(call('get_weather', *ARGUMENTS), call('say &quot;&amp;&quot;', index=2))}"


def test_reasoning_content_and_calls() -> None:
    found = read(ANSWER, asked())
    assert (found.reasoning, found.content, found.problems) == ("Hm. 🦊", "I look.", [])
    assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == [("get_weather", MEANT), ('say "&"', {})]
    off = read(ANSWER.partition(f"{O}response{S}")[2], asked(False))
    assert (off.reasoning, off.content, off.tool_calls) == ("", "I look.", found.tool_calls)


def test_an_answer_that_is_cut_anywhere_is_the_beginning_of_the_whole() -> None:
    """max_tokens may fall within a marker, whose name is then no text of the answer."""
    whole = read(ANSWER, asked())
    ids = tokens().encode(ANSWER, special=True)
    for at in range(len(ids) + 1):
        found = read_ids(ids[:at], asked())
        for part, all_of_it in ((found.reasoning, whole.reasoning), (found.content, whole.content)):
            assert (all_of_it or "").startswith((part or "").rstrip("\ufffd")), at


def test_streamed_is_what_is_not_streamed_at_every_split() -> None:
    """Every token of the small vocabulary is a byte, so this cuts through characters and through markers."""
    whole, num = read(ANSWER, asked()), len(tokens().encode(ANSWER, special=True))
    for split in range(1, num):
        assert read(ANSWER, asked(), (split, num)) == whole
    assert read(ANSWER, asked(), (1,)) == whole


MARKUP = [
    O,
    C,
    S,
    END,
    *(f"{b}{t}{S}" for b in (O, C) for t in ("think", "response", "tools", "message", "call", "json")),
]
BITS = [*MARKUP, f'{O}call tool="get_weather" index="1"{S}', f'{O}argument key="city" type="string"{S}',
        f"{C}argument{S}",
        f'{O}argument key="days" type="number"{S}', "think", "tools", '{"city": "ж"}', '"', "{", "}", "\n", " ", "3",
        f'{O}json type="object"{S}', f"{O}argument", "```json\n"]  # fmt: skip


@given(st.lists(st.sampled_from(BITS) | st.text("абв🦊", min_size=1, max_size=3), max_size=14), st.booleans())
def test_control_tokens_at_every_place_raise_nothing_and_leak_nothing(bits: list[str], thinking: bool) -> None:
    text = "".join(bits)
    conversation = asked(thinking)
    found = read(text, conversation)
    assert read(text, conversation, (1,)) == found
    for marker in (O, C, S, END):
        assert marker not in found.content and marker not in found.reasoning
    for number, made in enumerate(found.tool_calls):
        flagged = any(problem.index == number for problem in found.problems)
        assert flagged or isinstance(json.loads(made.arguments), dict)


@given(st.text("абвгд\n", max_size=20), st.lists(st.integers(0, 20), max_size=3), st.sampled_from([O, C, S]))
def test_a_bracket_that_stands_alone_is_dropped_and_nothing_else(text: str, places: list[int], bracket: str) -> None:
    cuts = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    broken = bracket.join(text[a:b] for a, b in pairwise(cuts))
    assert read(broken, asked(False)).content == text
    assert read(broken, asked(True)).reasoning == text


# --- kinds of faults, by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "close", [f"{C}think{S}", "", f"{C}response{S}"], ids=["closed", "not closed", "closed otherwise"]
)
def test_the_end_of_reasoning_may_be_left_out(close: str) -> None:
    """A parser that waits for it streams no call at all."""
    made = f"{O}tools{S}{call('get_weather', ('city', 'string', 'x'))}{C}tools{S}{C}message{S}"
    for text in (f"Hm.{close}{made}", f"Hm.{close}{O}response{S}{C}response{S}{made}"):
        for cuts in ((10**9,), (1,)):
            found = read(text, asked(), cuts)
            assert (found.reasoning, found.content, found.problems) == ("Hm.", "", [])
            assert [c.arguments for c in found.tool_calls] == ['{"city": "x"}']


@pytest.mark.parametrize("begins", ["", f"{O}think{S}"], ids=["in the prompt", "generated"])
@pytest.mark.parametrize("ends", [f"{RESPOND}So.{OVER}", RESPOND, ""], ids=["present", "at the end", "absent"])
def test_markers_of_reasoning_present_absent_and_cut_off(begins: str, ends: str) -> None:
    found = read(f"{begins}Hm.{ends}", asked())
    assert (found.reasoning, found.content) == ("Hm.", "So." if "So." in ends else "")


def test_the_first_and_a_later_turn_are_read_alike() -> None:
    """A parser that starts from the whole prompt sees the markers of earlier turns."""
    calls = (ToolCall("a", "get_weather", '{"city": "x"}'),)
    later = (
        USER, Message("assistant", (TextPart("I look."),), "Hm.", calls), Message.of("tool", "7", tool_call_id="a"),
        Message.of("assistant", "7.", reasoning="So."), USER,
    )  # fmt: skip
    for thinking in (True, False):
        text = ANSWER if thinking else ANSWER.partition(f"{O}response{S}")[2]
        assert read(text, asked(thinking, later)) == read(text, asked(thinking))


@pytest.mark.parametrize(
    "body",
    [f'{O}json type="object"{S}{{"city": "x"}}{C}json{S}', f'{O}json{S}```json\n{{"city": "x"}}\n```{C}json{S}',
     '{"city": "x"}', f'\n{O}json type="object"{S}\n{{"city": "x"}}\n{C}json{S}\n',
     f'{O}json type="object"{S}{{"city": "x"}}',
     f'{O}argument key="city"{S}x{C}argument{S}', f'{O}argument type="string" key="city"{S}x{C}argument{S}',
     f'{O}argument key="city" type="string"{S}x'],
)  # fmt: skip
def test_odd_shapes_of_arguments(body: str) -> None:
    """A block of JSON instead of arguments, with and without its tag; attributes left out or in another order."""
    text = f'Hm.{RESPOND}{C}response{S}{O}tools{S}{O}call tool="get_weather" index="1"{S}{body}{C}call{S}{C}tools{S}'
    for cuts in ((10**9,), (1,)):
        found = read(text, asked(), cuts)
        assert [c.arguments for c in found.tool_calls] == ['{"city": "x"}']
        assert (found.problems, found.content) == ([], "")


@pytest.mark.parametrize("end", ["", f"{C}tools{S}", f"{C}tools{S}{C}message{S}", f"{C}message{S}"])
def test_calls_whose_ends_are_left_out(end: str) -> None:
    one = f'{O}call tool="get_weather" index="1"{S}{O}argument key="city" type="string"{S}x{C}argument{S}'
    found = read(f"Hm.{RESPOND}{C}response{S}{O}tools{S}{one}{one}{end}", asked(), stop=258)
    assert [c.arguments for c in found.tool_calls] == ['{"city": "x"}'] * 2
    assert found.problems == []  # the end of the message, which is a token, ends the last one


def test_arguments_that_are_no_json_are_flagged() -> None:
    for kind, text in [("number", "many"), ("object", '{"a": '), ("boolean", "yes")]:
        found = read(f"{RESPOND}{calling(call('get_weather', ('days', kind, text)))}", asked())
        assert [p.index for p in found.problems] == [0] and "no JSON object" in found.problems[0].sentence
    found = read(f"{RESPOND}{calling(call('get_wether'))}", asked())
    assert "does not offer" in found.problems[0].sentence


def test_a_call_that_is_cut_off_is_flagged() -> None:
    text = f"{RESPOND}{calling(call('get_weather', *ARGUMENTS))}"
    found = read(text[: text.index("near")], asked())
    assert found.tool_calls[0].arguments.startswith('{"city": "Paris')
    assert [p.index for p in found.problems] == [0] and "cut off" in found.problems[0].sentence


def test_text_about_the_format_can_be_an_argument() -> None:
    text = f"a {O}response{S} and {C}think{S}, {S}"
    found = read(f"{RESPOND}{calling(call('get_weather', ('city', 'string', text)))}", asked())
    assert json.loads(found.tool_calls[0].arguments) == {"city": text}


def test_text_outside_the_elements_is_not_lost() -> None:
    """Counted tokens and an empty answer are the worst of both."""
    for text, content, reasoning in [
        (f"a{C}think{S}b{O}response{S}c{C}response{S}d{C}message{S}e", "bcde", "a"),
        (f"{C}think{S}b", "b", ""),
        (f"a{RESPOND}b{C}response{S}{O}response{S}c{OVER}", "bc", "a"),
        (f"a{RESPOND}b{C}response{S}{O}think{S}d{RESPOND}c{OVER}", "bc", "ad"),
        (f'a{C}think{S}{C}message{S}{END}{O}message role="assistant"{S}{O}response{S}b', "b", "a"),
    ]:
        for cuts in ((10**9,), (1,)):
            found = read(text, asked(), cuts)
            assert (found.content, found.reasoning, found.problems) == (content, reasoning, []), text


def test_reasoning_tokens_are_those_between_its_markers() -> None:
    for text, count in [
        ("Hm. 🦊", 8),
        (f"Hm.{RESPOND}So.", 3),
        (f"{RESPOND}So.", 0),
        (f"a{C}b{RESPOND}", 3),
        ("ab" + C, 3),
    ]:
        for cuts in (1, 3, 99):
            conversation = asked()
            parser = ENCODING.parser(conversation, ENCODING.prompt(conversation))
            reader = ParsedReader(Detokenizer(tokens(), keep=parser.keep), parser)
            ids = tokens().encode(text, special=True)
            for at in range(0, len(ids), cuts):
                reader.push(ids[at : at + cuts])
            assert reader.reasoning_tokens == count, text


# --- grammars -----------------------------------------------------------------------------------------------------


def taken(grammar: GrammarText | None, text: str) -> bool:
    """Whether the grammar takes the whole text and may end there."""
    assert grammar is not None
    ids = tokens().encode(text, special=True)
    free = 0 if grammar.after is None else ids.index(grammar.after) + 1
    kind = grammar.kind
    made = LLMatcher.grammar_from_regex(grammar.text) if kind == "regex" else LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(MASKS, made)
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids[free:]) == len(ids) - free and matcher.is_accepting()


def grammar(conversation: Conversation) -> GrammarText | None:
    return ENCODING.tool_grammar(conversation, ENCODING.prompt(conversation))


def head(thinking: bool) -> str:
    return f"Hm.{RESPOND}" if thinking else ""


GOOD = call("get_weather", ("city", "string", CITY), ("days", "number", "3"))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_forced_call_is_written_as_the_parser_reads_it(thinking: bool) -> None:
    held, begin = grammar(asked(thinking, tool_choice="required")), head(thinking)
    text = begin + calling(GOOD, call("say &quot;&amp;&quot;", ("a&quot;&amp;", "number", "3"), index=2))
    assert taken(held, text)
    found = read(text, asked(thinking))
    assert [json.loads(c.arguments) for c in found.tool_calls] == [{"city": CITY, "days": 3}, {'a"&': 3}]
    assert found.problems == []
    for bad in (
        f"I cannot.{OVER}", calling(call("get_wether")), calling(call("get_weather")),
        calling(call("get_weather", ("city", "string", "x"), ("days", "number", "many"))),
        calling(call("get_weather", ("city", "number", "3"))), calling(),
        calling(call("say &quot;&amp;&quot;", ("a&quot;&amp;", "number", "4"))),
    ):  # fmt: skip
        assert not taken(held, begin + bad), bad
    single = grammar(asked(thinking, tool_choice="required", parallel_tool_calls=False))
    assert taken(single, begin + calling(GOOD)) and not taken(single, begin + calling(GOOD, GOOD))


@pytest.mark.parametrize("kind", [("string", "x"), ("number", "3"), ("null", "null")])
def test_an_argument_of_several_types_says_which(kind: tuple[str, str]) -> None:
    held = grammar(asked(False, tool_choice="required"))
    assert taken(held, calling(call("say &quot;&amp;&quot;", ("a&quot;&amp;", *kind))))
    assert not taken(held, calling(call("say &quot;&amp;&quot;", ("a&quot;&amp;", "boolean", "true"))))


def test_a_named_function_is_the_only_one_and_comes_without_reasoning() -> None:
    conversation = asked(True, tool_choice=NamedTool("get_weather"))
    assert ENCODING.prompt(conversation).opens == "content"
    held = grammar(conversation)
    assert taken(held, calling(GOOD)) and not taken(held, calling(GOOD, GOOD))
    assert not taken(held, calling(call("say &quot;&amp;&quot;")))


@pytest.mark.parametrize("thinking", [True, False])
def test_strict_tools_are_held_when_the_model_chooses(thinking: bool) -> None:
    strict = Tool("get_weather", parameters=WEATHER.parameters, strict=True)
    held, begin = grammar(asked(thinking, tools=(strict,))), head(thinking)
    assert taken(held, f"{begin}No <b> call.{OVER}") and taken(held, f"{begin}I look.{calling(GOOD)}")
    assert not taken(held, f"{begin}I look.{calling(call('get_weather', ('days', 'number', '3')))}")
    assert grammar(asked(thinking)) is None and grammar(asked(thinking, tool_choice="none")) is None


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
KINDS: list[tuple[Any, str, str, str]] = [
    ("json_schema", SCHEMA, '{"a": 1}', '{"a": "x"}'), ("json_object", "", '{"b": [1]}', "[1]"),
    ("regex", "a/b+", "a/bb", "ab"), ("choice", '["yes", "n\\no"]', "n\no", "maybe"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "good", "bad"), KINDS)
@pytest.mark.parametrize("thinking", [True, False])
def test_a_format_is_held_inside_the_response(thinking: bool, kind: Any, text: str, good: str, bad: str) -> None:
    prompt, begin = ENCODING.prompt(asked(thinking)), head(thinking)
    held = ENCODING.answer_grammar(prompt, kind, text)
    assert taken(held, begin + good + OVER) and not taken(held, begin + bad + OVER)
    assert not taken(held, begin + good)  # the message is not over
    assert read(begin + good + OVER, asked(thinking)).content == good
    either = ENCODING.either_grammar(asked(thinking), prompt, kind, text)
    assert taken(either, begin + good + OVER) and taken(either, begin + calling(GOOD))
    assert not taken(either, begin + bad + OVER) and not taken(either, f"{begin}I look.{calling(GOOD)}")


def test_formats_that_cannot_stand_there() -> None:
    with pytest.raises(UsageError, match="Lark grammar cannot stand inside"):
        ENCODING.answer_grammar(ENCODING.prompt(asked()), "lark", 'start: "a"')
    last = Message.of("assistant", "{")
    goes_on = ENCODING.prompt(asked(False, (USER, last), continue_final=True, add_generation_prompt=False))
    assert ENCODING.answer_grammar(goes_on, "regex", "a+") == GrammarText("regex", "a+")
