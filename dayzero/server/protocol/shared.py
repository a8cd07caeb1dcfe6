"""Fields that several endpoints share. Every optional field may be null, which means it was not given.

Ranges stand here as msgspec.Meta, so that a value outside is 400 with its field named, and /openapi.json shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dayzero.engine.check import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS

INT64 = (-(2**63), 2**63 - 1)
INT31 = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=INT31)]
AtLeastOne = Annotated[int, Meta(ge=1, le=INT31)]
TokenId = Annotated[int, Meta(ge=0, le=INT31)]
Seed = Annotated[int, Meta(ge=INT64[0], le=INT64[1])]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
ReasoningEffort = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_-]+$")]
LogitBiasKey = Annotated[str, Meta(max_length=10, pattern=r"^[0-9]+$")]  # a token id, as JSON's keys are texts
FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What the output must look like; exactly one of these."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None
    effort: ReasoningEffort | None = None
    keep: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How answers are sampled, in the words of the OpenAI API and its common extensions."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: (
        Annotated[dict[LogitBiasKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Meta(ge=-INT31, le=INT31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


# --- tools and answer formats, in the nested form of chat ---------------------------------------------------------


class FunctionDef(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True, tag="function", tag_field="type"):
    function: FunctionDef


class FunctionRef(msgspec.Struct, kw_only=True):
    name: FunctionName


class NamedTool(msgspec.Struct, kw_only=True):
    """One tool that has to be called."""

    type: Literal["function"]
    function: FunctionRef


class FunctionCall(msgspec.Struct, kw_only=True):
    """arguments: JSON text, as the model wrote it; some clients send the object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallIn(msgspec.Struct, kw_only=True):
    """A tool call of an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True, tag="text", tag_field="type"):
    pass


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag="json_object", tag_field="type"):
    pass


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag="json_schema", tag_field="type"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


# --- what answers share -------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one request. A prompt that is answered n times counts once; a stop token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Of one candidate for a prompt position; the key beside it is the token id."""

    logprob: float
    rank: int | None
    decoded_token: str


class ToolProblemOut(msgspec.Struct, kw_only=True):
    """What is wrong with a tool call. index: of the call, null when it never came to a name. text: what the model wrote
    and could not be placed."""

    index: int | None
    message: str
    text: str = ""
