"""Cards of models, as ``/v1/models`` lists them: whatever a server sends is read, what is no card is left out."""

from __future__ import annotations

from typing import Any


def cards_of(listed: object) -> list[dict[str, Any]]:
    """The cards in the JSON of an answer, in its order."""
    data = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def card_of(listed: object, model: str | None) -> dict[str, Any]:
    """The card of ``model``, the first one where no name is given; empty where there is none."""
    return next((card for card in cards_of(listed) if model in (None, card.get("id"))), {})


def names_of(listed: object) -> list[str]:
    """Names of the models, in order."""
    return [name for card in cards_of(listed) if isinstance(name := card.get("id"), str) and name]


def capabilities_of(card: dict[str, Any]) -> dict[str, Any]:
    """What a card says that its server offers; empty where it says nothing."""
    found = card.get("capabilities")
    return found if isinstance(found, dict) else {}
