"""Grammars for the format whose answers are elements: think, response, tools. They are ``call_grammar``'s for the call
form ``elements``, and hold the whole answer from the end of the reasoning on, since no single token says that a call
begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.chat.call_grammar import ANY_OBJECT, BESIDE, Lark, client_body
from dayzero.chat.calls import json_types
from dayzero.chat.channel_grammars import CLOSE, OPEN, SEP, closing, opening
from dayzero.chat.conversation import Conversation, NamedTool, Tool
from dayzero.chat.encoding import GrammarKind, GrammarText, Prompt
from dayzero.chat.tokenizer import Tokenizer

# The format's names of the types of JSON, and what a schema calls them.
TYPES: Mapping[str, tuple[str, ...]] = {
    "string": ("string",), "number": ("number", "integer"), "boolean": ("boolean",), "null": ("null",),
    "object": ("object",), "array": ("array",),
}  # fmt: skip
ESCAPES = {"&": "&amp;", '"': "&quot;"}


def tool_grammar(conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer) -> GrammarText | None:
    """See ``ChatEncoding.tool_grammar``."""
    choice, tools = conversation.tool_choice, list(conversation.offered)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not tools or not (forced or any(tool.strict for tool in tools)):
        return None
    lark = Lark(tokenizer)
    calls = _section(lark, tools, conversation.parallel_tool_calls and not isinstance(choice, NamedTool))
    if forced:
        return _answer(lark, prompt, tokenizer, f"{lark.literal(closing('response'))} {calls}")
    return _answer(lark, prompt, tokenizer, f"{lark.until(closing('response'))} ({calls})?")


def answer_grammar(prompt: Prompt, kind: GrammarKind, text: str, tokenizer: Tokenizer) -> GrammarText:
    """See ``ChatEncoding.answer_grammar``."""
    if prompt.continued and prompt.opens == "content":
        return GrammarText(kind, text)
    lark = Lark(tokenizer)
    body = client_body(lark, kind, text, "stand inside this model's format")
    return _answer(lark, prompt, tokenizer, f"{body} {lark.literal(closing('response'))}")


def either_grammar(
    conversation: Conversation, prompt: Prompt, kind: GrammarKind, text: str, tokenizer: Tokenizer
) -> GrammarText:
    """See ``ChatEncoding.either_grammar``."""
    if prompt.continued and prompt.opens == "content":
        return GrammarText(kind, text)
    lark = Lark(tokenizer)
    end = lark.literal(closing("response"))
    calls = _section(lark, list(conversation.offered), conversation.parallel_tool_calls)
    body = client_body(lark, kind, text, BESIDE)
    return _answer(lark, prompt, tokenizer, f"({body} {end} | {end} {calls})")


def _answer(lark: Lark, prompt: Prompt, tokenizer: Tokenizer, rest: str) -> GrammarText:
    """The answer from where the prompt ends to the end of its message. rest: from inside the response on."""
    respond, after = lark.literal(opening("response")), None
    if prompt.opens == "reasoning":
        bracket = tokenizer.id_of(CLOSE)
        if bracket is None:
            first = f"{lark.until(closing('think'))} {respond} "
        else:  # the reasoning itself is free, and its end begins with a token of its own
            first, after = f"{lark.literal(closing('think').removeprefix(CLOSE))} {respond} ", bracket
    elif prompt.closed or prompt.text.endswith(opening("response")):
        first = ""
    else:
        first = f"({lark.literal(opening('think'))} {lark.until(closing('think'))})? {respond} "
    return GrammarText("lark", lark.text(f"{first}{rest} {lark.literal(closing('message'))}"), after)


def _section(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """All calls of an answer."""
    call = f'{OPEN}call tool="'
    calls = lark.rule(" | ".join(_call(lark, tool) for tool in tools))
    more = f" ({lark.literal(call)} {calls})*" if many else ""
    return f"{lark.literal(opening('tools') + call)} {calls}{more} {lark.literal(closing('tools'))}"


def _call(lark: Lark, tool: Tool) -> str:
    """One call behind its opening text."""
    name = json.dumps(f'{_attribute(tool.name)}" index="', ensure_ascii=False)
    arguments = _arguments(lark, tool.parameters if tool.parameters is not None else ANY_OBJECT)
    end = lark.literal(closing("call"))
    return " ".join(part for part in (name, "/[1-9][0-9]{0,2}/", lark.literal(f'"{SEP}'), arguments, end) if part)


def _attribute(text: str) -> str:
    return "".join(ESCAPES.get(letter, letter) for letter in text)


def _arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Arguments in the order of the schema; those it does not require may be left out."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    out = []
    for key, said in properties.items() if isinstance(properties, Mapping) else ():
        head = lark.literal(f'{OPEN}argument key="{_attribute(key)}" type="')
        out.append(f"({head} {_value(lark, said, shared)})" + ("" if key in required else "?"))
    return " ".join(out)


def _value(lark: Lark, said: Any, shared: Mapping[str, Any]) -> str:
    """The type of an argument and its text, for each type that its schema allows."""
    allowed = json_types(said) or frozenset(kind for kinds in TYPES.values() for kind in kinds)
    forms = []
    for name, kinds in TYPES.items():
        if not allowed & set(kinds):
            continue
        head, end = lark.literal(f'{name}"{SEP}'), closing("argument")
        if name == "string":
            forms.append(f"{head} {_text(lark, said, end)}")
        else:
            whole = said if isinstance(said, Mapping) else {}
            only = whole if allowed <= set(kinds) else {"allOf": [whole, {"type": sorted(allowed & set(kinds))}]}
            forms.append(f"{head} {lark.json({**only, **shared})} {lark.literal(end)}")
    return lark.rule(" | ".join(forms))


def _text(lark: Lark, said: Any, end: str) -> str:
    values = said.get("enum", [said["const"]] if "const" in said else None) if isinstance(said, Mapping) else None
    if not isinstance(values, list):
        return lark.until(end)
    words = " | ".join(lark.literal(value) or '""' for value in values if isinstance(value, str))
    return f"({words}) {lark.literal(end)}"
