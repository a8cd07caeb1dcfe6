"""LLM: a model in the caller's own process, prompts in, answers out. Imports torch only when one is made."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import count
from types import TracebackType
from typing import Any, cast

import msgspec

from dayzero.chat.conversation import Conversation, Tool
from dayzero.chat.encoding import ChatEncoding, GrammarText
from dayzero.chat.encoding import Prompt as ChatPrompt
from dayzero.chat.media import placed, spread
from dayzero.chat.pieces import OutputParser, Piece, assemble
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.answer import Answer, ChatOutput, Delta, RequestOutput
from dayzero.engine.api import EngineInfo
from dayzero.engine.build import Build, chat_service, executor_of
from dayzero.engine.check import ParamError, check
from dayzero.engine.config import EngineConfig
from dayzero.engine.events import Progress
from dayzero.engine.inprocess import InProcessEngine
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.media import images_of
from dayzero.engine.request import Grammar, NewRequest, SamplingParams
from dayzero.engine.turns import Turn, turn_of
from dayzero.errors import UsageError

Prompt = str | Sequence[int]

LAUNCH_OPTIONS = ("recipe", "executor", "remote_code", "threads", "stop_ids", "defaults", "device")
SAMPLING_DEFAULTS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
SEEDS = 1 << 63


class LLM:
    """A loaded model. Not for several threads. Use it as a context manager, or ``close`` it.

    path: folder, ``s3://…`` or hub id; or a whole LaunchSpec. options: fields of EngineConfig (max_running, dtype,
    pool_bytes…) and of LaunchSpec (recipe, threads…). progress: told of the loading. Errors: UsageError for an option
    that does not exist, else those of opening a model.
    """

    def __init__(
        self, path: str | LaunchSpec, *, progress: LoadProgress | None = None, make: Build = executor_of, **options: Any
    ) -> None:
        launch = path if isinstance(path, LaunchSpec) else _launch(str(path), options)
        self._chat = chat_service(launch.source, launch.recipe, upstream=launch.executor == "upstream")
        stops = tuple(sorted({*launch.stop_ids, *self._chat.stop_ids}))
        self._engine = InProcessEngine(msgspec.structs.replace(launch, stop_ids=stops), progress, make)
        self._numbers = count()
        if self._chat.tokenizer is not None:
            self._chat.tokenizer.limit(self.info.max_model_len)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's, None when it has none."""
        return self._chat.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What is known of the model: longest context, stop ids, the table that ``dayzero serve`` prints."""
        return self._engine.info

    @property
    def default_params(self) -> SamplingParams:
        """What a call without params samples with: the defaults of generation_config.json; lengths are the caller's."""
        given = self.info.defaults
        values = {name: given[name] for name in SAMPLING_DEFAULTS if name in given}
        if given.get("do_sample") is False and "temperature" not in given:
            values["temperature"] = 0.0
        return SamplingParams(**values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; of a prompt with ``n`` of several, one after the other.

        prompts: texts or lists of token ids, or a single one. params: for all, or one for each. Errors, before anything
        is computed: ParamError (a UsageError) naming what cannot be served. What goes wrong with one answer later is in
        its ``error``.
        """
        each = _prompts(prompts)
        own = [params or self.default_params] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(own) != len(each):
            raise UsageError(f"{len(each)} prompts came with {len(own)} params; give one for each, or one for all")
        asked = [one for prompt, its in zip(each, own) for one in self._requests(prompt, its)]
        self._engine.submit([request for _, _, request in asked])
        outputs = []
        try:
            for index, text, request in asked:
                answer = Answer(request.params, self.tokenizer)
                for _ in self._deltas(request, answer, together=True):
                    pass
                outputs.append(answer.whole(text, request.prompt, index))
        finally:
            for _, _, request in asked:  # of those that an interrupt left open
                self._engine.abort(request.id)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """One answer piece by piece; the last piece has ``finish_reason``. Leaving the iterator early ends the answer.

        Joined, the pieces are what ``generate`` gives. Errors: as there, at once. ``n`` must be 1.
        """
        return self._stream(self._one(prompt, params or self.default_params))

    def _stream(self, request: NewRequest) -> Iterator[Delta]:
        self._engine.submit([request])
        yield from self._deltas(request, Answer(request.params, self.tokenizer))

    def chat(
        self,
        messages: Sequence[Turn],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        **template_kwargs: Any,
    ) -> ChatOutput:
        """The next turn of a conversation. messages: Message, or mappings with ``role`` and ``content``: a text, or a
        list of texts and of mappings ``{"image": …}`` with a path, a file's bytes, a Pillow image or a data: URI.

        template_kwargs: variables of the chat template (enable_thinking…). Errors: UsageError when the checkpoint has
        no chat format, or for what the format cannot express; else as ``generate``. ``n`` must be 1.
        """
        *_, last = self.stream_chat(messages, params, tools=tools, **template_kwargs)
        assert isinstance(last, ChatOutput)
        return last

    def stream_chat(
        self,
        messages: Sequence[Turn],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        **template_kwargs: Any,
    ) -> Iterator[Piece | ChatOutput]:
        """``chat`` piece by piece; the last thing that comes is the whole. Leaving early ends the answer."""
        encoding, params = self._chat.encoding, params or self.default_params
        if encoding is None:
            raise UsageError(self._chat.why_no_chat)
        info = self.info.images
        if not isinstance(messages, list | tuple):
            raise UsageError(f"messages is a {type(messages).__name__}; give a list of messages")
        turns = [turn_of(number, message, info) for number, message in enumerate(messages)]
        conversation = Conversation(turns, tools, template_kwargs=template_kwargs)
        conversation.check()
        prompt = encoding.prompt(conversation)
        parser = encoding.parser(conversation, prompt)
        found = _grammar(encoding, conversation, prompt, params.grammar)
        if found is not None:
            params = msgspec.structs.replace(
                params, grammar=Grammar(kind=found.kind, text=found.text, after=found.after)
            )
        pictures = [part.image for turn in turns for part in turn.images if part.image is not None]
        media = []
        if info is not None and pictures:
            prompt = replace(prompt, ids=spread(prompt.ids, info.pad_id, pictures))
            media = images_of(placed(prompt.ids, info.pad_id, pictures))
        request = msgspec.structs.replace(self._one(prompt.ids, params), media=media)
        return self._stream_chat(prompt, parser, request)

    def _stream_chat(
        self, prompt: ChatPrompt, parser: OutputParser, request: NewRequest
    ) -> Iterator[Piece | ChatOutput]:
        answer, pieces = Answer(request.params, self.tokenizer, parser.keep), []
        self._engine.submit([request])
        for delta in self._deltas(request, answer):
            new = parser.push(delta.text, delta.token_ids)
            pieces += new
            yield from new
        rest = parser.finish()
        pieces += rest
        yield from rest
        yield ChatOutput(message=assemble(pieces), output=answer.whole(prompt.text, prompt.ids, 0))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt's text. UsageError when the checkpoint has no tokenizer, or for a text that no prompt
        could hold."""
        if self.tokenizer is None:
            raise UsageError(self._chat.why_no_tokenizer)
        self.tokenizer.check_length(text)
        return self.tokenizer.encode(text, special=True, begin=True)

    def progress(self) -> Progress:
        """The engine's numbers: steps, tokens, cache hits…"""
        return self._engine.progress()

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, prompt: Prompt, params: SamplingParams) -> NewRequest:
        if params.n != 1:
            raise ParamError("n", f"n is {params.n}; only generate gives several answers")
        ((_, _, request),) = self._requests(prompt, params)
        return request

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[tuple[int, str | None, NewRequest]]:
        """(index, text, request) of each of ``n`` answers, checked."""
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params is a {type(params).__name__}; give SamplingParams, one for all or a list of them")
        if not isinstance(prompt, str | list | tuple | range):
            raise UsageError(f"a prompt is a {type(prompt).__name__}; give a text or a list of token ids")
        text = prompt if isinstance(prompt, str) else None
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        info = self.info
        outside = next((i for i in ids if type(i) is not int or not 0 <= i < info.vocab), None)
        if outside is not None:
            raise ParamError("prompt", f"the prompt holds {outside!r}; token ids go from 0 to {info.vocab - 1}")
        params = check(params, len(ids), info.max_model_len, info.vocab)
        if params.stop and self.tokenizer is None:
            raise ParamError("stop", f"stop needs text; {self._chat.why_no_tokenizer}")
        leader, found, now = None, [], time.time()
        for index in range(params.n):
            seed = None if params.seed is None else (params.seed + index + SEEDS) % (2 * SEEDS) - SEEDS
            own = msgspec.structs.replace(params, n=1, seed=seed)
            name = f"llm-{next(self._numbers)}"
            found.append((index, text, NewRequest(id=name, prompt=ids, params=own, arrival=now, leader=leader)))
            leader = leader or name
        return found

    def _deltas(self, request: NewRequest, answer: Answer, together: bool = False) -> Iterator[Delta]:
        for output in self._engine.outputs(request.id, together=together):
            delta = answer.push(output)
            if answer.finished:
                self._engine.abort(request.id)  # a stop text that the engine knows nothing of
            yield delta
            if answer.finished:
                return


def _grammar(
    encoding: ChatEncoding, conversation: Conversation, prompt: ChatPrompt, asked: Grammar | None
) -> GrammarText | None:
    """What holds the answer: the caller's grammar where content begins, or calls of the tools that are offered."""
    if asked is None:
        return encoding.tool_grammar(conversation, prompt)
    if conversation.offered:
        return encoding.either_grammar(conversation, prompt, asked.kind, asked.text)
    return encoding.answer_grammar(prompt, asked.kind, asked.text)


def _launch(path: str, options: dict[str, Any]) -> LaunchSpec:
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known and name not in LAUNCH_OPTIONS:
            near = difflib.get_close_matches(name, [*known, *LAUNCH_OPTIONS], 1)
            raise UsageError(f"LLM has no option {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    config = EngineConfig(**{name: value for name, value in options.items() if name in known})
    return LaunchSpec(source=path, config=config, **{n: v for n, v in options.items() if n in LAUNCH_OPTIONS})


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one. UsageError for what is neither texts nor ids: the bytes of a text would pass
    for ids, and the keys of a mapping for texts."""
    if isinstance(prompts, str):
        return [prompts]
    each = list(prompts) if isinstance(prompts, list | tuple | range) else None
    if each and all(isinstance(item, int) for item in each):
        return [cast(list[int], each)]
    if each is None or not all(isinstance(item, str | list | tuple | range) for item in each):
        raise UsageError("prompts must be a text, a list of token ids, or a list of texts and lists of token ids")
    return each
