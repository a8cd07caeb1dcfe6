"""/v1/models."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Capabilities(msgspec.Struct, kw_only=True):
    """What the model takes and gives here. strict_tools: arguments of ``strict`` tools obey their schema also when the
    model itself decides to call. encoding: how conversations are written."""

    chat: bool
    tools: bool
    strict_tools: bool
    reasoning: bool
    images: bool
    tokenizer: bool
    encoding: str | None
    why_no_chat: str | None


class ModelCard(msgspec.Struct, kw_only=True):
    """max_model_len: longest prompt and answer together, in tokens. root: where the weights came from. defaults:
    what a request that names no value is sampled with. parent: another served name of the same model."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    dtype: str
    family: str
    defaults: dict[str, Any]
    capabilities: Capabilities
    object: Literal["model"] = "model"
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
