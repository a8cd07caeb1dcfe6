"""Agent frameworks, each through a tool loop of its own: langchain-openai and pydantic-ai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Service, program, run

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 240


def output(service: Service, name: str, folder: Path) -> Any:
    """What a program printed last."""
    command = [program("agents", "python"), str(PROGRAMS / name), f"{service.address}/v1"]
    return json.loads(run(command, folder, SECONDS).splitlines()[-1])


def test_a_client_that_is_missing_fails() -> None:
    with pytest.raises(AssertionError, match=r"make_venvs\.py nobody"):
        program("nobody", "python")


def test_langchain(service: Service, tmp_path: Path) -> None:
    told = output(service, "langchain_loop.py", tmp_path)
    assert len(told["seen"]) == 2
    assert all(city in ("Paris", "Rome") and days in (1, 2, 30) for city, days in told["seen"])
    assert len(set(told["ids"])) == 2
    first, second, _ = told["input_tokens"]
    assert second > first, "the second turn reads what came before it"
    assert (told["last"], told["last_calls"]) in (("length", 0), ("stop", 0))
    assert told["report"]["city"] in ("Paris", "Rome")


def test_pydantic_ai(service: Service, tmp_path: Path) -> None:
    """Every turn is a call; the results that the loop fed back are in its messages."""
    for run_of in output(service, "pydantic_ai_loop.py", tmp_path):
        assert run_of["report"]["city"] in ("Paris", "Rome")
        assert len(run_of["seen"]) >= 1
        assert run_of["requests"] == len(run_of["seen"]) + run_of["refused"] + 1
        assert run_of["parts"].count("tool-call") == run_of["requests"]
        assert run_of["parts"].count("tool-return") == len(run_of["seen"]) + 1
        assert run_of["parts"].count("retry-prompt") == run_of["refused"]
