"""Messages of each API as one ``Conversation``, and the options that decide how it is rendered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dayzero.chat.conversation import Conversation, ImagePart, Message, NamedTool, Part, TextPart, Tool, ToolCall
from dayzero.server.endpoint import Call
from dayzero.server.errors import bad
from dayzero.server.protocol import chat as api
from dayzero.server.protocol.shared import FunctionTool, Thinking, ToolCallIn
from dayzero.server.protocol.shared import NamedTool as NamedToolIn

PRINTED = ("tools[].function.", "messages[].tools[].function.")  # what a template prints of a request as it came
# What a client cannot set through chat_template_kwargs: fields of the request say it.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def from_chat(call: Call, body: Any) -> Conversation:
    """Of /v1/chat/completions and /tokenize, whose bodies share these fields."""
    raw_messages = (call.raw or {}).get("messages") or [{}] * len(body.messages)
    messages = [_message(item, raw) for item, raw in zip(body.messages, raw_messages)]
    tools = _tools(body.tools, (call.raw or {}).get("tools"))
    choice = getattr(body, "tool_choice", None)
    parallel = getattr(body, "parallel_tool_calls", None)
    thinking, effort = getattr(body, "thinking", None), getattr(body, "reasoning_effort", None)
    # The template prints a function as the client wrote it, so its further keys are read after all.
    call.ignored[:] = [path for path in call.ignored if not path.startswith(PRINTED)]
    return Conversation(
        messages,
        tools=tools,
        tool_choice=NamedTool(choice.function.name) if isinstance(choice, NamedToolIn) else choice or "auto",
        parallel_tool_calls=parallel is not False,
        template_kwargs=template_kwargs(call, body.chat_template_kwargs, effort, thinking),
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final=bool(body.continue_final_message),
    )


def _message(item: api.ChatMessage, raw: Any) -> Message:
    """raw: the message as it came."""
    parts = _parts(item.content)
    match item:
        case api.SystemMessage():
            return Message("system", parts, name=item.name, tools=_tools(item.tools, raw.get("tools")))
        case api.DeveloperMessage():
            return Message("developer", parts, name=item.name, tools=_tools(item.tools, raw.get("tools")))
        case api.UserMessage():
            return Message("user", parts, name=item.name)
        case api.AssistantMessage():
            reasoning = item.reasoning or item.reasoning_content
            calls = tuple(_tool_call(call) for call in item.tool_calls or ())
            return Message("assistant", parts, reasoning=reasoning, tool_calls=calls, name=item.name)
        case api.ToolMessage():
            return Message("tool", parts, tool_call_id=item.tool_call_id, name=item.name)


def _parts(content: str | Sequence[api.TextPart | api.RefusalPart | api.ImagePart] | None) -> tuple[Part, ...]:
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    out: list[Part] = []
    for part in content:
        if isinstance(part, api.ImagePart):
            image = part.image_url
            out.append(ImagePart(image) if isinstance(image, str) else ImagePart(image.url, image.detail or "auto"))
        else:
            out.append(TextPart(part.refusal if isinstance(part, api.RefusalPart) else part.text))
    return tuple(out)


def _tool_call(call: ToolCallIn) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(call.id or "", call.function.name, text)


def _tools(tools: Sequence[FunctionTool] | None, raw: Any) -> tuple[Tool, ...]:
    return tuple(function_tool(tool, its.get("function")) for tool, its in zip(tools or (), raw or ()))


def function_tool(tool: FunctionTool, raw: Any = None) -> Tool:
    """raw: the function object as it came."""
    function = tool.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict), raw)


def template_kwargs(
    call: Call, given: dict[str, Any] | None, effort: str | None, thinking: Thinking | None
) -> dict[str, Any]:
    """What the template is told. What the client sets for the template by name goes before what follows from
    reasoning_effort and thinking."""
    reserved = sorted(RESERVED & set(given or ()))
    if reserved:
        raise bad(f"chat_template_kwargs cannot set {reserved[0]}.", "chat_template_kwargs")
    out: dict[str, Any] = {}
    on: bool | None = None
    if effort is not None:
        out["reasoning_effort"] = effort
        on = False if effort == "none" else None
    if thinking is not None:
        on = thinking.type != "disabled" if thinking.type != "auto" else on
        if thinking.effort is not None:
            out["reasoning_effort"] = thinking.effort
        if thinking.keep is not None:
            out["preserve_thinking"] = thinking.keep == "all"
        if thinking.budget_tokens is not None:
            call.ignore("thinking.budget_tokens")
    if on is not None:
        out |= {"enable_thinking": on, "thinking": on}
    return out | (given or {})
