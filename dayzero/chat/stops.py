"""Which tokens end an answer, from every place that says so, and the publisher's sampling defaults.

Stop ids stand in up to five places that need not agree; a server must end on every one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dayzero.chat.families import Format
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import ConfigError

if TYPE_CHECKING:
    from dayzero.chat.tokenizer import Tokenizer

SAMPLING = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_new_tokens", "max_length", "no_repeat_ngram_size",
)  # fmt: skip
# How vendors name the token that ends a turn; only added tokens whose text the template itself writes are looked at.
END_OF_TURN = re.compile(
    r"(im_end|eot|eom|end_of_(turn|text|msg|message)|turn_end|endoftext|end▁of▁sentence|^</s>$|^<\|(end|return|call)\|>$)",
    re.I,
)


def read_side(source: Source, file: str) -> dict[str, Any]:
    """A JSON object beside the weights, {} when there is no such file. ConfigError when it is damaged."""
    return read_object(source, file, sizes=False)[0] if source.exists(file) else {}


def stop_ids(
    source: Source, tokenizer: Tokenizer | None, template: str, form: Format | None
) -> dict[int, tuple[str, ...]]:
    """id -> where it is said to end an answer. ConfigError for a value that is no id: dropped, it would leave a model
    that never stops."""
    settings = read_side(source, "tokenizer_config.json") if tokenizer is not None else {}
    found = stop_sources(
        read_side(source, "config.json"),
        read_side(source, "generation_config.json"),
        settings,
        tokenizer.added if tokenizer is not None else {},
        [(template, form)],
    )
    out: dict[int, tuple[str, ...]] = {}
    for where, value in found:
        for token in _ids(value, where):
            if where not in out.get(token, ()):
                out[token] = (*out.get(token, ()), where)
    return out


def sampling_defaults(source: Source) -> dict[str, Any]:
    """The sampling values of generation_config.json."""
    found = read_side(source, "generation_config.json")
    return {key: found[key] for key in SAMPLING if found.get(key) is not None}


def stop_sources(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    settings: Mapping[str, Any],
    added: Mapping[str, int],
    shown: Iterable[tuple[str, Format | None]],
) -> Iterator[tuple[str, Any]]:
    """(where, what stands there) for every place that names ids which end an answer: one id, several, or what is none.

    settings: tokenizer_config.json. added: text of each added token -> id. shown: chat templates, and the format each
    one writes.
    """
    for file, found in (("config.json", config), ("generation_config.json", generation)):
        yield file, found.get("eos_token_id")
        inner = found.get("text_config")
        if isinstance(inner, Mapping):
            yield f"{file} text_config", inner.get("eos_token_id")
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if isinstance(text, str) and text in added:
        yield "tokenizer_config.json eos_token", [added[text]]
    for template, form in shown:
        own = form.grammar.markers() if form else frozenset[str]()  # they end a part of an answer, not the answer
        yield "chat template", [i for t, i in added.items() if END_OF_TURN.search(t) and t in template and t not in own]
        if form is not None:
            yield f"chat format {form.name}", [added[t] for t in form.stops if t in added]


def _ids(value: Any, where: str) -> list[int]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if type(item) is not int or item < 0:
            raise ConfigError(f"{where}: eos_token_id holds {item!r:.40}; give a whole number >= 0, or a list.")
    return items
