"""What turns a conversation into a prompt and an answer's text into pieces, whatever the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dayzero.chat.conversation import Conversation
from dayzero.chat.media import Placed
from dayzero.chat.pieces import OutputParser
from dayzero.chat.tokenizer import Tokenizer
from dayzero.checkpoint.source import Source

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]  # as the engine's requests name them


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: exactly what the model reads. text: the same, for people and logs.

    opens: what the first generated character belongs to; ``reasoning`` when the prompt itself opened it. continued: the
    text of the last message that the answer goes on from (continue_final), else "". after: the token id behind which a
    grammar for the answer must begin (the end of reasoning), None: at the first token. closed: the prompt itself says
    that there is no reasoning (it opened and closed it, or the answer is already being written). media: where the
    conversation's images stand; the caller of ``ChatEncoding.prompt`` finds out (``media.placed``).
    """

    ids: list[int]
    text: str
    opens: Literal["content", "reasoning"] = "content"
    continued: str = ""
    after: int | None = None
    closed: bool = False
    media: tuple[Placed, ...] = ()


class GrammarText(NamedTuple):
    """The three fields of the engine's ``Grammar``."""

    kind: GrammarKind
    text: str
    after: int | None = None


class ChatEncoding(Protocol):
    """One model's chat format. Stateless: one object serves all requests, from any thread."""

    @property
    def name(self) -> str:
        """How the format is called in /v1/models and the start-up table."""

    @property
    def source(self) -> str:
        """Where it comes from: the template's file, or the encoder."""

    @property
    def holds_strict(self) -> bool:
        """Whether ``strict`` tools are held to their schema when the model itself decides to call them."""

    @property
    def takes_images(self) -> bool:
        """Whether it has words for an image."""

    @property
    def parses(self) -> tuple[str, ...]:
        """What the parser finds: of ``reasoning``, ``tools``."""

    def prompt(self, conversation: Conversation) -> Prompt:
        """UsageError (a 400) for what the format cannot express; nothing is left out silently."""

    def parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser:
        """A fresh parser for one answer to that prompt; it looks at ``prompt.opens``, never at earlier turns."""

    def tool_grammar(self, conversation: Conversation, prompt: Prompt) -> GrammarText | None:
        """What holds the answer to a call (tool_choice required or named) or the arguments of a ``strict`` tool to its
        schema, in the model's own call format; None when nothing is asked for. UsageError when it cannot be held."""

    def answer_grammar(self, prompt: Prompt, kind: GrammarKind, text: str) -> GrammarText:
        """A client's grammar (response_format and the like), made to begin where the answer's content begins."""

    def either_grammar(self, conversation: Conversation, prompt: Prompt, kind: GrammarKind, text: str) -> GrammarText:
        """The same while tools are offered and the model may choose (tool_choice auto): the answer is calls, with
        arguments of the tools' schemas, or it is of the client's grammar. UsageError when that cannot be held."""


# Families whose format is encoded here. A template in the folder goes before the encoder only when it writes another
# format (the DSML family's first member did, and so do finetuned models); of the same format it is a copy, and copies
# of these have been wrong.
OWN_ENCODERS = {"gpt_oss": "harmony", "deepseek_v32": "dsml", "kimi_k3": "xtml"}


def control_text(family: str | None, template: str) -> str:
    """Text that spells every token which a user's text must not turn into: the template's and the family's own."""
    own = OWN_ENCODERS.get(family or "")
    return " ".join((template, *(_encoders()[own][0] if own else ())))


def _encoders() -> dict[str, tuple[tuple[str, ...], Callable[[Tokenizer], ChatEncoding]]]:
    """Name of a format -> (tokens it cannot do without, its encoder)."""
    from dayzero.chat import dsml, harmony, xtml

    return {
        "harmony": (harmony.NEEDED, harmony.HarmonyEncoding),
        "dsml": (dsml.NEEDED, dsml.DsmlEncoding),
        "xtml": (xtml.NEEDED, xtml.XtmlEncoding),
    }


def choose(
    source: Source, family: str | None, tokenizer: Tokenizer | None, *, template: str | None = None
) -> tuple[ChatEncoding | None, str]:
    """(how to talk to the model, why so), or (None, why not and what to do instead).

    In order: the template given by the user; the encoder of the family, unless the folder's template writes another
    format; the folder's template. Errors: CheckpointError for a damaged file.
    """
    from dayzero.chat.families import recognise
    from dayzero.chat.template import ENCODER_FILES, find_template, special_tokens
    from dayzero.chat.template_encoding import TemplateEncoding

    if tokenizer is None:
        return None, f"{source.name} has no tokenizer that can be read; send token ids to /v1/completions."
    found = (template, "the template given") if template is not None else find_template(source)
    form, why = recognise(found[0], family, tokenizer.added) if found else (None, "")
    own, lacks = OWN_ENCODERS.get(family or ""), ""
    if own is not None and template is None and (form is None or form.name == own):
        encoding, lacks = _own_encoder(own, tokenizer)
        if encoding is not None:
            beside = f"; {found[1]} of the folder is not used" if found else ""
            return encoding, f"the family {family} is encoded by dayzero itself{beside}"
    if found is not None and form is not None:
        specials = special_tokens(source)
        return TemplateEncoding(found[0], form, tokenizer, source=found[1], specials=specials), why
    if lacks:
        return None, f"{source.name} holds no chat template, and {lacks}; send prompts to /v1/completions."
    code = sorted({f for pattern in ENCODER_FILES for f in fnmatch.filter(source.files(), pattern)})
    if code:
        return None, (
            f"{source.name} holds its chat format as code ({code[0]}), which is not run; give a template with "
            "--chat-template, or send prompts to /v1/completions."
        )
    return None, (
        f"{source.name} holds no chat template, as base models do; send prompts to /v1/completions, or give a template "
        "with --chat-template."
    )


def _own_encoder(name: str, tokenizer: Tokenizer) -> tuple[ChatEncoding | None, str]:
    """(the encoder, ""), or (None, what the vocabulary lacks for it)."""
    needed, make = _encoders()[name]
    missing = [token for token in needed if tokenizer.id_of(token) is None]
    if missing:
        return None, f"its tokenizer has no token {missing[0]}, which the family's format {name} needs"
    return make(tokenizer), ""
