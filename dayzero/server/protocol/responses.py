"""/v1/responses: request, answer and the events of a stream. Stateless: every call brings the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dayzero.engine.check import MAX_LOGPROBS
from dayzero.server.protocol.chat import TokenLogprob
from dayzero.server.protocol.shared import (
    AtLeastOne,
    FunctionName,
    JsonObjectFormat,
    ReasoningEffort,
    SamplingFields,
    Stops,
    TextFormat,
    ToolProblemOut,
)

# --- input items --------------------------------------------------------------------------------------------------


class InputText(msgspec.Struct, kw_only=True, tag="input_text", tag_field="type"):
    text: str


class OutputTextIn(msgspec.Struct, kw_only=True, tag="output_text", tag_field="type"):
    """Text of an earlier answer, with what came beside it."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class PlainText(msgspec.Struct, kw_only=True, tag="text", tag_field="type"):
    text: str


class RefusalIn(msgspec.Struct, kw_only=True, tag="refusal", tag_field="type"):
    refusal: str


class InputImage(msgspec.Struct, kw_only=True, tag="input_image", tag_field="type"):
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


InputPart = InputText | OutputTextIn | PlainText | RefusalIn | InputImage


class InputMessage(msgspec.Struct, kw_only=True, tag="message", tag_field="type"):
    """A turn of the conversation; ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call", tag_field="type"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag="function_call_output", tag_field="type"):
    call_id: str
    output: str | list[InputText | OutputTextIn | PlainText | InputImage]
    id: str | None = None
    status: str | None = None


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text", tag_field="type"):
    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag="summary_text", tag_field="type"):
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning", tag_field="type"):
    """What an earlier answer thought: its content, else its summary."""

    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


InputItem = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FlatTool(msgspec.Struct, kw_only=True, tag="function", tag_field="type"):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: FunctionName


class FlatJsonSchema(msgspec.Struct, kw_only=True, tag="json_schema", tag_field="type"):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | JsonObjectFormat | FlatJsonSchema | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """input: a text, or items. Ids of earlier answers are refused, since nothing is stored here."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    stop: Stops | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# --- answers ------------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputReasoningText(msgspec.Struct, kw_only=True):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(msgspec.Struct, kw_only=True, tag="message", tag_field="type"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, kw_only=True, tag="reasoning", tag_field="type"):
    id: str
    content: list[OutputReasoningText]
    status: Status
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponsesError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, kw_only=True):
    """store is always false: an answer cannot be fetched again."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    object: Literal["response"] = "response"
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    previous_response_id: None = None
    reasoning: dict[str, Any] = {}
    store: bool = False
    text: dict[str, Any] = {}
    top_logprobs: int = 0
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    completed_at: int | None = None
    tool_problems: list[ToolProblemOut] | UnsetType = UNSET
