"""Grammars that hold an answer to a call: what they allow is what the parser reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from dayzero.chat.conversation import Conversation, Message, NamedTool, Tool
from dayzero.chat.encoding import GrammarText, Prompt
from dayzero.chat.families import (
    ARG_PAIRS,
    ARG_PAIRS_COMPACT,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DSML_CALLS,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    PLAIN,
    XML,
    Format,
)  # fmt: skip
from dayzero.chat.format_encoding import FormatEncoding
from dayzero.chat.harmony import HarmonyEncoding
from dayzero.chat.pieces import assemble
from dayzero.chat.tokenizer import JsonTokenizer
from dayzero.errors import UsageError
from tests.paper.chat_models import byte_level
from tests.paper.test_chat_parser import NOTE, SECTIONS, WEATHER, answer, call_text

CALLING = (HERMES, XML, ARG_PAIRS, ARG_PAIRS_COMPACT, DEEPSEEK_V3, DEEPSEEK_V31, DSML_CALLS, KIMI, LLAMA, HARMONY)
# As in the publishers' vocabularies: control tokens marked special, text-like markers added without the mark.
MARKERS = sorted(
    {m for form in CALLING for m in form.grammar.markers() if m[:2] in ("<|", "<｜") and DSML_CALLS} - {"<｜"}
)
SPECIAL = tuple(m for m in MARKERS if "DSML" not in m and m.endswith(("|>", "｜>"))) + ("<|im_end|>",)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "｜DSML｜")  # fmt: skip
FILE = byte_level(SPECIAL, ADDED)
TOKENS = JsonTokenizer(FILE, {}, name="test", controls=" ".join(ADDED))
MASKS = LLTokenizer(FILE)
OPENED = Prompt([1], "", opens="reasoning")
CLOSED = Prompt([1], "", closed=True)
FREE = Prompt([1], "")


def encoding(form: Format) -> FormatEncoding:
    return HarmonyEncoding(TOKENS) if form is HARMONY else FormatEncoding(form, "test", TOKENS)


def taken(grammar: GrammarText, text: str) -> str:
    """How much of a text the grammar takes; "whole" when it takes all of it and may end there."""
    ids = TOKENS.encode(text, special=True)
    free = 0 if grammar.after is None else ids.index(grammar.after) + 1
    matcher = LLMatcher(MASKS, compiled(grammar))
    assert not matcher.get_error(), matcher.get_error()
    number = matcher.try_consume_tokens(ids[free:])
    whole = number == len(ids) - free and matcher.is_accepting()
    return "whole" if whole else TOKENS.decode(ids[: free + number], skip_special=False)


def compiled(grammar: GrammarText) -> str:
    if grammar.kind in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(grammar.text or '{"type": "object"}')
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
    return LLMatcher.grammar_from_lark(grammar.text)


def conversation(choice: Any = "required", tools: tuple[Tool, ...] = (WEATHER, NOTE), **more: Any) -> Conversation:
    return Conversation([Message.of("user", "Hi")], tools=tools, tool_choice=choice, **more)


def calls(form: Format, *made: tuple[str, dict[str, object]]) -> str:
    """Calls without reasoning, as ``answer`` writes them."""
    begin, end, between = SECTIONS[form.name]
    text = begin + between.join(call_text(form, name, args, i) for i, (name, args) in enumerate(made)) + end
    return text.removeprefix("<|start|>assistant").removesuffix("<|call|>") if form is HARMONY else text


CITY: dict[str, object] = {"city": 'a "b" </x>\n🦊', "days": 3}


@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
def test_a_forced_call_is_written_as_the_parser_reads_it(form: Format) -> None:
    grammar = encoding(form).tool_grammar(conversation(), CLOSED)
    assert grammar is not None
    good = calls(form, ("get_weather", CITY))
    assert taken(grammar, good) == "whole"
    asked = conversation()
    parser = encoding(form).parser(asked, CLOSED)
    found = assemble([*parser.push(good, TOKENS.encode(good, special=True)), *parser.finish()])
    assert json.loads(found.tool_calls[0].arguments) == CITY
    assert found.problems == []
    assert taken(grammar, "I cannot.") in ("", "I")  # "I" may begin nothing, or a word of the format
    assert taken(grammar, calls(form, ("get_wether", CITY))) != "whole"
    assert taken(grammar, calls(form, ("get_weather", {"city": "x", "days": "many"}))) != "whole"
    two = calls(form, ("get_weather", CITY), ("take_note", {}))
    if form is not HARMONY:
        assert taken(grammar, two) == "whole"
        single = encoding(form).tool_grammar(conversation(parallel_tool_calls=False), CLOSED)
        assert single is not None
        assert taken(single, two) != "whole"
        assert taken(single, good) == "whole"


@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
def test_a_named_function_is_the_only_one(form: Format) -> None:
    grammar = encoding(form).tool_grammar(conversation(NamedTool("take_note")), CLOSED)
    assert grammar is not None
    assert taken(grammar, calls(form, ("take_note", {}))) == "whole"
    assert taken(grammar, calls(form, ("get_weather", {"city": "x"}))) != "whole"


@pytest.mark.parametrize("form", [f for f in CALLING if f is not LLAMA], ids=lambda f: f.name)
def test_reasoning_comes_before_a_forced_call(form: Format) -> None:
    call = [("get_weather", dict(CITY))]
    for prompt in (OPENED, FREE):
        grammar = encoding(form).tool_grammar(conversation(), prompt)
        assert grammar is not None
        text = answer(form, call).removesuffix("<|call|>")
        if prompt is OPENED:
            text = text.removeprefix("<|channel|>analysis<|message|>" if form is HARMONY else "<think>\n")
            assert (grammar.after is None) == (form is HARMONY)
        assert taken(grammar, text) == "whole"
        assert (
            taken(grammar, text.partition("Hm.")[0] + "Hm." + ("<|end|>" if form is HARMONY else "</think>")) != "whole"
        )


@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
def test_a_strict_tool_is_held_once_the_model_calls_it(form: Format) -> None:
    strict = Tool("get_weather", parameters=WEATHER.parameters, strict=True)
    made = encoding(form)
    grammar = made.tool_grammar(conversation("auto", (strict, NOTE)), FREE)
    assert made.tool_grammar(conversation("auto"), FREE) is None  # nothing is strict
    assert made.tool_grammar(conversation("none", (strict,)), FREE) is None
    if form in (LLAMA, HARMONY, DSML_CALLS):  # no single token says that a call begins
        assert grammar is None
        assert made.holds_strict is False
        return
    assert grammar is not None
    assert made.holds_strict is True
    assert taken(grammar, "I look." + calls(form, ("get_weather", CITY))) == "whole"
    assert taken(grammar, "I look." + calls(form, ("get_weather", {"city": "x", "days": "many"}))) != "whole"


def test_schemas_of_all_kinds_are_held() -> None:
    tool = Tool(
        "f",
        parameters={
            "type": "object",
            "$defs": {"unit": {"enum": ["c", "f"]}},
            "properties": {"a": {"$ref": "#/$defs/unit"}, "b": {"type": "string", "enum": ["x", "y z"]},
                           "c": {"type": "array", "items": {"type": "integer"}}},
            "required": ["a"],
        },
    )  # fmt: skip
    for form in (XML, ARG_PAIRS, DSML_CALLS):
        grammar = encoding(form).tool_grammar(conversation(tools=(tool,)), CLOSED)
        assert grammar is not None
        quoted: dict[str, object] = {"a": '"c"' if form is not DSML_CALLS else "c", "b": "y z", "c": [1, 2]}
        text = calls(form, ("f", quoted))
        if form is DSML_CALLS:  # what the schema does not call text is JSON
            text = text.replace('"a" string="true">c<', '"a" string="false">"c"<')
        assert taken(grammar, text) == "whole"
        assert taken(grammar, text.replace("y z", "z")) != "whole"
        assert taken(grammar, calls(form, ("f", {"b": "x"}))) != "whole"  # a is required


def test_a_model_without_a_format_for_calls_cannot_be_forced() -> None:
    with pytest.raises(UsageError, match="shows no format for calls"):
        encoding(PLAIN).tool_grammar(conversation(), FREE)
    assert encoding(PLAIN).tool_grammar(conversation("auto"), FREE) is None


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", SCHEMA, '{"a": 1}', '{"a": "x"}'),
        ("json_object", "", '{"b": [1]}', "[1]"),
        ("regex", "a/b+", "a/bb", "ab"),
        ("choice", '["yes", "n\\no"]', "n\no", "maybe"),
    ],
)
@pytest.mark.parametrize("form", [HERMES, LLAMA, HARMONY], ids=lambda f: f.name)
def test_a_clients_grammar_begins_with_the_content(form: Format, kind: Any, text: str, good: str, bad: str) -> None:
    made = encoding(form)
    for prompt in (OPENED, FREE, CLOSED):
        grammar = made.answer_grammar(prompt, kind, text)
        if form is HARMONY:
            head = "<|channel|>final<|message|>"
            heads = ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + head, head]
            heads = ["Hm.<|end|><|start|>assistant" + head] if prompt is OPENED else heads
        else:
            heads = {OPENED.opens: ["Hm.</think>"]}.get(prompt.opens, ["<think>Hm.</think>\n\n", ""])
            heads = heads if form.think and prompt is not CLOSED else [""]
        for head in heads:
            assert taken(grammar, head + good) == "whole"
            assert taken(grammar, head + bad) != "whole"


def test_a_lark_grammar_cannot_be_put_behind_optional_reasoning() -> None:
    with pytest.raises(UsageError, match="Lark grammar"):
        encoding(HERMES).answer_grammar(FREE, "lark", 'start: "a"')
    assert encoding(HERMES).answer_grammar(CLOSED, "lark", 'start: "a"') == GrammarText("lark", 'start: "a"')


def test_without_tokens_of_its_own_a_format_is_spelled() -> None:
    tokens = JsonTokenizer(byte_level(("<|im_end|>",)), {}, name="plain")
    made = FormatEncoding(HERMES, "test", tokens)
    grammar = made.tool_grammar(conversation(), OPENED)
    assert grammar is not None
    assert grammar.after is None
    matcher = LLMatcher(LLTokenizer(byte_level(("<|im_end|>",))), LLMatcher.grammar_from_lark(grammar.text))
    text = "Hm.</think>\n\n" + calls(HERMES, ("take_note", {})).strip()
    ids = tokens.encode(text)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


PRETTY = json.dumps({
    "type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"], "additionalProperties": False,
})  # fmt: skip


@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
@pytest.mark.parametrize("prompt", [OPENED, FREE, CLOSED], ids=["opened", "free", "closed"])
def test_a_format_beside_tools_lets_the_model_choose(form: Format, prompt: Prompt) -> None:
    """Either a call or the format, behind reasoning where there may be some; and nothing else."""
    made = encoding(form)
    grammar = made.either_grammar(conversation("auto"), prompt, "json_schema", PRETTY)
    head = "" if form.think is None or prompt is not OPENED else "Hm.</think>\n\n"
    final = ""
    if form is HARMONY:
        head = "Hm.<|end|><|start|>assistant" if prompt is OPENED else ""
        final = "<|channel|>final<|message|>"
    # The format's own key is the one by which bare calls are told, so the two begin alike.
    for good in ('{"name": "x", "n": 2}', '{"name": "get_weather", "n": 2}'):
        assert taken(grammar, head + final + good) == "whole"
    call = calls(form, ("get_weather", CITY))
    assert taken(grammar, head + call) == "whole"
    for bad in (final + '{"name": "x", "n": "y"}', "I look." + call, calls(form, ("get_wether", CITY)), "Sure."):
        assert taken(grammar, head + bad) != "whole"
    if form is not HARMONY:
        two = head + calls(form, ("get_weather", CITY), ("take_note", {}))
        assert taken(grammar, two) == "whole"
        single = made.either_grammar(conversation("auto", parallel_tool_calls=False), prompt, "json_schema", PRETTY)
        assert taken(single, two) != "whole"


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [("json_object", "", '{"b": [1]}', "[1]"), ("regex", "a/b+", "a/bb", "ab"), ("choice", '["yes", "no"]', "no", "n")],
)
@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
def test_every_kind_of_format_stands_beside_tools(form: Format, kind: Any, text: str, good: str, bad: str) -> None:
    grammar = encoding(form).either_grammar(conversation("auto"), CLOSED, kind, text)
    final = "<|channel|>final<|message|>" if form is HARMONY else ""
    assert taken(grammar, final + good) == "whole"
    assert taken(grammar, final + bad) != "whole"
    assert taken(grammar, calls(form, ("take_note", {}))) == "whole"


def test_where_no_call_can_stand_the_format_alone_is_held() -> None:
    one = encoding(PLAIN).either_grammar(conversation("auto"), FREE, "json_schema", SCHEMA)
    assert one == GrammarText("json_schema", SCHEMA)
    goes_on = Prompt([1], "", continued="{", closed=True)  # the answer's content has begun
    assert encoding(HERMES).either_grammar(conversation("auto"), goes_on, "regex", "a+") == GrammarText("regex", "a+")
    with pytest.raises(UsageError, match="cannot stand beside tool calls"):
        encoding(HERMES).either_grammar(conversation("auto"), FREE, "lark", 'start: "a"')


def test_bare_calls_keep_the_definitions_of_their_schemas() -> None:
    parameters = {
        "type": "object",
        "$defs": {"unit": {"enum": ["c", "f"]}},
        "properties": {"unit": {"$ref": "#/$defs/unit"}},
        "required": ["unit"],
    }
    asked = conversation("auto", (Tool("f", parameters=parameters),))
    grammar = encoding(LLAMA).either_grammar(asked, FREE, "json_schema", PRETTY)
    assert taken(grammar, '{"name": "f", "parameters": {"unit": "c"}}') == "whole"
    assert taken(grammar, '{"name": "f", "parameters": {"unit": "k"}}') != "whole"
