"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET
from starlette.responses import Response

from dayzero.chat.pieces import Content, Piece, Reasoning, ToolArguments, ToolCallStart, ToolProblem, assemble
from dayzero.server.conversations import from_chat
from dayzero.server.endpoint import Call
from dayzero.server.errors import ApiError, bad
from dayzero.server.generation import Choice, Chunk, joined
from dayzero.server.jobs import ChatJob, chat_job, tokenizer_of
from dayzero.server.logprobs import chat_logprobs, prompt_logprobs
from dayzero.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    FunctionDelta,
    FunctionOut,
    MessageDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallOut,
)
from dayzero.server.protocol.shared import PromptLogprob, ToolProblemOut
from dayzero.server.sampling import Asked, grammar_asked
from dayzero.server.stream import DONE, data, respond


async def chat_completions(call: Call) -> Response:
    body: ChatRequest = call.body
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs to be true.", "top_logprobs")
    for legacy in ("functions", "function_call"):
        if (call.raw or {}).get(legacy) is not None:
            raise bad(f"{legacy} is not taken; use tools and tool_choice.", legacy)
    conversation = from_chat(call, body)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    asked = Asked(
        model=body.model,
        max_tokens=min(limits, default=None),
        n=body.n or 1,
        stop=body.stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    job = await chat_job(call, conversation, body, asked, grammar_asked(body, body.response_format))
    return await respond(call, job.generation, ChatWriter(call, job), bool(body.stream))


def finish_reason(chunk_finish: str, called: bool) -> str:
    """An answer that ended by itself and holds calls ended in order to make them."""
    return "tool_calls" if called and chunk_finish == "stop" else chunk_finish


class _Answer:
    """What one choice has come to so far."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish = ""
        self.stop_reason: int | str | None = None
        self.called = False


class ChatWriter:
    """Chunks to the answer of a chat request."""

    def __init__(self, call: Call, job: ChatJob) -> None:
        body: ChatRequest = call.body
        self._job, self._body = job, body
        self._tokenizer = tokenizer_of(call.state)
        self._created, self._id = int(time.time()), f"chatcmpl-{call.id}"
        self._answers = [_Answer() for _ in job.generation.choices]
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None

    # --- whole -------------------------------------------------------------------------------------------------------

    def add(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            answer = self._take(chunk)
            answer.tokens += self._ids(chunk)
            answer.pieces += self._shown(chunk.pieces)
            if self._body.logprobs:
                answer.logprobs += chat_logprobs(self._tokenizer, chunk.logprobs)

    def whole(self) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._job.model,
            choices=[self._choice(choice) for choice in self._job.generation.choices],
            usage=self._job.generation.usage(),
            prompt_logprobs=UNSET if self._prompt_logprobs is None else self._prompt_logprobs,
            prompt_token_ids=self._job.prompt.ids if self._body.return_token_ids else UNSET,
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        answer = self._answers[choice.index]
        parts = assemble(joined(answer.pieces))
        calls = [
            ToolCallOut(id=c.id, function=FunctionOut(name=c.name, arguments=c.arguments)) for c in parts.tool_calls
        ]
        message = AnswerMessage(
            content=parts.content or (None if calls else ""),
            reasoning=parts.reasoning or UNSET,
            reasoning_content=parts.reasoning or UNSET,
            tool_calls=calls or UNSET,
            tool_problems=[problem_out(p) for p in parts.problems] or UNSET,
        )
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=ChatLogprobs(content=answer.logprobs) if self._body.logprobs else None,
            finish_reason=answer.finish,
            stop_reason=answer.stop_reason,
            token_ids=answer.tokens if self._body.return_token_ids else UNSET,
        )

    # --- streamed ----------------------------------------------------------------------------------------------------

    def events(self, chunks: list[Chunk]) -> bytes:
        return b"".join(self._event(choice, chunk) for chunk in chunks for choice in self._chunk_choices(chunk))

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        last = self._chunk([])
        last.usage = self._job.generation.usage()
        return data(last) + DONE

    def error(self, error: ApiError) -> bytes:
        return data(error.body("openai")) + DONE

    def _event(self, choice: ChunkChoice, chunk: Chunk) -> bytes:
        out = self._chunk([choice])
        if choice.delta.role is not UNSET and chunk.index == 0:
            if self._prompt_logprobs is not None:
                out.prompt_logprobs = self._prompt_logprobs
            if self._body.return_token_ids:
                out.prompt_token_ids = self._job.prompt.ids
        return data(out)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        usage = None if self._usage else UNSET
        return ChatChunk(id=self._id, created=self._created, model=self._job.model, choices=choices, usage=usage)

    def _chunk_choices(self, chunk: Chunk) -> list[ChunkChoice]:
        """The role first, then one delta for each run of pieces of a kind, then the finish, once."""
        index, answer = chunk.index, self._take(chunk)
        out = [ChunkChoice(index=index, delta=delta) for delta in deltas(self._shown(chunk.pieces))]
        told = bool(chunk.tokens) and (self._body.logprobs or self._body.return_token_ids)
        ended = chunk.stop_id is not None and self._body.return_token_ids
        if not out and (told or ended):
            out = [ChunkChoice(index=index, delta=MessageDelta())]
        if told or ended:
            if self._body.logprobs:
                out[0].logprobs = ChatLogprobs(content=chat_logprobs(self._tokenizer, chunk.logprobs))
            if self._body.return_token_ids:
                out[0].token_ids = self._ids(chunk)
        if chunk.first:
            out.insert(0, ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        if chunk.finish is not None:
            last = ChunkChoice(index=index, delta=MessageDelta(), finish_reason=answer.finish)
            last.stop_reason = answer.stop_reason
            out.append(last)
        return out

    # --- both --------------------------------------------------------------------------------------------------------

    def _take(self, chunk: Chunk) -> _Answer:
        answer = self._answers[chunk.index]
        answer.called |= any(isinstance(piece, ToolCallStart) for piece in chunk.pieces)
        if chunk.finish is not None:
            answer.finish = finish_reason(chunk.finish, answer.called)
            answer.stop_reason = chunk.stop_reason
        if chunk.prompt_logprobs is not None and chunk.index == 0 and self._body.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, chunk.prompt_logprobs)
        return answer

    def _shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        if self._body.include_reasoning is False:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return list(pieces)

    @staticmethod
    def _ids(chunk: Chunk) -> list[int]:
        return [*chunk.tokens, *([] if chunk.stop_id is None else [chunk.stop_id])]


def problem_out(problem: ToolProblem) -> ToolProblemOut:
    return ToolProblemOut(index=problem.index, message=problem.sentence, text=problem.text)


def deltas(pieces: Sequence[Piece]) -> list[MessageDelta]:
    """Pieces as deltas, neighbours of one kind joined."""
    out: list[MessageDelta] = []
    for piece in joined(pieces):
        match piece:
            case Content(text):
                out.append(MessageDelta(content=text))
            case Reasoning(text):
                out.append(MessageDelta(reasoning=text, reasoning_content=text))
            case ToolCallStart(index, id, name):
                function = FunctionDelta(name=name, arguments="")
                out.append(
                    MessageDelta(tool_calls=[ToolCallDelta(index=index, id=id, type="function", function=function)])
                )
            case ToolArguments(index, text):
                out.append(
                    MessageDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
                )
            case ToolProblem():
                out.append(MessageDelta(tool_problems=[problem_out(piece)]))
    return out
