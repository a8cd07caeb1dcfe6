"""One conversation with images and a function's call over HTTP, from a twin with a sparse index, in chunks that end
inside images: streamed and whole, and the same with two experts held as with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero.console import no_progress
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.clients.service import Service, serving
from tests.cpu.test_experts_engine import expert_bytes
from tests.cpu.test_xtml_service import OFF, WEATHER, same, streamed, whole
from tests.paper.image_files import data_uri, png_claiming, png_uri

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "kimi_k3_1.json"
# Width, height, and tokens: patches of 4 pixels, two of them a token each way.
FIRST, SECOND = (30, 41, 4 * 6), (64, 9, 8 * 2)
MARKERS = 3  # around the size and between it and the placeholders
CALL: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, **OFF}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xtml_images") / "twin"
    write_twin(str(CONFIG), str(folder), TwinOptions(seed=5), no_progress)
    return folder


@pytest.fixture(scope="module")
def service(twin: Path) -> Iterator[Service]:
    with serving(twin, twin.parent / "log.txt", "--dtype", "float32", "--chunk-tokens", "17") as running:
        yield running


@pytest.fixture(scope="module")
def narrow(twin: Path) -> Iterator[Service]:
    """Two experts are held."""
    size = str(2 * expert_bytes(twin))
    options = ("--dtype", "float32", "--chunk-tokens", "17", "--expert-memory", size)
    with serving(twin, twin.parent / "narrow.txt", *options) as running:
        yield running


def image(size: tuple[int, int, int], seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png_uri(size[0], size[1], seed)}}


def asks(words: str, *images: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": words}, *images]}]


@pytest.fixture(scope="module")
def answers(service: Service) -> list[dict[str, Any]]:
    return conversation(service, streams=True)


def conversation(service: Service, streams: bool) -> list[dict[str, Any]]:
    """Two answers: a call after an image, then text after the call's result and another image. streams: ask for each
    once more, streamed."""
    turns = asks("Which city?", image(FIRST, 1))
    first = whole(service, messages=turns, **CALL)
    if streams:
        same(first, streamed(service, messages=turns, **CALL))
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 °C"}
    turns = [*turns, message, result, *asks("And here?", image(SECOND, 2))]
    second = whole(service, messages=turns, tools=[WEATHER], max_tokens=24)
    if streams:
        same(second, streamed(service, messages=turns, tools=[WEATHER], max_tokens=24))
    return [first, second]


def shown(answer: dict[str, Any]) -> list[Any]:
    """What two services say alike: all but ids, times and what was cached."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    usage = answer["usage"]
    said = [message["content"], message.get("reasoning"), calls, choice["finish_reason"]]
    return [*said, usage["prompt_tokens"], usage["completion_tokens"]]


def test_a_conversation_with_images_and_a_call(service: Service, answers: list[dict[str, Any]]) -> None:
    first, second = answers
    assert first["choices"][0]["finish_reason"] == "tool_calls"

    def added(size: tuple[int, int, int]) -> int:
        return MARKERS + len(service.ids(f"image {size[0]}x{size[1]}")) + size[2]

    blind = whole(service, messages=asks("Which city?"), **CALL)["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens"] == blind + added(FIRST)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 °C"}
    turns = [*asks("Which city?"), message, result, *asks("And here?")]
    blind = whole(service, messages=turns, tools=[WEATHER], max_tokens=1)["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens"] == blind + added(FIRST) + added(SECOND)


def test_two_held_experts_say_what_all_of_them_say(
    service: Service, narrow: Service, answers: list[dict[str, Any]]
) -> None:
    assert [shown(answer) for answer in conversation(narrow, streams=False)] == [shown(answer) for answer in answers]
    name = "dayzero:engine_expert_evictions"
    assert narrow.total(name) > 0 == service.total(name)


def test_the_image_decides_the_answer(service: Service) -> None:
    """Two images of one size come to the same ids; the answers' probabilities differ."""
    logprobs = []
    for seed in (1, 2):
        answer = whole(service, messages=asks("?", image(FIRST, seed)), max_tokens=1, logprobs=True, top_logprobs=3)
        logprobs.append(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"])
    assert logprobs[0] != logprobs[1]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "cannot be read"),
        (lambda: {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "not fetched here"),
        (lambda: {"type": "image_url", "image_url": {"url": data_uri(png_claiming(9000, 9000))}}, "9000x9000"),
    ],
    ids=["damaged", "address", "bomb"],
)
def test_a_wrong_image_is_400_and_names_its_message(service: Service, part: Any, said: str) -> None:
    body = {"messages": [*asks("a"), {"role": "assistant", "content": "b"}, *asks("c", part())], "max_tokens": 1}
    answer = service.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and said in answer.text and "messages[2].content" in answer.text
