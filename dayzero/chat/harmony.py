"""The harmony chat format: messages in channels, functions in a TypeScript-like form.

Written after the publisher's description of the format and its samples. Texts and ids were compared with its own
library over 1,500 random conversations with the real vocabulary; two things differ on purpose. A tool's result names
its recipient before the channel, as the description and the publisher's template have it (the library: after it). All
reasoning before the last answer is left out, as the description says (the library: that before the first answer).

chat_template_kwargs: reasoning_effort (low, medium, high; ``none`` and ``minimal`` come to low, since this model always
reasons, as does thinking false), model_identity, knowledge_cutoff, current_date (today's where it is not given),
preserve_thinking (show the reasoning of turns that ended in an answer, too, which the publisher leaves out).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dayzero.chat.call_grammar import FINAL, Lark, answer_grammar, reasoning_message
from dayzero.chat.control import ControlTokens
from dayzero.chat.conversation import Conversation, Message
from dayzero.chat.encoding import GrammarKind, GrammarText, Prompt
from dayzero.chat.families import HARMONY
from dayzero.chat.format_encoding import FormatEncoding, all_text, switches
from dayzero.chat.tokenizer import Tokenizer
from dayzero.chat.typescript import declarations
from dayzero.errors import FieldError

EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high"}
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CUTOFF = "2024-06"
KNOWN = (
    "reasoning_effort", "model_identity", "knowledge_cutoff", "current_date", "preserve_thinking", "enable_thinking",
    "thinking",
)  # fmt: skip
START, END, MESSAGE, CHANNEL, CALL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"
NEEDED = (START, END, MESSAGE, CHANNEL, CALL, "<|return|>", "<|constrain|>")

Plain = Callable[[str], str]


class HarmonyEncoding(FormatEncoding):
    """See ``encoding.ChatEncoding``. today: gives the date that the model is told."""

    def __init__(self, tokenizer: Tokenizer, *, today: Callable[[], datetime.date] = datetime.date.today) -> None:
        super().__init__(HARMONY, "dayzero's own encoder", tokenizer)
        self._control = ControlTokens(tokenizer)
        self._today = today

    def prompt(self, conversation: Conversation) -> Prompt:
        self._checked(conversation)
        breaker, _ = self._control.private_letters(all_text(conversation))

        def plain(text: str) -> str:
            return self._control.broken(text, breaker)

        messages = list(conversation.messages)
        leading = 0
        while leading < len(messages) and messages[leading].role in ("system", "developer"):
            leading += 1
        instructions = "\n\n".join(m.text for m in messages[:leading] if m.text)
        text = self._system(conversation) + _developer(conversation, instructions, plain)
        keep = bool(conversation.template_kwargs.get("preserve_thinking"))
        answered = max((i for i, m in enumerate(messages) if _is_final(m, i, conversation)), default=-1)
        for index in range(leading, len(messages)):
            final = conversation.continue_final and index == len(messages) - 1
            text += _message(messages, index, plain, keep or index > answered, final)
        return self._opened(conversation, text, breaker)

    def answer_grammar(self, prompt: Prompt, kind: GrammarKind, text: str) -> GrammarText:
        if prompt.continued and prompt.opens == "content":
            return GrammarText(kind, text)
        lark = Lark(self._tokenizer)
        return answer_grammar(kind, text, lark, f"{reasoning_message(lark, prompt)}{lark.literal(FINAL)} ", None)

    def _opened(self, conversation: Conversation, text: str, breaker: str) -> Prompt:
        last = conversation.messages[-1]
        opens, continued = False, ""
        if conversation.continue_final:
            opens = bool(last.reasoning and not last.text)
            continued = (last.reasoning or "") if opens else last.text
        elif conversation.add_generation_prompt:
            text += f"{START}assistant"
        ids = self._control.encode(text, breaker)
        closed = conversation.continue_final and not opens
        return Prompt(ids, text.replace(breaker, ""), "reasoning" if opens else "content", continued, closed=closed)

    def _system(self, conversation: Conversation) -> str:
        asked = switches(conversation, KNOWN)
        calls = "\nCalls to these tools must go to the commentary channel: 'functions'." if conversation.offered else ""
        return (
            f"{START}system{MESSAGE}{asked.get('model_identity') or IDENTITY}\n"
            f"Knowledge cutoff: {asked.get('knowledge_cutoff') or CUTOFF}\n"
            f"Current date: {asked.get('current_date') or self._today().isoformat()}\n\n"
            f"Reasoning: {_effort(asked)}\n\n"
            "# Valid channels: analysis, commentary, final. Channel must be included for every message."
            f"{calls}{END}"
        )


def _effort(asked: Mapping[str, Any]) -> str:
    default = "none" if asked.get("thinking", asked.get("enable_thinking")) is False else "medium"
    said = asked.get("reasoning_effort") or default
    if said not in EFFORTS:
        raise FieldError("reasoning_effort", f"reasoning_effort is {said!r}; this model knows low, medium and high.")
    return EFFORTS[said]


def _is_final(message: Message, index: int, conversation: Conversation) -> bool:
    """Whether a turn ended in an answer: reasoning before it is not shown again."""
    continued = conversation.continue_final and index == len(conversation.messages) - 1
    return message.role == "assistant" and not message.tool_calls and bool(message.text) and not continued


def _developer(conversation: Conversation, instructions: str, plain: Plain) -> str:
    parts = [f"# Instructions\n\n{plain(instructions)}"] if instructions else []
    if conversation.offered:
        parts.append(f"# Tools\n\n## functions\n\n{plain(declarations(conversation.offered))}")
    return f"{START}developer{MESSAGE}" + "\n\n".join(parts) + END if parts else ""


def _message(messages: Sequence[Message], index: int, plain: Plain, shows: bool, final: bool) -> str:
    """One message after the leading ones. shows: with its reasoning. final: the answer goes on from here."""
    message = messages[index]
    text = plain(message.text)
    if message.role == "user":
        return f"{START}user{MESSAGE}{text}{END}"
    if message.role in ("system", "developer"):
        return f"{START}developer{MESSAGE}# Instructions\n\n{text}{END}"
    if message.role == "tool":
        return f"{START}functions.{_tool_name(messages, index)} to=assistant{CHANNEL}commentary{MESSAGE}{text}{END}"
    out = ""
    if message.reasoning and shows:
        out = f"{START}assistant{CHANNEL}analysis{MESSAGE}{plain(message.reasoning)}"
        if final and not text:
            return out
        out += END
    if text or final:
        channel = "commentary" if message.tool_calls else "final"
        out += f"{START}assistant{CHANNEL}{channel}{MESSAGE}{text}" + ("" if final else END)
    for call in message.tool_calls:
        header = f"{START}assistant{CHANNEL}commentary to=functions.{plain(call.name)} <|constrain|>json"
        out += f"{header}{MESSAGE}{plain(call.arguments)}{CALL}"
    return out


def _tool_name(messages: Sequence[Message], index: int) -> str:
    """The function whose result a message is: that of the call it names, else the name it carries."""
    message = messages[index]
    calls = [call for earlier in messages[:index] for call in earlier.tool_calls]
    for call in reversed(calls):
        if call.id == message.tool_call_id:
            return call.name
    if message.name:
        return message.name
    raise FieldError(
        f"messages[{index}].tool_call_id",
        f"messages[{index}] is a tool's result, but no earlier call has the id {message.tool_call_id!r}; "
        "give the tool_call_id of the call, or the function's name.",
    )
