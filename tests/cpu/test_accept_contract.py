"""The contract stage: our own server passes; each broken promise is found by the finding that is for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_server import (
    DONE,
    Call,
    Fault,
    Head,
    bad_server,
    found_by,
    judged,
    kinds,
    of_choices,
    of_parts,
    replacing,
    setting,
)

from dayzero.acceptance.accept.http import Answer, Client, events_of
from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import Context, RunningServer, Subject
from dayzero.acceptance.stages import asking, contract, framing, probes, shapes
from dayzero.acceptance.stages.answers import Choice, Malformed, Reply, Score, at
from dayzero.acceptance.stages.asking import Ask, Checks
from dayzero.acceptance.stages.refusals import problem


def test_our_own_server_passes(good: RunningServer, subject: Subject, tmp_path: Path) -> None:
    """Through the proxy, without a fault in it: what is found below is the faults' own."""
    with bad_server(good, Fault()) as same:
        services: Any = SimpleNamespace(own=True, shared=lambda: same)
        found = contract.STAGE.run(Context(subject, services, tmp_path))
    bad = [finding for finding in found.findings if finding.verdict in ("fail", "note")]
    assert not bad, bad
    skipped = {finding.kind for finding in found.findings if finding.verdict == "not applicable"}
    assert skipped == {"contract.overload.retry"}
    assert len(found.findings) > 80


# --- one broken promise at a time


def _other_ids(call: Call, event: Any) -> list[Any]:
    if event != DONE and "id" in event:
        call.memory["n"] = call.memory.get("n", 0) + 1
        event["id"] = f"{event['id']}-{call.memory['n']}"
    return [event]


def _no_role(call: Call, choice: dict[str, Any]) -> None:
    choice.get("delta", {}).pop("role", None)


def _finish_twice(call: Call, choice: dict[str, Any]) -> None:
    choice["finish_reason"] = choice["finish_reason"] or "length"


def _content_behind_the_end(call: Call, event: Any) -> list[Any]:
    if event == DONE or not event.get("choices") or not event["choices"][0].get("finish_reason"):
        return [event]
    late = {**event, "choices": [{"index": 0, "delta": {"content": "x"}, "text": "x", "finish_reason": None}]}
    return [event, late]


def _usage_with_choices(call: Call, event: Any) -> list[Any]:
    if event != DONE and event.get("usage"):
        event["choices"] = [{"index": 0, "delta": {}, "text": "", "finish_reason": None}]
    return [event]


def _usage_always(call: Call, event: Any) -> list[Any]:
    if event != DONE:
        event["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return [event]


def _dropping(*types: str) -> Any:
    def run(call: Call, event: Any) -> list[Any]:
        return [] if event != DONE and event.get("type") in types else [event]

    return run


def _other_delta(call: Call, event: Any) -> list[Any]:
    if event != DONE and event.get("type") in ("response.output_text.delta", "content_block_delta"):
        if isinstance(event["delta"], str):
            event["delta"] = event["delta"].upper() + "!"
        else:
            event["delta"]["text"] = event["delta"].get("text", "") + "!"
    return [event]


def _ends_as_another(call: Call, event: Any) -> list[Any]:
    if event != DONE and event.get("type") in ("response.completed", "response.incomplete"):
        event["response"]["id"] += "-2"
    return [event]


def _no_more(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """The first requests, of one token, are answered, and nothing else is."""
    return (503, {"error": {"message": "gone"}}) if (call.body or {}).get("max_tokens", 1) > 1 else (status, body)


def _nothing_said(call: Call, status: int, body: Any) -> tuple[int, Any]:
    return status, {**body, "choices": []} if (call.body or {}).get("max_tokens", 1) > 1 else body


def _failing(status: int, *old: int) -> Any:
    """Answers with ``status`` where the server answers with one of ``old``."""

    def run(call: Call, was: int, body: Any) -> tuple[int, Any]:
        return (status, body) if was in old else (was, body)

    return run


def _plain_errors(call: Call, status: int, body: Any) -> tuple[int, Any]:
    return (status, {"detail": "no"}) if status >= 400 else (status, body)


def _short_errors(call: Call, status: int, body: Any) -> tuple[int, Any]:
    return (status, {"error": {"message": "no"}}) if status >= 400 else (status, body)


def _meaning_well(call: Call) -> None:
    """Bad values become good ones."""
    if isinstance(call.body, dict):
        for name in ("temperature", "max_tokens", "top_p"):
            if not isinstance(call.body.get(name), int | float) or call.body[name] < 0 or call.body[name] > 2**31:
                call.body.pop(name, None)
        if not isinstance(call.body.get("max_tokens"), int) or call.body["max_tokens"] > 4:
            call.body["max_tokens"] = 1


def _changing(path: str, change: Any) -> Any:
    def run(call: Call, status: int, body: Any) -> tuple[int, Any]:
        if call.path == path and status == 200 and isinstance(body, dict):
            change(body)
        return status, body

    return run


def _cards(change: Any) -> Any:
    return _changing("/v1/models", lambda body: [change(card) for card in body["data"]])


def _lower(card: dict[str, Any]) -> None:
    card["max_model_len"] -= 1000


def _higher(card: dict[str, Any]) -> None:
    card["max_model_len"] += 1000


def _reversed(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if isinstance(body, dict) and len(body.get("choices") or []) > 1:
        texts = [choice.get("text") for choice in body["choices"]]
        for choice, text in zip(body["choices"], reversed(texts)):
            choice["text"] = text
    return status, body


def _always_the_key(call: Call) -> None:
    call.headers["authorization"] = KEYS[0]


KEYS: list[str] = []


def _held(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if call.path == "/progress" and body.get("progress"):
        body["progress"]["usage"] = 0.25
    return status, body


def _mixed_up(call: Call) -> None:
    """Under load, somebody else's prompt."""
    if call.busy > 4 and call.chat:
        call.body["messages"] = [{"role": "user", "content": "Something else entirely."}]


def _one_mixed_up(call: Call) -> None:
    """As ``_mixed_up``, for one request of all."""
    if call.busy > 4 and call.chat and not MIXED:
        MIXED.append(1)
        call.body["messages"] = [{"role": "user", "content": "Something else entirely."}]


def _busy(call: Call, status: int, body: Any) -> tuple[int, Any]:
    return (429, {"error": {"message": "busy"}}) if call.busy > 4 else (status, body)


def _lost_count(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if call.path == "/metrics":
        return status, b"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 5.0\n"
    return status, body


def _head_with(name: str, value: str | None, path: str = "") -> Any:
    def run(call: Call, head: Head) -> None:
        if path in call.path:
            if value is None:
                head.pop(name, None)
            else:
                head[name] = value

    return run


def _on(method: str, path: str, status: int) -> Any:
    def run(call: Call, was: int, body: Any) -> tuple[int, Any]:
        return (status, {}) if (call.method, call.path) == (method, path) else (was, body)

    return run


def _named(name: str) -> set[str]:
    return {f"{name}-chat", f"{name}-completions"}


def _drop_done(call: Call, event: Any) -> list[Any]:
    return [] if event == DONE else [event]


def _done_twice(call: Call, event: Any) -> list[Any]:
    return [event, event] if event == DONE else [event]


MIXED: list[int] = []
STREAM = "stream.chat"
FAULTS: dict[str, tuple[Fault, str, set[str]]] = {
    # streams
    "a byte order mark": (
        Fault(frame=lambda body: b"\xef\xbb\xbf" + body), STREAM, {"stream.framing-chat", "stream.role"}),
    "single line ends": (
        Fault(frame=lambda body: body.replace(b"\n\n", b"\n")), STREAM,
        {"stream.framing-chat", "stream.done-chat", "stream.id-chat", "stream.created-chat", "stream.model-chat",
         "stream.object-chat", "stream.finish-chat", "stream.role", "stream.usage-chat"}),
    "bare lines": (
        Fault(frame=lambda body: b"hello\n" + body), STREAM, {"stream.framing-chat"}),
    "no UTF-8 in an event": (
        Fault(frame=lambda body: body.replace(b'"object"', b'"ob\xffject"', 1)), STREAM,
        {"stream.framing-chat", "stream.role"}),
    "the id changes": (Fault(event=_other_ids), STREAM, {"stream.id-chat"}),
    "no role": (Fault(event=of_parts(_no_role)), STREAM, {"stream.role"}),
    "no [DONE]": (Fault(event=_drop_done), STREAM, {"stream.done-chat"}),
    "[DONE] twice": (Fault(event=_done_twice), STREAM, {"stream.done-chat"}),
    "finish_reason in every chunk": (Fault(event=of_parts(_finish_twice)), STREAM, {"stream.finish-chat"}),
    "text behind the end": (Fault(event=_content_behind_the_end), STREAM, {"stream.finish-chat"}),
    "usage beside choices": (Fault(event=_usage_with_choices), STREAM, {"stream.usage-chat"}),
    "usage in every chunk": (Fault(event=_usage_always), STREAM, {"stream.usage-chat", "stream.unasked-chat"}),
    "include_usage is ignored": (Fault(request=setting(stream_options=None)), STREAM, {"stream.usage-chat"}),
    "a stream as plain text": (
        Fault(head=_head_with("content-type", "text/plain", "chat"), event=lambda call, event: [event]), STREAM,
        {"stream.type-chat"}),
    "a stream is held back": (Fault(hold=True), "stream.flushed", {"stream.flushed"}),
    # shapes
    "another model's name": (
        Fault(answer=_changing("/v1/chat/completions", lambda body: body.update(model="x"))), "chat.shape",
        {"chat.shape"}),
    "no id": (
        Fault(answer=_changing("/v1/chat/completions", lambda body: body.pop("id"))), "chat.shape", {"chat.shape"}),
    "one id for all": (
        Fault(answer=_changing("/v1/chat/completions", lambda body: body.update(id="chat"))), "chat.shape",
        {"chat.id"}),
    "no role in the message": (
        Fault(answer=of_choices(lambda choice: choice.get("message", {}).pop("role", None))), "chat.shape",
        {"chat.shape"}),
    "an unknown finish_reason": (
        Fault(answer=of_choices(lambda choice: choice.update(finish_reason="done"))), "chat.shape", {"chat.shape"}),
    "answers of another type": (
        Fault(head=_head_with("content-type", "text/html", "chat")), "chat.shape", {"chat.type"}),
    "cards without a date": (Fault(answer=_cards(lambda card: card.pop("created"))), "models", {"models"}),
    "a list of another kind": (
        Fault(answer=_changing("/v1/models", lambda body: body.update(object="models"))), "models", {"models.list"}),
    "one model twice in the list": (
        Fault(answer=_changing("/v1/models", lambda body: body["data"].append(body["data"][0]))), "models",
        {"models.names"}),
    "no card of one model": (Fault(answer=_on("GET", "/v1/models/small", 404)), "models", {"models.one"}),
    "a limit that is not": (Fault(answer=_cards(_lower)), "models.limit", {"models.limit"}),
    "a limit that is less": (Fault(answer=_cards(_higher)), "models.limit", {"models.limit-held"}),
    "parts are lost": (
        Fault(request=replacing("messages", lambda turns: [{**turn, "content": ""} if isinstance(turn["content"], list)
                                                           else turn for turn in turns])),
        "chat.parts", {"chat.parts"}),
    "the developer is not heard": (
        Fault(request=replacing("messages", lambda turns: [t for t in turns if t["role"] != "developer"])),
        "chat.roles", {"chat.roles"}),
    "one name of the limit is ignored": (
        Fault(request=setting(max_completion_tokens=None)), "chat.limits", {"chat.limits"}),
    "a completion that ends as nothing does": (
        Fault(answer=of_choices(lambda choice: choice.update(finish_reason="done"))), "completions.shape",
        {"completions.shape"}),
    "answers in another order": (Fault(answer=_reversed), "completions.many", {"completions.many"}),
    "ids get a token more": (
        Fault(request=replacing("prompt", lambda p: [5, *p] if isinstance(p, list) and isinstance(p[0], int) else p)),
        "completions.ids", {"completions.ids"} | {"completions.lists"}),
    "null is refused": (
        Fault(answer=lambda call, status, body: (400, body) if None in (call.body or {}).values() else (status, body)),
        "fields.null", {"fields.null"}),
    # the other APIs
    "a response that is never created": (
        Fault(event=_dropping("response.created")), "responses", {"responses.order"}),
    "an item that is never opened": (
        Fault(event=_dropping("response.output_item.added")), "responses", {"responses.order"}),
    "other deltas": (Fault(event=_other_delta), "responses", {"responses.stream"}),
    "a response without a status": (
        Fault(answer=_changing("/v1/responses", lambda body: body.pop("status"))), "responses", {"responses"}),
    "a response of another kind": (
        Fault(answer=_changing("/v1/responses", lambda body: body.update(object="answer"))), "responses",
        {"responses.shape"}),
    "a response ends under another id": (Fault(event=_ends_as_another), "responses", {"responses.id"}),
    "items are lost": (
        Fault(request=replacing("input", lambda items: items[:1] if isinstance(items, list) else items)),
        "responses.items", {"responses.items"}),
    "a message of the user's": (
        Fault(answer=_changing("/v1/messages", lambda body: body.update(role="user"))), "messages",
        {"messages.shape"}),
    "a message that never stops": (Fault(event=_dropping("message_stop")), "messages", {"messages.order"}),
    "a block that is never closed": (Fault(event=_dropping("content_block_stop")), "messages", {"messages.order"}),
    "other deltas of a message": (Fault(event=_other_delta), "messages", {"messages.stream"}),
    "a message without its end": (
        Fault(event=_dropping("message_delta")), "messages", {"messages.order", "messages.end"}),
    "counts that are too small": (
        Fault(answer=_changing("/v1/messages/count_tokens", lambda body: body.update(input_tokens=1))),
        "messages.count", {"messages.count"}),
    # refusals
    "500 for bad input": (
        Fault(answer=_failing(500, 400)), "errors.fields",
        {"errors.fields-chat-500", "errors.fields-completions-500"}),
    "500 for a bad body": (
        Fault(answer=_failing(500, 400)), "errors.bodies",
        {"errors.bodies-chat-500", "errors.bodies-completions-500"}),
    "bodies that are no request are taken": (
        Fault(answer=_failing(200, 400)), "errors.bodies",
        {"errors.bodies-chat-taken", "errors.bodies-completions-taken"}),
    "errors of bodies without an object": (
        Fault(answer=_plain_errors), "errors.bodies",
        {"errors.bodies-chat-object", "errors.bodies-completions-object"}),
    "500 for another Content-Type": (
        Fault(answer=lambda call, was, body: (500 if call.headers.get("content-type") == "text/html" else was, body)),
        "errors.bodies", _named("errors.type")),
    "a stream that is refused is 200": (Fault(answer=_failing(200, 400)), "errors.stream", _named("errors.stream")),
    "a stream that is refused is no JSON": (
        Fault(head=_head_with("content-type", "text/event-stream", "/v1/")), "errors.stream", _named("errors.stream")),
    "bad input is taken": (
        Fault(request=_meaning_well), "errors.fields", {"errors.fields-chat-taken", "errors.fields-completions-taken"}),
    "errors without an object": (
        Fault(answer=_plain_errors), "errors.fields",
        {"errors.fields-chat-object", "errors.fields-completions-object"}),
    "errors that lack fields": (
        Fault(answer=_short_errors), "errors.model", {"errors.model-object-chat", "errors.model-object-completions"}),
    "any model will do": (
        Fault(request=setting(model="small")), "errors.model", _named("errors.model")),
    "500 for a long prompt": (
        Fault(answer=_failing(500, 400)), "errors.long", _named("errors.long") | _named("errors.limit")),
    "500 for an unknown field": (
        Fault(answer=lambda call, was, body: (500 if "no_such_field" in (call.body or {}) else was, body)),
        "errors.unknown", {"errors.unknown"}),
    "unread fields are not named": (
        Fault(head=_head_with("x-dayzero-ignored", None)), "errors.unknown", {"errors.named"}),
    "errors of another API": (
        Fault(answer=lambda call, status, body: (status, body.get("error")) if status == 400 else (status, body)),
        "errors.messages", {"errors.messages"}),
    # around the endpoints
    "200 for any path": (Fault(answer=_failing(200, 404)), "http.paths", {"http.paths"}),
    "an unknown path without an object": (Fault(answer=_plain_errors), "http.paths", {"http.paths-object"}),
    "500 for embeddings": (Fault(answer=_on("POST", "/v1/embeddings", 500)), "http.paths", {"http.embeddings"}),
    "no Allow": (Fault(head=_head_with("allow", None)), "http.paths", {"http.allow"}),
    "404 for a method": (Fault(answer=_failing(404, 405)), "http.paths", {"http.methods"}),
    "500 for HEAD": (Fault(answer=_on("HEAD", "/health", 500)), "http.methods", {"http.other"}),
    "500 for a long header": (
        Fault(answer=lambda call, status, body: (500 if "x-long" in call.headers else status, body)), "http.headers",
        {"http.headers"}),
    "any key will do": (Fault(request=_always_the_key), "http.keys", {"http.keys"}),
    "not healthy": (Fault(answer=_on("GET", "/health", 503)), "probes.health", {"probes.health"}),
    "metrics for nobody": (
        Fault(answer=lambda call, was, body: (was, b"{not metrics" if call.path == "/metrics" else body)),
        "probes.health", {"probes.metrics"}),
    "a schema without endpoints": (
        Fault(answer=_changing("/openapi.json", lambda body: body.update(paths={}))), "probes.openapi",
        {"probes.openapi"}),
    "a counter that stands": (Fault(answer=_lost_count), "metrics.tokens", {"metrics.tokens"}),
    "blocks are never freed": (Fault(answer=_held), "cancel.freed", {"cancel.freed"}),
    "work goes on for clients that left": (Fault(stays=True), "cancel.freed", {"cancel.stopped"}),
    "one of many gets another's answer": (Fault(request=_one_mixed_up), "many.same", {"many.same"}),
    "requests are mixed up": (Fault(request=_mixed_up), "many.same", {"many.same"}),
    "no longer alive": (Fault(answer=_no_more), "alive", {"alive"}),
    "an answer without choices": (Fault(answer=_nothing_said), "alive", {"alive"}),
    "busy without a time": (Fault(answer=_busy), "many.same", {"overload.retry"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_promise_is_found_by_the_finding_that_is_for_it(
    name: str, good: RunningServer, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, check, expected = FAULTS[name]
    KEYS[:] = [good.headers["Authorization"]]
    MIXED.clear()
    monkeypatch.setattr(probes, "FREED_SECONDS", 60.0 if fault.stays else 0.3)
    monkeypatch.setattr(probes, "LONGEST", 200 if fault.stays else probes.LONGEST)
    found_by(fault, check, expected, good, subject, contract.checks())


@pytest.mark.parametrize(("margin", "same"), [(0.1, True), (2.0, False)])
def test_a_tie_that_company_turns_over_is_no_other_answer(margin: float, same: bool) -> None:
    def reply(*ids: int) -> Reply:
        scores = [Score("a", -0.5, (("a", -0.5), ("b", -0.5 - margin)))] * 2
        return Reply(Answer(200, {}, b"", 0.1), [Choice(0, text=str(ids), ids=[*ids], scores=scores)], None)

    ask: Any = SimpleNamespace(
        rounding=0.25, whole=lambda *given, **fields: reply(1, 2), amount=lambda *each: each[0],
        scored=lambda api, count: {"logprobs": count},
    )  # fmt: skip
    assert shapes._same(ask, "x", reply(1, 2), reply(1, 2).one)
    assert shapes._same(ask, "x", reply(1, 2), reply(1, 3).one) is same


def _cold(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """The first answer of each prompt, which no cache helped with, is another one."""
    if isinstance(body, dict) and body.get("output") and not MIXED:
        MIXED.append(1)
        body["output"][0]["content"][0]["text"] += "x"
    return status, body


def test_a_first_answer_that_rounding_made_another_is_asked_for_again(good: RunningServer, subject: Subject) -> None:
    MIXED.clear()
    with bad_server(good, Fault(answer=_cold)) as other:
        out = judged(other, subject, contract.checks(), "responses")
    assert not kinds(out, "fail") and MIXED, out.findings


@pytest.mark.parametrize(
    ("spent", "verdict", "tries"),
    [((64.0, 3.0), "pass", 2), ((64.0, 64.0, 64.0), "fail", 3), ((3.0,), "pass", 1)],
    ids=["a client that was late once", "work that goes on", "work that ends"],
)
def test_clients_of_a_busy_machine_leave_more_than_once(
    spent: tuple[float, ...], verdict: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model may have answered before its client can leave: that says nothing, as often as it is no rule."""
    counter, left = [0.0], iter(spent)
    asked: Any = SimpleNamespace(client=None, ignores_stops=True, amount=lambda *each: 1, card={"max_model_len": 320})

    def leaves(ask: Any, clients: int, tokens: int) -> tuple[tuple[float, float], float]:
        counter[0] += next(left)
        return (0.0, 0.0), 0.1

    monkeypatch.setattr(probes, "_load", lambda ask: (0.0, 0.0))
    monkeypatch.setattr(probes, "_left", leaves)
    monkeypatch.setattr(probes, "_settled", lambda ask, name: counter[0])
    monkeypatch.setattr(probes, "read_numbers", lambda client: {probes.GENERATED: counter[0]})
    out = Checks("t")
    probes._cancelled(asked, out)
    assert [(f.kind, f.verdict) for f in out.findings] == [("t.cancel.freed", "pass"), ("t.cancel.stopped", verdict)]
    assert next(left, None) is None and len(spent) == tries


def test_a_slow_machine_is_asked_with_patience(
    good: RunningServer, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Ask(good, subject, timeout=500.0).client.timeout == 500.0
    monkeypatch.setattr(asking, "PATIENCE", 10**6)
    assert Ask(good, subject).client.timeout > 100.0, "a first answer takes more than a tenth of a millisecond"


def test_overload_says_when_to_come_back(subject: Subject, tmp_path: Path) -> None:
    """Reached for real: one request at a time, and one that waits."""
    with Servers(subject, tmp_path) as own, own.private("--max-running", "1", "--max-waiting", "1") as narrow:
        out = judged(narrow, subject, contract.checks(), "many.same")
    assert {"many.same", "overload.retry"} <= kinds(out, "pass"), out.findings


def _foreign(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """A server of chat alone, with the errors and the lenience of its web framework."""
    if call.path == "/v1/models":
        card = {"id": "small", "object": "model", "created": 1, "owned_by": "x"}
        return status, {"object": "list", "data": [card]}
    if not call.chat:
        return 404, {"detail": "Not Found"}
    if status == 400:
        return 422, {"error": {"message": "no", "type": "bad"}}
    return status, body


def test_what_a_foreign_server_does_not_offer_is_not_applicable(good: RunningServer) -> None:
    with bad_server(good, Fault(answer=_foreign)) as foreign:
        out = judged(foreign, Subject(None, url=foreign.address), contract.checks())
    assert not kinds(out, "fail"), [f for f in out.findings if f.verdict == "fail"]
    assert {"responses", "messages", "completions.shape", "probes.health", "metrics.tokens", "cancel.freed",
            "models.limit", "errors.messages", "probes.openapi"} <= kinds(out, "not applicable")  # fmt: skip
    assert {"errors.fields-chat-object", "models.one", "http.paths-object"} <= kinds(out, "note")
    assert {"stream.id-chat", "errors.fields-chat-500", "many.same", "alive"} <= kinds(out, "pass")


# --- the client


def test_events_are_read_by_their_grammar() -> None:
    body = b': hello\nevent: a\ndata: {"x":\ndata: 1}\n\r\ndata:[DONE]\r\n\r\nid: 5\n\ndata: "\xff"\n\ndata: lost'
    one, two, three = events_of(body)
    assert (one.name, one.json) == ("a", {"x": 1})
    assert two.done and two.name == ""
    assert three.json is None and three.data == b'"\xff"'
    assert events_of(b"\xef\xbb\xbfdata: 1\n\n") == [], "a client that takes no mark away sees no data field"


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([0.01, 0.1, 0.2, 0.3, 0.4], "pass"),
        ([0.01, 0.4, 0.4, 0.4, 0.4], "fail"),  # the role at once, and the text at the end
        ([0.4, 0.4, 0.4, 0.4, 0.4], "fail"),
        ([0.01, 0.4], "fail"),  # all of the text in one piece
        ([0.01, 0.011, 0.012, 0.013, 0.014], "not applicable"),
    ],
)
def test_when_the_text_of_a_stream_came_is_looked_at(times: list[float], verdict: str) -> None:
    """Not when its first and its last byte did: a middleware may let the head and the role through."""
    said = [{"role": "assistant"}, *({"content": "word "} for _ in times[1:])]
    parts = [{"choices": [{"index": 0, "delta": delta}]} for delta in said]
    usage = {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    events = [f"data: {json.dumps(part)}\n\n".encode() for part in parts]
    events[-1] += f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
    sizes = list(itertools.accumulate(len(event) for event in events))
    body, arrivals = b"".join(events), tuple(zip(sizes, times, strict=True))
    answer = Answer(200, {"content-type": "text/event-stream"}, body, times[-1], 0.01, arrivals)
    assert framing.times_of(answer) == times[1:]
    out = Checks("t")
    framing._flushed(_streaming([answer], 0.001), out)
    assert [finding.verdict for finding in out.findings] == [verdict]


def _streaming(streams: list[Answer], first: float) -> Any:
    """Gives these streams in turn, then the last one again, and answers of one token within ``first`` seconds."""
    left = list(streams)

    def post(api: str, prompt: str, **more: Any) -> Answer:
        if not more.get("stream"):
            return Answer(200, {}, b"{}", first)
        return left.pop(0) if len(left) > 1 else left[0]

    return SimpleNamespace(ignores_stops=False, api="chat", post=post)


def _stream(times: list[float], usage: bool = True) -> Answer:
    """Words that came at these times."""
    part = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
    events = [f"data: {json.dumps(part)}\n\n".encode() for _ in times]
    told = {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    events[-1] += f"data: {json.dumps({'choices': [], 'usage': told})}\n\n".encode() * usage + b"data: [DONE]\n\n"
    arrivals = tuple(zip(itertools.accumulate(len(event) for event in events), times, strict=True))
    return Answer(200, {"content-type": "text/event-stream"}, b"".join(events), times[-1], 0.01, arrivals)


@pytest.mark.parametrize(
    ("streams", "first", "usage", "verdict"),
    [
        ([[5.0, 5.1, 5.2, 5.3]], 5.0, True, "pass"),  # a long prompt is no stream that was held
        ([[5.3, 5.3, 5.3, 5.3]], 5.0, True, "fail"),
        ([[0.4] * 5, [0.4] * 5, [0.1, 0.2, 0.3, 0.4]], 0.1, True, "pass"),
        ([[0.4] * 5, [0.4] * 5, [0.4] * 5, [0.1, 0.2, 0.3, 0.4]], 0.1, True, "fail"),
        ([[9.0, 9.01, 9.02, 9.03], [0.1, 0.11, 0.12, 0.13]], 0.1, True, "not applicable"),  # cold, then too quick
        ([[0.1, 0.2, 0.3, 0.4]], 0.1, False, "pass"),
        ([[0.4, 0.4, 0.4, 0.4]], 0.1, False, "fail"),
    ],
)  # fmt: skip
def test_a_stream_is_held_against_the_time_behind_its_first_token(
    streams: list[list[float]], first: float, usage: bool, verdict: str
) -> None:
    """Up to three times; where no usage is told, its pieces are counted."""
    out = Checks("t")
    framing._flushed(_streaming([_stream(times, usage) for times in streams], first), out)
    assert [finding.verdict for finding in out.findings] == [verdict], out.findings


def test_places_in_an_answer_are_named() -> None:
    body = {"choices": [{"message": {"content": 5, "ok": True}}]}
    with pytest.raises(Malformed, match=r"the answer\.choices\[0\]\.message\.content is '5', not of type str"):
        at(body, "choices", 0, "message", "content", kind=str)
    with pytest.raises(Malformed, match=r"choices\[1\] is missing"):
        at(body, "choices", 1, kind=dict)
    with pytest.raises(Malformed, match="not of type int"):
        at(body, "choices", 0, "message", "ok", kind=int)


def test_an_error_object_is_whole() -> None:
    def of(body: bytes) -> str:
        return problem(Answer(400, {}, body, 0.0))

    assert of(b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}') == ""
    assert "no error object" in of(b"<html>") and "no error object" in of(b"[]")
    assert of(b'{"error": {"message": "m", "type": "t"}}') == "no param, code"
    assert of(b'{"error": {"message": ""}}') == "no message"


def test_a_client_that_leaves_has_read_something(good: RunningServer) -> None:
    body = {"model": good.model, "prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
    data = Client(good.address, good.headers).leave("/v1/completions", body, num_bytes=1)
    assert data.startswith(b"data: ") and b"[DONE]" not in data
