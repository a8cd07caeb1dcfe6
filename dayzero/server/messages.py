"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from dayzero.chat.conversation import Conversation, ImagePart, Message, NamedTool, TextPart, Tool, ToolCall, ToolChoice
from dayzero.chat.pieces import Content, Piece, Reasoning, ToolArguments, ToolCallStart, ToolProblem
from dayzero.server.chat_completions import problem_out
from dayzero.server.conversations import template_kwargs
from dayzero.server.endpoint import Call, json_response
from dayzero.server.errors import ApiError
from dayzero.server.generation import Chunk, joined
from dayzero.server.jobs import ChatJob, chat_job, render
from dayzero.server.protocol import messages as api
from dayzero.server.protocol.shared import SamplingFields, Thinking, ToolProblemOut
from dayzero.server.sampling import Asked, Asks
from dayzero.server.stream import named, respond


async def messages(call: Call) -> Response:
    body: api.MessagesRequest = call.body
    conversation = _conversation(call, body)
    fields = SamplingFields(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p)
    asked = Asked(model=body.model, max_tokens=body.max_tokens, stop=body.stop_sequences)
    job = await chat_job(call, conversation, fields, asked, _grammar_asked(body))
    return await respond(call, job.generation, MessagesWriter(call, job), bool(body.stream))


async def count_tokens(call: Call) -> Response:
    body: api.CountRequest = call.body
    call.state.check_model(body.model)
    prompt = await render(call, _conversation(call, body))
    return json_response(api.CountAnswer(input_tokens=len(prompt.ids)))


def drop_hosted_tools(raw: Any) -> list[str]:
    """Take tools that Anthropic would run itself out of the JSON of a request; returns their paths."""
    return drop_tools(raw, lambda tool: tool.get("type") not in (None, "custom"))


def drop_tools(raw: Any, hosted: Any) -> list[str]:
    """Take the tools for which ``hosted`` holds out of ``raw`` and name them."""
    tools = raw.get("tools") if isinstance(raw, dict) else None
    if not isinstance(tools, list):
        return []
    gone = [tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("type"), str) and hosted(tool)]
    raw["tools"] = [tool for tool in tools if not any(tool is other for other in gone)]
    return [f"tools[].{''.join(c for c in tool['type'][:64] if c.isalnum() or c in '_-')}" for tool in gone]


# --- request ------------------------------------------------------------------------------------------------------


def _conversation(call: Call, body: api.CountRequest) -> Conversation:
    out: list[Message] = []
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        out.append(Message("system", tuple(TextPart(text) for text in texts)))
    for message in body.messages:
        out += _messages(call, message)
    thinking = None
    if body.thinking is not None:
        thinking = Thinking(type=body.thinking.type, budget_tokens=body.thinking.budget_tokens)
    effort = body.output_config.effort if body.output_config is not None else None
    choice, parallel = _choice(body.tool_choice)
    return Conversation(
        out,
        tools=[Tool(t.name, t.description, t.input_schema, bool(t.strict)) for t in body.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_kwargs=template_kwargs(call, body.chat_template_kwargs, effort, thinking),
        # A last message of the assistant's is a beginning that the answer goes on from.
        add_generation_prompt=out[-1].role != "assistant",
        continue_final=out[-1].role == "assistant",
    )


def _choice(given: api.ToolChoice | None) -> tuple[ToolChoice, bool]:
    """tool_choice and parallel_tool_calls."""
    match given:
        case api.ToolChoiceAny():
            return "required", not given.disable_parallel_tool_use
        case api.ToolChoiceTool():
            return NamedTool(given.name), not given.disable_parallel_tool_use
        case api.ToolChoiceNone():
            return "none", True
        case api.ToolChoiceAuto():
            return "auto", not given.disable_parallel_tool_use
    return "auto", True


def _messages(call: Call, message: api.MessageIn) -> list[Message]:
    """One message of this API can be several: results of tools are turns of their own."""
    if isinstance(message.content, str):
        return [Message.of(message.role, message.content)]
    if message.role == "assistant":
        return [_assistant(call, message.content)]
    out: list[Message] = []
    parts: list[TextPart | ImagePart] = []
    for block in message.content:
        if isinstance(block, api.ToolResultBlock):
            if parts:
                out.append(Message(message.role, tuple(parts)))
                parts = []
            out.append(_tool_result(call, block))
        elif isinstance(block, api.TextBlock):
            parts.append(TextPart(block.text))
        elif isinstance(block, api.ImageBlock):
            parts.append(_image(block))
        else:
            call.ignore(f"messages[].content[].{_kind(block)}")
    if parts or not out:
        out.append(Message(message.role, tuple(parts)))
    return out


def _assistant(call: Call, blocks: Sequence[api.ContentBlock]) -> Message:
    parts = tuple(TextPart(block.text) for block in blocks if isinstance(block, api.TextBlock))
    thought = "".join(block.thinking for block in blocks if isinstance(block, api.ThinkingBlock))
    calls = tuple(
        ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, api.ToolUseBlock)
    )
    for block in blocks:
        if not isinstance(block, api.TextBlock | api.ThinkingBlock | api.ToolUseBlock):
            call.ignore(f"messages[].content[].{_kind(block)}")
    return Message("assistant", parts, reasoning=thought or None, tool_calls=calls)


def _tool_result(call: Call, block: api.ToolResultBlock) -> Message:
    if block.is_error:
        call.ignore("messages[].content[].is_error")
    content = block.content
    if content is None or isinstance(content, str):
        return Message("tool", (TextPart(content or ""),), tool_call_id=block.tool_use_id)
    parts = tuple(TextPart(part.text) if isinstance(part, api.TextBlock) else _image(part) for part in content)
    return Message("tool", parts, tool_call_id=block.tool_use_id)


def _image(block: api.ImageBlock) -> ImagePart:
    source = block.source
    url, inline = source.get("url"), source.get("data")
    return ImagePart(str(url) if url is not None else f"data:{source.get('media_type')};base64,{inline}")


def _kind(block: api.ContentBlock) -> str:
    return str(type(block).__struct_config__.tag)


def _grammar_asked(body: api.CountRequest) -> Asks | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return "json_schema", json.dumps(body.output_config.format.schema, ensure_ascii=False), "output_config.format"


# --- answer -------------------------------------------------------------------------------------------------------


class _Block:
    """A content block being written. key: what it holds; texts: what has come of it."""

    def __init__(self, key: tuple[str, int], start: api.BlockOut) -> None:
        self.key, self.start, self.texts = key, start, list[str]()

    def whole(self, problems: list[ToolProblemOut]) -> api.BlockOut:
        text, start = "".join(self.texts), self.start
        if isinstance(start, api.TextOut):
            return api.TextOut(text=text)
        if isinstance(start, api.ThinkingOut):
            return api.ThinkingOut(thinking=text)
        value = _object(text)
        if value is None and not any(problem.index == self.key[1] for problem in problems):
            problems.append(ToolProblemOut(index=self.key[1], message="the arguments are no JSON object.", text=text))
        return api.ToolUseOut(id=start.id, name=start.name, input=value or {})


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class MessagesWriter:
    """Chunks to a message. Whole or streamed, the same blocks are kept; a stream also tells each change."""

    def __init__(self, call: Call, job: ChatJob) -> None:
        self._job, self._id = job, f"msg_{call.id}"
        self._blocks: list[_Block] = []
        self._problems: list[ToolProblemOut] = []
        self._stop: tuple[str, str | None] = ("end_turn", None)

    def add(self, chunks: list[Chunk]) -> None:
        self.events(chunks)

    def whole(self) -> api.MessageOut:
        blocks = [block.whole(self._problems) for block in self._blocks]
        out = self._message(blocks, *self._stop)
        out.tool_problems = self._problems or UNSET
        return out

    def events(self, chunks: list[Chunk]) -> bytes:
        out = []
        for chunk in chunks:
            if chunk.first:
                start = {"type": "message_start", "message": self._message([], None, None)}
                out.append(named("message_start", start))
            for piece in joined(chunk.pieces):
                out += self._piece(piece)
            if chunk.finish is not None:
                self._end(chunk)
        return b"".join(out)

    def end(self) -> bytes:
        closed = self._closed()
        for block in self._blocks:
            block.whole(self._problems)
        delta: dict[str, Any] = {"stop_reason": self._stop[0], "stop_sequence": self._stop[1]}
        if self._problems:
            delta["tool_problems"] = self._problems
        last = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        stop = named("message_stop", {"type": "message_stop"})
        return b"".join([*closed, named("message_delta", last), stop])

    def error(self, error: ApiError) -> bytes:
        return named("error", error.body("anthropic"))

    def _message(self, blocks: list[api.BlockOut], stop: str | None, sequence: str | None) -> api.MessageOut:
        return api.MessageOut(
            id=self._id, model=self._job.model, content=blocks, stop_reason=stop, stop_sequence=sequence,
            usage=self._usage(),
        )  # fmt: skip

    def _usage(self) -> api.MessagesUsage:
        usage = self._job.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return api.MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )

    def _end(self, chunk: Chunk) -> None:
        called = any(isinstance(block.start, api.ToolUseOut) for block in self._blocks)
        if chunk.finish == "length":
            self._stop = ("max_tokens", None)
        elif isinstance(chunk.stop_reason, str):
            self._stop = ("stop_sequence", chunk.stop_reason)
        elif called:
            self._stop = ("tool_use", None)

    def _piece(self, piece: Piece) -> list[bytes]:
        match piece:
            case Content(text):
                return self._grow(("text", 0), api.TextOut(text=""), {"type": "text_delta", "text": text}, text)
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
                return self._grow(("thinking", 0), api.ThinkingOut(thinking=""), delta, text)
            case ToolCallStart(index, id, name):
                return self._open(("tool", index), api.ToolUseOut(id=id, name=name, input={}))
            case ToolArguments(index, text):
                return self._delta({"type": "input_json_delta", "partial_json": text}, text)
            case ToolProblem():
                self._problems.append(problem_out(piece))
        return []

    def _grow(self, key: tuple[str, int], start: api.BlockOut, delta: dict[str, Any], text: str) -> list[bytes]:
        opened = [] if self._blocks and self._blocks[-1].key == key else self._open(key, start)
        return opened + self._delta(delta, text)

    def _open(self, key: tuple[str, int], start: api.BlockOut) -> list[bytes]:
        closed = self._closed()
        self._blocks.append(_Block(key, start))
        event = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}
        return [*closed, named("content_block_start", event)]

    def _delta(self, delta: dict[str, Any], text: str) -> list[bytes]:
        self._blocks[-1].texts.append(text)
        event = {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        return [named("content_block_delta", event)]

    def _closed(self) -> list[bytes]:
        if not self._blocks:
            return []
        return [named("content_block_stop", {"type": "content_block_stop", "index": len(self._blocks) - 1})]
