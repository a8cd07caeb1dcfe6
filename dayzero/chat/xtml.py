"""The chat format XTML: tags whose brackets are control tokens, and nothing else is. Its publisher ships a Python
encoder and no template.

Written after the publisher's technical report and public descriptions of that encoder. Its brackets are tokens; every
other text (tag names, attributes, what a user wrote) is encoded as letters, each piece for itself, as the publisher
does it: joined, they would come to other ids. Two things differ on purpose. A tool's result carries the number of the
call it answers, as the report says (the encoder counts results, which is the same where none is missing); and the
effort ``medium``, which the prompt itself names to the model, is taken though the encoder of the first release was
said to refuse it.

chat_template_kwargs: thinking or enable_thinking (on by default; a reasoning_effort of ``none`` and a named function
switch it off, the latter because the model knows that choice only without reasoning), reasoning_effort or
thinking_effort (low, medium, high, max; only one that is given is said to the model).
The reasoning of earlier turns is always shown, so preserve_thinking cannot be false.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dayzero.chat.channel_grammars import CLOSE, END_OF_MSG, OPEN, SEP
from dayzero.chat.conversation import Conversation, Message, NamedTool, Part, TextPart, Tool, ToolCall
from dayzero.chat.encoding import Prompt
from dayzero.chat.families import THINK, XTML
from dayzero.chat.format_encoding import FormatEncoding, switches
from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import FieldError

NEEDED = (OPEN, CLOSE, SEP, END_OF_MSG)
MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
SWITCHES = ("thinking", "enable_thinking", "reasoning_effort", "thinking_effort", "preserve_thinking")
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "max": "max"}
TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", list: "array"}

# The publisher's own words: the model was trained on these texts.
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
REQUIRED_TEXT = "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
NONE_TEXT = "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
NAMED_TEXT = "The system is invoked with `tool_choice=specified`.\nYou MUST call the tool `{}` in the next message."
RAW_JSON = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
OBJECT_TEXT = f"The system is invoked with `response_format=json_object`.\n{RAW_JSON}"
SCHEMA_TEXT = (
    f"The system is invoked with `response_format=json_schema`.\n{RAW_JSON}\n"
    "The JSON data must match the following schema:\n```json\n{}\n```"
)


class XtmlEncoding(FormatEncoding):
    """See ``encoding.ChatEncoding``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(XTML, "dayzero's own encoder", tokenizer)

    @property
    def takes_images(self) -> bool:
        return all(self._tokenizer.id_of(text) is not None for text in MEDIA)

    def prompt(self, conversation: Conversation) -> Prompt:
        conversation.check()
        thinking, effort = _thinking(conversation)
        out = _Writer(self._tokenizer)
        if conversation.tools:
            out.system("tool-declare", TOOLS_TEXT.format(_declared(conversation.tools)))
        if thinking and effort is not None:
            out.system("thinking-effort", EFFORT_TEXT.format(effort))
        messages = list(conversation.messages)
        last = self._split(messages.pop(), THINK) if conversation.continue_final else None
        for message, number, attributes in _turns(messages):
            out.turn(self._split(message, THINK), number, attributes, thinking)
        _options(out, conversation)
        if last is not None:
            return _continued(out, last, len(messages), thinking)
        opens = thinking and conversation.add_generation_prompt
        if conversation.add_generation_prompt:
            out.open("message", role="assistant")
            out.open("think" if thinking else "response")
        return out.made(opens, "")


def _continued(out: _Writer, last: Message, number: int, thinking: bool) -> Prompt:
    """The prompt whose end is the answer's beginning."""
    out.open("message", role="assistant")
    opens = bool(thinking and last.reasoning and not last.text)
    if thinking:
        out.open("think")
        out.say(last.reasoning or "")
        if opens:
            return out.made(True, last.reasoning or "")
        out.close("think")
    out.open("response")
    out.content(last.parts, number)
    return out.made(False, last.text)


class _Writer:
    """A prompt as it grows. Errors of its methods: FieldError for what the format or the vocabulary cannot express."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._texts: list[str] = []

    def made(self, opens: bool, continued: str) -> Prompt:
        after = self._tokenizer.id_of(CLOSE) if opens else None
        text = "".join(self._texts)
        return Prompt(self._ids, text, "reasoning" if opens else "content", continued, after, closed=not opens)

    def token(self, text: str, times: int = 1) -> None:
        number = self._tokenizer.id_of(text)
        assert number is not None, f"{text} was not looked for"
        self._ids += [number] * times
        self._texts += [text] * times

    def say(self, text: str) -> None:
        """Letters, whatever they spell."""
        self._tokenizer.check_length(text)
        self._ids += self._tokenizer.encode(text) if text else []
        self._texts.append(text)

    def open(self, tag: str, **attributes: object) -> None:
        self.token(OPEN)
        self.say(tag)
        for name, value in attributes.items():
            for text in (f" {name}", '="', escaped(str(value)), '"'):
                self.say(text)
        self.token(SEP)

    def close(self, tag: str) -> None:
        self.token(CLOSE)
        self.say(tag)
        self.token(SEP)

    def end(self) -> None:
        self.close("message")
        self.token(END_OF_MSG)

    def system(self, kind: str, text: str) -> None:
        """A message of the format's own."""
        self.open("message", role="system", type=kind)
        self.say(text)
        self.end()

    def content(self, parts: Iterable[Part], number: int) -> None:
        """Texts and images in their order. number: of the message, for errors."""
        for part in parts:
            if isinstance(part, TextPart):
                self.say(part.text)
                continue
            lacks = [text for text in MEDIA if self._tokenizer.id_of(text) is None]
            if part.image is None or lacks:
                raise FieldError(
                    f"messages[{number}].content", f"messages[{number}] holds an image, which this model does not take."
                )
            begin, between, pad, end = MEDIA
            self.token(begin)
            self.say(f"image {part.image.width}x{part.image.height}")
            self.token(between)
            self.token(pad, part.image.tokens)
            self.token(end)

    def turn(self, message: Message, number: int, attributes: dict[str, object], thinking: bool) -> None:
        if message.tools:
            self.system("tool-declare", MORE_TOOLS_TEXT.format(_declared(message.tools)))
            if not message.parts:
                return
        role = "system" if message.role == "developer" else message.role
        self.open("message", role=role, **attributes)
        if role == "assistant":
            self._assistant(message, number, thinking)
        else:
            self.content(message.parts, number)
        self.end()

    def _assistant(self, message: Message, number: int, thinking: bool) -> None:
        if thinking:
            self.open("think")
            self.say((message.reasoning or "") if (message.reasoning or "").strip() else "")
            self.close("think")
        self.open("response")
        self.content(message.parts, number)
        self.close("response")
        if not message.tool_calls:
            return
        self.open("tools")
        for index, call in enumerate(message.tool_calls, 1):
            self.open("call", tool=call.name, index=index)
            self._arguments(call, f"messages[{number}].tool_calls")
            self.close("call")
        self.close("tools")

    def _arguments(self, call: ToolCall, field: str) -> None:
        values = call.parsed()
        if values is None:
            if _is_json(call.arguments):
                raise FieldError(field, f"the arguments of the earlier call {call.id!r} are no JSON object.")
            self.open("json", type="object")  # a call that the model spoilt is shown as it was
            self.say(call.arguments)
            self.close("json")
            return
        for key, value in values.items():
            self.open("argument", key=key, type=TYPES.get(type(value), "object"))
            self.say(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            self.close("argument")


def escaped(text: str) -> str:
    """A text inside the quotes of an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _declared(tools: Sequence[Tool]) -> str:
    return _compact([{"type": "function", "function": tool.function()} for tool in tools])


def _thinking(conversation: Conversation) -> tuple[bool, str | None]:
    """(whether the model is to reason, how much). FieldError for a switch that the format has no place for."""
    asked = switches(conversation, SWITCHES)
    if asked.get("preserve_thinking") is False:
        raise FieldError(
            "chat_template_kwargs",
            "preserve_thinking cannot be false: this model's format always shows the reasoning of earlier turns.",
        )
    # Without one there is no message: the published format has it only where an effort is given. Some ports put `max`
    # there; then a plain request would come to some hundred more prompt tokens than the publisher counts.
    said = asked.get("thinking_effort", asked.get("reasoning_effort"))
    if said not in (None, "none", *EFFORTS):
        raise FieldError("reasoning_effort", f"reasoning_effort is {said!r}; this model knows {', '.join(EFFORTS)}.")
    thinking = bool(asked.get("thinking", asked.get("enable_thinking", said != "none")))
    return thinking and not isinstance(conversation.tool_choice, NamedTool), EFFORTS.get(said or "none")


def _options(out: _Writer, conversation: Conversation) -> None:
    """What holds for the next answer alone stands behind the turns, so that it changes nothing before it."""
    choice = conversation.tool_choice
    if isinstance(choice, NamedTool):
        out.system("tool-choice", NAMED_TEXT.format(choice.name))
    elif choice != "auto":
        out.system("tool-choice", REQUIRED_TEXT if choice == "required" else NONE_TEXT)
    kind, text = conversation.answer_format or ("", "")
    if kind == "json_object":
        out.system("response-format", OBJECT_TEXT)
    elif kind == "json_schema":
        out.system("response-format", SCHEMA_TEXT.replace("{}", _compact(json.loads(text))))


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message, int, dict[str, object]]]:
    """(message, its number, attributes behind its role); tools' results in the order of the calls they answer."""
    calls: Sequence[ToolCall] = ()
    at = 0
    while at < len(messages):
        message = messages[at]
        if message.role != "tool":
            calls = message.tool_calls if message.role == "assistant" else calls
            yield message, at, {"name": message.name} if message.name else {}
            at += 1
            continue
        end = at
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        yield from _results(messages, range(at, end), calls)
        at = end


def _results(
    messages: Sequence[Message], numbers: range, calls: Sequence[ToolCall]
) -> Iterator[tuple[Message, int, dict[str, object]]]:
    """Results that stand together. Where one names no call, all stay in their order and answer the calls in theirs."""
    places = {call.id: place for place, call in reversed(list(enumerate(calls)))}
    named = {n: places[messages[n].tool_call_id or ""] for n in numbers if (messages[n].tool_call_id or "") in places}
    if len(named) < len(numbers):
        named = {n: place for place, n in enumerate(numbers)}
        names = [messages[n].name or (calls[place].name if place < len(calls) else None) for n, place in named.items()]
    else:
        named = dict(sorted(named.items(), key=lambda item: item[1]))
        names = [calls[place].name for place in named.values()]
    for (number, place), name in zip(named.items(), names, strict=True):
        message = messages[number]
        if not name:
            raise FieldError(
                f"messages[{number}].tool_call_id",
                f"messages[{number}] is a tool's result, but no earlier call has the id {message.tool_call_id!r}; "
                "give the tool_call_id of the call, or the function's name.",
            )
        yield message, number, {"tool": name, "index": place + 1}
