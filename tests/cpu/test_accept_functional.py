"""The functional stage: our own server passes; each broken promise is found by the finding that is for it."""

from __future__ import annotations

import itertools
import json
import threading
import time
import unicodedata
from collections import Counter
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bad_server import (
    DONE,
    Call,
    Fault,
    bad_server,
    found_by,
    judged,
    kinds,
    of_choices,
    of_parts,
    replacing,
    setting,
)

from dayzero.acceptance.accept.http import Answer
from dayzero.acceptance.accept.paired import tail
from dayzero.acceptance.accept.stage import Context, RunningServer, Subject
from dayzero.acceptance.stages import functional, greedy, sampling
from dayzero.acceptance.stages.answers import Choice, Reply, Score
from dayzero.acceptance.stages.asking import Checks
from dayzero.acceptance.stages.greedy import Parted
from dayzero.acceptance.stages.looking import far_apart
from dayzero.acceptance.stages.sampling import LEAST_CHANCE
from dayzero.acceptance.stages.scores import faults_of
from dayzero.acceptance.stages.softmax import (
    OTHER,
    Told,
    chance_of,
    clear_cut,
    clear_cuts,
    clear_of,
    draws_for,
    inside,
    likeliest,
    nucleus,
    ratio_chance,
    tempered,
)
from dayzero.acceptance.stages.stops import cut_text
from dayzero.acceptance.stages.ties import bound_of


def test_our_own_server_passes(good: RunningServer, subject: Subject, tmp_path: Path) -> None:
    """Through the proxy, without a fault in it: what is found below is the faults' own."""
    with bad_server(good, Fault()) as same:
        services: Any = SimpleNamespace(own=True, shared=lambda: same)
        found = functional.STAGE.run(Context(subject, services, tmp_path))
    bad = [finding for finding in found.findings if finding.verdict in ("fail", "note")]
    assert not bad, bad
    skipped = {finding.kind for finding in found.findings if finding.verdict == "not applicable"}
    assert skipped == {"functional.images"}
    assert len(found.findings) > 60
    assert found.facts["ours"] and found.facts["apis"] == ["chat", "completions"]
    for name in ("greedy answers repeat", "logprob of a greedy answer", "chance of sampled tokens"):
        values = found.samples[name].values()
        assert values and len({type(value) for value in values}) == 1


# --- one broken promise at a time


def _swapped_scores(choice: dict[str, Any]) -> None:
    """Each log-probability stands beside the next token."""
    content = ((choice.get("logprobs") or {}).get("content")) or []
    numbers = [entry["logprob"] for entry in content]
    for entry, number in zip(content, numbers[1:] + numbers[:1]):
        entry["logprob"] = number


def _other_tokens(choice: dict[str, Any]) -> None:
    for entry in ((choice.get("logprobs") or {}).get("content")) or []:
        entry["bytes"] = entry["bytes"][::-1] + [33]


def _little_off(choice: dict[str, Any]) -> None:
    """By less than bfloat16 rounds, and more than float32 does, which this server computes in."""
    for entry in ((choice.get("logprobs") or {}).get("content")) or []:
        entry["logprob"] -= 0.01


def _positive(choice: dict[str, Any]) -> None:
    for entry in ((choice.get("logprobs") or {}).get("content")) or []:
        entry["logprob"] = -entry["logprob"]


def _one_short(choice: dict[str, Any]) -> None:
    if choice.get("logprobs") and choice["logprobs"].get("content"):
        choice["logprobs"]["content"] = choice["logprobs"]["content"][:-2]


def _drops_the_end(call: Call, choice: dict[str, Any]) -> None:
    call.memory["n"] = call.memory.get("n", 0) + 1
    if call.memory["n"] > 6:
        choice.get("delta", {}).pop("content", None)


def _more_usage(call: Call, event: Any) -> list[Any]:
    if event != DONE and event.get("usage"):
        event["usage"]["completion_tokens"] += 1
        event["usage"]["total_tokens"] += 1
    return [event]


def _more_prompt(call: Call, event: Any) -> list[Any]:
    if event != DONE and event.get("usage"):
        event["usage"]["prompt_tokens"] += 2
        event["usage"]["total_tokens"] += 2
    return [event]


def _more_prompt_whole(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if isinstance(body, dict) and body.get("usage"):
        _more_prompt(call, body)
    return status, body


def _works_on(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if isinstance(body, dict) and body.get("usage") and isinstance(call.body, dict) and call.body.get("stop"):
        body["usage"]["total_tokens"] += 24 - body["usage"]["completion_tokens"]
        body["usage"]["completion_tokens"] = 24
    return status, body


def _all_cached(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if isinstance(body, dict) and body.get("usage"):
        body["usage"]["prompt_tokens_details"]["cached_tokens"] = 10_000
    return status, body


def _cold(call: Call) -> None:
    """The first request with a prompt is answered by another model, as it were: the later ones are from a cache."""
    if not call.chat or not isinstance(call.body, dict) or call.body.get("temperature") != 0:
        return
    prompt = json.dumps(call.body["messages"])
    if prompt not in SEEN and call.body.get("max_tokens", 0) > 2:
        SEEN.add(prompt)
        call.body["logit_bias"] = {"118": 100}


SEEN: set[str] = set()


def _seeds(call: Call) -> None:
    if isinstance(call.body, dict) and call.body.get("temperature") == 1:
        call.body["seed"] = 7


def _strips(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if call.path == "/detokenize" and status == 200:
        body["prompt"] = body["prompt"].strip()
    return status, body


def _normalises(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if call.path == "/detokenize" and status == 200:
        body["prompt"] = unicodedata.normalize("NFC", body["prompt"])
    return status, body


def _echo_off(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if call.body and call.body.get("echo"):
        scores = body["choices"][0]["logprobs"]
        scores["token_logprobs"] = [None, *(p - 1.0 for p in scores["token_logprobs"][1:])]
        scores["top_logprobs"] = [None] * len(scores["token_logprobs"])
    return status, body


def _read_off(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """Wherever a prompt's log-probabilities are told."""
    for choice in body.get("choices") or [] if isinstance(body, dict) else []:
        for entry in (choice.get("prompt_logprobs") or [])[1:]:
            for one in entry.values():
                one["logprob"] -= 1.0
    return _echo_off(call, status, body)


def _thoughts_lost(call: Call) -> None:
    for turn in _turns(call):
        turn.pop("reasoning_content", None)


def _shifted(call: Call, status: int, body: Any) -> tuple[int, Any]:
    if isinstance(body, dict) and body.get("prompt_logprobs"):
        body["prompt_logprobs"] = [None, None, *body["prompt_logprobs"][1:-1]]
    return status, body


def _spoilt_arguments(choice: dict[str, Any]) -> None:
    for call in choice.get("message", {}).get("tool_calls") or []:
        call["function"]["arguments"] = call["function"]["arguments"].replace("Rome", "Oslo").replace("Paris", "Oslo")


def _no_names(call: Call, choice: dict[str, Any]) -> None:
    for part in choice["delta"].get("tool_calls") or []:
        part["id"] = "call_again"
        part.setdefault("function", {})["name"] = "get_weather" if "arguments" not in part["function"] else "x"


def _result_lost(call: Call) -> None:
    for message in (call.body or {}).get("messages") or []:
        if isinstance(message, dict) and message.get("role") == "tool":
            message["content"] = ""


def _history_lost(call: Call) -> None:
    if isinstance(call.body, dict) and isinstance(call.body.get("messages"), list):
        call.body["messages"] = call.body["messages"][:1]


def _leak(choice: dict[str, Any]) -> None:
    if choice.get("message"):
        choice["message"]["content"] = f"<think>{choice['message'].get('content') or ''}"


def _reasoning_in_text(choice: dict[str, Any]) -> None:
    message = choice.get("message") or {}
    if message.get("reasoning"):
        message["content"] = message.pop("reasoning") + (message["content"] or "")
        message.pop("reasoning_content")


def _turns(call: Call) -> list[dict[str, Any]]:
    return [turn for turn in (call.body or {}).get("messages") or [] if isinstance(turn, dict)]


def _refuses_reasoning(call: Call, status: int, body: Any) -> tuple[int, Any]:
    known = all(name in ("role", "content") for turn in _turns(call) for name in turn)
    return (status, body) if known else (400, {"error": {"message": "messages.1 has an unknown field"}})


def _one_name_lost(call: Call) -> None:
    for turn in _turns(call):
        turn.pop("reasoning", None)


def _halves(call: Call, choice: dict[str, Any]) -> None:
    """As when each token's bytes are decoded for themselves."""
    text = choice.get("delta", {}).get("content")
    if text:
        choice["delta"]["content"] = "".join(c if ord(c) < 128 else "\ufffd" * len(c.encode()) for c in text)


def _call_in_text(choice: dict[str, Any]) -> None:
    for call in (choice.get("message") or {}).get("tool_calls") or []:
        choice["message"]["content"] = call["function"]["arguments"]


def _bad_for_tools(call: Call, status: int, body: Any) -> tuple[int, Any]:
    return (500, {"error": {"message": "boom"}}) if call.body and call.body.get("tools") else (status, body)


def _stop_shown(call: Call) -> None:
    if isinstance(call.body, dict) and call.body.get("stop"):
        call.body["include_stop_str_in_output"] = True


def _says_length(call: Call, choice: dict[str, Any]) -> None:
    if choice.get("finish_reason") == "stop":
        choice["finish_reason"] = "length"


API2 = ("chat", "completions")
both = lambda name: {f"{name}-{api}" for api in API2}  # noqa: E731
FAULTS: dict[str, tuple[Fault, str, set[str]]] = {
    "greedy is not greedy": (
        Fault(request=replacing("temperature", lambda t: t or 1.0)), "greedy.repeat",
        {"greedy.repeat", "greedy.stream"}),
    "greedy is not the likeliest": (
        Fault(request=replacing("temperature", lambda t: t or 1.0)), "logprobs", both("greedy.top")),
    "warm is not cold": (Fault(request=_cold), "greedy.repeat", {"greedy.repeat", "greedy.stream"}),
    "a stream loses its end": (Fault(event=of_parts(_drops_the_end)), "greedy.repeat", {"greedy.stream"}),
    "temperature is ignored": (
        Fault(request=replacing("temperature", lambda t: 1.0)), "sampling",
        {"sampling.temperature-0.3", "sampling.temperature-1.5"}),
    "a high temperature is ignored": (
        Fault(request=replacing("temperature", lambda t: min(t, 1.0))), "sampling", {"sampling.temperature-1.5"}),
    "temperature is a square": (
        Fault(request=replacing("temperature", lambda t: 0.25)), "sampling",
        {"sampling.softmax", "sampling.temperature-1.5", "sampling.top-p", "sampling.top-k"}),
    "top_p is ignored": (Fault(request=replacing("top_p", lambda p: 1.0)), "sampling", {"sampling.top-p"}),
    "top_k is ignored": (Fault(request=replacing("top_k", lambda k: 0)), "sampling", {"sampling.top-k"}),
    "seeds are ignored": (
        Fault(request=setting(seed=None)), "sampling.seed", {"sampling.seed", "sampling.seed-stream"}),
    "every request has one seed": (Fault(request=_seeds), "sampling.seed", {"sampling.seeds", "sampling.unseeded"}),
    "biases are ignored": (
        Fault(request=setting(logit_bias=None)), "sampling.bias", {"sampling.bias-down", "sampling.bias-up"}),
    "stop strings are shown": (Fault(request=_stop_shown), "stop.string", both("stop.string")),
    "stop strings are ignored": (
        Fault(request=setting(stop=None)), "stop.string", both("stop.string")),
    "work goes on behind a stop string": (Fault(answer=_works_on), "stop.string", both("stop.work")),
    "a stop is told as length": (
        Fault(answer=of_choices(lambda choice: _says_length(None, choice)), event=of_parts(_says_length)),  # type: ignore[arg-type]
        "stop.string", both("stop.string")),
    "stop_token_ids are ignored": (Fault(request=setting(stop_token_ids=None)), "stop.ids", {"stop.ids"}),
    "stop ids do not stop": (Fault(request=setting(ignore_eos=True)), "stop.model", {"stop.model"}),
    "one token too many": (Fault(request=replacing("max_tokens", lambda n: n + 1)), "tokens.max", both("tokens.max")),
    "a stream counts one more": (Fault(event=_more_usage), "usage.modes", both("usage.modes")),
    "more is cached than asked": (Fault(answer=_all_cached), "usage.modes", both("usage.cached")),
    "one name of reasoning alone": (
        Fault(answer=of_choices(lambda choice: choice.get("message", {}).pop("reasoning", None))), "reasoning",
        {"reasoning.names"}),
    "prompts are counted wrong": (
        Fault(answer=_more_prompt_whole, event=_more_prompt), "usage.modes", both("usage.exact")),
    "n is ignored": (Fault(request=replacing("n", lambda n: 1)), "usage.modes", both("usage.n") | both("choices.n")),
    "the template drifts": (
        Fault(request=replacing("messages", lambda turns: [{"role": "system", "content": ""}, *turns])), "template.ids",
        {"template.own", "template.independent"}),
    "texts lose their edges": (
        Fault(answer=_strips), "tokenize.identity", {"tokenize.identity", "tokenize.answer"}),
    "numbers beside other tokens": (
        Fault(answer=of_choices(_swapped_scores)), "logprobs", {"logprobs.sane-chat", "greedy.top-chat"}),
    "scores of other tokens": (Fault(answer=of_choices(_other_tokens)), "logprobs", {"logprobs.tokens-chat"}),
    "positive log-probabilities": (Fault(answer=of_choices(_positive)), "logprobs", {"logprobs.sane-chat"}),
    "scores are missing": (
        Fault(answer=of_choices(_one_short)), "logprobs", {"logprobs.count-chat", "logprobs.tokens-chat"}),
    "a stream's scores are another's": (
        Fault(event=of_parts(lambda call, choice: _other_tokens(choice))), "logprobs.stream", {"logprobs.stream-chat"}),
    "a stream's scores are off by little": (
        Fault(event=of_parts(lambda call, choice: _little_off(choice))), "logprobs.stream",
        {"logprobs.stream-chat"}),
    "a prompt's scores are one off": (Fault(answer=_shifted), "logprobs.prompt", {"logprobs.prompt"}),
    "prefill is not decode": (Fault(answer=_read_off), "logprobs.echo", {"logprobs.echo"}),
    "an echo is not what was read": (Fault(answer=_echo_off), "logprobs.echo", {"logprobs.echo"}),
    "what was thought is lost": (
        Fault(request=_thoughts_lost), "template.ids", {"template.own", "template.independent"}),
    "the schema is not held": (
        Fault(request=setting(response_format=None)), "structured.schema", {"structured.schema", "structured.finish"}),
    "json_object is not held": (
        Fault(request=setting(response_format=None)), "structured.object", {"structured.object"}),
    "a regex is not held": (
        Fault(request=setting(structured_outputs=None, guided_regex=None)), "structured.regex", {"structured.regex"}),
    "characters are cut": (Fault(event=of_parts(_halves)), "stream.characters", {"stream.characters"}),
    "arguments leave their schema": (
        Fault(answer=of_choices(_spoilt_arguments)), "tools.required",
        {"tools.required-arguments", "tools.required-stream"}),
    "streamed calls repeat their names": (
        Fault(event=of_parts(_no_names)), "tools.required", {"tools.required-stream", "tools.required-pieces"}),
    "the call stands in the text": (
        Fault(answer=of_choices(_call_in_text)), "tools.required", {"tools.required-stream", "tools.required-text"}),
    "tools make it fail": (Fault(answer=_bad_for_tools), "tools.required", {"tools.required"}),
    "tool results are lost": (Fault(request=_result_lost), "tools.round", {"tools.result"}),
    "earlier turns are lost": (Fault(request=_history_lost), "tools.round", {"tools.round", "tools.result"}),
    "none calls all the same": (
        Fault(request=replacing("tool_choice", lambda choice: "required" if choice == "none" else choice)),
        "tools.none", {"tools.none"}),
    "a marker leaks": (Fault(answer=of_choices(_leak)), "markers", {"markers"}),
    "reasoning stands in the text": (
        Fault(answer=of_choices(_reasoning_in_text)), "reasoning",
        {"reasoning", "reasoning.stream", "reasoning.names"}),
    "reasoning of earlier answers is refused": (
        Fault(answer=_refuses_reasoning), "reasoning", {"reasoning.back"}),
    "one name of earlier reasoning is not read": (
        Fault(request=_one_name_lost), "reasoning", {"reasoning.back-names"}),
}  # fmt: skip
LAYERS = {
    "warm is not cold": "cache", "prefill is not decode": "cache", "the template drifts": "tokenizer+template",
    "a marker leaks": "tokenizer+template", "temperature is ignored": "operator", "a stream loses its end": "server",
    "reasoning of earlier answers is refused": "tokenizer+template",
    "one name of earlier reasoning is not read": "server", "none calls all the same": "server",
    "tool results are lost": "tokenizer+template", "numbers beside other tokens": "operator",
    # what the request says is lost on its way: the same code, or the engine beside it, does the right thing
    "greedy is not the likeliest": "server", "greedy is not greedy": "server", "one token too many": "server",
    "the schema is not held": "server", "an echo is not what was read": "server", "what was thought is lost": "server",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_promise_is_found_by_the_finding_that_is_for_it(
    name: str, good: RunningServer, subject: Subject
) -> None:
    fault, check, expected = FAULTS[name]
    SEEN.clear()
    failed = found_by(fault, check, expected, good, subject, functional.checks())
    if name in LAYERS:
        assert failed[0].layer == LAYERS[name]


def _batching(ids: bool = True) -> Any:
    """An Ask of a server whose answers hang on whether another request runs beside them, as kernels may."""
    lock, running, turns = threading.Lock(), [0], itertools.count(100)

    def whole(api: str, prompt: Any, **fields: Any) -> Reply:
        with lock:
            running[0] += 1
        time.sleep(0.1)
        company = running[0] > 1
        time.sleep(0.1)
        with lock:
            running[0] -= 1
        drawn = fields.get("seed") or (next(turns) if fields.get("temperature") else 1)
        told = [7, drawn, int(company)]
        answer = Answer(200, {}, b"", 0.1)
        return Reply(answer, [Choice(0, text=str(told), ids=told if ids else None, finish="length")], None)

    return SimpleNamespace(
        api="chat", ours=True, ignores_stops=False, rounding=0.25, whole=whole, streamed=whole,
        amount=lambda *each: each[0], scored=lambda api, count: {"logprobs": count},
    )  # fmt: skip


def test_a_seed_is_held_to_nothing_that_its_company_changes() -> None:
    out = Checks("t")
    sampling._seeds(_batching(), out)
    assert not kinds(out, "fail") and {"sampling.seed", "sampling.seed-stream"} <= kinds(out, "pass"), out.findings


@pytest.mark.parametrize("ids", [True, False])
def test_an_answer_that_its_company_changes_is_the_schedulers(ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "PROMPTS", greedy.PROMPTS[:1])
    out = Checks("t")
    greedy._first_turn(_batching(ids), out)
    assert [(f.kind, f.verdict, f.layer) for f in out.findings] == [
        (f"t.greedy.{kind}", "fail", "scheduler") for kind in ("repeat", "stream")
    ]
    assert all("company" in finding.remedy for finding in out.findings)


def test_text_that_is_normalised_is_a_note(good: RunningServer, subject: Subject) -> None:
    with bad_server(good, Fault(answer=_normalises)) as bad:
        out = judged(bad, subject, functional.checks(), "tokenize.identity")
    assert kinds(out, "note") == {"tokenize.identity"} and not kinds(out, "fail")


# --- a server that is not ours, and offers little


def _foreign(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """Knows chat without tools, extensions and log-probabilities; refuses what it does not know."""
    known = {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream",
        "stream_options",
    }  # fmt: skip
    if call.path == "/v1/models":
        return status, {"object": "list", "data": [{"id": "small", "object": "model", "created": 1, "owned_by": "x"}]}
    if not call.chat:
        return 404, {"detail": "Not Found"}
    if isinstance(call.body, dict) and set(call.body) - known:
        return 422, {"detail": f"unexpected {sorted(set(call.body) - known)}"}
    return status, body


def test_what_a_foreign_server_does_not_offer_is_not_applicable(good: RunningServer) -> None:
    def refusing(call: Call) -> None:  # streams are refused too, where fields are unknown
        if call.chat and _foreign(call, 200, None)[0] != 200:
            call.body["stream"] = False

    with bad_server(good, Fault(request=refusing, answer=_foreign)) as foreign:
        out = judged(foreign, Subject(None, url=foreign.address), functional.checks())
    assert not kinds(out, "fail"), [f for f in out.findings if f.verdict == "fail"]
    skipped = kinds(out, "not applicable")
    assert {"tools.required", "sampling", "template.own", "tokenize.identity", "structured.schema", "images",
            "offers.completions"} <= skipped  # fmt: skip
    assert {
        "greedy.repeat",
        "greedy.stream",
        "stop.string-chat",
        "tokens.max-chat",
        "usage.modes-chat",
        "markers",
    } <= kinds(out, "pass")
    whys = [finding.measured for finding in out.findings if finding.verdict == "not applicable"]
    assert all(isinstance(why, str) and why for why in whys)


def test_a_server_that_dies_is_told_of_once(good: RunningServer, subject: Subject) -> None:
    with bad_server(good, Fault()) as bad:
        from dayzero.acceptance.stages.asking import Ask, Checks, run_checks
        from dayzero.console import no_progress

        ask, out = Ask(bad, subject), Checks("t")
    run_checks(ask, out, functional.checks(), no_progress)
    assert len(kinds(out, "fail")) == 1 and len(kinds(out, "not applicable")) == len(functional.checks()) - 1
    (failed,) = [finding for finding in out.findings if finding.verdict == "fail"]
    assert "died" in failed.remedy and "was not answered" in str(failed.measured)


# --- arithmetic


def test_the_chance_of_counts_is_that_of_a_sound_sampler() -> None:
    rng = np.random.default_rng(5)
    chances = dict(enumerate([0.4, 0.3, 0.2, 0.05, 0.03, 0.01, 0.01]))
    found = []
    for trial in range(100):
        drawn = rng.choice(len(chances), size=64, p=list(chances.values()))
        found.append(chance_of(Counter(int(key) for key in drawn), chances, trial))
    # under a sound sampler it is spread over 0 to 1: at most so many below a tenth (5 sigma of a binomial)
    assert sum(chance < 0.1 for chance in found) <= 10 + 5 * (100 * 0.1 * 0.9) ** 0.5
    assert min(found) > LEAST_CHANCE / 10
    wrong = chance_of(Counter({0: 10, 1: 10, 2: 44}), chances, 0)
    assert wrong < LEAST_CHANCE
    assert chance_of(Counter({"new": 1}), chances, 0) == 0.0 and chance_of(Counter(), chances, 0) == 1.0


def test_what_is_known_of_a_temperature() -> None:
    """Against the whole softmax, of which only the likeliest tokens are stated."""
    logits = np.random.default_rng(1).normal(size=500)
    p = np.sort(np.exp(logits) / np.exp(logits).sum())[::-1]
    told = Told("chat", "", {key: float(one) for key, one in enumerate(p[:20])})
    for temperature in (0.2, 0.5, 1.0, 1.5, 3.0):
        q = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        for key, chance in tempered(told.chances, temperature).items():
            assert chance == pytest.approx(q[key] / q[:20].sum())
        bound, true = inside(told, temperature), q[:20].sum()
        assert bound <= true + 1e-12 if temperature < 1 else bound >= true - 1e-12
        # The likeliest ones are stated, but have no text of their own.
        part = Told("chat", "", {key: float(p[key]) for key in range(3, 20)}, tuple(float(one) for one in p[:3]))
        bound, true = inside(part, temperature), q[3:20].sum()
        assert bound <= true + 1e-12 if temperature < 1 else bound >= true - 1e-12
    cut = nucleus(told.chances)
    assert cut is not None
    top_p, kept = cut
    sums = np.cumsum(p)
    assert len(kept) == int((sums < top_p).sum()) + 1 and sum(kept.values()) == pytest.approx(1)


def test_ties_come_from_the_dtype() -> None:
    assert bound_of("bfloat16") == bound_of("") == 0.25  # two steps of 2^-3 at a logit of 16 to 32
    assert bound_of("float32") == pytest.approx(2 * 256 * 2.0**-19) and bound_of("float32") < 1.5e-3
    assert Parted(3, 0.1, bound_of("bfloat16")).tie and not Parted(3, 0.1, bound_of("float32")).tie
    assert not Parted(-1, None, bound_of("")).tie


def test_images_lie_as_far_apart_as_is_certain() -> None:
    """A token that one list lacks is no nat away, but no likelier than the last one listed."""
    one = {"a": -0.1, "b": -3.0, "c": -4.0}
    assert far_apart(one, dict(one)) == 0
    assert far_apart(one, {"a": -0.1, "b": -3.0, "d": -4.0}) == 0.0
    assert far_apart(one, {"a": -0.1, "d": -0.2, "e": -3.5}) == pytest.approx(3.8)  # d is at most -4 in the first
    assert far_apart({"a": -0.1}, {"b": -0.1}) == 0.0, "lists of one token tell nothing of each other's"
    assert far_apart({"a": -0.1}, {"a": -0.1 - 1e-4}) == pytest.approx(1e-4)


def test_a_sampler_without_a_temperature_is_found_in_the_draws_that_are_asked_for() -> None:
    deal = np.random.default_rng(5)
    chances = {n: float(p) for n, p in enumerate(1 / np.arange(1, 20))}
    total = sum(chances.values())
    chances = {n: 0.8 * p / total for n, p in chances.items()}
    for temperature in (0.3, 1.5):
        right = tempered(chances, temperature)
        number = max(96, draws_for(right, tempered(chances, 1)))
        assert number < 600
        tried = {0: 0, 1: 0}
        for wrong in (0, 1):
            p = np.array(list((tempered(chances, 1) if wrong else right).values()))
            for seed in range(60):
                counts = Counter(deal.choice(len(p), size=number, p=p / p.sum()).tolist())
                tried[wrong] += ratio_chance(counts, right, tempered(chances, 1), seed) < LEAST_CHANCE
        assert tried[0] <= 1 and tried[1] >= 57, (temperature, tried)


def test_a_clear_cut_does_not_hang_on_rounding() -> None:
    told = Told("chat", "x", {"a": 0.4, "b": 0.2, "c": 0.1, "d": 0.0999, "e": 0.0998})
    assert clear_cut(told) == 2 and clear_cut(Told("chat", "x", {"a": 0.1, "b": 0.1, "c": 0.1})) == 0
    hidden = Told("chat", "x", {"a": 0.4, "b": 0.1}, (0.2, 0.15))
    assert clear_cut(hidden) == 3 and clear_cut(replace(hidden, whole=False)) == 0
    assert likeliest(hidden, 3, 1) == pytest.approx({"a": 0.4 / 0.75, OTHER: 0.35 / 0.75})
    assert likeliest(hidden, 2, 0.5) == pytest.approx({"a": 0.16 / 0.2, OTHER: 0.04 / 0.2})


def test_no_cut_falls_between_tokens_that_rounding_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in bfloat16 are 0.125 apart, so that the third and the fourth token may be of one chance, or exchanged."""
    clear = clear_of(bound_of("bfloat16"))
    assert clear == pytest.approx(exp(0.25)) and clear_of(bound_of("float32")) == 1.01
    logits = np.array([4.0, 3.0, 2.0, 1.875, 1.0, 0.0, -0.125, -1.0])
    told = Told("chat", "x", {n: float(p) for n, p in enumerate(np.exp(logits) / np.exp(logits).sum())})
    assert clear_cuts(told, clear) == [2, 4, 5, 7] and clear_cut(told, clear) == 7
    found = nucleus(told.chances, clear)
    assert found is not None and set(found[1]) == {0, 1}
    level = Told("chat", "x", dict.fromkeys(range(10), 0.1))
    assert nucleus(level.chances, clear) is None and clear_cuts(level, clear) == []
    asked: list[Any] = []

    def follow(ask: Any, out: Any, kind: str, claim: str, told: Told, expected: Any, fields: Any, rival: Any) -> bool:
        asked.append((fields["top_k"], len(expected)))
        return True

    monkeypatch.setattr(sampling, "_follow", follow)
    ask, out = SimpleNamespace(rounding=bound_of("bfloat16"), ours=True), Checks("t")
    assert sampling._top_k(ask, out, told) and asked == [(2, 2)]  # type: ignore[arg-type]
    assert not sampling._top_k(ask, out, level) and [f.verdict for f in out.findings] == ["not applicable"]  # type: ignore[arg-type]


def test_tails_of_the_binomial() -> None:
    assert tail(0, 3, 0.5, above=True) == pytest.approx(1)
    assert tail(3, 3, 0.5, above=True) == pytest.approx(1 / 8)
    assert tail(1, 3, 0.5, above=False) == pytest.approx(1 / 2)
    assert tail(3, 3, 1.0, above=False) == 1.0 and tail(2, 3, 1.0, above=False) == 0.0


def test_impossible_scores_are_named() -> None:
    fine = Score("a", -0.5, (("a", -0.5), ("b", -1.5)))
    assert faults_of([fine], tie=0.25) == []
    assert "above 0" in faults_of([Score("a", 0.5, ())], tie=None)[0]
    assert "in order" in faults_of([Score("b", -2.0, (("b", -2.0), ("a", -0.5)))], tie=None)[0]
    assert "more than 1" in faults_of([Score("a", -0.1, (("a", -0.1), ("b", -0.2)))], tie=0.25)[0]
    assert "not the likeliest" in faults_of([Score("b", -1.5, (("a", -0.5), ("b", -1.5)))], tie=0.25)[0]
    assert exp(-0.5) + exp(-1.5) < 1


def test_a_text_to_cut_at_comes_once_before_its_place() -> None:
    assert cut_text("") is None and cut_text("aaaaaaa") is None and cut_text("\ufffd\ufffd\ufffd\ufffd") is None
    for text in ("hello world", "abcabcabd", "x\ufffdyz"):
        piece = cut_text(text)
        assert piece is not None and text.index(piece) > 0 and "\ufffd" not in piece
