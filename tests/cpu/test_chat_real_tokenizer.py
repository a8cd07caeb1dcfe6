"""A real vocabulary and a real template: ids and texts are those of the library most people use."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dayzero.chat.conversation import Conversation, Message
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.service import ChatService
from dayzero.checkpoint.source import open_source

POOLS = (
    "abc DEF 123\t\n", "北京天气你好吗", "🦊👩‍👩‍👧é\u0301ñ", "def f(x):\n    return x  # ok\n",
    "日本語ひらがな", "٣٤٥ עברית", "﷽\u200d\ufeff",
)  # fmt: skip


@pytest.fixture(scope="module")
def service(demo_model: Path) -> ChatService:
    return ChatService(open_source(str(demo_model)), family="llama")


def odd_texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choice(draw.choice(POOLS)) for _ in range(draw.randint(1, 40))) for _ in range(count)]


@pytest.mark.slow
def test_ids_and_texts_are_transformers(service: ChatService, demo_model: Path) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(demo_model)
    ours = service.tokenizer
    assert ours is not None
    for text in odd_texts(300):
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
        streamed = Detokenizer(ours)
        assert "".join(streamed.push([i]).text for i in ids) + streamed.flush().text == text


@pytest.mark.slow
def test_prompts_are_transformers(service: ChatService, demo_model: Path) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(demo_model)
    assert service.encoding is not None
    user, reply = Message.of("user", "What is 2+2? 北京"), Message.of("assistant", "Four.")
    for messages in ([user], [Message.of("system", "Be brief."), user], [user, reply, user]):
        shown = [{"role": m.role, "content": m.text} for m in messages]
        wanted = theirs.apply_chat_template(shown, add_generation_prompt=True, tokenize=False)
        prompt = service.encoding.prompt(Conversation(messages))
        assert prompt.text == wanted
        assert prompt.ids == theirs(wanted, add_special_tokens=False)["input_ids"]


def test_an_answer_ends_on_every_stop_id(service: ChatService) -> None:
    assert service.tokenizer is not None
    assert service.tokenizer.id_of("<|im_end|>") in service.stop_ids
    assert service.why_no_chat == ""
