"""Structured output: a matcher for each request that has a grammar, and the tokens it allows next.

Masks are bitmasks over the rows of the model's head, 32-bit words, token i is bit i % 32 of word i // 32. Ids that the
tokenizer does not know are never allowed, and the ids that end an answer exactly when the grammar is complete.
Paper: the library is imported when the first grammar comes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dayzero.chat.tiktoken_form import SPLIT, Vocabulary
from dayzero.engine.grammar_words import failed, one_sentence
from dayzero.engine.request import Grammar, NewRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

NO_TOKENIZER = "the checkpoint has no tokenizer.json, which structured output needs; ask without a grammar"
# Between the parts of a JSON text. An endless run of it would be valid, and models do fall into one.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
MAX_COMPILED = 32  # grammars kept: services ask with the same few schemas again and again
COMPILERS = 4  # grammars compiled at a time: a slow one does not hold up the others
COMPILE_SECONDS = 10.0  # the largest schemas that the library takes need some tenths of one

Result = TypeVar("Result")
Ids = Iterable[int]


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that it has no continuation for. The message is one sentence."""


def check_grammar(grammar: Grammar, tokenizer_json: str | Vocabulary | None) -> str | None:
    """Why this grammar cannot be used, as a sentence; None when it can.

    tokenizer_json: text of the checkpoint's file, None when it has none. The first call with a tokenizer takes up to a
    second for a large vocabulary, a call up to some tenths: not for an event loop's own thread.
    """
    if tokenizer_json is None:
        return NO_TOKENIZER
    try:
        start_matcher(grammar, _only_tokenizer(tokenizer_json))
    except GrammarError as error:
        return str(error)
    return None


@lru_cache(maxsize=2)
def _only_tokenizer(tokenizer_json: str | Vocabulary) -> LLTokenizer:
    return read_tokenizer(tokenizer_json, 0)


def read_tokenizer(tokenizer_json: str | Vocabulary, vocab: int) -> LLTokenizer:
    """The matchers' view of a tokenizer: text of tokenizer.json or the other form, rows of the head (0: not known).

    It is not told which ids end an answer: there may be several, some unknown to the file; ``Guard`` sees to them.
    Errors: GrammarError when the file cannot be read so.
    """
    from llguidance import LLTokenizer

    if isinstance(tokenizer_json, Vocabulary):
        return _read_ranks(tokenizer_json, vocab)
    if not tokenizer_json.lstrip().startswith("{"):  # anything else would be taken for a path
        raise GrammarError("structured output cannot read tokenizer.json: it is no JSON object")
    try:
        if vocab:
            try:
                return LLTokenizer(tokenizer_json, n_vocab=vocab)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
        return LLTokenizer(tokenizer_json)  # more ids than the head has rows
    except ValueError as error:
        raise GrammarError(f"structured output cannot read tokenizer.json: {one_sentence(str(error))}") from None


def _read_ranks(found: Vocabulary, vocab: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    last = max(found.added.values())
    return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]  # the stubs lack it
        encoder=dict(found.ranks),
        special_tokens=dict(found.added),
        pattern=SPLIT,
        eos_token=last,  # the library wants one; see above
        n_vocab=max(vocab, last + 1),
    )


def start_matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher before its first token. Errors: GrammarError when the text is no grammar, or nothing fits it."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, _compile(grammar), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds a grammar that no text satisfies
        why = matcher.get_error()
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
    if why:
        raise GrammarError(f"the {_NAMES[grammar.kind]} cannot be used: {one_sentence(why)}")
    return matcher


_NAMES = {
    "json_object": "JSON object grammar",
    "json_schema": "JSON schema",
    "regex": "regex",
    "choice": "list of choices",
    "lark": "grammar",  # often made from a client's schema and the model's own call format
}


def _compile(grammar: Grammar) -> str:
    """The library's own form of a grammar. It checks little here; the matcher does."""
    from llguidance import LLMatcher

    spaces: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=spaces)
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(_schema(grammar.text), overrides=spaces)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _choices(grammar.text))
    return LLMatcher.grammar_from_lark(f"start: {choices}")


def _schema(text: str) -> str:
    """The schema as an object; ``true`` is one that everything fits."""
    schema = json.loads(text)
    if schema is True:
        return "{}"
    if schema is False:
        raise ValueError("no text fits it")
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object")
    return text


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it must be a JSON list of one or more texts")
    return choices


class Guard:
    """One request's grammar while its answer grows. Errors of every method: GrammarError, for good.

    after: the grammar sleeps until this token id has been seen (None: it does not). vocab: rows of the head. ends: ids
    that end an answer. They are allowed when the grammar is complete, and where it names one of them itself, as some
    call formats close with such a token. also_ends: further ids that end this request's answer.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, after: int | None, vocab: int, ends: Ids, also_ends: Ids = ()
    ) -> None:
        self._matcher, self._after, self._vocab = matcher, after, vocab
        self._ends = frozenset(i for i in ends if 0 <= i < vocab)
        self._all_ends = self._ends | {i for i in also_ends if 0 <= i < vocab}
        # An id that is letters to the matcher: it would be allowed inside a text, and end the answer there.
        self._letters = [i for i in self._ends if i < tokenizer.vocab_size and not tokenizer.is_special_token(i)]
        # What the matcher takes for an end, and the model does not.
        self._not_ends = [i for i in tokenizer.eos_tokens if i < vocab and i not in self._all_ends]

    def advance(self, tokens: Iterable[int]) -> None:
        """Committed tokens, in order."""
        for token in tokens:
            if self._after is not None:
                self._after = None if token == self._after else self._after
            elif token in self._ends and (self._matcher.is_accepting() or token in self._letters):
                continue  # an answer that goes on behind its end (ignore_eos, min_tokens)
            elif not self._matcher.consume_token(token):
                raise GrammarError(failed("the answer left its grammar", self._matcher.get_error()))

    def mask(self) -> bytes | None:
        """Tokens allowed next, 4 * ceil(vocab / 32) bytes; None: all."""
        if self._after is not None:
            return None
        allowed = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise GrammarError(failed("the grammar failed", self._matcher.get_error()))
        num_bytes = 4 * -(-self._vocab // 32)
        allowed.extend(bytes(max(0, num_bytes - len(allowed))))
        del allowed[num_bytes:]
        tail = int.from_bytes(allowed[-4:], "little") & ((1 << (self._vocab - 1) % 32 + 1) - 1)
        allowed[-4:] = tail.to_bytes(4, "little")
        accepting = self._matcher.is_accepting()
        for token in (*self._letters, *(self._not_ends if accepting else ())):
            allowed[token // 8] &= ~(1 << token % 8)
        for token in self._all_ends if accepting else ():
            allowed[token // 8] |= 1 << token % 8
        if not any(allowed):
            raise GrammarError("the grammar allows no token of the vocabulary here")
        return bytes(allowed)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A request whose grammar is being compiled. until: when that has taken too long, by time.monotonic."""

    request: NewRequest
    future: Future[LLMatcher]
    until: float


class Grammars:
    """Grammars of all live requests, by request id. They are compiled on threads of their own: a large schema takes
    tenths of a second, in which nobody else's tokens should wait.

    tokenizer_json: text of the checkpoint's file or its other form, kept until the first grammar comes; None when it
    has none. vocab: rows of the head. stop_ids: ids that end an answer. wake: called from another thread when ``ready``
    has something. seconds: a grammar that is not compiled by then is refused.
    """

    def __init__(
        self,
        tokenizer_json: str | Vocabulary | None,
        vocab: int,
        stop_ids: Iterable[int],
        wake: Callable[[], None],
        *,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._text, self._vocab, self._ends, self._wake = tokenizer_json, vocab, frozenset(stop_ids), wake
        self._seconds = seconds
        self._kept = threading.Lock()  # of the tokenizer and the compiled grammars, which the compilers share
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compilers: ThreadPoolExecutor | None = None
        self._coming: dict[str, _Coming] = {}
        self._guards: dict[str, Guard] = {}
        self._failed: dict[str, str] = {}

    @property
    def coming(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._coming)

    def begin(self, request: NewRequest) -> None:
        """Compile the request's grammar; ``ready`` will give the request back."""
        assert request.params.grammar is not None
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(COMPILERS, "grammars")
        future = self._compilers.submit(self._compile, request.params.grammar)
        late = threading.Timer(self._seconds, self._wake)
        late.daemon = True
        self._coming[request.id] = _Coming(request, future, time.monotonic() + self._seconds)
        late.start()

        def done(_: Future[LLMatcher]) -> None:
            late.cancel()
            self._wake()

        future.add_done_callback(done)

    def ready(self, wait: bool = False) -> list[tuple[NewRequest, str | None]]:
        """Requests whose grammar is compiled, in order of arrival, and why it cannot be used (None: it can).
        wait: until there is one, if any are coming."""
        if wait and self._coming:
            until = min(coming.until for coming in self._coming.values())
            every = [coming.future for coming in self._coming.values()]
            futures.wait(every, max(0.0, until - time.monotonic()), futures.FIRST_COMPLETED)
        now = time.monotonic()
        done = [coming for coming in self._coming.values() if coming.future.done() or now >= coming.until]
        return [(coming.request, self._arrived(coming)) for coming in done]

    def cancel(self, request_id: str) -> bool:
        """Forget a request that ``ready`` has not given back; whether there was one."""
        return self._coming.pop(request_id, None) is not None

    def advance(self, request_id: str, tokens: Sequence[int]) -> None:
        """Committed tokens of any request; one without a grammar is passed over."""
        guard = self._guards.get(request_id)
        if guard is not None and tokens:
            self._run(request_id, lambda: guard.advance(tokens))

    def mask(self, request_id: str) -> bytes | None:
        """Tokens allowed next, None: all. Errors: GrammarError when there is none; the request is to end."""
        guard = self._guards.get(request_id)
        mask = None if guard is None else self._run(request_id, guard.mask)
        if request_id in self._failed:
            raise GrammarError(self._failed[request_id])
        return mask

    def end(self, request_id: str) -> None:
        """The request has finished."""
        self._guards.pop(request_id, None)
        self._failed.pop(request_id, None)

    def close(self) -> None:
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _arrived(self, coming: _Coming) -> str | None:
        request, future = coming.request, coming.future
        del self._coming[request.id]
        if not future.done():  # it cannot be stopped in the middle; the library's own limits end it
            future.cancel()
            kind = _NAMES[request.params.grammar.kind] if request.params.grammar is not None else "grammar"
            return f"the {kind} cannot be used: it was not compiled within {self._seconds:g} seconds; make it simpler"
        error = future.exception()
        if error is not None:
            return str(error) if isinstance(error, GrammarError) else _bug(error)
        assert request.params.grammar is not None
        assert self._tokenizer is not None
        self._guards[request.id] = Guard(
            future.result(),
            self._tokenizer,
            request.params.grammar.after,
            self._vocab,
            self._ends,
            request.params.stop_token_ids,
        )
        return None

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """On a compiler's thread."""
        with self._kept:
            if self._tokenizer is None:
                if self._text is None:
                    raise GrammarError(NO_TOKENIZER)
                self._tokenizer = read_tokenizer(self._text, self._vocab)
                self._text = None
            tokenizer = self._tokenizer
            key = msgspec.structs.replace(grammar, after=None)
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found.deep_copy()
        made = start_matcher(grammar, tokenizer)
        with self._kept:
            self._compiled[key] = made
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _run(self, request_id: str, work: Callable[[], Result]) -> Result | None:
        """Whatever goes wrong in a grammar ends the one request it belongs to."""
        if request_id in self._failed:
            return None
        try:
            return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except GrammarError as error:
            self._failed[request_id] = str(error)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            self._failed[request_id] = _bug(error)
        return None


def _bug(error: BaseException) -> str:
    return f"the grammar library failed: {type(error).__name__}: {one_sentence(str(error))}"
