"""From a checked body to a Generation: rendering, tokenising, grammars, parameters, and one NewRequest a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dayzero.chat.conversation import Conversation
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.encoding import ChatEncoding, Prompt
from dayzero.chat.tokenizer import Tokenizer
from dayzero.engine.request import Grammar, NewRequest, SamplingParams
from dayzero.server.endpoint import Call
from dayzero.server.errors import bad
from dayzero.server.generation import Choice, Generation, IdReader, ParsedReader, Reader, TextReader
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
    """The prompt, exactly as the model will read it. Errors: UsageError (400)."""
    encoding, _ = need_encoding(call.state)
    conversation.check()
    return await off_loop(call, lambda: encoding.prompt(conversation))


async def chat_job(
    call: Call, conversation: Conversation, fields: SamplingFields, asked: Asked, asks: Asks | None
) -> ChatJob:
    """Errors: ApiError 503 without an engine, UsageError and ApiError 400 for what cannot be asked."""
    state = call.state
    model = state.check_model(asked.model)
    info = state.ready()
    encoding, tokenizer = need_encoding(state)
    prompt = await render(call, conversation)
    if any(tool.strict for tool in conversation.offered) and not encoding.holds_strict:
        call.ignore("tools[].strict")
    grammar = await off_loop(call, lambda: _grammar(encoding, conversation, prompt, asks))
    asked = replace(asked, grammar=grammar)
    params = checked(sampling_params(fields, asked, state.defaults), prompt.ids, info, state.defaults)

    def reader() -> Reader:
        parser = encoding.parser(conversation, prompt)
        return ParsedReader(_detokenizer(tokenizer, params, parser.keep), parser, params.include_stop)

    generation = start(call, [prompt.ids], params, fields, reader)
    return ChatJob(conversation, prompt, params, generation, model)


def _grammar(encoding: ChatEncoding, conversation: Conversation, prompt: Prompt, asks: Asks | None) -> Grammar | None:
    found = encoding.tool_grammar(conversation, prompt)
    if asks is not None:
        kind, text, where = asks
        if conversation.offered:
            raise bad(
                f"{where} cannot be held while the answer may also be a tool call; "
                "leave tools out or set tool_choice to 'none'.", where,
            )  # fmt: skip
        found = encoding.answer_grammar(prompt, kind, text)
    return None if found is None else Grammar(kind=found.kind, text=found.text, after=found.after)


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams, keep: frozenset[int] = frozenset()) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        skip_special=params.skip_special_tokens,
        keep=keep,
        stop=params.stop,
        include_stop=params.include_stop,
    )


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
) -> Generation:
    """``n`` choices for each prompt; of those the first leads, so that the others find its prompt in the cache.

    params: checked, of all prompts or one for each.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    state, choices = call.state, list[Choice]()
    total = sum(own.n for own in each)
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
            )
            choices.append(Choice(index, request, reader(), prompt_index))
    call.headers["x-dayzero-sampling"] = header(each[0])
    call.record["sampling"] = shown(each[0])
    return Generation(state.engine, choices, RequestNumbers(state.metrics), state.config.keepalive_s)
