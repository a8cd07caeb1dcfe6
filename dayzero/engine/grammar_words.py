"""What the grammar library says, as a sentence for somebody who does not know it. Paper."""

from __future__ import annotations

import re

MAX_SENTENCE = 300
TOO_COMPLEX = "the grammar is too complex to be followed to its end; make it simpler, or its counts smaller"
_BEYOND_LIMITS = re.compile(r"lexer error: too many |(Parser|Lexer)TooComplex")
# Word of the library -> what it means to whoever wrote the grammar.
MEANINGS = (
    (r"NoExtension(Bias)?", "no text fits it"),
    (r"(Parser|Lexer)TooComplex|Lexer initialized with .* exceeded|initial lexer .*too big.*", "it is too complex"),
    (r"parser stopped in consume_token; no error message", "a text of it was complete already"),
    (r".*lookarounds not supported yet.*", "an anchor or a look-around inside of it is not supported"),
    (r"'utf-8' codec can't encode character .*", "it holds half of a surrogate pair, which is no character"),
    (r"RecursionError|maximum recursion depth exceeded.*", "it nests too deeply (recursion)"),
    (r"Empty grammar", "it is empty"),
    (r"schema too large", "it is too large"),
)
_MEANINGS = tuple((re.compile(pattern), meaning) for pattern, meaning in MEANINGS)
_PICTURE = re.compile(r"\d+ \|")
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in a text that the client has not written


def failed(what: str, text: str) -> str:
    """Sentence for a matcher that stopped within an answer. That a grammar is beyond the library's limits cannot be
    told before: its states are made as the answer grows."""
    return TOO_COMPLEX if _BEYOND_LIMITS.match(text) else f"{what}: {one_sentence(text)}"


def one_sentence(text: str) -> str:
    """Without the library's picture of the place, its dump of the state, and its own names for what can go wrong."""
    lines = [line.strip() for line in text.partition("<state>")[0].splitlines()]
    said = " ".join(line for line in lines if line.strip("^ ") and not _PICTURE.match(line))
    said = _PLACE.sub("", said)
    said = next((meaning for pattern, meaning in _MEANINGS if pattern.fullmatch(said)), said)
    return said if len(said) <= MAX_SENTENCE else f"{said[: MAX_SENTENCE - 1]}…"
