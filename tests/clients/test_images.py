"""Images through official clients against a service over a twin that has a tower: real requests, exact counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from dayzero.console import no_progress
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.clients.service import NAME, Service, serving
from tests.paper.image_files import png_uri

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "kimi_k3.json"
# The twin's patches have 4 pixels, two of them a token each way. Width, height, tokens:
SMALL, SAME, WIDE = (30, 41, 4 * 6), (30, 41, 4 * 6), (64, 9, 8 * 2)
MARKERS = 3  # begin, content, end around the size, whose letters are one id each in the twin's vocabulary


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    base = tmp_path_factory.mktemp("images")
    source = base / "source"
    source.mkdir()
    (source / "config.json").write_bytes(CONFIG.read_bytes())
    write_twin(str(source), str(base / "twin"), TwinOptions(seed=3), no_progress)
    with serving(base / "twin", base / "log", "--dtype", "float32", "--max-images", "3") as found:
        yield found


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0, timeout=120)


def image(size: tuple[int, int, int], seed: int) -> Any:
    return {"type": "image_url", "image_url": {"url": png_uri(size[0], size[1], seed)}}


def chat(client: openai.OpenAI, *parts: Any, **more: Any) -> Any:
    asked = {"model": NAME, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}} | more
    return client.chat.completions.create(messages=[{"role": "user", "content": list(parts)}], **asked)


def text(words: str) -> Any:
    return {"type": "text", "text": words}


def extra(service: Service, size: tuple[int, int, int]) -> int:
    """Tokens that one image adds to a prompt."""
    return MARKERS + len(service.ids(f"image {size[0]}x{size[1]}")) + size[2]


def test_the_service_says_that_it_takes_images(service: Service) -> None:
    assert service.get("/v1/models").json()["data"][0]["capabilities"]["images"] is True


def test_one_image(client: openai.OpenAI, service: Service) -> None:
    plain = chat(client, text("what is this?"))
    seen = chat(client, text("what is this?"), image(SMALL, 1))
    assert seen.choices[0].finish_reason == "length" and seen.usage.completion_tokens == 8
    assert seen.usage.prompt_tokens == plain.usage.prompt_tokens + extra(service, SMALL)
    again = chat(client, text("what is this?"), image(SMALL, 1))
    other = chat(client, text("what is this?"), image(SAME, 2), logprobs=True, top_logprobs=5)
    first = chat(client, text("what is this?"), image(SMALL, 1), logprobs=True, top_logprobs=5)
    assert said(again) == said(seen)
    assert first.choices[0].logprobs.content[0].top_logprobs != other.choices[0].logprobs.content[0].top_logprobs


def said(answer: Any) -> tuple[Any, Any]:
    message = answer.choices[0].message.to_dict()
    return message.get("content"), message.get("reasoning")


def test_three_images_streamed_and_whole(client: openai.OpenAI, service: Service) -> None:
    parts = [text("first"), image(SMALL, 4), text("second"), image(SAME, 5), image(WIDE, 6), text("which?")]
    plain = chat(client, text("first"), text("second"), text("which?"))
    whole = chat(client, *parts)
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens + 2 * extra(service, SMALL) + extra(service, WIDE)
    chunks = list(chat(client, *parts, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks if chunk.choices]
    joined = ["".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning")]
    assert joined == [part or "" for part in said(whole)]


def test_an_image_that_was_seen_before_is_not_encoded_again(client: openai.OpenAI, service: Service) -> None:
    name = "vllm:mm_cache"
    before = service.total(f"{name}_queries"), service.total(f"{name}_hits")
    for words in ("one", "two"):  # other text in front of it: the prefix cache is of no help
        chat(client, text(words), image(WIDE, 9))
    assert service.total(f"{name}_queries") == before[0] + 2
    assert service.total(f"{name}_hits") == before[1] + 1


def test_too_many_and_broken_images_are_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as many:
        chat(client, *[image(SMALL, n) for n in range(4)])
    assert many.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as broken:
        chat(client, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert broken.value.param == "messages[0].content"
    with pytest.raises(openai.BadRequestError) as far:
        chat(client, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}})
    assert "not fetched here" in far.value.message


def test_responses_and_messages_take_them_too(client: openai.OpenAI, service: Service) -> None:
    url = png_uri(SMALL[0], SMALL[1], 1)
    part: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what is this?"}, part]}]
    answer = client.responses.create(model=NAME, input=asked, max_output_tokens=16, store=False, temperature=0)
    want = chat(client, text("what is this?"), image(SMALL, 1)).usage.prompt_tokens
    assert answer.usage is not None and answer.usage.input_tokens == want
    claude = anthropic.Anthropic(base_url=service.address, api_key="none", max_retries=0, timeout=120)
    source: Any = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content: Any = [text("what is this?"), {"type": "image", "source": source}]
    counted = claude.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == want
