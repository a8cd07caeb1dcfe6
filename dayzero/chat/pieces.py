"""What an answer is made of once its markers are taken out, piece by piece as it is generated.

A streamed answer is the pieces themselves; one that is not streamed is ``assemble`` of the same pieces, so the two
cannot differ. Pieces of one kind may be cut anywhere: only their concatenation has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; index counts the calls of the answer from 0. id: the model's own where its format has one."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments' JSON text of the call ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolProblem:
    """Something about a call is wrong, in one sentence: arguments that are no JSON object, an unknown function, a call
    that was cut off. index: the call, None when it never came to a name. text: what came and could not be placed
    (never part of content, arguments or reasoning)."""

    index: int | None
    sentence: str
    text: str = ""


Piece = Content | Reasoning | ToolCallStart | ToolArguments | ToolProblem


class OutputParser(Protocol):
    """Turns the text of one answer into pieces. One parser for one answer."""

    @property
    def needs_special_text(self) -> bool:
        """Whether markers are special tokens, so that the text must be decoded with them. ``keep`` names them."""

    @property
    def keep(self) -> frozenset[int]:
        """Ids of special tokens whose text the parser must see; all others may be skipped."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens between the markers of reasoning so far: a function of the ids alone, however they were cut."""

    def push(self, text: str, ids: Sequence[int]) -> list[Piece]:
        """Pieces that are certain now. text: what was decoded since the last call; ids: the tokens that came with it
        (they are counted; which of them made which character does not matter)."""

    def finish(self) -> list[Piece]:
        """What was held back, and what is wrong with calls that never ended. Call once, at the end."""


@dataclass(slots=True)
class AssembledCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Assembled:
    """An answer as a whole. reasoning, content: "" when there was none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[AssembledCall] = field(default_factory=list)
    problems: list[ToolProblem] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case ToolCallStart(index, id, name):
                assert index == len(self.tool_calls), f"call {index} after {len(self.tool_calls)} calls"
                self.tool_calls.append(AssembledCall(id, name))
            case ToolArguments(index, text):
                self.tool_calls[index].arguments += text
            case ToolProblem():
                self.problems.append(piece)


def assemble(pieces: Iterable[Piece]) -> Assembled:
    """All pieces of one answer, joined."""
    out = Assembled()
    for piece in pieces:
        out.add(piece)
    return out
