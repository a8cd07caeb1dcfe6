"""Token ids to text as they come: whole characters only, and nothing that may turn out to begin a stop string.

The text is a function of the ids alone. However they are cut into pushes, the same characters come out, and the same
token is named as the one that completed a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dayzero.chat.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Text:
    """text: what is certain now. stopped: the stop string that ended the answer, None while it goes on. tokens_used:
    how many of the ids of this push belong to the answer: all, or up to and with the one that completed the stop."""

    text: str
    stopped: str | None
    tokens_used: int


class Detokenizer:
    """One answer's text. skip_special: leave out special tokens' text, except that of ``keep`` (a parser's markers).

    stop: texts that end the answer; of two that are complete with the same character, the longer counts.
    min_tokens: a stop string that one of the first ``min_tokens`` tokens completes is text like any other; one that a
    later token completes counts wherever it began. include_stop: whether the stop string is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        keep: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._early = min_tokens  # tokens that are still to come before stop strings count
        self._skip = tokenizer.special_ids - frozenset(keep) if skip_special else frozenset[int]()
        self._stops = tuple(sorted((s for s in stop if s), key=len, reverse=True))
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        return self._stopped

    def push(self, ids: Sequence[int]) -> Text:
        """More tokens. After a stop, nothing: tokens_used is 0."""
        if self._stopped is not None:
            return Text("", self._stopped, 0)
        if not self._stops:
            data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skip)
            return Text(self._utf8.decode(data), None, len(ids))
        out = []
        for number, token in enumerate(ids):
            self._early -= 1
            if token in self._skip:
                continue
            out.append(self._take(self._utf8.decode(self._tokenizer.token_bytes(token))))
            if self._stopped is not None:
                return Text("".join(out), self._stopped, number + 1)
        return Text("".join(out), None, len(ids))

    def flush(self) -> Text:
        """The rest, when no more tokens come: what was held back; half a character becomes U+FFFD."""
        if self._stopped is not None:
            return Text("", self._stopped, 0)
        text = self._take(self._utf8.decode(b"", final=True)) + ("" if self._stopped is not None else self._held)
        self._held = ""
        return Text(text, self._stopped, 0)

    def _take(self, text: str) -> str:
        """Text that can go out once ``text`` has come; sets ``_stopped``."""
        if not self._stops:
            return text
        if not text:
            return ""
        old = len(self._held)
        self._held += text
        end, stop = self._first_stop(old) if self._early < 0 else (0, None)
        if stop is not None:
            self._stopped = stop
            out = self._held[: end if self._include_stop else end - len(stop)]
            self._held = ""
            return out
        keep = self._may_begin()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return out

    def _first_stop(self, old: int) -> tuple[int, str | None]:
        """(end, stop) of the stop string that is complete first; only those that end in the new text can be."""
        best, which = len(self._held) + 1, None
        for stop in self._stops:  # longest first, so that of two with one end the longer stays
            at = self._held.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and at + len(stop) < best:
                best, which = at + len(stop), stop
        return best, which

    def _may_begin(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(s) > length and s.startswith(tail) for s in self._stops):
                return length
        return 0
