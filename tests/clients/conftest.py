"""One small model and one service for all clients; every test below is marked ``clients``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.clients.service import Service, serving
from tests.clients.small_model import write_model

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what -m does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """float32, so that log-probabilities can be compared closely."""
    log = tmp_path_factory.mktemp("service") / "log"
    with serving(model, log, "--dtype", "float32") as found:
        yield found


@pytest.fixture(scope="session")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def claude(service: Service) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.address, api_key="none", max_retries=0, timeout=120)
