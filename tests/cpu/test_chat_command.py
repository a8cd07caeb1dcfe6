"""``dayzero chat`` over a small model: turns from options and from a pipe, and what ends a turn but not the talk."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dayzero.chat.pieces import Content, Reasoning
from dayzero.cli import main
from dayzero.console import no_progress
from dayzero.engine.llm import LLM
from dayzero.rehearse.twin import write_twin
from tests.paper.small_tokenizer import small_tokenizer_json

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "qwen3_8b.json"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "m"
    write_twin(str(CONFIG), str(folder), progress=no_progress)
    (folder / "tokenizer.json").write_text(small_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def chat(model: Path, *more: str) -> int:
    return main(["chat", str(model), "--temperature", "0", "--max-tokens", "5", "--pool-bytes", "8MiB", *more])


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Standard input as the interpreter opens it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape"))


def test_turns_of_options_are_one_conversation(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(model, "--prompt", "the ab", "--prompt", "ab", "--system", "ba", "--json") == 0
    turns: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["turns"]
    assert [turn["user"] for turn in turns] == ["the ab", "ab"]
    said = [{"role": "system", "content": "ba"}, {"role": "user", "content": "the ab"}]
    with LLM(str(model), pool_bytes=8 << 20) as llm:
        params = llm.default_params.__class__(temperature=0, max_tokens=5)
        first = llm.chat(said, params)
        said += [{"role": "assistant", "content": first.message.content}, {"role": "user", "content": "ab"}]
        second = llm.chat(said, params)
    assert [turn["content"] for turn in turns] == [first.message.content, second.message.content]


def test_a_line_that_cannot_be_asked_does_not_end_the_talk(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are no text, and a line beyond the context, between two good ones."""
    typed(monkeypatch, b"the ab\n\xff\xfe\n" + b"the ab " * 90_000 + b"\n\n/new\nab\n/exit\nnever\n")
    assert chat(model) == 0
    out = capsys.readouterr().out
    assert out.count("(no answer: ") == 2 and "surrogate" in out
    assert out.count(" tokens in ") == 2 and out.count("> a new conversation") == 1


def test_the_end_of_input_ends_it_and_a_bad_option_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, b"")
    assert chat(model) == 0
    assert chat(model, "--prompt", "the ab " * 90_000) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_an_answer_begins_on_a_line_of_its_own_behind_the_reasoning(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [Reasoning("so it"), Reasoning(" is"), Content("four"), Content("!")]
    given = iter([pieces, pieces[2:]])
    streamed = LLM.stream_chat

    def reasoned(self: LLM, *args: Any, **more: Any) -> Any:
        yield from next(given)
        yield list(streamed(self, *args, **more))[-1]

    monkeypatch.setattr(LLM, "stream_chat", reasoned)
    assert chat(model, "-q", "--prompt", "ab", "--prompt", "ba") == 0
    assert capsys.readouterr().out == "so it is\nfour!\nfour!\n"


def test_an_interrupt_stops_the_answer_and_not_the_talk(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed = LLM.stream_chat
    calls = []

    def interrupted(self: LLM, *given: Any, **more: Any) -> Any:
        calls.append([message.text for message in given[0]])
        for piece in streamed(self, *given, **more):
            if len(calls) == 2:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    typed(monkeypatch, b"the ab\nba\nab\n")
    assert chat(model) == 0
    assert "(stopped)" in capsys.readouterr().out
    assert [call[-1] for call in calls] == ["the ab", "ba", "ab"]
    assert len(calls[2]) == 3, "the turn that was cut short is not in the conversation"
