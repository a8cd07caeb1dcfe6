"""Chat templates as the field writes them: Jinja text in tokenizer_config.json or chat_template.jinja, sandboxed."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template

    from dayzero.chat.sandbox import BoundedSandbox

# Where publishers keep a chat format as code, which is never run.
ENCODER_FILES = ("encoding_*.py", "encoding/*.py", "*/encoding_*.py", "chat_encoding*.py", "chat_format*.py")
# What a template's own expressions can come to, besides what Jinja itself says.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def find_template(source: Source) -> tuple[str, str] | None:
    """(the checkpoint's chat template, the file it stands in), None when it has none. Of several named ones, the one
    called ``default``."""
    if source.exists("chat_template.jinja"):
        return source.text("chat_template.jinja"), "chat_template.jinja"
    for file in ("chat_template.json", "tokenizer_config.json"):
        if source.exists(file):
            found = _object(source, file).get("chat_template")
            if isinstance(found, list):
                named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
                found = named.get("default")
            if isinstance(found, str):
                return found, file
    return None


def read_template(source: Source) -> str | None:
    """The text of ``find_template``."""
    found = find_template(source)
    return None if found is None else found[0]


def _object(source: Source, file: str) -> dict[str, Any]:
    try:
        config = json.loads(source.text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} of {source.name} is not JSON: {str(error)[:200]}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} of {source.name} must hold an object.")
    return config


def special_tokens(source: Source) -> dict[str, str]:
    """bos_token, eos_token … of tokenizer_config.json, as templates use them by name."""
    if not source.exists("tokenizer_config.json"):
        return {}
    out = {}
    for key, value in _object(source, "tokenizer_config.json").items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                out[key] = text
    return out


class ChatTemplate:
    """One template, compiled at its first use. Renders from any thread, one at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lock = threading.Lock()
        self._compiled: tuple[BoundedSandbox, Template] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text. messages: {"role", "content"} and what else the template reads. variables: over the usual
        ones (add_generation_prompt true, tools and documents none). UsageError when the template refuses."""
        usual = {"add_generation_prompt": True, "tools": None, "documents": None}
        with self._lock, _told("render"):
            sandbox, compiled = self._compiled or self._compile()
            sandbox.start()
            return compiled.render(**{**usual, **(variables or {}), "messages": list(messages)})

    def check(self) -> None:
        """Compile it, which finds what is no template. UsageError says why."""
        with self._lock, _told("compile"):
            self._compile()

    def _compile(self) -> tuple[BoundedSandbox, Template]:
        from dayzero.chat.sandbox import BoundedSandbox

        sandbox = BoundedSandbox()
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        sandbox.filters["tojson"] = _to_json
        self._compiled = sandbox, sandbox.template(self.text)
        return self._compiled


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What a template runs into, as one sentence."""
    from jinja2 import TemplateError

    try:
        yield
    except UsageError:
        raise
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        said = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
        raise UsageError(f"the chat template does not {what}: {said}") from error


def _refuse(message: str) -> None:
    raise UsageError(f"the chat template refuses these messages: {message}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    if separators is not None:
        separators = tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """``ChatTemplate(template).render`` for a single use."""
    return ChatTemplate(template).render(messages, variables)
