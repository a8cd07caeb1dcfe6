"""One answer as the offline API puts it together from the engine's outputs: ids, text, log-probabilities. Paper."""

from __future__ import annotations

from dataclasses import dataclass, field

from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.pieces import Assembled
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.events import Logprobs, Output
from dayzero.engine.request import FinishReason, SamplingParams
from dayzero.errors import ModelError, UsageError


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One whole answer.

    prompt: text of the prompt, None when token ids were given. token_ids: of the answer; a stop token that ended it is
    not among them. text: without a stop string, unless asked for; empty without a tokenizer. finish_reason: ``stop``,
    ``length`` or ``error``. stop_reason: the stop string or the stop token's id. logprobs: one for each token id, None
    unless asked for. prompt_logprobs: of prompt tokens 1.., None unless asked for. cached_tokens: prompt tokens found
    in the prefix cache. index: which of ``n`` answers. error: (kind, sentence), see ``events.Output``.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs] | None = None
    cached_tokens: int = 0
    index: int = 0
    error: tuple[str, str] | None = None

    def raise_error(self) -> None:
        """Raise what ended it: UsageError for a request that cannot be served, ModelError for a model that failed."""
        if self.error is not None:
            kind, sentence = self.error
            raise (UsageError if kind in ("too_long", "grammar", "grammar_too_complex") else ModelError)(
                f"the answer ended with an error: {sentence}"
            )


@dataclass(frozen=True, kw_only=True)
class ChatOutput:
    """One answer of a conversation, taken apart by the model's chat format. ``output.text`` is what it wrote."""

    message: Assembled
    output: RequestOutput


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of an answer. finish_reason is set in the last one, exactly once."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: tuple[str, str] | None = None


class Answer:
    """An answer that grows. ``push`` takes an output and gives what is new; ``whole`` is for the end.

    keep: special tokens whose text is part of the answer all the same, as a chat format's parser asks for.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, keep: frozenset[int] = frozenset()) -> None:
        self._params, self._keep = params, keep
        self._text: Detokenizer | None = None
        if tokenizer is not None:
            self._text = Detokenizer(
                tokenizer,
                skip_special=params.skip_special_tokens,
                keep=keep,
                stop=params.stop,
                min_tokens=params.min_tokens,
                include_stop=params.include_stop,
            )
        self._deltas: list[Delta] = []
        self._prompt_logprobs: list[Logprobs] | None = None
        self._cached = 0
        self.finished = False

    def push(self, output: Output) -> Delta:
        """What is new. Once ``finished`` is set the engine's request may still go on, and is to be aborted."""
        assert not self.finished
        self._cached = output.cached if output.cached is not None else self._cached
        self._prompt_logprobs = output.prompt_logprobs if output.prompt_logprobs is not None else self._prompt_logprobs
        text, used, stopped = self._push_text(output)
        finish: FinishReason | None = "stop" if stopped is not None else output.finish
        delta = Delta(
            token_ids=output.tokens[:used],
            text=text,
            logprobs=output.logprobs[:used],
            finish_reason=finish,
            stop_reason=stopped if stopped is not None else output.stop_id,
            error=None if stopped is not None else output.error,
        )
        self.finished = finish is not None
        self._deltas.append(delta)
        return delta

    def _push_text(self, output: Output) -> tuple[str, int, str | None]:
        """(new text, how many of the output's tokens belong to the answer, the stop string that ended it)."""
        if self._text is None:
            return "", len(output.tokens), None
        new = self._text.push(output.tokens)
        text = new.text
        if output.finish is not None and new.stopped is None:
            if output.stop_id is not None and (self._params.include_stop or output.stop_id in self._keep):
                text += self._text.push([output.stop_id]).text
            text += self._text.flush().text
        return text, new.tokens_used, self._text.stopped

    def whole(self, prompt: str | None, prompt_token_ids: list[int], index: int) -> RequestOutput:
        """All of it, once it has finished."""
        last = self._deltas[-1]
        assert last.finish_reason is not None
        logprobs = [item for delta in self._deltas for item in delta.logprobs]
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            token_ids=[token for delta in self._deltas for token in delta.token_ids],
            text="".join(delta.text for delta in self._deltas),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=logprobs if self._params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=self._cached,
            index=index,
            error=last.error,
        )
