"""Grammars that hold an answer to the model's own call format, or begin a client's grammar behind the reasoning.

They are written in the Lark dialect of the grammar library, in which a JSON schema may stand in place (``%json``) and a
token is named by its id (``<[7]>``): a marker that is a token of its own is never spelled by other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.chat.calls import only_text
from dayzero.chat.conversation import Conversation, NamedTool, Tool
from dayzero.chat.encoding import GrammarKind, GrammarText, Prompt
from dayzero.chat.families import CallShape, Format
from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import FieldError, UsageError

# Between the parts of a JSON text. An endless run of white space would be valid, and models do fall into one.
SPACES = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
BREAKS = r"/\n{0,4}/"
BESIDE = "stand beside tool calls"
FINAL = "<|channel|>final<|message|>"  # where a model that writes in channels puts its answer


class Lark:
    """Builds one grammar's text. tokenizer: whose added tokens are named by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._added = tokenizer.added
        spelled = sorted((re.escape(t) for t in tokenizer.added if t.strip()), key=len, reverse=True)
        self._pattern = re.compile("|".join(spelled)) if spelled else None
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """A further rule; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def parts(self, text: str) -> list[str | int]:
        """A text as letters and token ids, in order."""
        out: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            out += [text[at : match.start()], self._added[match[0]]]
            at = match.end()
        return [part for part in [*out, text[at:]] if part != ""]

    def literal(self, text: str) -> str:
        """Exactly this text."""
        shown = [f"<[{p}]>" if isinstance(p, int) else json.dumps(p, ensure_ascii=False) for p in self.parts(text)]
        return " ".join(shown)

    def until(self, closing: str) -> str:
        """Any text, and then ``closing``."""
        parts = self.parts(closing)
        number = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
        if number is None:
            return self.rule("/(?s:.*)/", f"[suffix={json.dumps(closing, ensure_ascii=False)}]")
        before = "".join(str(part) for part in parts[:number])
        rest = "".join(f" <[{p}]>" if isinstance(p, int) else f" {json.dumps(p)}" for p in parts[number:])
        return self.rule(f"/(?s:.*){_escaped(before)}/") + rest

    def json(self, schema: Any) -> str:
        """JSON of a schema."""
        if not isinstance(schema, Mapping):
            schema = {} if schema is None or schema is True else {"not": {}}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": SPACES}, ensure_ascii=False))


def _escaped(text: str) -> str:
    """A text inside a Lark regex."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace("\\\n", r"\n")


def marker_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the token that a marker is, white space around it aside; None when it is several."""
    return tokenizer.id_of(text.strip())


def thinking_first(lark: Lark, form: Format, prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, int | None]:
    """(what a grammar must allow before the answer, the token behind which it begins).

    Where the prompt opened the reasoning, its closing token ends it, if it is one; where the model may open it itself,
    a whole block is allowed.
    """
    if form.think is None:
        return "", None
    opening, closing = form.think
    if prompt.opens == "reasoning":
        end = tokenizer.id_of(closing)
        return ("", end) if end is not None else (f"{lark.until(closing)} {BREAKS} ", None)
    if prompt.closed:
        return "", None
    block = f"{lark.literal(opening)} {lark.until(closing)} {BREAKS}"
    return f"({block})? ", None


def answer_grammar(kind: GrammarKind, text: str, lark: Lark, first: str, after: int | None) -> GrammarText:
    """A client's grammar, begun where content begins. first: what the grammar allows before it ("": nothing)."""
    if not first:
        return GrammarText(kind, text, after)
    return GrammarText("lark", lark.text(first + client_body(lark, kind, text, "follow this model's reasoning")), after)


def client_body(lark: Lark, kind: GrammarKind, text: str, where: str) -> str:
    """A client's grammar as a part of another. where: what a Lark grammar, which brings its own start, cannot do."""
    if kind == "lark":
        raise UsageError(f"a Lark grammar cannot {where}; ask with a JSON schema or a regex.")
    if kind == "json_object":
        return lark.json(ANY_OBJECT)
    if kind == "regex":
        return lark.rule("/" + re.sub(r"(?<!\\)/", r"\\/", text) + "/")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the grammar of the request is not JSON: {str(error)[:120]}.") from error
    if kind == "json_schema":
        return lark.json(value)
    if not (isinstance(value, list) and value and all(isinstance(choice, str) for choice in value)):
        raise UsageError("a choice must be a list of one or more texts.")
    return "(" + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value) + ")"


# --- calls -----------------------------------------------------------------------------------------------------------


def tool_grammar(form: Format, conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer) -> GrammarText | None:
    """See ``ChatEncoding.tool_grammar``. A ``strict`` tool under tool_choice auto is held from the marker that opens a
    call on, where that marker is one token; a format without one cannot know that a call begins."""
    choice, tools = conversation.tool_choice, list(conversation.offered)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not tools or not (forced or any(tool.strict for tool in tools)):
        return None
    if form.shape.form == "none":
        if not forced:
            return None
        raise FieldError(
            "tool_choice",
            "tool_choice asks for a call, but this model's template shows no format for calls; use auto or none.",
        )
    many = conversation.parallel_tool_calls and not isinstance(choice, NamedTool)
    lark = Lark(tokenizer)
    shape = form.shape
    if shape.form == "channels":
        return _channels(lark, form, tools, prompt, forced)
    if forced:
        first, after = thinking_first(lark, form, prompt, tokenizer)
        return GrammarText("lark", lark.text(f"{first}{BREAKS} {_section(lark, shape, tools, many)}"), after)
    opening = shape.section[0] or shape.call
    head = lark.parts(opening)[:1]
    if not head or not isinstance(head[0], int):
        return None
    whole = _section(lark, shape, tools, many)
    return GrammarText("lark", lark.text(whole.removeprefix(f"<[{head[0]}]>").lstrip()), head[0])


def either_grammar(
    form: Format, conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, kind: GrammarKind, text: str
) -> GrammarText | None:
    """Calls, or a client's grammar: what an answer may be that is asked for a format while tools are offered. Of the
    text that models like to write before a call nothing is allowed, since it would not be of the format. None: this
    answer cannot hold calls, so that the client's grammar alone is right.
    """
    shape, tools = form.shape, list(conversation.offered)
    if shape.form == "none" or (prompt.continued and prompt.opens == "content"):
        return None
    lark = Lark(tokenizer)
    body = client_body(lark, kind, text, BESIDE)
    if shape.form == "channels":
        call, final = _channel_calls(lark, tools), lark.literal(FINAL)
        return GrammarText("lark", lark.text(f"{reasoning_message(lark, prompt)}({call} | {final} {body})"))
    first, after = thinking_first(lark, form, prompt, tokenizer)
    if shape.section[0] or shape.call:
        calls = _section(lark, shape, tools, conversation.parallel_tool_calls)
    else:
        calls = _bare_calls(lark, shape, tools, conversation.parallel_tool_calls)
    breaks = f"{BREAKS} " if form.think is not None else ""
    return GrammarText("lark", lark.text(f"{first}{breaks}({calls} | {body})"), after)


def _bare_calls(lark: Lark, shape: CallShape, tools: Sequence[Tool], many: bool) -> str:
    """Calls that no marker opens, as JSON: spelled as texts, they could not be told from an answer that is an object,
    since the library reads the longest text it can."""
    made = []
    for tool in tools:
        schema = tool.parameters if tool.parameters is not None else ANY_OBJECT
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        keys = {"name": {"const": tool.name}, shape.arguments_key: dict(schema)}
        made.append(
            lark.json(
                {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False, **shared}
            )
        )
    calls = lark.rule(" | ".join(made))
    return calls + (f" ({lark.literal(shape.between)} {calls})*" if many else "")


def holds_strict(form: Format, tokenizer: Tokenizer) -> bool:
    """Whether ``strict`` can be kept under tool_choice auto."""
    head = Lark(tokenizer).parts(form.shape.section[0] or form.shape.call)[:1]
    return bool(head) and isinstance(head[0], int)


def _section(lark: Lark, shape: CallShape, tools: Sequence[Tool], many: bool) -> str:
    """All calls of an answer. The opening text stands in the first rule, so that a caller can take its marker off."""
    calls = lark.rule(" | ".join(_call(lark, shape, tool) for tool in tools))
    # Neighbouring texts are one literal: the library reads the longest it can and does not go back.
    opening = lark.literal(shape.section[0] + shape.call)
    again = f"{lark.literal(shape.between + shape.call)} {calls}"
    more = f" ({again.strip()})*" if many else ""
    return f"{opening} {calls}{more} {lark.literal(shape.section[1])}".strip()


def _call(lark: Lark, shape: CallShape, tool: Tool) -> str:
    """One call behind its opening text."""
    schema = tool.parameters if tool.parameters is not None else ANY_OBJECT
    name = json.dumps(tool.name, ensure_ascii=False)
    if shape.form == "object":
        head = json.dumps(f'{{"name": {name}, "{shape.arguments_key}": ', ensure_ascii=False)
        return f'{head} {lark.json(schema)} "}}" {lark.literal(shape.end)}'.strip()
    if shape.form == "named":
        number = ' ":" /[0-9]{1,3}/' if shape.numbered else ""
        return f"{name}{number} {lark.literal(shape.name)} {lark.json(schema)} {lark.literal(shape.end)}"
    return f"{name} {lark.literal(shape.name)} {_arguments(lark, shape, schema)} {lark.literal(shape.end)}"


def _arguments(lark: Lark, shape: CallShape, schema: Mapping[str, Any]) -> str:
    """Tagged arguments in the order of the schema; those it does not require may be left out."""
    out = []
    properties = schema.get("properties")
    required = schema.get("required") or ()
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    for key, said in properties.items() if isinstance(properties, Mapping) else ():
        text = only_text(said)
        head = shape.key[0] + key + shape.key[1] + (f'{"true" if text else "false"}">' if shape.typed else "")
        body = f"{lark.literal(head)} {_value(lark, shape, said, shared, text)}"
        out.append(f"({body})" + ("" if key in required else "?"))
    return " ".join(out)


def _value(lark: Lark, shape: CallShape, schema: Any, shared: Mapping[str, Any], text: bool) -> str:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if text and choices:
        words = " | ".join(lark.literal(str(choice)) or '""' for choice in choices)
        return f"({words}) {lark.literal(shape.value)}"
    if text:
        return lark.until(shape.value)
    inner = {**schema, **shared} if isinstance(schema, Mapping) else schema
    return f"{lark.json(inner)} {lark.literal(shape.value)}"


def _channels(lark: Lark, form: Format, tools: Sequence[Tool], prompt: Prompt, forced: bool) -> GrammarText | None:
    """A message to the function's own recipient. Its end is a stop token, so nothing can follow it."""
    if not forced:
        return None
    return GrammarText("lark", lark.text(f"{reasoning_message(lark, prompt)}({_channel_calls(lark, tools)})"))


def _channel_calls(lark: Lark, tools: Sequence[Tool]) -> str:
    return " | ".join(
        f"{lark.literal(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} "
        f"{lark.json(tool.parameters if tool.parameters is not None else ANY_OBJECT)}"
        for tool in tools
    )


def reasoning_message(lark: Lark, prompt: Prompt) -> str:
    """What a model that writes in channels may say before the message that is asked for."""
    block = f"{lark.until('<|end|>')} {lark.literal('<|start|>assistant')}"
    if prompt.opens == "reasoning":
        return f"{block} "
    return f"({lark.literal('<|channel|>analysis<|message|>')} {block})? "
