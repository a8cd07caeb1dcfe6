"""Grammars of formats whose answers are messages in channels, each opened and closed by control tokens.

They are tables like those of ``families``; they stand here because they share nothing with the inline ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dayzero.chat.markers import Edge, Grammar, Route, State

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
FENCE = ("```json", "```")


def harmony_grammar() -> Grammar:
    """Messages with a header each: the channel says what the text is, the recipient that it is a call."""
    start, channel, message = "<|start|>", "<|channel|>", "<|message|>"
    ends = ("<|end|>", "<|call|>", "<|return|>")
    routes = (
        Route(r".*\bto=functions\.(?P<name>[^\s<]+).*", "arguments"),
        Route(r".*\bto=(?P<name>(?!assistant\b|user\b)[^\s<]+).*", "arguments"),
        Route(r".*<\|channel\|>\s*analysis\b.*", "reasoning"),
        Route(r".*<\|channel\|>.*", "content"),
        Route(r"\s*(?:assistant)?\s*", "content"),
    )
    over = tuple(Edge(marker, "between", quoted=True) for marker in ends)
    again = (Edge(start, "role", quoted=True), Edge(channel, "role", keep=True, quoted=True))
    same = {"<|message|>", "<|constrain|>"}

    def body(sink: Literal["content", "reasoning", "arguments"]) -> State:
        call = sink == "arguments"
        edges = tuple(replace(edge, ends_call=call) for edge in (*over, *again))
        return State(sink, edges if call else (*edges, *(Edge(m, sink) for m in sorted(same))))

    opens = Edge(message, "content", routes=True)
    words = r"\s*(?:assistant)?\s*(?:to=\S+)?\s*"
    states = {
        "between": State("header", (opens, Edge(start, "role"), *over), routes, words, loose=True),
        "role": State("header", (opens, Edge(start, "role"), *over), routes, words),
        "content": body("content"),
        "reasoning": body("reasoning"),
        "arguments": body("arguments"),
    }
    return Grammar(
        states,
        {"content": "between", "reasoning": "reasoning", "continued": "content"},
        trim="",
        literals=("<|channel|>", "<|constrain|>"),
    )


def opening(tag: str) -> str:
    """A tag without attributes, as XTML opens it."""
    return f"{OPEN}{tag}{SEP}"


def closing(tag: str) -> str:
    """The end of what ``opening`` began."""
    return f"{CLOSE}{tag}{SEP}"


def xtml_grammar() -> Grammar:
    """Tags whose brackets are control tokens. An answer is the elements think, response and tools; tools holds calls,
    a call holds arguments with their types, or in one block of JSON what could not be split into arguments.

    Brackets that stand alone are dropped from prose; inside an argument's text only a closing tag is markup, so that
    text about this format can be an argument.
    """
    return Grammar(
        {**_prose_states(), **_call_states()},
        {"content": "content", "reasoning": "reasoning", "continued": "content"},
        trim="",
        literals=(OPEN, CLOSE, SEP),
        escapes=(("&quot;", '"'), ("&amp;", "&")),
    )


OVER = Edge(END_OF_MSG, "between", quoted=True)
TAGS = ("think", "response", "tools", "message", "call", "argument", "json")


def _edges(here: str, **closes: str) -> tuple[Edge, ...]:
    """All tags and brackets, as they lead on from ``here``; closes: tags whose end leads somewhere else."""
    begins = (
        Edge(opening("think"), "reasoning"),
        Edge(opening("response"), "content"),
        Edge(opening("tools"), "section"),
        Edge(OPEN + "message", "message"),
        Edge(OPEN + "call", "call"),
    )
    ends = tuple(Edge(closing(tag), closes.get(tag, here)) for tag in TAGS)
    return (*begins, *ends, *(Edge(bracket, here) for bracket in (OPEN, CLOSE, SEP)), OVER)


def _prose_states() -> dict[str, State]:
    prose = {"think": "between", "response": "between", "message": "between"}
    return {
        "between": State("header", _edges("between"), words=r"\s*", loose=True),
        "message": State("header", (Edge(SEP, "between", routes=True), OVER), (Route(".*"),)),
        "reasoning": State("reasoning", _edges("reasoning", **prose)),
        "content": State("content", _edges("content", **prose)),
        "section": State("gap", _edges("section", tools="between", message="between")),
    }


def _ended(routes: bool = False) -> tuple[Edge, ...]:
    """Every tag that ends the call that is open, and what that leads to. routes: a header ends with it, too."""
    made = (Edge(closing("call"), "section"), Edge(closing("tools"), "between"), Edge(closing("message"), "between"))
    return tuple(replace(edge, ends_call=True, quoted=True, routes=routes) for edge in (*made, OVER))


def _call_states() -> dict[str, State]:
    argument = Edge(OPEN + "argument", "key")
    name, key, kind = (
        rf'(?:(?=.*?\s{attribute}="(?P<{group}>[^"]*)"))'
        for attribute, group in (("tool", "name"), ("key", "key"), ("type", "type"))
    )
    inside = (
        argument,
        Edge(OPEN + "json", "block"),
        Edge(OPEN + "call", "call", ends_call=True),
        *(Edge(closing(tag), "params") for tag in ("argument", "json")),
        *(Edge(bracket, "params") for bracket in (OPEN, CLOSE, SEP)),
        *_ended(),
    )
    headed = (Edge(SEP, "params", routes=True), replace(argument, routes=True), *_ended(routes=True))
    return {
        "call": State("header", headed, (Route(f"{name}.*"),)),
        "params": State("gap", inside, bare="json"),
        "key": State("header", (Edge(SEP, "value", routes=True), OVER), (Route(f"{key}{kind}?.*"),)),
        "value": State("value", (Edge(closing("argument"), "params"), *_ended())),
        "block": State("header", (Edge(SEP, "json", routes=True), OVER), (Route(".*"),)),
        "json": State("arguments", (Edge(closing("json"), "params", quoted=True), *_ended()), fence=FENCE),
    }
