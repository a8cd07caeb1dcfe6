"""/v1/models and /v1/models/{id}: what is served, with its true limits, defaults and capabilities."""

from __future__ import annotations

from starlette.responses import Response

from dayzero.server.endpoint import Call, json_response
from dayzero.server.errors import ApiError
from dayzero.server.protocol.models import Capabilities, ModelCard, ModelList
from dayzero.server.state import ServerState

OWNER = "dayzero"


def cards(state: ServerState) -> list[ModelCard]:
    """One card for each served name. ApiError 503 while no model is loaded."""
    info, chat = state.known(), state.chat
    names = state.config.served_names
    encoding = chat.encoding if chat is not None else None
    parses = encoding.parses if encoding is not None else ()
    capabilities = Capabilities(
        chat=encoding is not None,
        tools="tools" in parses,
        strict_tools=encoding is not None and encoding.holds_strict,
        reasoning="reasoning" in parses,
        images=info.images is not None and encoding is not None and encoding.takes_images,
        tokenizer=chat is not None and chat.tokenizer is not None,
        encoding=encoding.name if encoding is not None else None,
        why_no_chat=None if encoding is not None else state.why_no_chat(),
    )
    return [
        ModelCard(
            id=name,
            created=state.created,
            owned_by=OWNER,
            root=info.source,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            family=info.family,
            defaults=state.defaults.shown(),
            capabilities=capabilities,
            parent=None if name == names[0] else names[0],
        )
        for name in names
    ]


async def list_models(call: Call) -> Response:
    return json_response(ModelList(data=cards(call.state)))


async def get_model(call: Call) -> Response:
    name = call.request.path_params["model"]
    for card in cards(call.state):
        if card.id == name:
            return json_response(card)
    raise ApiError(404, f"the model {name[:200]!r} is not served here.", param="model", code="model_not_found")
