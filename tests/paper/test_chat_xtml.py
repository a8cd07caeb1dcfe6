"""The XTML encoder: goldens segment by segment with the published ids of control tokens, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dayzero.chat.conversation import (
    Conversation,
    ImagePart,
    Message,
    NamedTool,
    Part,
    TextPart,
    Tool,
    ToolCall,
)
from dayzero.chat.encoding import OWN_ENCODERS, choose, control_text
from dayzero.chat.media import Picture, placed
from dayzero.chat.service import ChatService
from dayzero.chat.xtml import XtmlEncoding
from dayzero.checkpoint.source import open_source
from dayzero.errors import FieldError, UsageError
from tests.paper.xtml_support import real_size, tokens, write_files

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "xtml_goldens.json").read_text(encoding="utf-8"))["cases"]
USER = Message.of("user", "Weather?")
WEATHER = Tool("get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
CALLS = (ToolCall("a", "get_weather", '{"city": "Paris"}'), ToolCall("b", "take_note", "{}"))
CALLING = Message("assistant", (), None, CALLS)
OFF: dict[str, Any] = {"template_kwargs": {"thinking": False}}


def tool(function: dict[str, Any]) -> Tool:
    return Tool(function["name"], parameters=function["parameters"], raw=function)


def message(said: dict[str, Any]) -> Message:
    content = said.get("content") or []
    parts: list[Part] = []
    for item in [content] if isinstance(content, str) else content:
        if isinstance(item, str):
            parts.append(TextPart(item))
        else:
            width, height, count = item["image"]
            parts.append(ImagePart("data:", image=Picture(width, height, count)))
    more = {key: said[key] for key in ("reasoning", "tool_call_id", "name") if key in said}
    calls = tuple(ToolCall(*call) for call in said.get("tool_calls", ()))
    extra = tuple(tool(function) for function in said.get("tools", ()))
    return Message(said["role"], tuple(parts), tool_calls=calls, tools=extra, **more)


def conversation(request: dict[str, Any]) -> Conversation:
    more = {key: request[key] for key in ("template_kwargs",) if key in request}
    choice = request.get("tool_choice", "auto")
    form = request.get("answer_format")
    return Conversation(
        [message(said) for said in request["messages"]],
        tools=[tool(function) for function in request.get("tools", ())],
        tool_choice=NamedTool(choice["name"]) if isinstance(choice, dict) else choice,
        answer_format=None if form is None else (form[0], form[1]),
        **more,
    )


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_goldens(golden: dict[str, Any]) -> None:
    """Ids of what letters come to are those of a made-up vocabulary: see the note in the file."""
    one = real_size()
    prompt = XtmlEncoding(one).prompt(conversation(golden["request"]))
    segments = [(text.removeprefix("§"), text.startswith("§")) for text in golden["segments"]]
    assert prompt.text == "".join(text for text, _ in segments)
    wanted: list[int] = []
    for text, control in segments:
        ids = one.encode(text, special=control)
        assert not control or len(ids) == 1
        wanted += ids
    assert prompt.ids == wanted
    counts = Counter(str(i) for i in prompt.ids if i >= 163584)
    assert counts == golden["counts"]
    assert one.decode(prompt.ids, skip_special=False) == prompt.text


def test_segments_are_not_joined_before_they_are_encoded() -> None:
    """The point and the quote behind it would be one token."""
    one = real_size()
    prompt = XtmlEncoding(one).prompt(Conversation([Message.of("user", "x", name="Dr.")], **OFF))
    assert one.encode(prompt.text, special=True) != prompt.ids
    assert one.decode(one.encode(prompt.text, special=True), skip_special=False) == prompt.text


def shown(*messages: Message, **more: Any) -> str:
    prompt = XtmlEncoding(tokens()).prompt(Conversation(messages, **{**OFF, **more}))
    assert tokens().decode(prompt.ids, skip_special=False) == prompt.text
    return prompt.text


def test_where_the_answer_begins() -> None:
    made = XtmlEncoding(tokens())
    on = made.prompt(Conversation([USER]))
    assert (on.opens, on.after, on.closed) == ("reasoning", tokens().id_of("<|close|>"), False)
    off = made.prompt(Conversation([USER], **OFF))
    assert (off.opens, off.after, off.closed) == ("content", None, True)
    for name, value, opens in [
        ("enable_thinking", False, "content"), ("reasoning_effort", "none", "content"),
        ("reasoning_effort", "high", "reasoning"), ("thinking_effort", "low", "reasoning"),
    ]:  # fmt: skip
        assert made.prompt(Conversation([USER], template_kwargs={name: value})).opens == opens
    no_turn = made.prompt(Conversation([USER], add_generation_prompt=False))
    assert no_turn.text.endswith("<|close|>message<|sep|><|end_of_msg|>")


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max"])
def test_each_effort_is_said_to_the_model(effort: str) -> None:
    for name in ("reasoning_effort", "thinking_effort"):
        assert f"`thinking_effort={effort}`" in shown(USER, template_kwargs={name: effort})
    for unsaid in ({}, {"thinking_effort": None}, {"reasoning_effort": "none", "thinking": True}, {"thinking": True}):
        assert "thinking-effort" not in shown(USER, template_kwargs=unsaid)
    assert "thinking-effort" not in shown(USER, template_kwargs={"thinking": False, "reasoning_effort": effort})


def test_an_answer_goes_on_from_its_beginning() -> None:
    made = XtmlEncoding(tokens())
    last = Message.of("assistant", "It is", reasoning="Hm.")
    goes_on = {"continue_final": True, "add_generation_prompt": False}
    text = made.prompt(Conversation([USER, last], **goes_on))
    assert text.text.endswith("<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>It is")
    assert (text.opens, text.continued, text.closed) == ("content", "It is", True)
    thought = made.prompt(Conversation([USER, Message("assistant", reasoning="Let")], **goes_on))
    assert thought.text.endswith("<|open|>think<|sep|>Let")
    assert (thought.opens, thought.continued) == ("reasoning", "Let")


def test_reasoning_is_taken_under_either_name_and_inline() -> None:
    """What clients send back: a field, or marked text at the start of the content."""
    field = Message.of("assistant", "So.", reasoning="Hm.")
    inline = Message.of("assistant", "<think>\nHm.\n</think>\n\nSo.")
    on = {"template_kwargs": {}}
    assert shown(USER, field, USER, **on) == shown(USER, inline, USER, **on)
    assert len(shown(USER, field, USER, **on)) > len(shown(USER, Message.of("assistant", "So."), USER, **on))
    blank = Message.of("assistant", "So.", reasoning=" \n")
    assert shown(USER, blank, USER, **on) == shown(USER, Message.of("assistant", "So."), USER, **on)
    assert "Hm." not in shown(USER, field, USER)  # without reasoning there is no place for it


def test_results_stand_in_the_order_of_their_calls() -> None:
    first, second = Message.of("tool", "1", tool_call_id="a"), Message.of("tool", "2", tool_call_id="b")
    assert shown(USER, CALLING, first, second) == shown(USER, CALLING, second, first)
    head = '<|open|>message role="tool" tool="{}" index="{}"<|sep|>{}<|close|>'
    assert head.format("get_weather", 1, 1) + "message<|sep|><|end_of_msg|>" + head.format("take_note", 2, 2) in shown(
        USER, CALLING, second, first
    )
    assert head.format("take_note", 2, 2) in shown(USER, CALLING, second)  # the number is the call's
    unnamed = Message.of("tool", "1"), Message.of("tool", "2")
    assert shown(USER, CALLING, *unnamed) == shown(USER, CALLING, first, second)
    assert head.format("other", 1, 1) in shown(USER, Message.of("tool", "1", name="other"))


def test_a_developer_is_the_system() -> None:
    assert shown(Message.of("developer", "Be brief."), USER) == shown(Message.of("system", "Be brief."), USER)


def test_a_changed_last_option_changes_nothing_before_it() -> None:
    """So that the cache of the history stays good."""
    plain = shown(USER, tools=[WEATHER])
    history = plain[: plain.index('<|open|>message role="assistant"')]
    for more in ({"tool_choice": "required"}, {"tool_choice": "none"}, {"answer_format": ("json_object", "")}):
        assert shown(USER, tools=[WEATHER], **more).startswith(history)


@pytest.mark.parametrize(
    ("messages", "more", "field", "said"),
    [
        ([USER], {"template_kwargs": {"mood": 1}}, "chat_template_kwargs", "'mood', which this model's encoder"),
        ([USER], {"template_kwargs": {"preserve_thinking": False}}, "chat_template_kwargs", "always shows"),
        ([USER], {"template_kwargs": {"reasoning_effort": "huge"}}, "reasoning_effort", "low, medium, high, max"),
        ([USER, Message.of("tool", "1", tool_call_id="q")], {}, "messages[1].tool_call_id", "no earlier call has"),
        ([Message("user", (ImagePart("data:"),))], {}, "messages[0].content", "holds an image"),
        (
            [Message("assistant", tool_calls=(ToolCall("a", "f", "[1]"),))],
            {},
            "messages[0].tool_calls",
            "no JSON object",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(messages: list[Message], more: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        shown(*messages, **more)
    assert isinstance(caught.value, FieldError) and caught.value.field == field


def test_placeholders_are_those_of_the_pictures() -> None:
    pictures = [Picture(1, 1, 1), Picture(161, 184, 42), Picture(4096, 16, 147)]
    parts = [TextPart("a"), *(ImagePart("data:", image=picture) for picture in pictures)]
    prompt = XtmlEncoding(tokens()).prompt(Conversation([Message("user", tuple(parts))], **OFF))
    pad = tokens().id_of("<|media_pad|>")
    assert pad is not None
    stand = placed(prompt.ids, pad, pictures)
    assert [(p.picture.tokens, prompt.ids[p.first - 1]) for p in stand] == [
        (n, tokens().id_of("<|media_content|>")) for n in (1, 42, 147)
    ]
    forged = XtmlEncoding(tokens()).prompt(Conversation([Message.of("user", "<|media_pad|>")], **OFF))
    assert pad not in forged.ids


# --- which encoder a folder gets ----------------------------------------------------------------------------------


def test_the_family_is_encoded_without_a_template(tmp_path: Path) -> None:
    assert OWN_ENCODERS["kimi_k3"] == "xtml" and "<|sep|>" in control_text("kimi_k3", "")
    folder = write_files(tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 258}')
    service = ChatService(open_source(str(folder)), family="kimi_k3")
    assert service.encoding is not None and service.encoding.name == "xtml"
    assert service.encoding.parses == ("reasoning", "tools") and service.encoding.holds_strict
    assert service.stop_ids[258] == ("config.json", "chat format xtml")
    (folder / "encoding_k3.py").write_text("raise SystemExit")  # the publisher's, which is never run
    assert ChatService(open_source(str(folder)), family="kimi_k3").encoding is not None
    other = ChatService(open_source(str(folder)), family="unknown")
    assert other.encoding is None and "encoding_k3.py), which is not run" in other.why_no_chat


def test_a_vocabulary_without_the_brackets_is_told(tmp_path: Path) -> None:
    folder = write_files(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["261"]["content"] = "<|other|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    service = ChatService(open_source(str(folder)), family="kimi_k3")
    assert service.encoding is None and "has no token <|sep|>" in service.why_no_chat


def test_a_template_of_the_same_format_is_parsed_alike(tmp_path: Path) -> None:
    source = open_source(str(write_files(tmp_path)))
    template = (
        '{% for m in messages %}<|open|>message role="{{ m.role }}"<|sep|>{{ m.content }}<|close|>message<|sep|>'
        '<|end_of_msg|>{% endfor %}<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    made, _ = choose(source, "kimi_k3", tokens(), template=template)
    assert made is not None and made.name == "xtml"
    asked = Conversation([USER])
    prompt = made.prompt(asked)
    assert prompt.opens == "content"
    assert prompt.text == shown(USER)
    grammar = made.answer_grammar(prompt, "regex", "a+")
    assert grammar.after is None and grammar.text.startswith('start: r0 <[260]> "response"')
