"""A tool loop with langchain-openai, in an environment of its own. Argument: the address of the API.

Two turns, whole and streamed; each result goes back as LangChain writes it. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

SEEN: list[tuple[str, int]] = []


@tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 30]) -> str:
    """Look out of the window."""
    SEEN.append((city, days))
    return f"blue in {city}"


class Report(BaseModel):
    """What was seen."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def main(address: str) -> dict[str, Any]:
    model = ChatOpenAI(
        model="small", base_url=address, api_key="none", max_tokens=400, seed=1, max_retries=0, timeout=120,
        stream_usage=True,
    )  # fmt: skip
    forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    turns: list[Any] = [HumanMessage("What is the weather?")]
    for stream in (False, True):
        if stream:
            answer: Any = None
            for chunk in forced.stream(turns):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = forced.invoke(turns)
        assert not answer.invalid_tool_calls, answer
        (call,) = answer.tool_calls
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        turns += [answer, result]
    last = model.bind_tools([get_weather], tool_choice="none").invoke(turns, max_tokens=8)
    report = model.with_structured_output(Report, method="json_schema").invoke("Report.")
    usage = [message.usage_metadata["input_tokens"] for message in (turns[1], turns[3], last)]
    return {
        "seen": SEEN, "ids": [turn.tool_call_id for turn in turns if isinstance(turn, ToolMessage)],
        "input_tokens": usage, "last": last.response_metadata["finish_reason"], "last_calls": len(last.tool_calls),
        "report": report.model_dump(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
