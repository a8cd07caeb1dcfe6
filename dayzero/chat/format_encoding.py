"""What every encoding of one ``Format`` has: a parser for its answers, and grammars that hold them to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dayzero.chat import call_grammar, element_grammar
from dayzero.chat.calls import NewId, random_id
from dayzero.chat.conversation import Conversation, Message, TextPart
from dayzero.chat.encoding import GrammarKind, GrammarText, Prompt
from dayzero.chat.families import Format
from dayzero.chat.parser import MarkerParser
from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import FieldError, UsageError


class FormatEncoding:
    """Base of the encodings; a subclass adds ``prompt``. source: the template's file or the encoder's name."""

    def __init__(self, form: Format, source: str, tokenizer: Tokenizer, *, new_id: NewId = random_id) -> None:
        self.format = form
        self.source = source
        self._tokenizer = tokenizer
        self._new_id = new_id

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def parses(self) -> tuple[str, ...]:
        return self.format.grammar.finds

    @property
    def takes_images(self) -> bool:
        return False

    @property
    def holds_strict(self) -> bool:
        """Whether the arguments of ``strict`` tools obey their schema under tool_choice auto, too."""
        if self._elements:
            return True
        return call_grammar.holds_strict(self.format, self._tokenizer)

    def parser(self, conversation: Conversation, prompt: Prompt) -> MarkerParser:
        return MarkerParser(
            self.format.grammar,
            opens="continued" if conversation.continue_final and prompt.opens == "content" else prompt.opens,
            tools=conversation.offered,
            parallel=conversation.parallel_tool_calls,
            new_id=self._ids(conversation),
            tokenizer=self._tokenizer,
        )

    @property
    def _elements(self) -> bool:
        return self.format.shape.form == "elements"

    def tool_grammar(self, conversation: Conversation, prompt: Prompt) -> GrammarText | None:
        if self._elements:
            return element_grammar.tool_grammar(conversation, prompt, self._tokenizer)
        return call_grammar.tool_grammar(self.format, conversation, prompt, self._tokenizer)

    def answer_grammar(self, prompt: Prompt, kind: GrammarKind, text: str) -> GrammarText:
        if self._elements:
            return element_grammar.answer_grammar(prompt, kind, text, self._tokenizer)
        lark = call_grammar.Lark(self._tokenizer)
        first, after = call_grammar.thinking_first(lark, self.format, prompt, self._tokenizer)
        return call_grammar.answer_grammar(kind, text, lark, first, after)

    def either_grammar(self, conversation: Conversation, prompt: Prompt, kind: GrammarKind, text: str) -> GrammarText:
        tokens = self._tokenizer
        if self._elements:
            return element_grammar.either_grammar(conversation, prompt, kind, text, tokens)
        found = call_grammar.either_grammar(self.format, conversation, prompt, tokens, kind, text)
        return found if found is not None else self.answer_grammar(prompt, kind, text)

    def _ids(self, conversation: Conversation) -> NewId:
        """Ids for calls that carry none."""
        return self._new_id

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _checked(self, conversation: Conversation) -> None:
        conversation.check()
        for number, message in enumerate(conversation.messages):
            if message.images and not self.takes_images:
                raise UsageError(f"messages[{number}] holds an image, which this model's chat format does not take.")

    def _split(self, message: Message, think: tuple[str, str] | None = None) -> Message:
        """An assistant's message whose text begins with marked reasoning, with that reasoning in its own field.
        think: the markers, by default those of the format."""
        think = think or self.format.think
        if message.role != "assistant" or think is None or message.reasoning is not None or not message.parts:
            return message
        text = message.text.lstrip("\n")
        if not text.startswith(think[0]):
            return message
        inside, closing, behind = text[len(think[0]) :].partition(think[1])
        if not closing:
            return message
        return replace(message, reasoning=inside.strip("\n"), parts=(TextPart(behind.lstrip("\n")),))


def switches(conversation: Conversation, known: Collection[str]) -> Mapping[str, Any]:
    """``chat_template_kwargs`` of a conversation. FieldError for one that the encoder does not know."""
    unknown = sorted(set(conversation.template_kwargs) - set(known))
    if unknown:
        raise FieldError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {unknown[0]!r}, which this model's encoder does not know; "
            f"it knows {', '.join(known)}.",
        )
    return conversation.template_kwargs


def all_text(conversation: Conversation) -> Iterable[str]:
    """Every text of a conversation that may come to stand in its prompt."""
    for message in conversation.messages:
        yield message.text
        yield message.reasoning or ""
        yield from (call.arguments for call in message.tool_calls)
    yield from (str(tool.function()) for tool in conversation.offered)
