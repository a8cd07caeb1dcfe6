"""/tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dayzero.server.protocol.chat import ChatMessage
from dayzero.server.protocol.shared import FunctionTool, TokenId


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt or messages. add_special_tokens: those the tokenizer itself puts around a prompt; messages get
    them from their template."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """prompt: the text that was tokenised, for messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    prompt: str | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """special_tokens: id -> text."""

    vocab_size: int
    max_model_len: int
    special_tokens: dict[str, str]
    encoding: str | None
