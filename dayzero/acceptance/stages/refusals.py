"""Bad requests: 400 and never 500, an error object that says what is wrong, and a server that goes on as before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dayzero.acceptance.accept.http import Answer, NoAnswer
from dayzero.acceptance.stages.answers import CHAT, PATHS, Api, at
from dayzero.acceptance.stages.asking import Ask, Check, Checks

BAD = (400, 422)
LEAST_WORDS = 20_000  # of a prompt that is too long; more where the context is
SECONDS = 20.0  # for one answer: a bad request that is taken may keep a server busy for as long as it likes
SHARE = 1 / 3  # of what a whole answer is given, where that is more: on a machine that is slow
USER = {"role": "user", "content": "Hello."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NEVER_500 = "Check each field's type and range before the engine sees it, and answer 400 with the field's name."
SILENT = "Refuse what cannot be done; what is taken without a word is an answer to another question."

# Fields that no server may take as they are: (name, fields of the request).
FIELDS: Mapping[str, dict[str, Any]] = {
    "temperature as text": {"temperature": "hot"},
    "temperature below 0": {"temperature": -1},
    "top_p above 1": {"top_p": 7},
    "max_tokens as text": {"max_tokens": "many"},
    "n of 0": {"n": 0},
    "stop of numbers": {"stop": [5]},
    "logit_bias of words": {"logit_bias": {"word": "much"}},
    "stream as text": {"stream": "perhaps"},
    "a penalty out of range": {"presence_penalty": 99},
    "a seed of text": {"seed": "seven"},
}
CHAT_FIELDS: Mapping[str, dict[str, Any]] = {
    "messages as text": {"messages": "hello"},
    "no messages": {"messages": []},
    "an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "content as a number": {"messages": [{"role": "user", "content": 7}]},
    "a part of no kind": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "required without tools": {"tool_choice": "required"},
    "a tool that is not there": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    "json_schema without one": {"response_format": {"type": "json_schema"}},
    "a schema that is none": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "animal"}}}},
    "an unknown format": {"response_format": {"type": "xml"}},
    "top_logprobs without end": {"logprobs": True, "top_logprobs": 10**6},
}  # fmt: skip
TEXT_FIELDS: Mapping[str, dict[str, Any]] = {
    "a prompt that is an object": {"prompt": {"a": 1}},
    "ids below 0": {"prompt": [-1]},
    "ids beyond the vocabulary": {"prompt": [2**31 - 2]},
    "an empty list of ids": {"prompt": [[]]},
    "logprobs without end": {"logprobs": 10**6},
}
# What would keep a server busy for good where it is taken, so it is sent to our own alone; some read a number below 0
# as no limit.
ENDLESS: Mapping[str, dict[str, Any]] = {
    "max_tokens without end": {"max_tokens": 10**30},
    "max_tokens below 0": {"max_tokens": -5},
}
# What servers are known to take, and give what they think is meant.
LENIENT = frozenset({
    "stream as text", "a penalty out of range", "an unknown role", "required without tools", "n of 0",
    "a schema that is none", "stop of numbers",
})  # fmt: skip
BODIES: Mapping[str, bytes] = {
    "no body": b"",
    "half an object": b'{"model": ',
    "a list": b"[]",
    "null": b"null",
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "half a surrogate": b'{"model": "\\ud800"}',
    "very deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
    "a long number": b'{"seed": ' + b"9" * 5000 + b"}",
}


def checks() -> tuple[Check, ...]:
    return (
        Check("errors.model", "an unknown model is 404", _model),
        Check("errors.fields", "bad fields are 400, never 500", _fields, core=True),
        Check("errors.bodies", "bodies that are no request are 400, never 500", _bodies, core=True),
        Check("errors.long", "a prompt that is too long is 400", _long, layer="scheduler"),
        Check("errors.unknown", "fields that nobody knows do no harm", _unknown),
        Check("errors.stream", "an error of a streamed request has a status too", _streamed),
        Check("errors.messages", "/v1/messages has errors of its own shape", _anthropic, "chat", apis=CHAT),
    )


def problem(answer: Answer) -> str:
    """What is wrong with an error object of OpenAI's shape; "" when nothing is."""
    body = answer.json
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"no error object: {answer.body[:60]!r}"
    if not isinstance(error.get("message"), str) or not error["message"]:
        return "no message"
    missing = [name for name in ("type", "param", "code") if name not in error]
    return f"no {', '.join(missing)}" if missing else ""


def _tell(
    out: Checks, kind: str, claim: str, answers: Mapping[str, Answer | str], lenient: Iterable[str], ours: bool
) -> None:
    """5xx and silence fail. What is taken without a word fails too, except where servers are known to mean well: there
    it is a note. The error objects are one finding."""
    broken = {name: answer if isinstance(answer, str) else answer.said for name, answer in answers.items()
              if isinstance(answer, str) or answer.status >= 500}  # fmt: skip
    told = {name: answer for name, answer in answers.items() if isinstance(answer, Answer)}
    taken = [name for name, answer in told.items() if answer.status < 400]
    serious = [name for name in taken if ours or name not in set(lenient)]
    out.judge(
        f"{kind}-500", f"{claim}: none is a 5xx, none goes unanswered", not broken,
        broken or f"{len(answers)} requests", "4xx", remedy=NEVER_500,
    )  # fmt: skip
    out.judge(
        f"{kind}-taken", f"{claim}: none is taken without a word", not taken, taken or f"{len(told)} refused",
        "a status of 400 or 422", bad="fail" if serious else "note", remedy=SILENT,
    )  # fmt: skip
    refused = {name: answer for name, answer in told.items() if 400 <= answer.status < 500}
    shapeless = {name: why for name, answer in refused.items() if (why := problem(answer))}
    out.judge(
        f"{kind}-object", f"{claim}: each has an error object", not shapeless,
        dict(list(shapeless.items())[:3]) or f"{len(refused)} errors", "error: message, type, param, code",
        bad="fail" if ours or any("no error object" in why for why in shapeless.values()) else "note",
        remedy="Answer every error with the API's error object.",
    )  # fmt: skip


def _try(ask: Ask, api: Api, body: Any) -> Answer | str:
    try:
        return ask.client.post(PATHS[api], body, timeout=max(SECONDS, ask.client.timeout * SHARE))
    except NoAnswer as error:
        return str(error)


def _model(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        answer = ask.client.post(PATHS[api], ask.body(api, "Hello.", max_tokens=1) | {"model": "no-such-model-1"})
        # some servers load what is asked for by name, and one that serves a single model may not look at it
        out.judge(
            f"errors.model-{api}", f"an unknown model is 404 ({api})", answer.status == 404, answer.said, "404",
            bad="fail" if ask.ours or answer.status >= 500 else "note",
            remedy="Answer 404 with the names that are served.",
        )  # fmt: skip
        if 400 <= answer.status < 500:
            out.judge(f"errors.model-object-{api}", f"and has an error object ({api})", not problem(answer),
                      problem(answer) or "whole", "message, type, param, code",
                      bad="fail" if ask.ours else "note")  # fmt: skip


def _fields(ask: Ask, out: Checks) -> None:
    own: dict[Api, Mapping[str, dict[str, Any]]] = {"chat": CHAT_FIELDS, "completions": TEXT_FIELDS}
    for api in ask.apis:
        answers = {
            name: _try(ask, api, ask.body(api, "Hello.", max_tokens=1) | fields)
            for name, fields in {**FIELDS, **own[api], **(ENDLESS if ask.ours else {})}.items()
        }
        _tell(out, f"errors.fields-{api}", f"bad fields of {PATHS[api]}", answers, LENIENT, ask.ours)


def _bodies(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        answers = {name: _try(ask, api, body) for name, body in BODIES.items()}
        _tell(out, f"errors.bodies-{api}", f"bodies that are no request ({api})", answers, (), ask.ours)
        typed = ask.client.post(
            PATHS[api],
            json.dumps(ask.body(api, "Hello.", max_tokens=1)).encode(),
            headers={"Content-Type": "text/html"},
        )
        out.judge(
            f"errors.type-{api}", f"another Content-Type is refused or read as JSON, never 5xx ({api})",
            typed.status < 500, typed.said if typed.status >= 300 else typed.status, "200, 400, 415 or 422",
            remedy=NEVER_500,
        )  # fmt: skip


def _long(ask: Ask, out: Checks) -> None:
    limit = ask.card.get("max_model_len")
    if not isinstance(limit, int):
        claim = "a prompt that is too long is refused at once"
        out.skip("errors.long", claim, "the server does not tell what is too long for it", "scheduler")
        return
    words = max(LEAST_WORDS, 3 * limit)  # each is a token or more
    for api in ask.apis:
        answer = _try(ask, api, ask.body(api, "word " * words, max_tokens=1))
        status = answer.status if isinstance(answer, Answer) else 0
        out.judge(
            f"errors.long-{api}", f"a prompt of {words} words is refused at once ({api})",
            status in (400, 413, 422), answer if isinstance(answer, str) else answer.said, "400, 413 or 422",
            layer="scheduler", remedy="Compare the prompt with the context before it is queued.",
        )  # fmt: skip
        over = _try(ask, api, ask.body(api, "Hello.", max_tokens=limit + 1))
        code = over.status if isinstance(over, Answer) else 0
        # some servers cut the limit down instead
        out.judge(
            f"errors.limit-{api}", f"more tokens than the context holds are refused ({api})", code in BAD,
            over if isinstance(over, str) else over.said if code >= 400 else "taken", "400", layer="scheduler",
            bad="note" if code == 200 and not ask.ours else "fail",
            remedy="Compare prompt and max_tokens with the context.",
        )  # fmt: skip


def _unknown(ask: Ask, out: Checks) -> None:
    api = ask.api or "chat"
    bare = ask.whole(api, "Hello.", temperature=0, max_tokens=4)
    answer = ask.post(api, "Hello.", temperature=0, max_tokens=4, no_such_field=1, metadata={"a": "b"})
    same = answer.ok and at(answer.json, "usage", "prompt_tokens", kind=int) == bare.used.prompt
    policy = "taken, and ignored" if answer.ok else f"refused with {answer.said}"
    told = answer.headers.get("x-dayzero-ignored")
    out.judge(
        "errors.unknown", "fields that nobody knows are ignored or refused", same or answer.status in BAD,
        policy + (f"; named in a header: {told}" if told else ""), "200 with the same prompt, 400 or 422",
        remedy=NEVER_500,
    )  # fmt: skip
    if ask.ours:
        told = told or "no header"
        out.judge("errors.named", "and they are named in a header", "no_such_field" in told, told,
                  "no_such_field", remedy="Name what was ignored.")  # fmt: skip


def _streamed(ask: Ask, out: Checks) -> None:
    """A client that reads events of a stream which is none never learns what was wrong."""
    for api in ask.apis:
        answer = ask.post(api, "Hello.", max_tokens=1, temperature="hot", stream=True)
        kind = answer.headers.get("content-type", "")
        told = 400 <= answer.status < 500 and kind.startswith("application/json")
        within = answer.ok and any("error" in chunk for chunk in answer.chunks)
        out.judge(
            f"errors.stream-{api}", f"a streamed request that is refused has its status ({api})", told,
            f"{answer.status}, {kind}", "4xx, application/json", bad="note" if within else "fail",
            remedy="Check the request before the stream begins.",
        )  # fmt: skip


def _anthropic(ask: Ask, out: Checks) -> None:
    good = ask.client.post("/v1/messages", {"model": ask.model, "max_tokens": 1, "messages": [USER]})
    claim = "errors of /v1/messages have its own shape"
    if not good.ok and not ask.ours:
        out.skip("errors.messages", claim, f"refused with {good.said}")
        return
    bad: dict[str, dict[str, Any]] = {
        "no max_tokens": {"messages": [USER]},
        "temperature above 1": {"messages": [USER], "max_tokens": 1, "temperature": 5},
        "no messages": {"messages": [], "max_tokens": 1},
    }
    wrong = {}
    for name, fields in bad.items():
        answer = ask.client.post("/v1/messages", {"model": ask.model, **fields})
        body = answer.json if isinstance(answer.json, dict) else {}
        error = body.get("error")
        shaped = isinstance(error, dict) and bool(error.get("type")) and bool(error.get("message"))
        if answer.status not in BAD or body.get("type") != "error" or not shaped:
            wrong[name] = answer.said
    out.judge("errors.messages", claim, not wrong, wrong or f"{len(bad)} errors",
              "400, type error, error: type and message", bad="fail" if ask.ours else "note",
              remedy="Answer with Anthropic's error object at Anthropic's paths.")  # fmt: skip
