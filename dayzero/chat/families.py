"""The formats in use, as tables for the one parser, and how a format is recognised.

A new format is a new ``Format`` here: its grammar, the texts by which a template shows it, and what its ids look like.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dayzero.chat.channel_grammars import (
    CLOSE,
    END_OF_MSG,
    OPEN,
    SEP,
    closing,
    harmony_grammar,
    opening,
    xtml_grammar,
)
from dayzero.chat.markers import Edge, Grammar, Route, State

CallForm = Literal["object", "named", "tagged", "channels", "elements", "none"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a call is written, for a grammar that holds the model to it: the texts around name, arguments and values.

    section: around all calls. call: before the name. name: between name and arguments. end: behind a call. Of tagged
    calls, key: around an argument's name; value: behind a value; typed: behind its name stands whether it is text.
    arguments_key: of calls that are one object. numbered: the call's number stands behind its name.
    """

    form: CallForm
    section: tuple[str, str] = ("", "")
    call: str = ""
    name: str = ""
    end: str = ""
    key: tuple[str, str] = ("", "")
    value: str = ""
    between: str = ""
    arguments_key: str = "arguments"
    typed: bool = False
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write reasoning and calls.

    signs: texts that a template of this format holds, all of them; without: texts it must not hold. think: the markers
    of reasoning, None when it has none. native_ids: the model numbers its calls itself and reads its own ids back.
    stops: tokens that end an answer in this format, besides those that files name.
    """

    name: str
    grammar: Grammar
    shape: CallShape
    signs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    think: tuple[str, str] | None = None
    native_ids: bool = False
    stops: tuple[str, ...] = ()


THINK = ("<think>", "</think>")


def inline(
    think: tuple[str, str] | None,
    states: Mapping[str, State],
    calls: tuple[Edge, ...] = (),
    *,
    strays: Collection[str] = (),
    in_reasoning: tuple[Edge, ...] | None = None,
    bare: str | None = None,
    literals: tuple[str, ...] = (),
) -> Grammar:
    """A grammar whose answer is text with marked parts in it.

    calls: the markers that open calls. in_reasoning: the same while the model reasons: there they end the reasoning,
    because models leave out its closing marker before a call. strays: closing markers that mean nothing in content.
    """
    content = [*calls, *(Edge(stray, "content") for stray in strays)]
    made = dict(states)
    starts = {"content": "content", "reasoning": "content", "continued": "content"}
    if think is not None:
        opening, closing = think
        content += [Edge(opening, "reasoning"), Edge(closing, "content")]
        inside = calls if in_reasoning is None else in_reasoning
        made["reasoning"] = State("reasoning", (Edge(closing, "content"), Edge(opening, "reasoning"), *inside))
        starts["reasoning"] = "reasoning"
    made["content"] = State("content", tuple(content), bare=bare)
    return Grammar(made, starts, literals=literals)


def _hermes() -> Format:
    opening, closing = "<tool_call>", "</tool_call>"
    states = {"object": State("object", (Edge(closing, "content", ends_call=True),))}
    calls = (Edge(opening, "object"),)
    inside = (Edge(opening, "object", follows="{"),)
    shape = CallShape("object", call=opening + "\n", end="\n" + closing, between="\n")
    return Format(
        "hermes",
        inline(THINK, states, calls, strays=(closing,), in_reasoning=inside),
        shape,
        signs=("<tool_call>",),
        without=("<arg_key>", "<function="),
        think=THINK,
    )


def _xml() -> Format:
    """Parameters as tags, each value on lines of its own."""
    opening, closing = "<tool_call>", "</tool_call>"
    states = {
        "section": State("gap", (Edge("<function=", "name"), Edge(closing, "content")), bare="object"),
        "object": State("object", (Edge(closing, "content", ends_call=True),)),
        "name": State("header", (Edge(">", "params", routes=True),), (Route(r"\s*(?P<name>[^\s>]+)\s*"),)),
        "params": State(
            "gap",
            (
                Edge("<parameter=", "key"),
                Edge("</function>", "section", ends_call=True),
                Edge(closing, "content", ends_call=True),
            ),
        ),
        "key": State("header", (Edge(">", "value", routes=True),), (Route(r"\s*(?P<key>[^>]+?)\s*"),)),
        "value": State("value", (Edge("</parameter>", "params"),), padding=True),
    }
    calls = (Edge(opening, "section"), Edge("<function=", "name"))
    inside = (Edge(opening, "section", follows="<function="),)
    shape = CallShape(
        "tagged",
        section=(opening + "\n", "\n" + closing),
        call="<function=",
        name=">\n",
        end="</function>",
        key=("<parameter=", ">\n"),
        value="\n</parameter>\n",
        between=f"\n{closing}\n{opening}\n",
    )
    return Format(
        "xml_parameters",
        inline(THINK, states, calls, strays=(closing,), in_reasoning=inside),
        shape,
        signs=("<function=", "<parameter="),
        think=THINK,
    )


def _arg_pairs(breaks: str) -> Format:
    """The name, then pairs of tags for key and value. breaks: what stands between them."""
    opening, closing = "<tool_call>", "</tool_call>"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    states = {
        "name": State(
            "header",
            (Edge("<arg_key>", "key", routes=True), Edge(closing, "content", routes=True, ends_call=True)),
            (Route(r"\s*(?P<name>[^\s<]+)\s*"),),
        ),
        "key": State(
            "header",
            (Edge("<arg_value>", "value", routes=True), Edge(closing, "content", ends_call=True)),
            (Route(r"\s*(?P<key>.+?)\s*(?:</arg_key>)?\s*"),),
        ),
        "value": State("value", (Edge("</arg_value>", "params"),)),
        "params": State("gap", (Edge("<arg_key>", "key"), Edge(closing, "content", ends_call=True))),
    }
    shape = CallShape(
        "tagged",
        call=opening,
        name=breaks,
        end=closing,
        key=("<arg_key>", f"</arg_key>{breaks}<arg_value>"),
        value=f"</arg_value>{breaks}",
        between=breaks,
    )
    return Format(
        "arg_pairs" if breaks else "arg_pairs_compact",
        inline(THINK, states, (Edge(opening, "name"),), strays=(closing, *inner), in_reasoning=()),
        shape,
        signs=("<arg_key>", "<arg_value>", *(() if breaks else ("</arg_key><arg_value>",))),
        think=THINK,
    )


def _deepseek(fenced: bool) -> Format:
    """Control tokens around each call; fenced: a type before the name and the arguments in a code block."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, close, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    outer = (Edge(begin, "section"), Edge(call, "type" if fenced else "name"))
    over = (
        Edge(close, "section", ends_call=True, quoted=True),
        Edge(end, "content", ends_call=True, quoted=True),
    )
    states = {
        "section": State("gap", (outer[1], Edge(end, "content"))),
        "arguments": State("arguments", over, fence=("```json", "```") if fenced else None),
    }
    if fenced:
        states["type"] = State("header", (Edge(sep, "name"),), words=r"\s*(?:function)?\s*")
        states["name"] = State("header", (Edge("\n", "arguments", routes=True),), (Route(r"\s*(?P<name>\S+)\s*"),))
        shape = CallShape("named", (begin, end), f"{call}function{sep}", "\n```json\n", f"\n```{close}")
    else:
        states["name"] = State("header", (Edge(sep, "arguments", routes=True),), (Route(r"\s*(?P<name>\S+)\s*"),))
        shape = CallShape("named", (begin, end), call, sep, close)
    if fenced:
        shape = replace(shape, between="\n")
    return Format(
        "deepseek_v3" if fenced else "deepseek_v31",
        inline(THINK, states, outer, strays=(end, close, sep)),
        shape,
        signs=("<｜tool▁call▁begin｜>", *(("```json",) if fenced else ())),
        without=("｜DSML｜", *(() if fenced else ("```json",))),
        think=THINK,
    )


DSML = "｜DSML｜"


def _dsml(section: str) -> Format:
    """Tags with a control token in their names; each value says whether it is text."""
    begin, end = f"<{DSML}{section}>", f"</{DSML}{section}>"
    call, close = f"<{DSML}invoke", f"</{DSML}invoke>"
    param, shut = f"<{DSML}parameter", f"</{DSML}parameter>"
    over = (Edge(close, "section", ends_call=True), Edge(end, "content", ends_call=True))
    states = {
        "section": State("gap", (Edge(call, "name"), Edge(end, "content"))),
        "name": State("header", (Edge(">", "params", routes=True),), (Route(r'\s*name="(?P<name>.*?)"\s*'),)),
        "params": State("gap", (Edge(param, "key"), *over)),
        "key": State(
            "header",
            (Edge(">", "value", routes=True),),
            (Route(r'\s*name="(?P<key>.*?)"(?:\s+string="(?P<string>true|false)")?\s*'),),
        ),
        "value": State("value", (Edge(shut, "params"),)),
    }
    shape = CallShape(
        "tagged",
        section=(begin + "\n", "\n" + end),
        call=f'{call} name="',
        name='">\n',
        end=close,
        key=(f'{param} name="', '" string="'),
        value=shut + "\n",
        between="\n",
        typed=True,
    )
    calls = (Edge(begin, "section"), Edge(call, "name"))
    return Format(
        "dsml" if section == "function_calls" else "dsml_tool_calls",
        inline(THINK, states, calls, strays=(end, close, param, shut), literals=(DSML,)),
        shape,
        signs=(DSML, section),
        think=THINK,
        stops=("<｜end▁of▁sentence｜>",),
    )


def _kimi() -> Format:
    """A section of control tokens; the id holds the function's name."""
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, sep, close = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    over = (
        Edge(close, "section", ends_call=True, quoted=True),
        Edge(end, "content", ends_call=True, quoted=True),
    )
    outer = (Edge(begin, "section"), Edge(call, "name"))
    states = {
        "section": State("gap", (outer[1], Edge(end, "content"))),
        "name": State(
            "header",
            (Edge(sep, "arguments", routes=True),),
            (Route(r"\s*(?P<id>(?:functions\.)?(?P<name>\S+?):\d+)\s*"), Route(r"\s*(?:functions\.)?(?P<name>\S+)\s*")),
        ),
        "arguments": State("arguments", over),
    }
    shape = CallShape("named", (begin, end), call + "functions.", sep, close, numbered=True)
    return Format(
        "kimi_k2",
        inline(THINK, states, outer, strays=(end, close, sep)),
        shape,
        signs=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        think=THINK,
        native_ids=True,
    )


def _llama() -> Format:
    """The whole answer is one object, or what follows a control token is."""
    states = {
        "bare": State("object", tentative=True),
        "tagged": State("object", (Edge("<|python_tag|>", "tagged", ends_call=True, quoted=True),)),
    }
    shape = CallShape("object", arguments_key="parameters", between="; ")
    return Format(
        "llama3_json",
        inline(None, states, (Edge("<|python_tag|>", "tagged"),), bare="bare"),
        shape,
        signs=("<|start_header_id|>", "<|eot_id|>"),
    )


def _harmony() -> Format:
    return Format(
        "harmony",
        harmony_grammar(),
        CallShape("channels"),
        signs=("<|channel|>", "<|message|>", "analysis"),
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        stops=("<|return|>", "<|call|>"),
    )


def _xtml() -> Format:
    return Format(
        "xtml",
        xtml_grammar(),
        CallShape("elements"),
        signs=(OPEN, CLOSE, SEP, END_OF_MSG),
        think=(opening("think"), closing("think")),
        stops=(END_OF_MSG,),
    )


HERMES, XML, KIMI, LLAMA, HARMONY, XTML = _hermes(), _xml(), _kimi(), _llama(), _harmony(), _xtml()
ARG_PAIRS, ARG_PAIRS_COMPACT = _arg_pairs("\n"), _arg_pairs("")
DEEPSEEK_V3, DEEPSEEK_V31 = _deepseek(True), _deepseek(False)
DSML_CALLS, DSML_TOOL_CALLS = _dsml("function_calls"), _dsml("tool_calls")
THINKING = Format("thinking", inline(THINK, {}), CallShape("none"), think=THINK)
PLAIN = Format("plain", inline(None, {}), CallShape("none"))

# The first whose signs a template holds is its format, so the more particular come first.
FORMATS = (
    HARMONY, XTML, DSML_CALLS, DSML_TOOL_CALLS, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, ARG_PAIRS_COMPACT, ARG_PAIRS, XML,
    HERMES, LLAMA,
)  # fmt: skip
# What a family writes when its template does not show it.
BY_FAMILY: Mapping[str, Format] = {
    "gpt_oss": HARMONY, "deepseek_v32": DSML_CALLS, "deepseek_v3": DEEPSEEK_V31, "glm5": ARG_PAIRS_COMPACT,
    "qwen3_5": XML, "qwen3": HERMES, "kimi_k3": XTML,
}  # fmt: skip


def without_thinking(found: Format) -> Format:
    """The same calls for a model that has no markers of reasoning."""
    if found.think is None or found is HARMONY:
        return found
    marks = set(found.think)
    states = {
        name: replace(state, edges=tuple(e for e in state.edges if e.marker not in marks))
        for name, state in found.grammar.states.items()
        if name != "reasoning"
    }
    starts = {**found.grammar.starts, "reasoning": "content"}
    return replace(found, grammar=replace(found.grammar, states=states, starts=starts), think=None)


def recognise(template: str, family: str | None, vocabulary: Collection[str]) -> tuple[Format, str]:
    """(the format, why): by what the template writes, else by the family, else by control tokens in the vocabulary.

    Markers of reasoning count only where template or vocabulary know them, so that a model without any keeps a
    ``<think>`` that someone asked it to write.
    """
    found, why = PLAIN, "the template shows no tool calls"
    for known in FORMATS:
        if known.signs and all(s in template for s in known.signs) and not any(w in template for w in known.without):
            found, why = known, f"the template writes {known.signs[0]}"
            break
    else:
        if family is not None and family in BY_FAMILY and "tools" in template:
            found, why = BY_FAMILY[family], f"the family {family} writes so, though the template does not show it"
    thinks = all(mark in template or mark in vocabulary for mark in THINK)
    if found is PLAIN and thinks:
        return THINKING, f"{why}; <think> is known to template or vocabulary"
    if found.think == THINK and not thinks:
        return without_thinking(found), why
    return found, why
