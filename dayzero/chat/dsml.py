"""The chat format whose tool calls are DSML tags. Its publisher ships a Python encoder and no template.

Written after the publisher's published encoder (V3.2): what that writes is kept to the letter, where it fails a
sentence says so. The texts of 3,000 random conversations were compared with a copy of it, without a difference.

Reasoning: ``thinking`` or ``enable_thinking`` of chat_template_kwargs switches it on, as does a reasoning_effort; off
is the publisher's default. The format shows no reasoning of turns before the last user message. A developer's message
is taken for the system's: what the format itself calls a developer is a user of another kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from dayzero.chat.control import ControlTokens
from dayzero.chat.conversation import Conversation, Message, TextPart, ToolCall
from dayzero.chat.encoding import Prompt
from dayzero.chat.families import DSML, DSML_CALLS
from dayzero.chat.format_encoding import FormatEncoding, all_text, switches
from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import FieldError, UsageError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
NEEDED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)  # ｜DSML｜ may be spelled
Plain = Callable[[str], str]
SWITCHES = ("thinking", "enable_thinking", "reasoning_effort", "preserve_thinking")

# The publisher's own words: the model was trained on this text.
TOOLS_TEXT = """

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{d}function_calls>" block like the following as part of your reply to the user:
<{d}function_calls>
<{d}invoke name="$FUNCTION_NAME">
<{d}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{d}parameter>
...
</{d}invoke>
<{d}invoke name="$FUNCTION_NAME2">
...
</{d}invoke>
</{d}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<{d}function_calls>
...
</{d}function_calls>
<function_results>
...
</function_results>
{think}...thinking about results{end_think}
Here are the functions available in JSONSchema format:
<functions>
{tools}
</functions>
"""


class DsmlEncoding(FormatEncoding):
    """See ``encoding.ChatEncoding``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(DSML_CALLS, "dayzero's own encoder", tokenizer)
        self._control = ControlTokens(tokenizer)

    def prompt(self, conversation: Conversation) -> Prompt:
        self._checked(conversation)
        breaker, _ = self._control.private_letters(all_text(conversation))

        def plain(text: str) -> str:
            return self._control.broken(text, breaker)

        messages = [_with_plain_text(self._split(m), plain) for m in conversation.messages]
        if conversation.offered and messages[0].role != "system":
            messages.insert(0, Message("system"))
        thinking = _thinking(conversation)
        last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        pieces = [BOS]
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            if message.role == "system":
                pieces.append(message.text + (_tools(conversation, plain) if index == 0 else ""))
            elif message.role == "assistant":
                shows = thinking and index > last_user
                pieces.append(_assistant(message, plain, shows, last and conversation.continue_final))
            else:
                pieces.append(f"{USER}{message.text}" if message.role == "user" else _result(messages, index))
                opening = (ASSISTANT if message.role == "user" else "\n\n") + (
                    THINK if thinking and index >= last_user else END_THINK
                )
                between = message.role == "tool" and not last and messages[index + 1].role == "tool"
                if not between and (not last or conversation.add_generation_prompt):
                    pieces.append(opening)
        return self._opened(conversation, "".join(pieces), breaker, messages[-1], thinking)

    def _opened(self, conversation: Conversation, text: str, breaker: str, last: Message, thinking: bool) -> Prompt:
        opens, continued = thinking and last.role in ("user", "tool"), ""
        if conversation.continue_final:
            opens = bool(thinking and last.reasoning and not last.text)
            continued = (last.reasoning or "") if opens else last.text
        ids = self._control.encode(text, breaker)
        after = self._tokenizer.id_of(END_THINK) if opens else None
        text = text.replace(breaker, "")
        return Prompt(ids, text, "reasoning" if opens else "content", continued, after, closed=not opens)


def _with_plain_text(message: Message, plain: Plain) -> Message:
    """A message whose own text spells no control token, in a role that the format has."""
    return replace(
        message,
        role="system" if message.role == "developer" else message.role,
        parts=(TextPart(plain(message.text)),),
        reasoning=None if message.reasoning is None else plain(message.reasoning),
    )


def _thinking(conversation: Conversation) -> bool:
    """Whether the model is to reason. UsageError for a switch that the format has no place for."""
    asked = switches(conversation, SWITCHES)
    if asked.get("preserve_thinking"):
        raise FieldError(
            "chat_template_kwargs",
            "preserve_thinking cannot be had: this model's format shows no reasoning of earlier turns.",
        )
    wanted = asked.get("reasoning_effort") not in (None, "none", "minimal")
    return bool(asked.get("thinking", asked.get("enable_thinking", wanted)))


def _tools(conversation: Conversation, plain: Plain) -> str:
    if not conversation.offered:
        return ""
    shown = "\n".join(json.dumps(tool.function(), ensure_ascii=False) for tool in conversation.offered)
    return TOOLS_TEXT.format(d=DSML, think=THINK, end_think=END_THINK, tools=plain(shown))


def _assistant(message: Message, plain: Plain, shows: bool, final: bool) -> str:
    """shows: whether the turn has a place for reasoning. final: the answer goes on from here."""
    text = message.reasoning or "" if shows else ""
    if shows and not (final and not message.text):
        text += END_THINK
    text += message.text
    if message.tool_calls:
        calls = "\n".join(_call(call, plain) for call in message.tool_calls)
        text += f"\n\n<{DSML}function_calls>\n{calls}\n</{DSML}function_calls>"
    return text if final else text + EOS


def _call(call: ToolCall, plain: Plain) -> str:
    values = call.parsed()
    if values is None:
        raise UsageError(
            f"the arguments of the earlier call {call.id!r} are no JSON object, which this model's format cannot show."
        )
    lines = []
    for key, value in values.items():
        is_text = "true" if isinstance(value, str) else "false"
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<{DSML}parameter name="{plain(key)}" string="{is_text}">{plain(shown)}</{DSML}parameter>')
    inner = "\n".join(lines)
    return f'<{DSML}invoke name="{plain(call.name)}">\n{inner}\n</{DSML}invoke>'


def _result(messages: Sequence[Message], index: int) -> str:
    """The tool's result at ``index``: all results of a turn stand in one block, in the order of their calls."""
    first = index
    while first and messages[first - 1].role == "tool":
        first -= 1
    if first != index:
        return ""  # the first result wrote the block
    results = [messages[index]]
    for message in messages[index + 1 :]:
        if message.role != "tool":
            break
        results.append(message)
    calls = messages[first - 1].tool_calls if first else ()
    if len(results) != len(calls):
        raise UsageError(
            f"messages holds {len(results)} tool results for {len(calls)} tool calls; give one result for each call."
        )
    by_id = {m.tool_call_id: m for m in results}
    if all(call.id in by_id for call in calls):
        results = [by_id[call.id] for call in calls]
    return "\n\n<function_results>" + "".join(f"\n<result>{m.text}</result>" for m in results) + "\n</function_results>"
