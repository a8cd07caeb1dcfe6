"""How many characters one token can stand for at most, so that a text that is too long in any case is refused before
anybody spends half a minute on encoding it. Paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from dayzero.errors import UsageError

# Characters that a composed one can stand for: no canonical decomposition is longer than four (Unicode, UAX 15).
COMPOSED = 4
NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
ASCII, BEHIND = range(0x80), range(0x80, 0xC0)  # BEHIND: the bytes behind the first of a longer character


class TextTooLong(UsageError):
    """A text has more tokens than a prompt may have, however it is encoded."""


class Coverage(NamedTuple):
    """chars: most characters that one token stands for. lost: those that the vocabulary has no token for, and drops."""

    chars: int
    lost: str = ""


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: dict[str, Any] | list[tuple[str, Any]] = {}
    byte_fallback: bool = False


class _Token(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _File(msgspec.Struct):
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_Token] = []


def coverage(tokenizer_json: str, letters: Mapping[int, str]) -> Coverage | None:
    """What the tokens of a tokenizer.json cover; None where nobody can say, since something in it drops or joins
    characters. letters: of byte-level vocabularies, byte -> the letter that stands for it."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
    except (msgspec.DecodeError, RecursionError):
        return None
    squeezed = _squeezed(file.normalizer)
    if squeezed is None or file.model.type not in (None, "BPE", "Unigram") or _drops(file.pre_tokenizer):
        return None
    if any(token.lstrip or token.rstrip for token in file.added_tokens):  # swallows any white space
        return None
    vocab = file.model.vocab
    pieces = list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    known = _known_bytes(file, set(pieces), letters)
    if not known.issuperset(BEHIND):  # else something is left of every character beyond ASCII
        return None
    chars = max([1, *map(len, pieces), *(len(token.content) for token in file.added_tokens)]) * squeezed
    return Coverage(chars, "".join(chr(byte) for byte in ASCII if byte not in known))


def _parts(step: Mapping[str, Any] | None, word: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, its parts' parts too."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [part for inner in step.get(word) or () for part in _parts(inner, word)]


def _squeezed(normalizer: Mapping[str, Any] | None) -> int | None:
    """Characters of a text that come to one at most before it is encoded, None: any number."""
    out = 1
    for part in _parts(normalizer, "normalizers"):
        kind = part.get("type")
        if kind in NORMAL_FORMS:
            out = COMPOSED
        elif kind == "Replace":
            old = (part.get("pattern") or {}).get("String")
            if old is None or len(part.get("content") or "") < len(old):
                return None
        elif kind != "Prepend":
            return None
    return out


def _drops(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether characters may be lost between words."""
    keeps = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"}
    parts = _parts(pre_tokenizer, "pretokenizers")
    return any(part.get("type") not in keeps or part.get("behavior") == "Removed" for part in parts)


def _known_bytes(file: _File, pieces: set[str], letters: Mapping[int, str]) -> frozenset[int]:
    if file.model.byte_fallback:
        return frozenset(b for b in range(256) if f"<0x{b:02X}>" in pieces or (b < 0x80 and chr(b) in pieces))
    level = any(part.get("type") == "ByteLevel" for part in _parts(file.pre_tokenizer, "pretokenizers"))
    return frozenset(b for b in range(256) if letters[b] in pieces) if level else frozenset()
