"""Answers that must have a form: JSON of a schema, any JSON object, a regular expression, one of several texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dayzero.acceptance.stages.answers import CHAT, Choice, Malformed, Refused
from dayzero.acceptance.stages.asking import Ask, Check, Checks, lost_in_thought
from dayzero.acceptance.stages.tools import LONG_ENOUGH, PARAMETERS, good

PATTERN = r"[a-c]{3}-[0-9]{2}"
# Characters of two, three and four bytes, a joiner, and a mark of its own: forced, so that any model writes them.
LETTERS = "\u00e9\u4eac\u3042\U0001f642\u200de\u0301\U0001f469\u200d\U0001f467"
PROMPT = "Where shall we go, and for how many days? Answer in JSON."
GRAMMAR = "Mask the logits by the grammar at every token, and end the answer only where the grammar may end."
CHARACTERS = "a stream never cuts a character in two"
HOLD_BACK = "Keep bytes back until they are whole characters before a chunk is sent."

NO_SCHEMA: Mapping[str, Any] = {"type": "animal"}
BLANKS = 16  # at its end, of an answer that is nothing else any more


def checks() -> tuple[Check, ...]:
    return (
        Check("structured.schema", "json_schema is held", _schema, apis=CHAT),
        Check("structured.object", "json_object gives an object", _object, apis=CHAT),
        Check("structured.regex", "a regular expression is held", _regex),
        Check("stream.characters", "a stream never cuts a character", _characters),
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _both(ask: Ask, fields: Mapping[str, Any]) -> tuple[Choice, Choice]:
    asked = {"temperature": 0, "max_tokens": ask.room(LONG_ENOUGH), **fields}
    return ask.whole("chat", PROMPT, **asked).one, ask.streamed("chat", PROMPT, **asked).one


def _schema(ask: Ask, out: Checks) -> None:
    schema = {"name": "trip", "schema": dict(PARAMETERS), "strict": True}
    one, stream = _both(ask, {"response_format": {"type": "json_schema", "json_schema": schema}})
    claim = "an answer of response_format json_schema obeys the schema"
    if lost_in_thought(one):
        out.skip("structured.schema", claim, f"the answer is reasoning alone: {one.reasoning[-60:]!r}")
    elif one.finish == "length" and one.text.lstrip()[:1] in ("", "{") and one.text[-BLANKS:].isspace():
        # A model of no skill may put blanks between two parts of an object for ever, as the grammar of JSON lets it.
        out.skip("structured.schema", claim, f"{LONG_ENOUGH} tokens were spent on blanks: {one.text.strip()[:60]!r} …")
    else:
        held = good(_json(one.text))
        layer = "server" if held or not _heard(ask) else "scheduler"
        out.judge("structured.schema", claim, held, one.text[:120], "valid", layer=layer, remedy=GRAMMAR)
        out.judge("structured.finish", "and ends by itself", one.finish == "stop", one.finish, "stop", remedy=GRAMMAR)
    out.judge(
        "structured.stream", "and is the same streamed", one.shown == stream.shown, stream.text[:120],
        "equal to the whole answer", remedy="Stream what the grammar holds; lose and double nothing.",
    )  # fmt: skip


def _heard(ask: Ask) -> bool:
    """Whether the server reads the format: it refuses one that is none. Then what is lost is lost behind it."""
    none = {"type": "json_schema", "json_schema": {"name": "trip", "schema": NO_SCHEMA, "strict": True}}
    return 400 <= ask.post("chat", PROMPT, temperature=0, max_tokens=1, response_format=none).status < 500


def _object(ask: Ask, out: Checks) -> None:
    one, _ = _both(ask, {"response_format": {"type": "json_object"}, "max_tokens": ask.room(48)})
    text = one.text.strip()
    value = _json(text)
    # an object that is cut off by the limit is not wrong; what comes before the first brace is
    right = isinstance(value, dict) if one.finish == "stop" else text.startswith("{") or not text
    out.judge(
        "structured.object", "an answer of response_format json_object is one", right, f"{text[:80]!r}, {one.finish}",
        "a JSON object, or the start of one where it is cut off", remedy=GRAMMAR,
    )  # fmt: skip


def extension(ask: Ask, kind: str, value: Any, holds: Callable[[str], bool]) -> tuple[dict[str, Any] | None, str]:
    """(the fields by which this server holds an answer to a form, ""), or (None, what became of each way to say it).
    Of several names the extension has, a server may refuse some, and ignore others without a word."""
    api, said = ask.api or "chat", []
    for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        try:
            text = ask.whole(api, PROMPT, temperature=0, max_tokens=ask.room(LONG_ENOUGH), **fields).one.text
        except Refused as error:
            said.append(f"{next(iter(fields))}: refused with {error}")
            continue
        if holds(text.strip()):
            return fields, ""
        said.append(f"{next(iter(fields))}: taken, and answered with {text[:40]!r}")
    return None, "; ".join(said)


def _regex(ask: Ask, out: Checks) -> None:
    claim = "a regular expression is held"
    fields, why = extension(ask, "regex", PATTERN, lambda text: re.fullmatch(PATTERN, text) is not None)
    if fields is None and "taken" not in why and not ask.ours:
        out.skip("structured.regex", claim, why)
        return
    out.judge(
        "structured.regex", claim, fields is not None, why or next(iter(fields or {})), PATTERN, remedy=GRAMMAR,
        bad="fail" if ask.ours else "note",
    )  # fmt: skip


def _characters(ask: Ask, out: Checks) -> None:
    """With letters that the answer is forced to have, where the server is able to; else with what the model writes."""
    api = ask.api or "chat"
    held, why = extension(ask, "choice", [LETTERS], lambda text: text == LETTERS)
    if held is None and ask.ours:  # its grammars are judged above: letters that are forced must come as they are
        out.judge("stream.characters", CHARACTERS, False, why, LETTERS, remedy=HOLD_BACK)
        return
    prompt = PROMPT if held else f"Repeat this exactly: {LETTERS}"
    fields = {"temperature": 0, "max_tokens": ask.room(LONG_ENOUGH) if held else 40, **(held or {})}
    reply, text = ask.streamed(api, prompt, **fields), ask.whole(api, prompt, **fields).one.said
    halves = 0
    for event in reply.answer.events:
        if not event.done and event.json is None:
            raise Malformed(f"an event is no JSON in UTF-8: {event.data[:60]!r}")
        halves += any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(event.json, ensure_ascii=False))
    said = reply.one.said
    out.judge(
        "stream.characters", CHARACTERS, not halves and said == text,
        f"{said[:40]!r}{' (forced)' if held else ''}, {halves} half surrogates", f"{text[:40]!r}", remedy=HOLD_BACK,
    )  # fmt: skip
