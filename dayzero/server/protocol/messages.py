"""/v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dayzero.server.protocol.shared import INT31, Count, FunctionName, ReasoningEffort, Share, StopText, ToolProblemOut

# --- request ------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, kw_only=True, tag="text", tag_field="type"):
    text: str


class ImageBlock(msgspec.Struct, kw_only=True, tag="image", tag_field="type"):
    source: dict[str, Any]


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, kw_only=True, tag="redacted_thinking", tag_field="type"):
    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use", tag_field="type"):
    id: str
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


ContentBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class MessageIn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolIn(msgspec.Struct, kw_only=True):
    """A tool of the client's own."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoiceAuto(msgspec.Struct, kw_only=True, tag="auto", tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(msgspec.Struct, kw_only=True, tag="any", tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(msgspec.Struct, kw_only=True, tag="tool", tag_field="type"):
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(msgspec.Struct, kw_only=True, tag="none", tag_field="type"):
    pass


ToolChoice = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """budget_tokens cannot be held; it is named among what was ignored."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    messages: Annotated[list[MessageIn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=INT31)]
    stop_sequences: list[StopText] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT31)] | None = None
    min_p: Share | None = None


# --- answers ------------------------------------------------------------------------------------------------------


class CountAnswer(msgspec.Struct, kw_only=True):
    input_tokens: int


class TextOut(msgspec.Struct, kw_only=True, tag="text", tag_field="type"):
    text: str


class ThinkingOut(msgspec.Struct, kw_only=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseOut(msgspec.Struct, kw_only=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessagesUsage(msgspec.Struct, kw_only=True):
    """input_tokens leaves out what came from the cache, as this API counts."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageOut(msgspec.Struct, kw_only=True):
    id: str
    model: str
    content: list[BlockOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    tool_problems: list[ToolProblemOut] | UnsetType = UNSET
