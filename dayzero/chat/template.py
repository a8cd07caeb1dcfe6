"""Chat templates as the field writes them: Jinja text in tokenizer_config.json or chat_template.jinja, sandboxed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError, UsageError

# What a template's own expressions can come to, besides what Jinja itself says.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def read_template(source: Source) -> str | None:
    """The checkpoint's chat template, None when it has none. Several named ones: the one called ``default``."""
    if source.exists("chat_template.jinja"):
        return source.text("chat_template.jinja")
    if not source.exists("tokenizer_config.json"):
        return None
    found = _tokenizer_config(source).get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer_config(source: Source) -> dict[str, Any]:
    try:
        config = json.loads(source.text("tokenizer_config.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer_config.json of {source.name} is not JSON: {str(error)[:200]}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"tokenizer_config.json of {source.name} must hold an object.")
    return config


def special_tokens(source: Source) -> dict[str, str]:
    """bos_token, eos_token … of tokenizer_config.json, as templates use them by name."""
    if not source.exists("tokenizer_config.json"):
        return {}
    out = {}
    for key, value in _tokenizer_config(source).items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                out[key] = text
    return out


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """The prompt text. messages: {"role", "content"} and what else the template reads. UsageError when it refuses."""
    from jinja2 import TemplateError

    from dayzero.chat.sandbox import BoundedSandbox

    def refuse(message: str) -> None:
        raise UsageError(f"the chat template refuses these messages: {message}")

    sandbox = BoundedSandbox()
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    sandbox.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    try:
        compiled = sandbox.template(template)
        return compiled.render(messages=list(messages), add_generation_prompt=True, **(variables or {}))
    except UsageError:
        raise
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        said = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
        raise UsageError(f"the chat template does not render: {said}") from error
