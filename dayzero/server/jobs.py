"""From a checked body to a Generation: rendering, tokenising, grammars, parameters, and one NewRequest a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dayzero.chat.conversation import Conversation
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.encoding import ChatEncoding, Prompt
from dayzero.chat.media import Placed, placed, spread
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.media import images_of
from dayzero.engine.request import Grammar, NewRequest, SamplingParams
from dayzero.errors import FieldError, UsageError
from dayzero.server.endpoint import Call
from dayzero.server.errors import as_api_error, bad
from dayzero.server.generation import Choice, Generation, IdReader, ParsedReader, Reader, TextReader
from dayzero.server.logprobs import ContentLogprobs
from dayzero.server.media import pictures_of, with_pictures
from dayzero.server.protocol.shared import SamplingFields
from dayzero.server.sampling import Asked, Asks, checked, header, of_choice, sampling_params, shown
from dayzero.server.state import RequestNumbers, ServerState

Result = TypeVar("Result")


async def off_loop(call: Call, work: Callable[[], Result]) -> Result:
    """``work()``, on a thread when the request is long: others' tokens do not wait for its tokenising."""
    if call.size > call.state.config.thread_chars:
        return await asyncio.to_thread(work)
    return work()


def need_encoding(state: ServerState) -> tuple[ChatEncoding, Tokenizer]:
    """What chat needs. ApiError 400 that says why there is none."""
    chat = state.chat
    if chat is None or chat.encoding is None or chat.tokenizer is None:
        raise bad(f"this model cannot chat here: {state.why_no_chat()}", "messages", "no_chat")
    return chat.encoding, chat.tokenizer


def tokenizer_of(state: ServerState) -> Tokenizer | None:
    return state.chat.tokenizer if state.chat is not None else None


def need_tokenizer(state: ServerState, param: str) -> Tokenizer:
    tokenizer = tokenizer_of(state)
    if tokenizer is None:
        why = state.chat.why_no_tokenizer if state.chat is not None else "this server was started without a tokenizer."
        raise bad(f"only token ids are taken here: {why}", param, "no_tokenizer")
    return tokenizer


@dataclass(frozen=True)
class ChatJob:
    """A conversation on its way to its answers."""

    conversation: Conversation
    prompt: Prompt
    params: SamplingParams
    generation: Generation
    model: str


async def render(call: Call, conversation: Conversation) -> Prompt:
    """The prompt, exactly as the model will read it. ApiError 400 names the field at fault."""
    encoding, _ = need_encoding(call.state)
    turns = call.route.turns
    try:
        conversation.check()
        shown = await with_pictures(call, conversation)
        prompt = await off_loop(call, lambda: encoding.prompt(shown))
        pictures = pictures_of(shown)
        info = call.state.known().images if pictures else None
        if info is None:
            return prompt
        ids = spread(prompt.ids, info.pad_id, pictures)
        return replace(prompt, ids=ids, media=placed(ids, info.pad_id, pictures))
    except FieldError as error:
        ours = error.field.startswith("messages") and turns != "messages"  # items of another API have other numbers
        raise bad(str(error), turns if ours else error.field) from error
    except UsageError as error:  # too long, or of the template, which tells nobody what it disliked
        raise bad(str(error), turns, as_api_error(error).code) from error


async def chat_job(
    call: Call, conversation: Conversation, fields: SamplingFields, asked: Asked, asks: Asks | None
) -> ChatJob:
    """Errors: ApiError 503 without an engine, UsageError and ApiError 400 for what cannot be asked."""
    state = call.state
    model = state.check_model(asked.model)
    info = state.ready()
    encoding, tokenizer = need_encoding(state)
    if asks is not None:
        conversation = replace(conversation, answer_format=asks[:2])
    prompt = await render(call, conversation)
    if conversation.offered and "tools" not in encoding.parses:
        call.ignore("tools")  # no call can come of them
    elif any(tool.strict for tool in conversation.offered) and not encoding.holds_strict:
        call.ignore("tools[].strict")
    grammar = await off_loop(call, lambda: _grammar(encoding, conversation, prompt, asks))
    asked = replace(asked, grammar=grammar)
    params = checked(sampling_params(fields, asked, state.defaults), prompt.ids, info, state.defaults, call.route.turns)

    def reader() -> Reader:
        parser = encoding.parser(conversation, prompt)
        return ParsedReader(_detokenizer(tokenizer, params, parser.keep), parser, params.include_stop)

    generation = start(call, [prompt.ids], params, fields, reader, prompt.media)
    return ChatJob(conversation, prompt, params, generation, model)


def _grammar(encoding: ChatEncoding, conversation: Conversation, prompt: Prompt, asks: Asks | None) -> Grammar | None:
    """A format is asked of the content, so an answer that must be a call (tool_choice) has nothing to do with it."""
    may_call, chooses = bool(conversation.offered), conversation.tool_choice == "auto"
    if asks is None or (may_call and not chooses):
        found = encoding.tool_grammar(conversation, prompt)
    else:
        kind, text, where = asks
        try:
            if may_call:
                found = encoding.either_grammar(conversation, prompt, kind, text)
            else:
                found = encoding.answer_grammar(prompt, kind, text)
        except UsageError as error:
            raise bad(str(error), where) from error
    return None if found is None else Grammar(kind=found.kind, text=found.text, after=found.after)


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams, keep: frozenset[int] = frozenset()) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        skip_special=params.skip_special_tokens,
        keep=keep,
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop,
    )


def content_logprobs(call: Call, job: ChatJob) -> ContentLogprobs:
    """For one answer of ``job``."""
    encoding, tokenizer = need_encoding(call.state)
    parser = encoding.parser(job.conversation, job.prompt)
    skip = tokenizer.special_ids - parser.keep if job.params.skip_special_tokens else frozenset[int]()
    return ContentLogprobs(parser, tokenizer, skip)


def text_reader(tokenizer: Tokenizer | None, params: SamplingParams) -> Reader:
    """Of one plain completion."""
    if tokenizer is None:
        return IdReader()
    return TextReader(_detokenizer(tokenizer, params), params.include_stop)


def start(
    call: Call,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    fields: SamplingFields,
    reader: Callable[[], Reader],
    media: Sequence[Placed] = (),
) -> Generation:
    """``n`` choices for each prompt; of those the first leads, so that the others find its prompt in the cache.

    params: checked, of all prompts or one for each. media: the images of every prompt.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    state, choices = call.state, list[Choice]()
    total, images = sum(own.n for own in each), images_of(media)
    if total > state.config.max_choices:
        raise bad(f"the request asks for {total} answers; at most {state.config.max_choices} are taken.", "n")
    for prompt_index, (ids, own) in enumerate(zip(prompts, each, strict=True)):
        leader = f"{call.id}-{len(choices)}"
        for number in range(own.n):
            index = len(choices)
            request = NewRequest(
                id=f"{call.id}-{index}",
                prompt=ids,
                params=of_choice(own, number),
                priority=fields.priority or 0,
                arrival=call.arrival,
                salt=fields.cache_salt,
                leader=leader if number else None,
                media=images,
            )
            choices.append(Choice(index, request, reader(), prompt_index))
    call.headers["x-dayzero-sampling"] = header(each[0])
    call.record["sampling"] = shown(each[0])
    return Generation(state.engine, choices, RequestNumbers(state.metrics), state.config.keepalive_s)
