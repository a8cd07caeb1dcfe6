"""A conversation as the server hands it over: messages, tools and what the template is told. Plain data.

Nothing here is a model's; an encoding turns it into a prompt. ``check`` says what no encoding could make sense of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dayzero.chat.media import Picture
from dayzero.errors import FieldError

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """source: an http address or a ``data:`` URI. detail: as the client said it. image: the picture behind it, once it
    was read; an encoding writes its size and as many placeholders as it has tokens."""

    source: str
    detail: str = "auto"
    image: Picture | None = None


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call an earlier answer made. arguments: the JSON text as it stood in that answer."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object, {} when there are none, None when the text is no JSON object."""
        if not self.arguments.strip():
            return {}
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. reasoning: what the answer thought (``reasoning`` or ``reasoning_content`` of the request); text inside
    ``<think>`` at the start of an assistant's content is taken out by the encoding, which knows the model's markers.

    tool_call_id: of a ``tool`` message, the call it answers. name: the speaker or the tool, when the client gave one.
    tools: further functions that a system's message brings in the course of a conversation.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(cls, role: Role, text: str, **more: Any) -> Message:
        return cls(role, (TextPart(text),), **more)

    @property
    def text(self) -> str:
        """Its text parts, one a line, as servers of this field join them."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return tuple(part for part in self.parts if isinstance(part, ImagePart))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. parameters: its JSON schema, None: no arguments. strict: arguments must obey it.

    raw: the ``function`` object as the client wrote it: templates print it, so the order of its keys is part of the
    prompt. None: name, description, parameters in that order.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    raw: Mapping[str, Any] | None = None

    def function(self) -> dict[str, Any]:
        """The ``function`` object of the API."""
        if self.raw is not None:
            return dict(self.raw)
        out: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            out["description"] = self.description
        if self.parameters is not None:
            out["parameters"] = dict(self.parameters)
        return out


@dataclass(frozen=True, slots=True)
class NamedTool:
    """tool_choice: this one."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be answered.

    template_kwargs: further variables of the template or options of an encoder (enable_thinking, thinking,
    reasoning_effort, preserve_thinking …). add_generation_prompt: open an assistant's turn at the end. continue_final:
    the last message is an assistant's and is continued instead. answer_format: (kind, text) of the grammar that the
    content will be held to, for formats that tell the model so.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    answer_format: tuple[str, str] | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools the model may call: none of them when tool_choice is ``none``."""
        return () if self.tool_choice == "none" else self._all_tools

    @property
    def _all_tools(self) -> tuple[Tool, ...]:
        return (*self.tools, *(tool for message in self.messages for tool in message.tools))

    def check(self) -> None:
        """FieldError in one sentence for what no encoding could make sense of."""
        if not self.messages:
            raise FieldError("messages", "messages is empty; give at least one message.")
        for number, message in enumerate(self.messages):
            if message.role not in ROLES:
                raise FieldError(
                    f"messages[{number}].role",
                    f"messages[{number}].role is {message.role!r}; it must be one of {', '.join(ROLES)}.",
                )
            if message.tool_calls and message.role != "assistant":
                raise FieldError(
                    f"messages[{number}].tool_calls",
                    f"messages[{number}] has tool_calls, which only an assistant's message can have.",
                )
        names = [tool.name for tool in self._all_tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FieldError("tools", f"tools names {twice[0]!r} twice; give each function a name of its own.")
        self._check_choice(names)
        if self.continue_final and self.messages[-1].role != "assistant":
            raise FieldError(
                "continue_final_message",
                f"continue_final_message needs an assistant's message at the end, not one of {self.messages[-1].role}.",
            )
        if self.continue_final and self.messages[-1].tool_calls:
            raise FieldError(
                "continue_final_message", "continue_final_message cannot continue a message that has tool_calls."
            )

    def _check_choice(self, names: Sequence[str]) -> None:
        choice = self.tool_choice
        if choice == "required" and not names:
            raise FieldError("tool_choice", "tool_choice is 'required', but the request has no tools.")
        if isinstance(choice, NamedTool) and choice.name not in names:
            said = ", ".join(names) or "none"
            raise FieldError("tool_choice", f"tool_choice names the function {choice.name!r}, but tools holds {said}.")
        if not isinstance(choice, NamedTool) and choice not in ("auto", "none", "required"):
            raise FieldError(
                "tool_choice", f"tool_choice is {choice!r}; it must be auto, none, required or a named function."
            )
