"""Input items of /v1/responses as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.chat.conversation import Conversation, ImagePart, Message, NamedTool, Part, TextPart, Tool, ToolCall
from dayzero.server.conversations import template_kwargs
from dayzero.server.endpoint import Call
from dayzero.server.errors import bad
from dayzero.server.messages import drop_tools
from dayzero.server.protocol import responses as api

NOT_STORED = "answers are not stored here; send the whole conversation as input items."


def prepare(raw: Any) -> list[str]:
    """Mend the JSON of a request: items whose type is left out are messages; tools that would run elsewhere are taken
    out, and their paths returned."""
    items = raw.get("input") if isinstance(raw, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "type" not in item and "role" in item:
            item["type"] = "message"
    return drop_tools(raw, lambda tool: tool["type"] != "function")


def refuse_stored(body: api.ResponsesRequest) -> None:
    """ApiError 400 for whatever would need an earlier call's answer, or a later call to fetch this one."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad(f"{name} is not taken: {NOT_STORED}", name)
    if body.background:
        raise bad(f"background is not taken: {NOT_STORED}", "background")


def conversation_of(call: Call, body: api.ResponsesRequest) -> Conversation:
    """ApiError 400 for what template_kwargs refuses."""
    messages = [Message.of("system", body.instructions)] if body.instructions else []
    messages += [Message.of("user", body.input)] if isinstance(body.input, str) else _turns(body.input)
    choice = body.tool_choice
    effort = body.reasoning.effort if body.reasoning is not None else None
    return Conversation(
        messages,
        tools=[Tool(t.name, t.description, t.parameters, bool(t.strict)) for t in body.tools or ()],
        tool_choice=NamedTool(choice.name) if isinstance(choice, api.FlatNamedTool) else choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs=template_kwargs(call, body.chat_template_kwargs, effort, None),
    )


@dataclass(slots=True)
class _Turn:
    """An assistant's turn: items of one answer that come one after the other are one message."""

    reasoning: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts or self.calls)

    def message(self) -> Message:
        thought = "\n".join(self.reasoning) or None
        return Message("assistant", tuple(self.parts), reasoning=thought, tool_calls=tuple(self.calls))


def _turns(items: Sequence[api.InputItem]) -> list[Message]:
    out: list[Message] = []
    turn = _Turn()
    for item in items:
        own = isinstance(item, api.ReasoningItem | api.FunctionCallItem) or (
            isinstance(item, api.InputMessage) and item.role == "assistant"
        )
        # Reasoning opens a turn; so does an answer's text behind an answer's text or calls.
        begins = isinstance(item, api.ReasoningItem) and (turn.parts or turn.calls)
        begins = begins or (isinstance(item, api.InputMessage) and own and (turn.parts or turn.calls))
        if turn and (not own or begins):
            out.append(turn.message())
            turn = _Turn()
        match item:
            case api.ReasoningItem():
                turn.reasoning.append(_reasoning(item))
            case api.FunctionCallItem():
                turn.calls.append(ToolCall(item.call_id, item.name, item.arguments))
            case api.FunctionOutputItem():
                out.append(Message("tool", _parts(item.output), tool_call_id=item.call_id))
            case api.InputMessage(role="assistant"):
                turn.parts += _parts(item.content)
            case api.InputMessage():
                out.append(Message(item.role, _parts(item.content)))
    return [*out, turn.message()] if turn else out


def _reasoning(item: api.ReasoningItem) -> str:
    texts = [part.text for part in item.content or ()] or [part.text for part in item.summary or ()]
    return "\n".join(texts)


def _parts(content: str | Sequence[api.InputPart]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    out: list[Part] = []
    for part in content:
        if isinstance(part, api.InputImage):
            out.append(ImagePart(part.image_url or f"file:{part.file_id}", part.detail or "auto"))
        else:
            out.append(TextPart(part.refusal if isinstance(part, api.RefusalIn) else part.text))
    return tuple(out)
