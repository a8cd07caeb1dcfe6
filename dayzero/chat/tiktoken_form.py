"""The vocabulary form ``tiktoken.model``: one base64 token and its rank a line, and no tokenizer.json beside it.

Ids are the ranks; 256 ids behind them are added tokens, named in tokenizer_config.json, the others ``reserved``. The
expression that splits a text into words stands in the publisher's code alone, which is never run, so it is known here
by the name of that code. Text is encoded by the library the publisher uses, so ids are the same by construction.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dayzero.chat.text_limit import Coverage
from dayzero.chat.tokenizer import NO_UNICODE, Tokenizer
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from tiktoken import Encoding

FILE, CONFIG = "tiktoken.model", "tokenizer_config.json"
NUM_ADDED = 256
CODE = "tokenization_kimi"  # whose split this is
# Words: runs of Han; letters, case by case, with one sign before and an English contraction behind; up to three digits;
# signs with the line breaks behind them; line breaks; spaces, of which the last belongs to the next word.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MAX_CHARACTERS = 400_000  # the publisher's code cuts a text at every one of these,
MAX_RUN = 25_000  # and a run of nothing but white space, or of no white space, at every one of those
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What the files hold. ranks: token -> id, ids 0…len−1. added: text -> id, all behind the ranks. special: ids of
    added tokens whose text is no part of an answer. begin: the bos id where the files ask for one."""

    name: str
    ranks: Mapping[bytes, int]
    added: Mapping[str, int]
    special: frozenset[int]
    begin: tuple[int, ...] = ()


def is_known(source: Source) -> bool:
    """Whether the folder holds a vocabulary of this form whose way to split texts is known."""
    if not source.exists(FILE):
        return False
    config = read_object(source, CONFIG, sizes=False)[0] if source.exists(CONFIG) else {}
    return CODE in str(config.get("auto_map")) or source.exists(f"{CODE}.py")


def read_vocabulary(source: Source) -> Vocabulary:
    """Errors: CheckpointError in one sentence, with the line at fault."""
    ranks = read_ranks(source.text(FILE), source.name)
    config = read_object(source, CONFIG, sizes=False)[0] if source.exists(CONFIG) else {}
    first = len(ranks)
    names = {i: (f"<|reserved_token_{i}|>", True) for i in range(first, first + NUM_ADDED)}
    listed = config.get("added_tokens_decoder")
    for number, token in listed.items() if isinstance(listed, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if not isinstance(text, str) or not text or not number.isdecimal() or int(number) not in names:
            raise CheckpointError(
                f"{CONFIG} of {source.name} lists {str(text)[:40]!r} as token {number[:12]}, but the added tokens of "
                f"{FILE} are {first} to {first + NUM_ADDED - 1}; download both files again."
            )
        names[int(number)] = text, token.get("special") is not False
    added = {text: i for i, (text, _) in names.items()}
    if len(added) < len(names):
        raise CheckpointError(f"{CONFIG} of {source.name} gives one text to two tokens; download it again.")
    special = frozenset(i for i, (_, is_special) in names.items() if is_special)
    bos = config.get("bos_token")
    text = bos.get("content") if isinstance(bos, Mapping) else bos
    begin = (added[text],) if config.get("add_bos_token") is True and text in added else ()
    return Vocabulary(source.name, ranks, added, special, begin)


def read_ranks(text: str, name: str) -> dict[bytes, int]:
    """Token -> rank, of the text of the file. CheckpointError when it is damaged."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise CheckpointError(
                f"{FILE} of {name}: line {number} is no base64 text with a number behind it; download the file again."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{FILE} of {name}: its ranks are not 0 to {len(ranks) - 1}; download the file again.")
    lacks = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if lacks:
        raise CheckpointError(
            f"{FILE} of {name} has no token for the byte {lacks[0]}, so not every text can be encoded; "
            "download the file again."
        )
    return ranks


class TiktokenTokenizer(Tokenizer):
    """A vocabulary of this form. Every added token is a control token: text never turns into one unless asked to."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.name = vocabulary.name
        self.added = dict(vocabulary.added)
        self.special_ids = vocabulary.special
        self.control_ids = frozenset(self.added.values())
        self.vocab_size = max(self.control_ids) + 1
        self._begin = list(vocabulary.begin)
        self._tokens = list(vocabulary.ranks)
        for token, rank in vocabulary.ranks.items():
            self._tokens[rank] = token
        self._spelled = {i: text.encode() for text, i in self.added.items()}
        self._library = library_encoding(vocabulary)
        self.coverage = Coverage(max(map(len, (*vocabulary.ranks, *self.added))))

    def encode(self, text: str, special: bool = False, *, begin: bool = False) -> list[int]:
        allowed = "all" if special else frozenset[str]()
        try:
            text.encode()
        except UnicodeError as error:
            raise UsageError(NO_UNICODE) from error
        ids = list(self._begin) if begin else []
        for part in pieces(text):
            ids += self._library.encode(part, allowed_special=allowed, disallowed_special=())  # type: ignore[arg-type]
        return ids

    def _look_up(self, token: int) -> bytes:
        if 0 <= token < len(self._tokens):
            return self._tokens[token]
        return self._spelled.get(token, b"")


def library_encoding(vocabulary: Vocabulary) -> Encoding:
    from tiktoken import Encoding

    return Encoding(
        vocabulary.name,
        pat_str=SPLIT,
        mergeable_ranks=dict(vocabulary.ranks),
        special_tokens=dict(vocabulary.added),
    )


def pieces(text: str) -> Iterator[str]:
    """A text in the parts that are encoded each for itself, as the publisher's code cuts it."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part = text[start : start + MAX_CHARACTERS]
        begins = 0
        if len(part) > MAX_RUN:
            for run in _RUN.finditer(part):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield part[begins:cut]
                    begins = cut
        yield part[begins:]


def file_text(ranks: Mapping[bytes, int]) -> str:
    """The text of a file of this form."""
    lines = sorted((rank, token) for token, rank in ranks.items())
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in lines)
