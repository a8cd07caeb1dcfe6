"""The table of endpoints: what the app serves and what /openapi.json describes are one list."""

from __future__ import annotations

from dataclasses import replace

from dayzero.server import health, models, tokenize
from dayzero.server.chat_completions import chat_completions
from dayzero.server.completions import completions
from dayzero.server.endpoint import Route
from dayzero.server.messages import count_tokens, drop_hosted_tools, messages
from dayzero.server.protocol.chat import ChatCompletion, ChatRequest
from dayzero.server.protocol.completions import Completion, CompletionRequest
from dayzero.server.protocol.messages import CountAnswer, CountRequest, MessageOut, MessagesRequest
from dayzero.server.protocol.models import ModelCard, ModelList
from dayzero.server.protocol.responses import Response, ResponsesRequest
from dayzero.server.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from dayzero.server.response_items import prepare
from dayzero.server.responses import responses

BODY = (400, 408, 413)
ENGINE = (404, 429, 500, 503)

GENERATE = (
    Route("/v1/chat/completions", chat_completions, "POST", ChatRequest, ChatCompletion, guarded=True, logged=True,
          stream=True, statuses=(*BODY, *ENGINE), summary="Answer a conversation."),
    Route("/v1/completions", completions, "POST", CompletionRequest, Completion, guarded=True, logged=True,
          stream=True, statuses=(*BODY, *ENGINE), summary="Continue texts or token ids."),
    Route("/v1/responses", responses, "POST", ResponsesRequest, Response, guarded=True, logged=True, prepare=prepare,
          turns="input", stream=True, statuses=(*BODY, *ENGINE), summary="Answer input items; nothing is stored."),
    Route("/v1/messages", messages, "POST", MessagesRequest, MessageOut, style="anthropic", guarded=True, logged=True,
          prepare=drop_hosted_tools, stream=True, statuses=(*BODY, *ENGINE), summary="Answer messages."),
)  # fmt: skip

_COUNT = Route("/v1/messages/count_tokens", count_tokens, "POST", CountRequest, CountAnswer, style="anthropic",
               guarded=True, prepare=drop_hosted_tools, statuses=(*BODY, 404), summary="Its tokens.")  # fmt: skip
_TOKENS = (
    Route("/tokenize", tokenize.tokenize, "POST", TokenizeRequest, TokenizeAnswer, guarded=True,
          statuses=(*BODY, 404, 503), summary="Token ids of a text or a conversation."),
    Route("/detokenize", tokenize.detokenize, "POST", DetokenizeRequest, DetokenizeAnswer, guarded=True,
          statuses=(*BODY, 404, 503), summary="The text of token ids."),
    Route("/tokenizer_info", tokenize.tokenizer_info, answer=TokenizerInfo, guarded=True, statuses=(400, 503),
          summary="Size and special tokens of the vocabulary."),
)  # fmt: skip
_MODELS = (
    Route("/v1/models", models.list_models, answer=ModelList, guarded=True, statuses=(503,),
          summary="What is served."),
    Route("/v1/models/{model:path}", models.get_model, answer=ModelCard, guarded=True, statuses=(404, 503),
          summary="One served model."),
)  # fmt: skip
_PROBES = (
    Route("/health", health.health, answer=health.Health, statuses=(503,), summary="Alive and moving."),
    Route("/ping", health.health, answer=health.Health, statuses=(503,), summary="The same as /health."),
    Route("/ping", health.health, "POST", answer=health.Health, statuses=(503,), summary="The same as /health."),
    Route("/ready", health.ready, answer=health.Health, statuses=(503,), summary="Takes requests."),
    Route("/health/ready", health.ready, answer=health.Health, statuses=(503,), summary="The same as /ready."),
    Route("/progress", health.progress, answer=health.ProgressAnswer, summary="The numbers behind the probes."),
    Route("/version", health.version, answer=health.Version, summary="Of this server."),
    Route("/metrics", health.metrics, summary="For Prometheus."),
)  # fmt: skip

ROUTES: tuple[Route, ...] = (
    *GENERATE,
    _COUNT,
    *_MODELS,
    *_TOKENS,
    *(replace(route, path=f"/v1{route.path}") for route in _TOKENS),
    *_PROBES,
)
