"""The chat side of one checkpoint in one object: what a server, a terminal or a test needs to turn messages into ids
and ids into an answer. A checkpoint that lacks a part still has a service, which says what is missing and why.
"""

from __future__ import annotations

from typing import Any

from dayzero.chat.encoding import ChatEncoding, choose, control_text
from dayzero.chat.format_encoding import FormatEncoding
from dayzero.chat.stops import sampling_defaults, stop_ids
from dayzero.chat.template import find_template
from dayzero.chat.tokenizer import Tokenizer, open_tokenizer
from dayzero.checkpoint.source import Source


class ChatService:
    """family: the recipe's name of the model, None when there is none. template: a user's own chat template (Jinja
    text), which goes before everything the folder holds. Errors: CheckpointError for damaged files, ConfigError for
    stop ids that are none.

    tokenizer, encoding: None when there is none; why_no_tokenizer, why_no_chat then say why and what to do ("" when
    there is one). why: how the encoding was found. stop_ids: id -> where it is said, from every source; all of them
    end an answer. defaults: sampling values of generation_config.json.
    """

    def __init__(self, source: Source, *, family: str | None = None, template: str | None = None) -> None:
        found = (template, "the template given") if template is not None else find_template(source)
        text = found[0] if found else ""
        self.tokenizer: Tokenizer | None
        self.encoding: ChatEncoding | None
        self.tokenizer, said = open_tokenizer(source, controls=control_text(family, text))
        self.why_no_tokenizer = said if self.tokenizer is None else ""
        self.encoding, self.why = choose(source, family, self.tokenizer, template=template)
        self.why_no_chat = self.why_no_tokenizer or (self.why if self.encoding is None else "")
        form = self.encoding.format if isinstance(self.encoding, FormatEncoding) else None
        self.stop_ids: dict[int, tuple[str, ...]] = stop_ids(source, self.tokenizer, text, form)
        self.defaults: dict[str, Any] = sampling_defaults(source)

    def table(self) -> list[tuple[str, str]]:
        """Rows for the start-up table."""
        ends = ", ".join(f"{i} ({'; '.join(said)})" for i, said in sorted(self.stop_ids.items()))
        if self.encoding is None:
            chat = f"none: {self.why_no_chat}"
        else:
            chat = f"{self.encoding.name}, by {self.encoding.source} ({self.why})"
        return [
            ("tokenizer", f"{self.tokenizer.vocab_size} ids" if self.tokenizer else f"none: {self.why_no_tokenizer}"),
            ("chat format", chat),
            ("stop ids", ends or "none: answers run to their token limit"),
            ("sampling defaults", ", ".join(f"{k} {v}" for k, v in self.defaults.items()) or "none"),
        ]
