"""An agent of pydantic-ai, in an environment of its own. Argument: the address of the API.

The agent calls a tool and gives its answer through another one; its own loop feeds results and refusals back. An answer
before the tool was used is refused, so the loop has several turns. Once whole, once streamed. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

TURNS = 30


class Report(BaseModel):
    """What was seen."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def agent(address: str, seen: list[tuple[str, int]], refused: list[Report]) -> Agent[None, Report]:
    model = OpenAIChatModel("small", provider=OpenAIProvider(base_url=address, api_key="none"))

    def settings(context: RunContext[None]) -> OpenAIChatModelSettings:
        """Another seed each turn: one seed draws the same call again and again."""
        seed = context.run_step
        return OpenAIChatModelSettings(max_tokens=400, seed=seed, parallel_tool_calls=False, timeout=120)

    made = Agent(model, output_type=ToolOutput(Report), model_settings=settings, retries=TURNS)

    @made.tool_plain
    def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 30]) -> str:
        """Look out of the window."""
        seen.append((city, days))
        return f"blue in {city}"

    @made.output_validator
    def after_looking(report: Report) -> Report:
        if not seen:
            refused.append(report)
            raise ModelRetry("Look out of the window first.")
        return report

    return made


async def main(address: str) -> list[dict[str, Any]]:
    out = []
    for stream in (False, True):
        seen: list[tuple[str, int]] = []
        refused: list[Report] = []
        made, limits = agent(address, seen, refused), UsageLimits(request_limit=TURNS)
        if stream:
            async with made.run_stream("What is the weather?", usage_limits=limits) as run:
                report, result = await run.get_output(), run
        else:
            result = await made.run("What is the weather?", usage_limits=limits)
            report = result.output
        messages = result.all_messages()
        parts = [part.part_kind for message in messages for part in message.parts]
        out.append({
            "report": report.model_dump(), "seen": seen, "refused": len(refused), "parts": parts,
            "requests": sum(message.kind == "response" for message in messages),
        })  # fmt: skip
    return out


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
