"""A small model and a server of this package over it, one for each file of tests that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import RunningServer, Subject
from tests.clients.small_model import write_model

OPTIONS = ("--dtype", "float32", "--threads", "1", "--pool-bytes", "64MiB")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model") / "small"
    write_model(folder)
    return Subject(str(folder), serve=OPTIONS)


@pytest.fixture(scope="module")
def servers(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(subject, tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
def good(servers: Servers) -> RunningServer:
    return servers.shared()
