"""The marker parser: every format's own samples, any cutting of the text, and text that only looks like markers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.chat.conversation import Tool
from dayzero.chat.families import (
    ARG_PAIRS,
    ARG_PAIRS_COMPACT,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DSML_CALLS,
    DSML_TOOL_CALLS,
    FORMATS,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    PLAIN,
    THINKING,
    XML,
    XTML,
    Format,
    without_thinking,
)  # fmt: skip
from dayzero.chat.parser import MarkerParser
from dayzero.chat.pieces import Assembled, assemble

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": ["string", "null"]}},
        "required": ["city"],
    },
)
NOTE = Tool("take_note", parameters={"type": "object", "properties": {}})
ALL = (*FORMATS, THINKING, PLAIN, without_thinking(HERMES))
CITY = 'Paris "20e"\nnear </x> 北京 🦊'


def start(form: Format, opens: str, tools: tuple[Tool, ...]) -> MarkerParser:
    return MarkerParser(form.grammar, opens=opens, tools=tools, new_id=lambda i: f"call_{i}")  # type: ignore[arg-type]


def read(
    form: Format,
    text: str,
    opens: str = "content",
    cut: int | None = None,
    *,
    tools: tuple[Tool, ...] = (WEATHER, NOTE),
) -> Assembled:
    parser = start(form, opens, tools)
    cut = cut or max(1, len(text))
    pieces = [p for i in range(0, len(text), cut) for p in parser.push(text[i : i + cut])]
    return assemble([*pieces, *parser.finish()])


def arguments(city: str = CITY, **more: object) -> dict[str, object]:
    return {"city": city, **more}


def call_text(form: Format, name: str, args: dict[str, object], index: int = 0) -> str:
    """One call as the publishers' templates write it, without the section around."""
    text = json.dumps(args, ensure_ascii=False)
    if form is HERMES:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    if form is LLAMA:
        return f'{{"name": "{name}", "parameters": {text}}}'
    if form is DEEPSEEK_V3:
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
    if form is DEEPSEEK_V31:
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    if form is KIMI:
        return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    if form is HARMONY:
        return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
    plain = {k: (v if isinstance(v, str) else json.dumps(v)) for k, v in args.items()}
    if form is XTML:
        kinds = {k: "string" if isinstance(v, str) else "number" for k, v in args.items()}
        inner = "".join(
            f'<|open|>argument key="{k}" type="{kinds[k]}"<|sep|>{v}<|close|>argument<|sep|>' for k, v in plain.items()
        )
        return f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>{inner}<|close|>call<|sep|>'
    if form is XML:
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in plain.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    if form is ARG_PAIRS:
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in plain.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"
    if form is ARG_PAIRS_COMPACT:
        inner = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in plain.items())
        return f"<tool_call>{name}{inner}</tool_call>"
    said = {k: "true" if isinstance(v, str) else "false" for k, v in args.items()}
    inner = "".join(
        f'<｜DSML｜parameter name="{k}" string="{said[k]}">{v}</｜DSML｜parameter>\n' for k, v in plain.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>'


SECTIONS = {
    DEEPSEEK_V3.name: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n"),
    DEEPSEEK_V31.name: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", ""),
    KIMI.name: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", ""),
    DSML_CALLS.name: ("\n\n<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n"),
    DSML_TOOL_CALLS.name: ("\n\n<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>", "\n"),
    HERMES.name: ("\n", "", "\n"),
    XML.name: ("\n\n", "", "\n"),
    ARG_PAIRS.name: ("\n", "", "\n"),
    ARG_PAIRS_COMPACT.name: ("", "", ""),
    LLAMA.name: ("", "", "; "),
    HARMONY.name: ("", "", ""),
    XTML.name: ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", ""),
}
THINK_OPENS = {HARMONY.name: "<|channel|>analysis<|message|>", XTML.name: "<|open|>think<|sep|>"}


def answer(form: Format, calls: list[tuple[str, dict[str, object]]], think: str = "Hm.", content: str = "") -> str:
    """A whole answer of a model that opens its reasoning itself."""
    begin, end, between = SECTIONS[form.name]
    made = begin + between.join(call_text(form, n, a, i) for i, (n, a) in enumerate(calls)) + end if calls else ""
    if form is XTML:
        text = f"<|open|>think<|sep|>{think}<|close|>think<|sep|><|open|>response<|sep|>{content}"
        return f"{text}<|close|>response<|sep|>{made}<|close|>message<|sep|>"
    if form is HARMONY:
        text = f"<|channel|>analysis<|message|>{think}<|end|>"
        if content:
            channel = "commentary" if calls else "final"
            text += f"<|start|>assistant<|channel|>{channel}<|message|>{content}<|end|>"
        return text + made
    return (f"<think>\n{think}\n</think>\n\n" if form.think else "") + content + made


CALLING = list(FORMATS)
# What a marker is only inside a call; elsewhere it is text that anyone may write.
ORDINARY = (">", "\n", "</function>", "<parameter=", "</parameter>")


@pytest.mark.parametrize("form", ALL, ids=lambda f: f.name)
def test_each_table_is_sound(form: Format) -> None:
    assert list(form.grammar.problems()) == []


@pytest.mark.parametrize("form", CALLING, ids=lambda f: f.name)
@pytest.mark.parametrize("cut", [None, 1, 2, 7])
def test_calls_and_reasoning_as_the_publishers_write_them(form: Format, cut: int | None) -> None:
    calls = [("get_weather", arguments(days=3)), ("take_note", {})]
    content = "" if form is LLAMA else "I look."
    found = read(form, answer(form, calls, content=content), cut=cut)
    assert found.content == content
    assert found.reasoning == ("Hm." if form.think else "")
    assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == calls
    assert found.problems == []
    if form.native_ids:
        assert [c.id for c in found.tool_calls] == ["functions.get_weather:0", "functions.take_note:1"]


@pytest.mark.parametrize("form", [f for f in CALLING if f.think], ids=lambda f: f.name)
def test_the_prompt_may_have_opened_the_reasoning(form: Format) -> None:
    whole = answer(form, [("get_weather", arguments())], content="So.")
    opening = THINK_OPENS.get(form.name, "<think>\n")
    started = read(form, whole.removeprefix(opening), "reasoning")
    assert started == read(form, whole)
    assert read(form, whole, "reasoning") == started or form is HARMONY  # a model that repeats the marker


@pytest.mark.parametrize(
    "form",
    [f for f in CALLING if f.think and f not in (HARMONY, XTML, ARG_PAIRS, ARG_PAIRS_COMPACT)],
    ids=lambda f: f.name,
)
def test_a_call_ends_reasoning_that_was_not_closed(form: Format) -> None:
    text = answer(form, [("get_weather", arguments())]).replace("</think>\n\n", "")
    found = read(form, text)
    assert (found.reasoning, found.content, len(found.tool_calls)) == ("Hm.", "", 1)


@pytest.mark.parametrize("form", [HERMES, XML, ARG_PAIRS], ids=lambda f: f.name)
def test_reasoning_may_write_about_the_marker(form: Format) -> None:
    found = read(form, "<think>I use <tool_call> here.</think>ok")
    assert (found.reasoning, found.content) == ("I use <tool_call> here.", "ok")


@pytest.mark.parametrize("form", [f for f in CALLING if f is not LLAMA], ids=lambda f: f.name)
@pytest.mark.parametrize("cut", [None, 1])
def test_a_call_that_is_cut_off_is_flagged_with_what_came(form: Format, cut: int | None) -> None:
    whole = answer(form, [("get_weather", arguments(days=3))])
    text = whole[: whole.index("near")]
    found = read(form, text, cut=cut)
    assert [c.name for c in found.tool_calls] == ["get_weather"]
    assert "Paris" in found.tool_calls[0].arguments
    assert [p.index for p in found.problems] == [0]
    assert "cut off" in found.problems[0].sentence
    assert found.content == ""


@pytest.mark.parametrize("form", [f for f in CALLING if f is not LLAMA], ids=lambda f: f.name)
def test_an_unknown_function_is_flagged_and_kept(form: Format) -> None:
    found = read(form, answer(form, [("get_wether", {"city": "x"})]))
    assert [c.name for c in found.tool_calls] == ["get_wether"]
    assert [p.index for p in found.problems] == [0]
    assert "get_wether" in found.problems[0].sentence


def test_broken_arguments_are_flagged() -> None:
    text = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{'city': 1}<|tool_call_end|>"
    found = read(KIMI, text)
    assert found.tool_calls[0].arguments == "{'city': 1}"
    assert "no JSON object" in found.problems[0].sentence
    found = read(HERMES, "<tool_call>get_weather(city)</tool_call> after")
    assert (found.content, found.tool_calls) == (" after", [])
    assert found.problems[0].text == "get_weather(city)"
    found = read(HERMES, '<tool_call>{"arguments": {}}</tool_call>')
    assert "no name" in found.problems[0].sentence


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        (HERMES, '<tool_call>{"arguments": {"city": "</tool_call>"}, "name": "get_weather"}</tool_call>',
         '{"city": "</tool_call>"}'),
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>',
         '{"city": "x"}'),
        (HERMES, '<tool_call>{"name": "get_weather"}</tool_call>', "{}"),
        (XML, '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>', '{"city": "x"}'),
        (XML, "<function=get_weather>\n<parameter=city>\nx\n</parameter>\n</function>", '{"city": "x"}'),
        (KIMI, '<|tool_call_begin|>get_weather:0 <|tool_call_argument_begin|> "{\\"city\\": \\"x\\"}"<|tool_call_end|>',
         '{"city": "x"}'),
        (DEEPSEEK_V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{\"city\": \"x\"}<｜tool▁call▁end｜>",
         '{"city": "x"}'),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "x"}}',
         '{"city": "x"}'),
        (HARMONY, ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "x"}', '{"city": "x"}'),
        (HARMONY, '<|channel|>analysis to=functions.get_weather code<|message|>{"city": "x"}', '{"city": "x"}'),
    ],
)  # fmt: skip
def test_odd_shapes_that_models_write(form: Format, text: str, wanted: str) -> None:
    for cut in (None, 1):
        found = read(form, text, cut=cut)
        assert [(c.name, c.arguments) for c in found.tool_calls] == [("get_weather", wanted)]
        assert (found.problems, found.content) == ([], "")


@pytest.mark.parametrize(
    ("schema", "raw", "wanted"),
    [
        ({"type": "string"}, "3", "3"), ({"type": "integer"}, "3", 3), ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "true", True), ({"type": "boolean"}, "False", False), ({}, "[1, 2]", [1, 2]),
        ({"type": "array"}, '["a"]', ["a"]), ({"type": "object"}, '{"a": 1}', {"a": 1}), ({}, "a b", "a b"),
        ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "integer"]}, "x", "x"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7), ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "many", "many"), ({"type": "array"}, "NaN", "NaN"), ({"type": "string"}, "", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [XML, ARG_PAIRS], ids=lambda f: f.name)
def test_values_without_quotes_become_what_the_schema_says(
    form: Format, schema: dict[str, object], raw: str, wanted: object
) -> None:
    tool = Tool("get_weather", parameters={"properties": {"city": schema}})
    found = read(form, call_text(form, "get_weather", {"city": raw}), tools=(tool,))
    assert json.loads(found.tool_calls[0].arguments) == {"city": wanted}


@pytest.mark.parametrize(
    "text",
    ['{"answer": 3}', '{"name": "someone", "parameters": {}}', '{"name": "get_weather"', "{", "[1]", '{"a" 1}',
     ' {"name": 5}', "{}", '{"name": "get_weather" 3', '  {"parameters": {"city": 1}'],
)  # fmt: skip
def test_an_object_that_is_no_call_is_content(text: str) -> None:
    for cut in (None, 1):
        found = read(LLAMA, text, cut=cut)
        if text == '{"name": "get_weather"' or text == '{"name": "get_weather" 3':
            assert found.content == "" and len(found.tool_calls) == 1 and len(found.problems) >= 1
        else:
            assert (found.content, found.tool_calls, found.problems) == (text, [], [])
    found = read(LLAMA, '{"name": "get_weather", "parameters": {}}', tools=())
    assert found.content == '{"name": "get_weather", "parameters": {}}'  # no tools, so no calls


def test_text_behind_a_bare_call_is_content() -> None:
    found = read(LLAMA, '{"name": "take_note", "parameters": {}}; then {"a": 1}')
    assert (found.content, len(found.tool_calls)) == ('; then {"a": 1}', 1)


def test_channels_out_of_order_lose_nothing() -> None:
    for text, content, reasoning in [
        ("Hello", "Hello", ""),
        ("Hello<|end|>", "Hello", ""),
        ("Hi <|channel|>final<|message|>there", "Hi there", ""),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b", "a"),
        ("<|message|>a<|message|>b<|constrain|>c", "abc", ""),
        ("<|channel|>odd<|message|>a<|end|>b<|start|>assistant<|channel|>final<|message|>c", "abc", ""),
        ("<|channel|>final<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|end|>", "a", "b"),
        ("<|end|><|end|><|start|><|start|>assistant<|message|>a<|return|>", "a", ""),
        ("<|channel|>final<|message|>a<|start|>assist", "a", ""),
    ]:
        for cut in (None, 1):
            found = read(HARMONY, text, cut=cut)
            assert (found.content, found.reasoning) == (content, reasoning), text


def test_one_call_too_many_is_flagged() -> None:
    parser = MarkerParser(HERMES.grammar, tools=(NOTE,), parallel=False)
    found = assemble([*parser.push(2 * '<tool_call>{"name": "take_note"}</tool_call>', []), *parser.finish()])
    assert len(found.tool_calls) == 2
    assert [p.index for p in found.problems] == [1]
    assert "parallel_tool_calls" in found.problems[0].sentence


def fragments(form: Format) -> st.SearchStrategy[str]:
    """Markers, halves of markers, JSON, and letters that no marker holds."""
    markers = sorted(form.grammar.markers())
    halves = [m[:n] for m in markers for n in (1, len(m) // 2, len(m) - 1)]
    bits = [
        '{"name": "get_weather", "arguments": {', '"city": "ж"', "}}", "}", '"', "\\", "get_weather", "\n", ";", ">",
        '{"name": "take_note", "parameters": {}}', ' name="city" string="true">', "functions.take_note:0", "analysis",
        "final", "assistant", " to=functions.take_note ", "```json\n", "\n```", "city", " ",
    ]  # fmt: skip
    letters = st.text("абвгд🦊\n", min_size=1, max_size=4)
    return st.lists(st.sampled_from([*markers, *markers, *halves, *bits]) | letters, max_size=10).map("".join)


@pytest.mark.parametrize("form", ALL, ids=lambda f: f.name)
def test_any_cutting_of_any_text_gives_the_same(form: Format) -> None:
    @given(fragments(form), st.lists(st.integers(1, 9), min_size=1), st.sampled_from(["content", "reasoning"]))
    def check(text: str, cuts: list[int], opens: str) -> None:
        whole = read(form, text, opens)
        parser = start(form, opens, (WEATHER, NOTE))
        pieces, at, number = [], 0, 0
        while at < len(text):
            step = cuts[number % len(cuts)]
            pieces += parser.push(text[at : at + step])
            at, number = at + step, number + 1
        assert assemble([*pieces, *parser.finish()]) == whole
        for marker in form.grammar.markers() - {*ORDINARY, *form.grammar.literals}:
            assert marker not in whole.content
        for call, index in zip(whole.tool_calls, range(99)):
            flagged = any(p.index == index for p in whole.problems)
            try:
                assert flagged or isinstance(json.loads(call.arguments), dict)
            except ValueError:
                raise AssertionError(f"{call.arguments!r} is not flagged") from None

    check()


@pytest.mark.parametrize("form", ALL, ids=lambda f: f.name)
def test_no_letter_is_lost_or_doubled(form: Format) -> None:
    """Letters that no marker holds come out once: in content, reasoning, arguments, a name, or a problem's text."""

    @given(fragments(form), st.sampled_from(["content", "reasoning"]))
    def check(text: str, opens: str) -> None:
        found = read(form, text, opens)
        shown = found.content + found.reasoning + "".join(p.text for p in found.problems)
        shown += "".join(c.arguments + c.name for c in found.tool_calls)
        for letter in "абвг🦊":
            if form in (HARMONY, XTML):  # what stands between a channel's or a tag's name and its text is header
                assert shown.count(letter) <= text.count(letter)
            else:
                assert shown.count(letter) == text.count(letter), (text, found)

    check()


@given(st.text("<>/thinkool_cal|{}\n ", max_size=60))
def test_text_without_a_whole_marker_is_content_to_the_letter(text: str) -> None:
    for form in ALL:
        if form is HARMONY or any(marker in text for marker in form.grammar.markers()):
            continue
        assert read(form, text, cut=3).content == text
