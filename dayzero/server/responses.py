"""POST /v1/responses: items out, and the events by which a stream builds them up."""

from __future__ import annotations

import json
import time
from typing import Any

from msgspec import UNSET
from starlette.responses import Response as HttpResponse

from dayzero.chat.pieces import Content, Piece, Reasoning, ToolArguments, ToolCallStart, ToolProblem
from dayzero.engine.events import Logprobs
from dayzero.server.chat_completions import problem_out
from dayzero.server.endpoint import Call
from dayzero.server.errors import ApiError, bad
from dayzero.server.generation import Chunk, joined
from dayzero.server.jobs import ChatJob, chat_job, content_logprobs, tokenizer_of
from dayzero.server.logprobs import chat_logprobs
from dayzero.server.protocol import responses as api
from dayzero.server.protocol.chat import TokenLogprob
from dayzero.server.protocol.shared import JsonObjectFormat, ToolProblemOut
from dayzero.server.response_items import conversation_of, refuse_stored
from dayzero.server.sampling import Asked, Asks, grammar_asked
from dayzero.server.stream import named, respond

LOGPROBS = "message.output_text.logprobs"  # of ``include``: log-probabilities of the answer's text


async def responses(call: Call) -> HttpResponse:
    body: api.ResponsesRequest = call.body
    refuse_stored(body)
    if body.store:
        call.ignore("store")
    if body.truncation == "auto":
        call.ignore("truncation")
    call.ignore(*(f"include.{name[:64]}" for name in body.include or () if name != LOGPROBS))
    logprobs = (body.top_logprobs or 0) if body.top_logprobs or LOGPROBS in (body.include or ()) else None
    asked = Asked(model=body.model, max_tokens=body.max_output_tokens, stop=body.stop, logprobs=logprobs)
    job = await chat_job(call, conversation_of(call, body), body, asked, _grammar_asked(body))
    return await respond(call, job.generation, ResponsesWriter(call, job), bool(body.stream))


def _grammar_asked(body: api.ResponsesRequest) -> Asks | None:
    guided = grammar_asked(body, None)
    wanted = body.text.format if body.text is not None else None
    asks: Asks | None = None
    if isinstance(wanted, JsonObjectFormat):
        asks = ("json_object", "", "text.format")
    elif isinstance(wanted, api.FlatJsonSchema):
        asks = ("json_schema", json.dumps(wanted.schema, ensure_ascii=False), "text.format")
    if guided and asks:
        raise bad(f"text.format and {guided[2]} both say what the answer must look like.", guided[2])
    return asks or guided


class _Item:
    """An output item being written. kind: of pieces it takes; texts, logprobs: what has come of it."""

    def __init__(
        self, kind: type[Piece], item: api.OutputMessage | api.OutputReasoning | api.OutputFunctionCall
    ) -> None:
        self.kind, self.item, self.texts = kind, item, list[str]()
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponsesWriter:
    """Chunks to a response. Whole or streamed, the same items are kept; a stream also tells each change."""

    def __init__(self, call: Call, job: ChatJob) -> None:
        self._call, self._job = call, job
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._problems: list[ToolProblemOut] = []
        self._status: api.Status = "in_progress"
        self._sequence = 0
        self._tokenizer = tokenizer_of(call.state)
        self._content = content_logprobs(call, job) if job.params.logprobs is not None else None
        self._logprobs: list[tuple[int, Logprobs]] = []  # of the answer's texts, by their number; not told yet

    def add(self, chunks: list[Chunk]) -> None:
        self.events(chunks)

    def whole(self) -> api.Response:
        return self._response()

    def events(self, chunks: list[Chunk]) -> bytes:
        out: list[bytes] = []
        for chunk in chunks:
            if chunk.first:
                out += [self._whole_event("response.created"), self._whole_event("response.in_progress")]
            if self._content is not None:
                self._logprobs += self._content.take(chunk.logprobs)
                self._logprobs += self._content.finish() if chunk.finish is not None else []
            for piece in joined(chunk.pieces):
                out += self._piece(piece)
            if chunk.finish is not None:
                status: api.Status = "incomplete" if chunk.finish == "length" else "completed"
                out += self._close(status)
                self._status = status
        return b"".join(out)

    def end(self) -> bytes:
        return self._whole_event(f"response.{self._status}")

    def error(self, error: ApiError) -> bytes:
        closed = self._close("incomplete")
        self._status = "failed"
        problem = {"code": error.code, "message": error.message, "param": error.param}
        failed = self._response()
        failed.error = api.ResponsesError(code=error.code or "server_error", message=error.message)
        last = self._event("response.failed", response=failed)
        return b"".join([*closed, self._event("error", **problem), last])

    # --- the response ------------------------------------------------------------------------------------------------

    def _response(self) -> api.Response:
        body: api.ResponsesRequest = self._call.body
        params, raw, job = self._job.params, self._call.raw, self._job
        done = self._status in ("completed", "incomplete")
        cut = self._status == "incomplete"
        return api.Response(
            id=f"resp_{self._call.id}",
            created_at=self._created,
            model=job.model,
            status=self._status,
            output=[item.item for item in self._items],
            tools=raw.get("tools") or [],
            tool_choice=raw.get("tool_choice") or "auto",
            parallel_tool_calls=job.conversation.parallel_tool_calls,
            temperature=params.temperature,
            top_p=params.top_p,
            incomplete_details=api.IncompleteDetails(reason="max_output_tokens") if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            top_logprobs=body.top_logprobs or 0,
            text=raw.get("text") or {"format": {"type": "text"}},
            usage=self._usage() if done else None,
            completed_at=int(time.time()) if done else None,
            tool_problems=self._problems or UNSET,
        )

    def _usage(self) -> api.ResponsesUsage:
        usage = self._job.generation.usage()
        return api.ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_tokens_details=api.InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens_details=api.OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
        )

    # --- items -------------------------------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> list[bytes]:
        match piece:
            case Content(text):
                opened = self._open(Content)
                logprobs = self._told_logprobs()
                return [*opened, self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)]
            case Reasoning(text):
                opened = self._open(Reasoning)
                return [*opened, self._text_event("response.reasoning_text.delta", delta=text)]
            case ToolCallStart(_, id, name):
                return self._open(ToolCallStart, id, name)
            case ToolArguments(_, text):
                return [self._item_event("response.function_call_arguments.delta", delta=text)]
            case ToolProblem():
                self._problems.append(problem_out(piece))
        return []

    def _open(self, kind: type[Piece], call_id: str = "", name: str = "") -> list[bytes]:
        """A new item, unless text goes on in the last one."""
        if self._items and self._items[-1].kind is kind and kind is not ToolCallStart:
            if self._items[-1].item.status == "in_progress":
                return []
        out = self._close("completed")
        number = f"{self._call.id}_{len(self._items)}"
        item: Any
        if kind is Content:
            item = api.OutputMessage(id=f"msg_{number}", content=[], status="in_progress")
        elif kind is Reasoning:
            item = api.OutputReasoning(id=f"rs_{number}", content=[], status="in_progress")
        else:
            item = api.OutputFunctionCall(
                id=f"fc_{number}", call_id=call_id, name=name, arguments="", status="in_progress"
            )
        self._items.append(_Item(kind, item))
        out.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item=item))
        if kind is not ToolCallStart:
            empty = api.OutputText(text="") if kind is Content else api.OutputReasoningText(text="")
            out.append(self._part_event("response.content_part.added", empty))
        return out

    def _close(self, status: api.Status) -> list[bytes]:
        """End the item that is open, if one is."""
        if not self._items or self._items[-1].item.status != "in_progress":
            return []
        last = self._items[-1]
        item, text = last.item, last.text
        out = []
        if isinstance(item, api.OutputFunctionCall):
            item.arguments = text
            out.append(self._done_event("response.function_call_arguments.done", arguments=text, name=item.name))
        else:
            if isinstance(item, api.OutputMessage):
                self._told_logprobs()  # of what was held back behind its last delta
                logprobs = last.logprobs
                out.append(self._done_event("response.output_text.done", content_index=0, text=text, logprobs=logprobs))
                item.content = [api.OutputText(text=text, logprobs=logprobs)]
            else:
                out.append(self._done_event("response.reasoning_text.done", content_index=0, text=text))
                item.content = [api.OutputReasoningText(text=text)]
            out.append(self._part_event("response.content_part.done", item.content[0]))
        item.status = status
        out.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        return out

    def _told_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities that nobody was told of yet, as those of the item that is open."""
        number = sum(isinstance(item.item, api.OutputMessage) for item in self._items)
        mine = [item for run, item in self._logprobs if run <= number]
        self._logprobs = [(run, item) for run, item in self._logprobs if run > number]
        new = chat_logprobs(self._tokenizer, mine)
        self._items[-1].logprobs += new
        return new

    # --- events ------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named(kind, event)

    def _whole_event(self, kind: str) -> bytes:
        return self._event(kind, response=self._response())

    def _item_event(self, kind: str, delta: str, **fields: Any) -> bytes:
        """More of the item that is open."""
        last = self._items[-1]
        last.texts.append(delta)
        place = {"item_id": last.item.id, "output_index": len(self._items) - 1}
        return self._event(kind, **place, delta=delta, **fields)

    def _text_event(self, kind: str, delta: str, **fields: Any) -> bytes:
        return self._item_event(kind, delta, content_index=0, **fields)

    def _done_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1].item.id, "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _part_event(self, kind: str, part: Any) -> bytes:
        return self._done_event(kind, content_index=0, part=part)
