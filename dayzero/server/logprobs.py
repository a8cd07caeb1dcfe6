"""Log-probabilities as each API writes them. Every number is finite: JSON has no other."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from dayzero.chat.pieces import Content, OutputParser, Piece, ToolProblem
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.events import Logprobs
from dayzero.server.protocol.chat import TokenLogprob, TopLogprob
from dayzero.server.protocol.completions import CompletionLogprobs
from dayzero.server.protocol.shared import PromptLogprob

LEAST = -9999.0  # stands for a probability of zero


def finite(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """One token as text; its id where there is no tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.text_of(token)


def _bytes(tokenizer: Tokenizer | None, token: int) -> list[int] | None:
    return None if tokenizer is None else list(tokenizer.token_bytes(token))


def chat_logprobs(tokenizer: Tokenizer | None, items: Sequence[Logprobs]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token=token_text(tokenizer, item.token),
            logprob=finite(item.logprob),
            bytes=_bytes(tokenizer, item.token),
            top_logprobs=[
                TopLogprob(token=token_text(tokenizer, t), logprob=finite(p), bytes=_bytes(tokenizer, t))
                for t, p in item.top
            ],
        )
        for item in items
    ]


def prompt_logprobs(tokenizer: Tokenizer | None, items: Sequence[Logprobs]) -> list[dict[str, PromptLogprob] | None]:
    """One entry a prompt token; nothing comes before the first."""
    out: list[dict[str, PromptLogprob] | None] = [None]
    for item in items:
        entry = {
            str(token): PromptLogprob(
                logprob=finite(logprob), rank=rank + 1, decoded_token=token_text(tokenizer, token)
            )
            for rank, (token, logprob) in enumerate(item.top)
        }
        entry[str(item.token)] = PromptLogprob(
            logprob=finite(item.logprob), rank=item.rank, decoded_token=token_text(tokenizer, item.token)
        )
        out.append(entry)
    return out


class ContentLogprobs:
    """Tells which tokens of a chat answer lie in its content, however the answer is cut.

    Each token's text is read for itself by a parser of its own. When content comes out, it is the newest tokens' text:
    a token may be held back, as half a character or as what may yet be a marker, and be content only later. parser:
    fresh, of this answer. skip: ids whose text is left out of it.
    """

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._parser, self._tokenizer, self._skip = parser, tokenizer, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[tuple[Logprobs, int]] = []  # with the bytes of its text
        self._run, self._open = 0, False

    def take(self, items: Sequence[Logprobs]) -> list[tuple[int, Logprobs]]:
        """The next tokens; those that are known to be content, in order, with the number of their run: calls or
        reasoning may stand between runs of content."""
        out: list[tuple[int, Logprobs]] = []
        for item in items:
            if item.token not in self._skip:
                data = self._tokenizer.token_bytes(item.token)
                self._held.append((item, len(data)))
                out += self._sorted(self._parser.push(self._utf8.decode(data), [item.token]))
        return out

    def finish(self) -> list[tuple[int, Logprobs]]:
        """The rest."""
        return self._sorted([*self._parser.push(self._utf8.decode(b"", final=True), []), *self._parser.finish()])

    def _sorted(self, pieces: Sequence[Piece]) -> list[tuple[int, Logprobs]]:
        if not pieces:
            return []
        size = sum(len(piece.text.encode()) for piece in pieces if isinstance(piece, Content))
        held, self._held = self._held, []
        first = len(held)
        while first and size > 0:
            first -= 1
            size -= held[first][1]
        for piece in pieces:
            if isinstance(piece, Content):
                self._run += not self._open
            self._open = isinstance(piece, Content) or (self._open and isinstance(piece, ToolProblem))
        return [(self._run, item) for item, _ in held[first:]]


class LegacyLogprobs:
    """The parallel lists of /v1/completions, built up token by token. skip_special: as in the choice's text."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def take(self, tokens: Sequence[int], items: Sequence[Logprobs | None]) -> CompletionLogprobs:
        """The next tokens; None: the first token of a prompt, which nothing predicts."""
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, item in zip(tokens, items, strict=True):
            out.tokens.append(token_text(self._tokenizer, token))
            out.text_offset.append(self._offset)
            out.token_logprobs.append(None if item is None else finite(item.logprob))
            out.top_logprobs.append(None if item is None else self._top(item))
            self._offset += self._length(token)
        return out

    def _top(self, item: Logprobs) -> dict[str, float]:
        """Text -> logprob. Of several tokens with one text (pieces of characters), the likeliest counts; the chosen
        token is always there."""
        out: dict[str, float] = {}
        for token, logprob in [*item.top, (item.token, item.logprob)]:
            text = token_text(self._tokenizer, token)
            out[text] = max(out.get(text, LEAST), finite(logprob))
        return out

    def _length(self, token: int) -> int:
        if self._tokenizer is None or (self._skip and token in self._tokenizer.special_ids):
            return 0
        return len(self._utf8.decode(self._tokenizer.token_bytes(token)))
