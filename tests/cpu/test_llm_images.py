"""Images through the Python API: a path, bytes, a Pillow image and a data: URI are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from small_models import write_small

from dayzero import LLM
from dayzero.chat.conversation import ImagePart, Message, TextPart
from dayzero.engine.request import SamplingParams
from dayzero.errors import UsageError
from tests.paper.image_files import data_uri, file_of, picture

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_small("kimi_k3", tmp_path_factory.mktemp("k3"))
    with LLM(str(folder), dtype="float32", pool_bytes=8 << 20) as made:
        yield made


def ask(llm: LLM, *parts: Any) -> Any:
    return llm.chat([{"role": "user", "content": list(parts)}], PARAMS).output


def test_every_way_to_hand_an_image_over_is_the_same(llm: LLM, tmp_path: Path) -> None:
    image = picture(30, 41, 3)
    data = file_of(image)
    path = tmp_path / "x.png"
    path.write_bytes(data)
    given: list[Any] = [
        {"image": path}, {"image": str(path)}, {"image": data}, {"image": image}, {"type": "image", "image": data},
        {"type": "image_url", "image_url": {"url": data_uri(data)}},
    ]  # fmt: skip
    answers = [ask(llm, "what is ", one, {"type": "text", "text": "this?"}) for one in given]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({tuple(answer.prompt_token_ids) for answer in answers}) == 1
    message = Message("user", (TextPart("what is "), ImagePart(str(path)), TextPart("this?")))
    assert llm.chat([message], PARAMS).output.token_ids == answers[0].token_ids
    counters = llm.progress().counters
    assert counters["mm_queries"] - counters["mm_hits"] == 1, "it was encoded once"


def test_what_is_no_image_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    for given, said in (
        ({"image": tmp_path / "none.png"}, "messages\\[0\\].*cannot be read"),
        ({"image": b"nothing"}, "not a known format"),
        ({"image": 7}, "not int"),
        ({"picture": b""}, "role and content"),
        ({"image_url": "data:image/png;base64,%"}, "no valid base64"),
    ):
        with pytest.raises(UsageError, match=said):
            ask(llm, given)
