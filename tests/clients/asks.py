"""What the tests of several clients ask: a question, and a tool whose arguments are short whatever a model writes."""

from __future__ import annotations

from typing import Any

from tests.clients.service import NAME

QUESTION = "What is the weather in Paris?"
USER: Any = {"role": "user", "content": QUESTION}
CITIES = ("Paris", "Rome", "New York")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"type": "integer", "enum": [1, 2, 30]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Look out of the window.", "parameters": PARAMETERS, "strict": True
    },
}  # fmt: skip
OTHER: Any = {"type": "function", "function": {"name": "get_time", "parameters": {**PARAMETERS}}}


def good_arguments(values: Any) -> bool:
    """Whether a call's arguments are what PARAMETERS allows, and nothing else."""
    return (
        isinstance(values, dict)
        and set(values) == {"city", "days"}
        and values["city"] in CITIES
        and type(values["days"]) is int
        and values["days"] in (1, 2, 30)
    )


def ask(**more: Any) -> dict[str, Any]:
    """A chat request: short, and the same again when it is asked again."""
    return {"model": NAME, "messages": [USER], "max_tokens": 12, "seed": 5} | more
