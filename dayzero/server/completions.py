"""POST /v1/completions: text or token ids, one prompt or several, echoed with log-probabilities if asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from dayzero.chat.pieces import Content
from dayzero.chat.text_limit import TextTooLong
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.events import Logprobs
from dayzero.engine.request import Grammar, SamplingParams
from dayzero.server.endpoint import Call
from dayzero.server.errors import ApiError, as_api_error, bad
from dayzero.server.generation import Chunk, Generation
from dayzero.server.jobs import need_tokenizer, off_loop, start, text_reader, tokenizer_of
from dayzero.server.logprobs import LegacyLogprobs, prompt_logprobs
from dayzero.server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from dayzero.server.sampling import Asked, checked, grammar_asked, sampling_params
from dayzero.server.stream import DONE, data, respond

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """ids: what the model reads. text: as the client gave it, None when it gave ids."""

    ids: list[int]
    text: str | None


async def completions(call: Call) -> Response:
    body: CompletionRequest = call.body
    model = call.state.check_model(body.model)
    _refuse(body)
    info = call.state.ready()
    if body.stop:
        need_tokenizer(call.state, "stop")
    prompts = await read_prompts(call, body)
    params = _params(call, body)
    # as this API has always had it; where there is less room, what there is: nobody has asked for 16
    defaults = replace(call.state.defaults, max_tokens=DEFAULT_MAX_TOKENS)
    each = [checked(params, prompt.ids, info, defaults) for prompt in prompts]
    tokenizer = tokenizer_of(call.state)
    ids = [prompt.ids for prompt in prompts]
    generation = start(call, ids, each, body, lambda: text_reader(tokenizer, params))
    return await respond(call, generation, CompletionWriter(call, generation, prompts, model), bool(body.stream))


def _refuse(body: CompletionRequest) -> None:
    """What this endpoint cannot do. ApiError 400."""
    if body.suffix:
        raise bad("suffix is not taken: no model here fills in the middle.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad(f"best_of is {body.best_of}; it may only equal n, since answers are not ranked here.", "best_of")


async def read_prompts(call: Call, body: CompletionRequest) -> list[TextPrompt]:
    """The four forms of ``prompt``. ApiError 400 for a mixture, and for text where there is no tokenizer."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise bad("prompt mixes texts, token ids and lists; all of its entries must be of one kind.", "prompt")
    if kinds == {int}:
        return [TextPrompt([i for i in given if isinstance(i, int)], None)]
    if kinds == {list}:
        return [TextPrompt(ids, None) for ids in given if isinstance(ids, list)]
    tokenizer = need_tokenizer(call.state, "prompt")
    texts = [text for text in given if isinstance(text, str)]
    begin = body.add_special_tokens is not False
    for text in texts:
        try:
            tokenizer.check_length(text)
        except TextTooLong as error:
            raise bad(str(error), "prompt", as_api_error(error).code) from error
    return await off_loop(
        call, lambda: [TextPrompt(tokenizer.encode(text, special=True, begin=begin), text) for text in texts]
    )


def _params(call: Call, body: CompletionRequest) -> SamplingParams:
    found = grammar_asked(body, body.response_format)
    asked = Asked(
        max_tokens=body.max_tokens,
        n=body.n or 1,
        stop=body.stop,
        logprobs=body.logprobs,
        grammar=None if found is None else Grammar(kind=found[0], text=found[1]),
    )
    params = sampling_params(body, asked, call.state.defaults)
    if body.echo and body.logprobs is not None:
        needed = max(body.logprobs, body.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=needed)
    return params


class _Answer:
    def __init__(self, tokenizer: Tokenizer | None, skip_special: bool) -> None:
        self.text: list[str] = []
        self.legacy = LegacyLogprobs(tokenizer, skip_special)
        self.choice = CompletionChoice(index=0, text="")


class CompletionWriter:
    """Chunks to the answer of a completion request."""

    def __init__(self, call: Call, generation: Generation, prompts: Sequence[TextPrompt], model: str) -> None:
        body: CompletionRequest = call.body
        self._body, self._generation, self._prompts, self._model = body, generation, prompts, model
        self._tokenizer = tokenizer_of(call.state)
        self._created, self._id = int(time.time()), f"cmpl-{call.id}"
        skip = body.skip_special_tokens is not False
        self._answers = [_Answer(self._tokenizer, skip) for _ in generation.choices]
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    def add(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            new, answer = self._choice(chunk), self._answers[chunk.index]
            answer.text.append(new.text)
            if chunk.first:
                answer.choice = new
            else:
                _extend(answer.choice, new)

    def whole(self) -> Completion:
        choices = [answer.choice for answer in self._answers]
        for answer in self._answers:
            answer.choice.text = "".join(answer.text)
        return self._completion(choices, usage=True)

    def events(self, chunks: list[Chunk]) -> bytes:
        choices = [self._choice(chunk) for chunk in chunks]
        return b"".join(data(self._completion([choice])) for choice in choices if _says(choice))

    def end(self) -> bytes:
        return data(self._completion([], usage=True)) + DONE if self._usage else DONE

    def error(self, error: ApiError) -> bytes:
        return data(error.body("openai")) + DONE

    def _completion(self, choices: list[CompletionChoice], usage: bool = False) -> Completion:
        numbers = self._generation.usage() if usage else None if self._usage else UNSET
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=numbers)

    def _choice(self, chunk: Chunk) -> CompletionChoice:
        body, legacy = self._body, self._answers[chunk.index].legacy
        out = CompletionChoice(index=chunk.index, text="")
        if chunk.first:
            self._begin(chunk, out, legacy)
        out.text += _text(chunk)
        if body.logprobs is not None:
            new = legacy.take(chunk.tokens, chunk.logprobs)
            out.logprobs = new if out.logprobs is None else _extended(out.logprobs, new)
        if body.return_token_ids or self._tokenizer is None:
            out.token_ids = [*chunk.tokens, *([] if chunk.stop_id is None else [chunk.stop_id])]
        if chunk.finish is not None:
            out.finish_reason, out.stop_reason = chunk.finish, chunk.stop_reason
        return out

    def _begin(self, chunk: Chunk, out: CompletionChoice, legacy: LegacyLogprobs) -> None:
        """What goes before the first token: the prompt's own text and numbers."""
        body, prompt = self._body, self._prompts[self._generation.choices[chunk.index].prompt_index]
        told = chunk.prompt_logprobs
        if body.prompt_logprobs is not None and told is not None:
            out.prompt_logprobs = prompt_logprobs(self._tokenizer, _likeliest(told, body.prompt_logprobs))
        if body.return_token_ids:
            out.prompt_token_ids = prompt.ids
        if body.echo:
            out.text = self._prompt_text(prompt)
            if body.logprobs is not None:
                assert told is not None, "prompt log-probabilities were asked for and did not come"
                out.logprobs = legacy.take(prompt.ids, [None, *_likeliest(told, body.logprobs)])

    def _prompt_text(self, prompt: TextPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt.ids, skip_special=self._body.skip_special_tokens is not False)


def _likeliest(items: Sequence[Logprobs], num_top: int) -> list[Logprobs]:
    return [msgspec.structs.replace(item, top=item.top[:num_top]) for item in items]


def _text(chunk: Chunk) -> str:
    return "".join(piece.text for piece in chunk.pieces if isinstance(piece, Content))


def _says(choice: CompletionChoice) -> bool:
    return bool(
        choice.text
        or choice.finish_reason
        or (choice.logprobs and choice.logprobs.tokens)
        or choice.token_ids
        or choice.prompt_logprobs is not UNSET
        or choice.prompt_token_ids is not UNSET
    )


def _extended(a: CompletionLogprobs, b: CompletionLogprobs) -> CompletionLogprobs:
    """``a`` with ``b`` behind it, in place."""
    a.tokens += b.tokens
    a.token_logprobs += b.token_logprobs
    a.top_logprobs += b.top_logprobs
    a.text_offset += b.text_offset
    return a


def _extend(answer: CompletionChoice, new: CompletionChoice) -> None:
    """Add a later part of a choice, but for its text."""
    if answer.logprobs is not None and new.logprobs is not None:
        _extended(answer.logprobs, new.logprobs)
    if isinstance(answer.token_ids, list) and isinstance(new.token_ids, list):
        answer.token_ids += new.token_ids
    answer.finish_reason, answer.stop_reason = new.finish_reason, new.stop_reason
