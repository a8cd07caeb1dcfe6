"""Mutations of the server and of the chat side. No torch: HTTP processes read this file."""

from __future__ import annotations

from typing import Any

from tests.cpu.mutations.mutation import Mutation, Part, Patches

SERVER, TEXT = "server", "tokenizer+template"


def no_done(patches: Patches) -> None:
    """A stream of chat ends without [DONE]."""
    patches.wrap("dayzero.server.chat_completions:DONE", lambda done: b"")


def one_token_less(patches: Patches) -> None:
    """Streams count one token less."""

    def make(usage: Any) -> Any:
        def changed(self: Any) -> Any:
            found = usage(self)
            found.completion_tokens = max(0, found.completion_tokens - 1)
            return found

        return changed

    patches.wrap("dayzero.server.generation:Generation.usage", make)


def tokens_alone(patches: Patches) -> None:
    """Each push is decoded by itself: characters of several tokens fall apart."""

    def make(push: Any) -> Any:
        def changed(self: Any, ids: Any) -> Any:
            from dayzero.chat.detokenize import Text

            if self._stops:
                return push(self, ids)
            parts = [self._tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids if i not in self._skip]
            return Text("".join(parts), None, len(ids))

        return changed

    patches.wrap("dayzero.chat.detokenize:Detokenizer.push", make)


def stop_ends_leak(patches: Patches) -> None:
    """What may begin a stop string is not held back."""
    patches.wrap("dayzero.chat.detokenize:Detokenizer._may_begin", lambda held: lambda self: 0)


def reasoning_in_content(patches: Patches) -> None:
    """Streams put reasoning into the content."""

    def make(deltas: Any) -> Any:
        def changed(pieces: Any) -> Any:
            from dayzero.chat.pieces import Content, Reasoning

            return deltas([Content(p.text) if isinstance(p, Reasoning) else p for p in pieces])

        return changed

    patches.wrap("dayzero.server.chat_completions:deltas", make)


def arguments_twice(patches: Patches) -> None:
    """Streamed arguments of a call come twice."""

    def make(deltas: Any) -> Any:
        def changed(pieces: Any) -> Any:
            from dayzero.chat.pieces import ToolArguments

            return deltas([q for p in pieces for q in ((p, p) if isinstance(p, ToolArguments) else (p,))])

        return changed

    patches.wrap("dayzero.server.chat_completions:deltas", make)


def calls_end_as_stop(patches: Patches) -> None:
    patches.wrap("dayzero.server.chat_completions:finish_reason", lambda told: lambda finish, called: finish)


def reasoning_of_history_lost(patches: Patches) -> None:
    """The reasoning of earlier answers does not reach the prompt."""

    def make(message: Any) -> Any:
        def changed(item: Any, raw: Any) -> Any:
            from dataclasses import replace

            return replace(message(item, raw), reasoning=None)

        return changed

    patches.wrap("dayzero.server.conversations:_message", make)


def parts_lost(patches: Patches) -> None:
    """Of a message of parts, the first is taken."""
    patches.wrap("dayzero.server.conversations:_parts", lambda parts: lambda content: parts(content)[:0]
                 if isinstance(content, list) else parts(content))  # fmt: skip


def scores_left_out(patches: Patches) -> None:
    """Tokens beyond ASCII have no log-probabilities."""
    patches.wrap(
        "dayzero.server.chat_completions:chat_logprobs",
        lambda told: lambda tokenizer, items: [one for one in told(tokenizer, items) if one.token.isascii()],
    )


def prompt_scores_shifted(patches: Patches) -> None:
    """Each token of a prompt has the log-probabilities of the next."""
    patches.wrap(
        "dayzero.server.chat_completions:prompt_logprobs",
        lambda told: lambda tokenizer, items: [None, None, *told(tokenizer, items)[1:-1]],
    )


def echo_of_nothing(patches: Patches) -> None:
    """An echoed prompt has the log-probabilities of a sure thing."""

    def make(take: Any) -> Any:
        def changed(self: Any, tokens: Any, items: Any) -> Any:
            found = take(self, tokens, items)
            if found.token_logprobs[:1] == [None]:  # of a prompt: what is generated comes several tokens at a time too
                found.token_logprobs[1:] = [-1e-4] * (len(found.token_logprobs) - 1)
            return found

        return changed

    patches.wrap("dayzero.server.logprobs:LegacyLogprobs.take", make)


def no_turn_opened(patches: Patches) -> None:
    """No turn of the model is opened."""

    def make(from_chat: Any) -> Any:
        def changed(call: Any, body: Any) -> Any:
            from dataclasses import replace

            return replace(from_chat(call, body), add_generation_prompt=False)

        return changed

    for place in ("chat_completions", "tokenize"):
        patches.wrap(f"dayzero.server.{place}:from_chat", make)


def defaults_win(patches: Patches) -> None:
    """What generation_config.json says goes before what the request says."""

    def make(params: Any) -> Any:
        def changed(fields: Any, asked: Any, defaults: Any) -> Any:
            import msgspec

            return msgspec.structs.replace(params(fields, asked, defaults), temperature=1.0)

        return changed

    patches.wrap("dayzero.server.jobs:sampling_params", make)


def seeds_lost(patches: Patches) -> None:
    def make(params: Any) -> Any:
        def changed(fields: Any, asked: Any, defaults: Any) -> Any:
            import msgspec

            return msgspec.structs.replace(params(fields, asked, defaults), seed=None)

        return changed

    patches.wrap("dayzero.server.jobs:sampling_params", make)


def bad_input_is_500(patches: Patches) -> None:
    """Bad requests are told as faults of the server."""

    def make(status: Any) -> Any:
        def changed(error: Any) -> Any:
            found = status(error)
            found.status = 500 if found.status == 400 else found.status
            return found

        return changed

    patches.wrap("dayzero.server.endpoint:as_api_error", make)


def any_key(patches: Patches) -> None:
    patches.wrap("dayzero.server.endpoint:_check_key", lambda check: lambda request, keys: None)


def clients_stay(patches: Patches) -> None:
    """Nobody notices that a client has left."""

    def make(until_gone: Any) -> Any:
        async def changed(receive: Any) -> None:
            import asyncio

            await asyncio.Event().wait()

        return changed

    patches.wrap("dayzero.server.endpoint:_until_gone", make)


def streams_held(patches: Patches) -> None:
    """A stream is sent when it is whole."""

    def make(write: Any) -> Any:
        async def changed(self: Any, send: Any, chunks: Any) -> None:
            held = self.__dict__.setdefault("held", [])
            held += chunks
            if any(chunk.finish is not None for chunk in chunks):
                await write(self, send, held)

        return changed

    patches.wrap("dayzero.server.stream:EventStream._write", make)


def health_of_nobody(patches: Patches) -> None:
    """/health asks nobody, and is unwell."""

    def make(alive: Any) -> Any:
        def changed(state: Any) -> Any:
            found = alive(state)
            found.status = "unhealthy"
            return found

        return changed

    patches.wrap("dayzero.server.health:_alive", make)


def tokens_not_counted(patches: Patches) -> None:
    def make(made: Any) -> Any:
        def changed(self: Any, *given: Any) -> None:
            made(self, *given)
            self.generation_tokens = self.prompt_tokens

        return changed

    patches.wrap("dayzero.server.metrics:Metrics.__init__", make)


def response_events_lost(patches: Patches) -> None:
    """Events of /v1/responses come without their opening."""
    patches.wrap("dayzero.server.responses:named", lambda named: lambda event, value: b""
                 if event == "response.output_item.added" else named(event, value))  # fmt: skip


def message_never_stops(patches: Patches) -> None:
    patches.wrap("dayzero.server.messages:named", lambda named: lambda event, value: b""
                 if event == "message_stop" else named(event, value))  # fmt: skip


def drained_at_once(patches: Patches) -> None:
    """Who is being served is cut off when the server is asked to end."""

    def make(drain: Any) -> Any:
        async def changed(self: Any, timeout: Any = None) -> bool:
            self._draining = True
            return False

        return changed

    patches.wrap("dayzero.server.state:ServerState.drain", make)


def chat_refused(patches: Patches) -> None:
    """No conversation is taken."""

    def make(from_chat: Any) -> Any:
        def changed(call: Any, body: Any) -> Any:
            from dayzero.server.errors import bad

            raise bad("this model cannot chat here", "messages")

        return changed

    patches.wrap("dayzero.server.chat_completions:from_chat", make)


def first_of_echo(patches: Patches) -> None:
    """The first token of an echoed prompt is said to be sure."""

    def make(take: Any) -> Any:
        def changed(self: Any, tokens: Any, items: Any) -> Any:
            found = take(self, tokens, items)
            found.token_logprobs = [0.0 if one is None else one for one in found.token_logprobs]
            return found

        return changed

    patches.wrap("dayzero.server.logprobs:LegacyLogprobs.take", make)


def blanks_lost(patches: Patches) -> None:
    """Pieces of a stream lose their blanks."""

    def make(deltas: Any) -> Any:
        def changed(pieces: Any) -> Any:
            from dayzero.chat.pieces import Content

            return deltas([Content("".join(p.text.split())) if isinstance(p, Content) else p for p in pieces])

        return changed

    patches.wrap("dayzero.server.chat_completions:deltas", make)


def reasoning_not_counted(patches: Patches) -> None:
    patches.wrap("dayzero.server.generation:ParsedReader.reasoning_tokens", lambda told: property(lambda self: 0))


def no_version(patches: Patches) -> None:
    """/version fails."""

    def make(version: Any) -> Any:
        async def changed(call: Any) -> Any:
            raise RuntimeError("the version is not known")

        return changed

    patches.wrap("dayzero.server.health:version", make)


def _asked(stage: str, *checks: str) -> tuple[Part, ...]:
    return (Part(stage, checks),)


F, C = "functional", "contract"
MUTATIONS: tuple[Mutation, ...] = (
    Mutation("a stream without its end", "J", SERVER, "small", _asked(C, "stream.chat"), plant=no_done,
             process="http"),
    Mutation("usage counts one token less", "J", SERVER, "small",
             (*_asked(F, "usage.modes"), *_asked(C, "responses")), "sglang#15660", plant=one_token_less,
             process="http"),
    Mutation("tokens are decoded one by one", "J", SERVER, "small", _asked(F, "stream.characters"),
             "tt-inference-server#2594", plant=tokens_alone, process="http"),
    Mutation("the beginning of a stop string is shown", "J", SERVER, "small", _asked(F, "stop.string"),
             plant=stop_ends_leak, process="http"),
    Mutation("streams put reasoning into the content", "I", SERVER, "small", _asked(F, "reasoning"), "vllm#45687",
             plant=reasoning_in_content, process="http"),
    Mutation("streamed arguments come twice", "I", SERVER, "small", _asked(F, "tools.required"), "vllm#41739",
             plant=arguments_twice, process="http"),
    Mutation("a call ends as a stop", "I", SERVER, "small", _asked(F, "tools.required"), plant=calls_end_as_stop,
             process="http"),
    Mutation("reasoning of earlier answers is lost", "I", SERVER, "small", _asked(F, "template.ids"), "vllm#42664",
             plant=reasoning_of_history_lost, process="http"),
    Mutation("parts of a message are lost", "J", SERVER, "small", _asked(C, "chat.parts"), plant=parts_lost,
             process="http"),
    Mutation("tokens beyond ASCII have no log-probabilities", "J", SERVER, "small", _asked(F, "logprobs"),
             plant=scores_left_out, process="http"),
    Mutation("log-probabilities of a prompt are one off", "J", SERVER, "small", _asked(F, "logprobs.prompt"),
             "vllm#8268", plant=prompt_scores_shifted, process="http"),
    Mutation("an echoed prompt has other log-probabilities", "J", SERVER, "small", _asked(F, "logprobs.echo"),
             "llama.cpp#27174", plant=echo_of_nothing, process="http"),
    Mutation("no turn of the model is opened", "H", TEXT, "small", _asked(F, "template.ids"), plant=no_turn_opened,
             process="http"),
    Mutation("sampling defaults win over the request", "H", SERVER, "small", _asked(F, "greedy.repeat", "logprobs"),
             "vllm#15241", plant=defaults_win, process="http"),
    Mutation("seeds are lost", "J", SERVER, "small", _asked(F, "sampling.seed"), plant=seeds_lost, process="http"),
    Mutation("bad input is a fault of the server", "J", SERVER, "small", _asked(C, "errors.fields"),
             plant=bad_input_is_500, process="http"),
    Mutation("any key will do", "J", SERVER, "small", _asked(C, "http.keys"), plant=any_key, process="http"),
    Mutation("nobody notices that a client has left", "S", SERVER, "small", _asked(C, "cancel.freed"), "vllm#50425",
             plant=clients_stay, process="http"),
    Mutation("a stream is held until it is whole", "J", SERVER, "small", _asked(C, "stream.flushed"),
             plant=streams_held, process="http"),
    Mutation("a healthy server says that it is unwell", "S", SERVER, "small", _asked(C, "probes.health"), "vllm#39863",
             plant=health_of_nobody, process="http"),
    Mutation("the counter of tokens counts others", "S", SERVER, "small", _asked(C, "metrics.tokens"),
             "production-stack#989", plant=tokens_not_counted, process="http"),
    Mutation("items of a response are never opened", "J", SERVER, "small", _asked(C, "responses"), "vllm#42407",
             plant=response_events_lost, process="http"),
    Mutation("a message never stops", "J", SERVER, "small", _asked(C, "messages"), plant=message_never_stops,
             process="http"),
    Mutation("answers are cut off when the server ends", "S", SERVER, "small", _asked("robustness", "hurt"),
             plant=drained_at_once, process="http"),
    Mutation("no conversation is taken", "J", SERVER, "small", (*_asked(F, "tokens.max"), *_asked(C, "models")),
             "vllm#29849", plant=chat_refused, process="http"),
    Mutation("the first token of an echo is sure", "J", SERVER, "small", _asked(F, "logprobs.echo"),
             plant=first_of_echo, process="http"),
    Mutation("pieces of a stream lose their blanks", "Q", SERVER, "small", _asked(F, "structured.schema"),
             plant=blanks_lost, process="http"),
    Mutation("tokens of reasoning are not counted", "I", SERVER, "small", _asked(F, "reasoning"), "sglang#15660",
             plant=reasoning_not_counted, process="http"),
    Mutation("the version is not known", "S", SERVER, "small", _asked(C, "probes.health"), plant=no_version,
             process="http"),
)  # fmt: skip
