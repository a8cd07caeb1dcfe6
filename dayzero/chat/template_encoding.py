"""A conversation through the checkpoint's own Jinja template.

A template makes one text of everything, so what a user wrote and what the template wrote look alike in it. Control
tokens spelled in system, developer, user or tool text are therefore kept apart (see ``control``). Text of assistant
messages, tool definitions and arguments is the caller's own and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dayzero.chat.control import ControlTokens
from dayzero.chat.conversation import Conversation, ImagePart, Message, Part, Role, ToolCall
from dayzero.chat.encoding import Prompt
from dayzero.chat.families import Format
from dayzero.chat.format_encoding import FormatEncoding, all_text
from dayzero.chat.template import ChatTemplate
from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import FieldError

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
# Names of one switch; a request may use either, a template reads its own.
SAME_SWITCH = ("enable_thinking", "thinking")
# How templates ask for an image among the parts of a message.
IMAGES = re.compile(r"""['"](?:image|image_url)['"]""")
NATIVE_ID = re.compile(r"functions\.\S+:\d+")


class Arguments(dict[str, Any]):
    """A call's arguments for a template: an object where it asks for one, and the JSON text where it writes them."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> Any:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return other + self._text if isinstance(other, str) else NotImplemented


class TemplateEncoding(FormatEncoding):
    """See ``encoding.ChatEncoding``. specials: bos_token and the like, as templates name them."""

    def __init__(
        self, template: str, form: Format, tokenizer: Tokenizer, *, source: str, specials: Mapping[str, str]
    ) -> None:
        super().__init__(form, source, tokenizer)
        self._template = ChatTemplate(template)
        self._specials = dict(specials)
        self._none_content = re.search(r"content['\"\]]*\s+is\s+(?:not\s+)?none", template) is not None
        self._control = ControlTokens(tokenizer)
        self._images = IMAGES.search(template) is not None

    @property
    def takes_images(self) -> bool:
        return self._images

    def prompt(self, conversation: Conversation) -> Prompt:
        """A template writes one placeholder for an image; ``media.spread`` makes as many of it as there are tokens."""
        self._checked(conversation)
        breaker, end = self._control.private_letters(all_text(conversation))
        messages = [self._split(message) for message in conversation.messages]
        native = _native_ids(messages) if self.format.native_ids else {}
        shown = [self._message(m, breaker, native) for m in messages]
        if conversation.continue_final:
            _mark_end(shown[-1], end)
        text = self._template.render(shown, self._variables(conversation))
        if conversation.continue_final:
            text = self._cut(text, end)
        ids = self._control.encode(text, breaker)
        text = text.replace(breaker, "")
        return self._opened(conversation, messages[-1], ids, text)

    def _opened(self, conversation: Conversation, last: Message, ids: list[int], text: str) -> Prompt:
        """What the answer begins in, told from the very end of the prompt, never from earlier turns."""
        opens: Literal["content", "reasoning"] = "content"
        continued = last.text if conversation.continue_final else ""
        think = self.format.think
        if think is None:
            return Prompt(ids, text, continued=continued)
        if conversation.continue_final:
            opens = "reasoning" if last.reasoning and not last.text else "content"
            continued = last.reasoning or "" if opens == "reasoning" else continued
            closed = opens == "content"
        else:
            tail = text.rstrip()
            opens = "reasoning" if tail.endswith(think[0]) else "content"
            closed = tail.endswith(think[1])
        after = self._tokenizer.id_of(think[1]) if opens == "reasoning" else None
        return Prompt(ids, text, opens, continued, after, closed)

    # --- what the template is given ----------------------------------------------------------------------------------

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        asked = dict(conversation.template_kwargs)
        for name in RESERVED:
            if name in asked:
                raise FieldError(
                    "chat_template_kwargs",
                    f"chat_template_kwargs cannot set {name!r}; it is a field of the request itself.",
                )
        given = [name for name in SAME_SWITCH if name in asked]
        if len(given) == 1:
            for name in SAME_SWITCH:
                asked.setdefault(name, asked[given[0]])
        if "preserve_thinking" in asked:
            asked.setdefault("clear_thinking", not asked["preserve_thinking"])  # the same switch, the other way round
        tools = [{"type": "function", "function": tool.function()} for tool in conversation.offered]
        return {
            **self._specials,
            **asked,
            "tools": tools or None,
            "add_generation_prompt": conversation.add_generation_prompt and not conversation.continue_final,
        }

    def _message(self, message: Message, breaker: str, native: Mapping[str, str]) -> dict[str, Any]:
        role, text = message.role, message.text
        if role == "developer" and "developer" not in self._template.text:
            role = "system"
        if message.role != "assistant":
            text = self._control.broken(text, breaker)
        out: dict[str, Any] = {"role": role, "content": text}
        if message.images:
            out["content"] = [self._part(part, message.role, breaker) for part in message.parts]
        if message.tool_calls:
            out["tool_calls"] = [_call(call, native) for call in message.tool_calls]
            if not text and self._none_content:
                out["content"] = None
        if message.reasoning is not None:
            out["reasoning_content"] = out["reasoning"] = message.reasoning
            if re.search(r"\bthinking\b['\"]?\s*(?:in|\])|message\.thinking", self._template.text):
                out["thinking"] = message.reasoning
        if message.tool_call_id is not None:
            out["tool_call_id"] = native.get(message.tool_call_id, message.tool_call_id)
        if message.name is not None:
            out["name"] = message.name
        return out

    def _part(self, part: Part, role: Role, breaker: str) -> dict[str, str]:
        """A part as templates with a place for images take it; the image itself is not the template's business."""
        if isinstance(part, ImagePart):
            return {"type": "image", "image": ""}
        return {"type": "text", "text": part.text if role == "assistant" else self._control.broken(part.text, breaker)}

    def _cut(self, text: str, end: str) -> str:
        """The prompt up to where the last message ends."""
        if text.count(end) != 1:
            raise FieldError(
                "continue_final_message",
                "continue_final_message: the chat template does not show the last message as it is, so it cannot be "
                "continued; send the text to /v1/completions instead.",
            )
        return text[: text.index(end)]


def _mark_end(message: dict[str, Any], end: str) -> None:
    if message["content"] or not message.get("reasoning_content"):
        message["content"] = (message["content"] or "") + end
        return
    for name in ("reasoning_content", "reasoning", "thinking"):
        if name in message:
            message[name] += end


def _call(call: ToolCall, native: Mapping[str, str]) -> dict[str, Any]:
    values = call.parsed()
    # A call that the model spoilt is shown as it was.
    arguments: Any = call.arguments if values is None else Arguments(values, call.arguments.strip() or "{}")
    return {
        "id": native.get(call.id, call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _native_ids(messages: Sequence[Message]) -> dict[str, str]:
    """The client's id of each earlier call -> the id the model itself would have given it, numbered through the
    conversation. Ids of that form already are kept."""
    out: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.tool_calls:
            if not NATIVE_ID.fullmatch(call.id):
                out[call.id] = f"functions.{call.name}:{number}"
            number += 1
    return out
