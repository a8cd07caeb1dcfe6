"""Keeps what a user wrote from becoming control tokens, where one text holds both.

Before a prompt is put together, control tokens spelled in a user's text are broken up by a character of private use.
Afterwards the control tokens that are still whole are the format's own; what was broken up is put together again and
encoded as letters. A prompt in which nobody spells a control token is encoded as one text, exactly as its publisher
does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dayzero.chat.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)


class ControlTokens:
    """The control tokens of one tokenizer. Stateless."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = (t for t, i in tokenizer.added.items() if i in tokenizer.control_ids and len(t) > 1)
        words = sorted(map(re.escape, spelled), key=len, reverse=True)
        self._pattern = re.compile("|".join(words)) if words else None

    def private_letters(self, texts: Iterable[str]) -> tuple[str, str]:
        """Two characters that stand in none of the texts."""
        used = set("".join(texts))
        free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        return next(free), next(free)

    def broken(self, text: str, breaker: str) -> str:
        """A user's text with no control token whole in it."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: match[0][0] + breaker + match[0][1:], text)

    def encode(self, text: str, breaker: str) -> list[int]:
        """Ids of a prompt with broken texts in it. TextTooLong for one that no model's context could hold."""
        self._tokenizer.check_length(text)
        if breaker not in text or self._pattern is None:
            return self._tokenizer.encode(text, special=True)
        parts: list[tuple[str, bool]] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [(text[at : match.start()].replace(breaker, ""), False), (match[0], True)]
            at = match.end()
        return self._tokenizer.encode_parts([*parts, (text[at:].replace(breaker, ""), False)])
