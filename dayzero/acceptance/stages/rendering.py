"""Conversations as the checkpoint writes them, by our own rendering and by the library's: golden prompt ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.stage import Subject
from dayzero.chat.conversation import Conversation, Message, Tool
from dayzero.chat.service import ChatService
from dayzero.engine.build import chat_service
from dayzero.errors import UserError

TEMPLATE_OPTION = "--chat-template"
LEAST_SHOWN = 60


@lru_cache(maxsize=2)
def own_chat(subject: Subject) -> tuple[ChatService | None, str]:
    """(tokenizer, format and stop ids of the source, ""), or (None, why there are none)."""
    if subject.source is None:
        return None, "no checkpoint is given beside the server's address"
    serve = list(subject.serve)
    template = serve[serve.index(TEMPLATE_OPTION) + 1] if TEMPLATE_OPTION in serve[:-1] else None
    try:
        text = None if template is None else Path(template).read_text(encoding="utf-8")
        return chat_service(subject.source, subject.recipe, upstream="--upstream" in serve, template=text), ""
    except (UserError, OSError) as error:
        return None, str(error)


def own_ids(chat: ChatService, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
    """By the code that the server runs too, in this process. UsageError for what the format cannot say."""
    assert chat.encoding is not None
    turns = [Message.of(m["role"], m["content"], reasoning=m.get("reasoning_content")) for m in messages]
    offered = [
        Tool(one["function"]["name"], one["function"].get("description"), one["function"].get("parameters"),
             raw=one["function"])
        for one in tools
    ]  # fmt: skip
    return chat.encoding.prompt(Conversation(turns, offered)).ids


class Library:
    """The same by ``transformers``, which knows nothing of our code. Errors: ``Unrendered``."""

    def __init__(self, source: str) -> None:
        if not Path(source).is_dir():
            raise Unrendered(f"{source} is no folder on this machine")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise Unrendered("transformers is not installed: pip install 'dayzero[oracle]'") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise Unrendered(f"transformers opens no tokenizer there: {_short(error)}") from error
        if not self._tokenizer.chat_template:
            raise Unrendered("transformers finds no chat template there")

    def ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        import jinja2

        try:
            found = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise Unrendered(f"transformers does not render it: {_short(error)}") from error
        return [int(token) for token in found["input_ids"]]


class Unrendered(Exception):
    """There is no independent rendering; the sentence says why."""


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[: 3 * LEAST_SHOWN] or type(error).__name__


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Where two lists of ids part, with what stands there."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return f"id {place}: {list(ours[place : place + 4])} against {list(theirs[place : place + 4])}"
