"""``dayzero chat``: a conversation with a model in the terminal, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dayzero.commands.engine_options import EngineArguments, chat_of, launch_of
from dayzero.console import Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.chat.conversation import Message
    from dayzero.chat.pieces import Piece
    from dayzero.engine.answer import ChatOutput
    from dayzero.engine.llm import LLM
    from dayzero.engine.request import SamplingParams

HELP = "/new begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class ChatArguments(EngineArguments):
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Ask this and end; may be repeated as turns.")
    ] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None
    temperature: Annotated[float | None, typer.Option(min=0, show_default="the checkpoint's", help="0 is greedy.")] = (
        None
    )
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer in tokens.")] = None
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Ask the chat template for answers without reasoning.")
    ] = False


def run(arguments: ChatArguments, console: Console) -> int:
    """Talk to a model in this terminal, without a server. Reasoning is shown in dim type."""
    from dayzero.engine.llm import LLM

    chat = chat_of(arguments)
    if chat.encoding is None:
        raise UsageError(f"{arguments.source} cannot be talked to: {chat.why_no_chat}")
    with console.progress("reading weights", None, "B") as bar:
        llm = LLM(launch_of(arguments, chat.stop_ids), progress=lambda done, total: bar.reach(done, total))
    with llm:
        talk = _Talk(llm, arguments, console)
        console.line(f"{llm.info.family}, {llm.info.dtype}, {llm.info.max_model_len:,} tokens of context. {HELP}.")
        for text in arguments.prompt or _typed(console):
            talk.turn(text)
        console.emit_json({"turns": talk.turns})
    return 0


def _typed(console: Console) -> Iterator[str]:
    """Lines of the terminal, until its end."""
    while True:
        console.stream("\n> ")
        line = sys.stdin.readline()
        if not line or line.strip() in ("/exit", "/quit"):
            return
        if line.strip():
            yield line.rstrip("\n")


class _Talk:
    """The conversation so far, and how its next answer is sampled and shown."""

    def __init__(self, llm: LLM, arguments: ChatArguments, console: Console) -> None:
        self._llm, self._arguments, self._console = llm, arguments, console
        self._messages: list[Message] = []
        self._typed = arguments.prompt is None and not console.json_mode
        self._reasons = False  # what was shown last is reasoning
        self.turns: list[dict[str, object]] = []
        self._begin()

    def _begin(self) -> None:
        from dayzero.chat.conversation import Message

        system = self._arguments.system
        self._messages = [] if system is None else [Message.of("system", system)]

    def turn(self, text: str) -> None:
        """One question and its answer, or a command."""
        from dayzero.chat.conversation import Message

        if text.strip() == "/new":
            self._begin()
            self._console.line("a new conversation")
            return
        before = list(self._messages)
        self._messages.append(Message.of("user", text))
        try:
            kept = self._ask(text)
        except UsageError as error:  # too long, or what the format cannot say; the conversation goes on without it
            if not self._typed:
                raise
            self._console.line(f"(no answer: {error})")
            kept = False
        if not kept:
            self._messages = before

    def _ask(self, text: str) -> bool:
        """Whether the question and its answer are a turn; one that was cut short is none."""
        began, out, self._reasons = time.perf_counter(), None, False
        kwargs: dict[str, Any] = {"enable_thinking": False, "thinking": False} if self._arguments.no_thinking else {}
        try:
            for piece in self._llm.stream_chat(self._messages, self._params(), **kwargs):
                out = self._show(piece) or out
        except KeyboardInterrupt:
            self._console.line("\n(stopped)")
        if out is None:
            return False
        self._keep(text, out, time.perf_counter() - began)
        return True

    def _show(self, piece: Piece | ChatOutput) -> ChatOutput | None:
        from dayzero.chat.pieces import Content, Reasoning, ToolProblem
        from dayzero.engine.answer import ChatOutput

        if isinstance(piece, ChatOutput):
            return piece
        if isinstance(piece, Content):
            self._console.stream("\n" * self._reasons + piece.text)
            self._reasons = False
        elif isinstance(piece, Reasoning):
            self._reasons = True
            self._console.stream(piece.text, dim=True)
        elif isinstance(piece, ToolProblem):
            self._console.line(f"(a tool call that is none: {piece.sentence})")
        return None

    def _keep(self, text: str, out: ChatOutput, seconds: float) -> None:
        from dayzero.chat.conversation import Message

        answer, output = out.message, out.output
        output.raise_error()
        self._messages.append(Message.of("assistant", answer.content, reasoning=answer.reasoning or None))
        count = len(output.token_ids)
        self._console.stream("\n")
        self._console.line(
            f"[{count} tokens in {seconds:.1f} s, {output.finish_reason}, {output.cached_tokens} cached]"
        )
        self.turns.append(
            {"user": text, "content": answer.content, "reasoning": answer.reasoning, "tokens": count,
             "finish_reason": output.finish_reason, "seconds": seconds, "cached_tokens": output.cached_tokens}
        )  # fmt: skip

    def _params(self) -> SamplingParams:
        import msgspec

        given = {"temperature": self._arguments.temperature, "max_tokens": self._arguments.max_tokens}
        changes = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(self._llm.default_params, **changes)
