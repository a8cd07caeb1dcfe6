"""/v1/chat/completions: request and answer, whole and streamed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dayzero.engine.check import MAX_LOGPROBS, MAX_N
from dayzero.server.protocol.shared import (
    AtLeastOne,
    FunctionTool,
    NamedTool,
    PromptLogprob,
    ReasoningEffort,
    ResponseFormat,
    SamplingFields,
    Stops,
    StreamOptions,
    Thinking,
    ToolCallIn,
    ToolProblemOut,
    Usage,
)

# --- messages -----------------------------------------------------------------------------------------------------


class TextPart(msgspec.Struct, kw_only=True, tag="text", tag_field="type"):
    text: str


class RefusalPart(msgspec.Struct, kw_only=True, tag="refusal", tag_field="type"):
    refusal: str


class ImageUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(msgspec.Struct, kw_only=True, tag="image_url", tag_field="type"):
    """An image by http or data: URI."""

    image_url: ImageUrl | str


TextContent = str | list[TextPart]


class SystemMessage(msgspec.Struct, kw_only=True, tag="system", tag_field="role"):
    content: TextContent | None = None
    name: str | None = None
    tools: list[FunctionTool] | None = None  # further ones, from here on


class DeveloperMessage(msgspec.Struct, kw_only=True, tag="developer", tag_field="role"):
    content: TextContent | None = None
    name: str | None = None
    tools: list[FunctionTool] | None = None  # further ones, from here on


class UserMessage(msgspec.Struct, kw_only=True, tag="user", tag_field="role"):
    content: str | list[TextPart | ImagePart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, kw_only=True, tag="assistant", tag_field="role"):
    """reasoning and reasoning_content are two names of one thing."""

    content: str | list[TextPart | RefusalPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    name: str | None = None


class ToolMessage(msgspec.Struct, kw_only=True, tag="tool", tag_field="role"):
    content: str | list[TextPart | ImagePart] | None = None
    tool_call_id: str | None = None
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class ChatRequest(SamplingFields, kw_only=True):
    """Of max_tokens and max_completion_tokens, which mean the same, the smaller counts."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None


# --- answers ------------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each generated token, reasoning and markers included."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionOut(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallOut(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionOut
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    """reasoning and reasoning_content hold the same text, for clients that know either name."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET
    tool_problems: list[ToolProblemOut] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    function: FunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    tool_problems: list[ToolProblemOut] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
