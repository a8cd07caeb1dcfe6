"""Text to token ids and back, by the checkpoint's own tokenizer.json and nothing heavier than ``tokenizers``; the other
form that is read stands in ``tiktoken_form``.

Each token is known by its bytes, so an answer is decoded by joining bytes: streamed or not, the text is the same, and
a token that holds half a character is no special case.

A *control* token is one that user text must not turn into: those the file marks special, and those the chat template
itself writes (some publishers leave their role markers unmarked). Other added tokens, such as runs of spaces or HTML
tags, are ordinary vocabulary and are found in any text.
"""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from dayzero.chat.text_limit import Coverage, TextTooLong, coverage
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError, UsageError

OTHER_FILES = ("tiktoken.model", "*.tiktoken", "tokenizer.model", "spiece.model", "vocab.json", "tekken.json")
NO_UNICODE = "the text holds half of a surrogate pair, which is no character."
METASPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    def marked(self) -> AddedToken:
        """The same token, special for the library."""
        return AddedToken(
            self.content,
            special=True,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=self.normalized,
        )


class _File(msgspec.Struct):
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


class Tokenizer(abc.ABC):
    """One vocabulary, whatever file it stands in. Safe to use from several threads.

    vocab_size: highest id + 1. special_ids: those whose text is no part of an answer (``skip_special``). control_ids:
    those that text never turns into unless asked to; special_ids are among them. added: text of each added token -> id.
    coverage: how much text a token holds at most, None: nobody knows.
    """

    name: str
    vocab_size: int
    special_ids: frozenset[int]
    control_ids: frozenset[int]
    added: dict[str, int]
    coverage: Coverage | None = None
    _max_tokens: int | None = None
    _strip = 0  # spaces at the start of a decoded text that are the tokenizer's own

    def __init__(self) -> None:
        self._bytes: dict[int, bytes] = {}

    # --- text to ids -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def encode(self, text: str, special: bool = False, *, begin: bool = False) -> list[int]:
        """Token ids of a text. special: control tokens spelled in it become themselves; otherwise they are letters.

        begin: add what the tokenizer puts around a text (bos and the like), as for a prompt that no template made.
        UsageError for a text that is not Unicode.
        """

    def limit(self, max_tokens: int) -> None:
        """No prompt may have more tokens from now on."""
        self._max_tokens = max_tokens

    def check_length(self, text: str) -> None:
        """TextTooLong for a text that is beyond the limit however it is encoded, which takes no time to see. One that
        passes may still be too long."""
        if self.coverage is None or self._max_tokens is None or len(text) <= self._max_tokens * self.coverage.chars:
            return
        length = len(text) - sum(map(text.count, self.coverage.lost))
        if length > self._max_tokens * self.coverage.chars:
            raise TextTooLong(
                f"the prompt has {length} characters, of which a token of this model holds at most "
                f"{self.coverage.chars}; it takes at most {self._max_tokens} tokens, prompt and answer together: "
                "shorten the prompt."
            )

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, special) parts, each encoded for itself, so that no token reaches across two of them."""
        return [i for text, special in parts if text for i in self.encode(text, special)]

    def id_of(self, text: str) -> int | None:
        """The id of the added token spelled so, None when that text is no token of its own."""
        return self.added.get(text)

    # --- ids to text -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _look_up(self, token: int) -> bytes:
        """``token_bytes``, before it is remembered."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for ids beyond the vocabulary (heads are padded)."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def text_of(self, token: int) -> str:
        """One token as text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids that begin a text (where a tokenizer puts a space before the first word, it is taken off)."""
        skip = self.special_ids if skip_special else frozenset[int]()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")
        for _ in range(self._strip):
            text = text.removeprefix(" ")
        return text


class JsonTokenizer(Tokenizer):
    """A vocabulary in the form of tokenizer.json."""

    def __init__(self, text: str, config: Mapping[str, Any], *, name: str, controls: str = "") -> None:
        """text: of tokenizer.json. config: tokenizer_config.json. controls: a chat template; the added tokens it spells
        are control tokens. CheckpointError in one sentence when it is no tokenizer that can be decoded."""
        super().__init__()
        self.name = name
        self._library, parsed = _load(text, name)
        self._lock = threading.Lock()
        self._letters: Library | None = None  # the same, with control tokens as letters
        added = {token.content: token for token in parsed.added_tokens}
        for token in self._add_listed(config, added):
            added[token.content] = token
        self.added = {text: token.id for text, token in added.items()}
        self.special_ids = frozenset(token.id for token in added.values() if token.special)
        spelled = [t for t in added.values() if t.content.strip() and t.content in controls]
        self.control_ids = self.special_ids | {t.id for t in spelled}
        unmarked = [t.marked() for t in spelled if not t.special]
        if unmarked:  # from here on the library leaves them alone, too, when it is told to
            self._library.add_special_tokens(unmarked)
        self.vocab_size = max([self._library.get_vocab_size(), *(i + 1 for i in self.added.values())])
        self._added_bytes = {i: text.encode() for text, i in self.added.items()}
        self._decode = _byte_decoder(parsed.decoder, name)
        self._strip = _leading_spaces(parsed.decoder)
        self._begin = self._missing_begin(config)
        found = coverage(text, LETTER_OF)
        self.coverage = found and found._replace(chars=max([found.chars, *map(len, self.added)]))

    def _add_listed(self, config: Mapping[str, Any], added: Mapping[str, _Added]) -> Iterable[_Added]:
        """Tokens that only tokenizer_config.json lists, as some publishers leave them; the library is told of them."""
        listed = config.get("added_tokens_decoder")
        for number, token in sorted((listed or {}).items()) if isinstance(listed, dict) else ():
            if not (isinstance(token, dict) and isinstance(token.get("content"), str)) or token["content"] in added:
                continue
            content, special = token["content"], bool(token.get("special"))
            ours = AddedToken(content, special=special, normalized=bool(token.get("normalized", False)))
            (self._library.add_special_tokens if special else self._library.add_tokens)([ours])
            found = self._library.token_to_id(content)
            if found is None or str(found) != str(number):
                raise CheckpointError(
                    f"tokenizer_config.json of {self.name} gives {content!r} the id {number}, but tokenizer.json makes "
                    f"it {found}; download both files again."
                )
            yield _Added(found, content, special)

    def _missing_begin(self, config: Mapping[str, Any]) -> list[int]:
        """The bos id where tokenizer_config.json asks for one that tokenizer.json's own rules do not add."""
        bos = config.get("bos_token")
        text = bos.get("content") if isinstance(bos, Mapping) else bos
        if config.get("add_bos_token") is not True or not isinstance(text, str):
            return []
        bos_id = self._library.token_to_id(text)
        own = self._library.encode("a", add_special_tokens=True).ids
        return [] if bos_id is None or own[:1] == [bos_id] else [bos_id]

    def encode(self, text: str, special: bool = False, *, begin: bool = False) -> list[int]:
        try:
            library = self._library if special else self._with_letters()
            ids = library.encode(text, add_special_tokens=begin).ids
        except (UnicodeError, TypeError) as error:
            raise UsageError(NO_UNICODE) from error
        if begin and self._begin and ids[:1] != self._begin:
            return self._begin + ids
        return ids

    def _with_letters(self) -> Library:
        """One switch of the library decides how it reads control tokens. Turning it for each text would make all
        texts wait for one long one, so there are two of it, once both are needed."""
        with self._lock:
            if self._letters is None:
                self._letters = Library.from_str(self._library.to_str())
                self._letters.encode_special_tokens = True
            return self._letters

    def _look_up(self, token: int) -> bytes:
        found = self._added_bytes.get(token)
        if found is None:
            piece = self._library.id_to_token(token) if token >= 0 else None
            found = b"" if piece is None else self._decode(piece)
        return found


def open_tokenizer(source: Source, *, controls: str = "") -> tuple[Tokenizer | None, str]:
    """(the tokenizer, where it is from), or (None, why there is none). CheckpointError when its files are damaged.

    controls: the chat template's text, see ``Tokenizer``.
    """
    import fnmatch

    from dayzero.chat import tiktoken_form

    if not source.exists("tokenizer.json"):
        if tiktoken_form.is_known(source):
            return tiktoken_form.TiktokenTokenizer(tiktoken_form.read_vocabulary(source)), tiktoken_form.FILE
        other = sorted({f for pattern in OTHER_FILES for f in fnmatch.filter(source.files(), pattern)})
        if other:
            return None, (
                f"{source.name} holds its tokenizer as {other[0]}, a form that is not read; put the publisher's "
                "tokenizer.json beside the weights, or send token ids."
            )
        return None, f"{source.name} holds no tokenizer; put tokenizer.json beside the weights, or send token ids."
    config: dict[str, Any] = {}
    if source.exists("tokenizer_config.json"):
        config = read_object(source, "tokenizer_config.json", sizes=False)[0]
    text = source.text("tokenizer.json")
    return JsonTokenizer(text, config, name=source.name, controls=controls), "tokenizer.json"


def _load(text: str, name: str) -> tuple[Library, _File]:
    try:
        parsed = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json of {name} is no tokenizer: {str(error)[:160]}.") from error
    try:
        library = Library.from_str(text)
    except Exception as error:  # the library raises nothing narrower for a damaged file
        raise CheckpointError(f"tokenizer.json of {name} is no tokenizer: {str(error)[:160]}.") from error
    library.no_truncation()  # what a training run left in the file would cut prompts short in silence
    library.no_padding()
    return library, parsed


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]


def _byte_decoder(decoder: Mapping[str, Any] | None, name: str) -> Any:
    """piece -> bytes, for the two kinds of vocabulary in use: letters that stand for bytes; text with ▁ for a space."""
    kinds = [part.get("type") for part in _parts(decoder)]
    if "ByteLevel" in kinds:
        return _byte_level
    replaces = {
        part["pattern"]["String"]: part.get("content", "")
        for part in _parts(decoder)
        if part.get("type") == "Replace" and isinstance(part.get("pattern"), Mapping) and "String" in part["pattern"]
    }
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or not set(kinds) <= known or ("Metaspace" not in kinds and METASPACE not in replaces):
        said = ", ".join(str(kind) for kind in kinds) or "none"
        raise CheckpointError(
            f"tokenizer.json of {name} has the decoder {said}; dayzero reads byte-level and sentencepiece vocabularies."
        )
    for part in _parts(decoder):
        if part.get("type") == "Metaspace":
            replaces[part.get("replacement", METASPACE)] = " "
    falls_back = "ByteFallback" in kinds

    def pieces(piece: str) -> bytes:
        match = _BYTE.fullmatch(piece) if falls_back else None
        if match:
            return bytes.fromhex(match[1])
        for old, new in replaces.items():
            piece = piece.replace(old, new)
        return piece.encode()

    return pieces


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_LETTERS[letter] for letter in piece)
    except KeyError:
        return piece.encode()


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: printable Latin-1 for itself, the rest from
    U+0100 on, in order (as GPT-2 numbered them)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in itself]
    return {chr(b): b for b in itself} | {chr(0x100 + n): b for n, b in enumerate(rest)}


_LETTERS = _letters()
LETTER_OF = {byte: letter for letter, byte in _LETTERS.items()}


def _leading_spaces(decoder: Mapping[str, Any] | None) -> int:
    """Spaces at the start of a decoded text that are the tokenizer's own."""
    total = 0
    for part in _parts(decoder):
        if part.get("type") == "Strip" and part.get("content") == " ":
            total += int(part.get("start", 0))
        elif part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            total += 1
    return total
