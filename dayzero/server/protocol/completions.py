"""/v1/completions: request and answer, whole and streamed (a chunk has the shape of the whole answer)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dayzero.engine.check import MAX_LOGPROBS, MAX_N
from dayzero.server.protocol.shared import (
    Count,
    PromptLogprob,
    ResponseFormat,
    SamplingFields,
    Stops,
    StreamOptions,
    TokenId,
    Usage,
)

Prompt = (
    str
    | Annotated[
        list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(
            min_length=1, description="Strings, or token ids, or lists of token ids; all entries must be of one kind."
        ),
    ]
)


class CompletionRequest(SamplingFields, kw_only=True):
    """prompt: one text, several, one list of token ids, or several. suffix is refused; best_of may only equal n."""

    prompt: Prompt
    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token. The first token of an echoed prompt has no logprob. text_offset counts
    characters of this choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
