"""HTTP around the endpoints: methods, paths, headers, keys, probes, counters, clients that leave, many at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dayzero.acceptance.accept.http import Answer, NoAnswer
from dayzero.acceptance.stages import greedy
from dayzero.acceptance.stages.answers import PATHS, Malformed, Refused, whole
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.metrics import GENERATED, RUNNING, USAGE, read_numbers, samples_of
from dayzero.acceptance.stages.refusals import problem

HEADER_BYTES = 100_000
AT_ONCE = 16
FREED_SECONDS = 15.0
# Tokens that were computed; where a server does not tell, those that clients were told, which may be less.
MADE = ("engine_generated_tokens_total", GENERATED)
GONE = "requests_client_gone_total"  # of a server of ours: clients that it saw leave
LONGEST = 4096  # tokens of answers that nobody waits for: so many that they are not over before their clients left
ABORT = "Abort a request in the engine when its connection closes, and free its blocks."
MANY_TOKENS = 12
TRIES = 3
CUT_SHARE = 0.9  # of the tokens they asked for; who works on makes all of them
RARE = 1 / 3  # of answers; where more are others, and nothing says how close it was, it is no rounding


def checks() -> tuple[Check, ...]:
    return (
        Check("http.paths", "unknown paths are 404, other methods 405", _paths),
        Check("http.methods", "HEAD and OPTIONS do no harm", _methods),
        Check("http.headers", "a very long header does no harm", _headers),
        Check("http.keys", "a wrong key is 401", _keys),
        Check("probes.health", "probes answer", _health),
        Check("probes.openapi", "/openapi.json describes what is served", _openapi),
        Check("metrics.tokens", "the counter of generated tokens counts them", _tokens),
        Check("cancel.freed", "a client that leaves frees what it held", _cancelled, layer="scheduler"),
        Check("many.same", "many at once get the answers they get alone", _many, core=True, layer="scheduler"),
        Check("alive", "the server answers as before", _alive, core=True),
    )  # fmt: skip


def _paths(ask: Ask, out: Checks) -> None:
    missing = ask.client.get("/v1/no-such-path")
    out.judge("http.paths", "an unknown path is 404", missing.status == 404, missing.said, "404",
              remedy="Answer 404 for paths that are not served.")  # fmt: skip
    out.judge(
        "http.paths-object", "and has an error object", not problem(missing), problem(missing) or "whole",
        "message, type, param, code", bad="fail" if ask.ours else "note",
        remedy="Answer with the API's error object at unknown paths too.",
    )  # fmt: skip
    other = ask.client.post("/v1/embeddings", {"model": ask.model, "input": "Hello."})
    out.judge(
        "http.embeddings", "embeddings of a model that has none are refused, never a 5xx", other.status < 500,
        other.status if other.ok else other.said, "404 or 400, or 200 of a model that has them",
        remedy="Answer 404 where an endpoint is not offered.",
    )  # fmt: skip
    wrong, allows = {}, {}
    for api in ask.apis:
        answer = ask.client.get(PATHS[api])
        allows[api] = answer.headers.get("allow")
        if answer.status != 405:
            wrong[api] = answer.said
    out.judge("http.methods", "GET of a path that takes POST is 405", not wrong, wrong or list(allows), "405",
              bad="fail" if ask.ours else "note", remedy="Answer 405, not 404 or 500.")  # fmt: skip
    out.judge("http.allow", "and says which methods it takes", all("POST" in (one or "") for one in allows.values()),
              allows, "Allow: POST", bad="fail" if ask.ours else "note", remedy="Send Allow with 405.")  # fmt: skip


def _methods(ask: Ask, out: Checks) -> None:
    told = {}
    for method, path in (
        ("HEAD", "/health"),
        ("OPTIONS", PATHS["chat"]),
        ("OPTIONS", "/v1/models"),
        ("DELETE", "/health"),
    ):
        try:
            told[f"{method} {path}"] = ask.client.request(method, path)
        except NoAnswer as error:
            out.judge("http.other", "HEAD, OPTIONS and DELETE are answered", False, f"{method} {path}: {error}")
            return
    bad = {name: answer.status for name, answer in told.items() if answer.status >= 500}
    body = told["HEAD /health"].body
    out.judge(
        "http.other", "HEAD, OPTIONS and DELETE are answered, HEAD without a body", not bad and not body,
        {name: answer.status for name, answer in told.items()}, "below 500", remedy="Answer 405 where it is not taken.",
    )  # fmt: skip


def _headers(ask: Ask, out: Checks) -> None:
    answer = ask.client.get("/v1/models", headers={"X-Long": "x" * HEADER_BYTES})
    out.judge(
        "http.headers", f"a header of {HEADER_BYTES // 1000} kB is read or refused, never a 5xx", answer.status < 500,
        answer.status, "200, 400 or 431", remedy="Bound the head of a request, and answer 431 beyond.",
    )  # fmt: skip


def _keys(ask: Ask, out: Checks) -> None:
    claim = "requests without the key, or with a wrong one, are 401"
    if not ask.client.headers:
        out.skip("http.keys", claim, "no key is needed")
        return
    told: dict[str, Answer] = {}
    for name, value in (("none", None), ("wrong", "Bearer wrong"), ("half", ask.client.headers["Authorization"][:-2])):
        told[name] = ask.client.post(
            PATHS[ask.api or "chat"], ask.body(ask.api or "chat", "Hi.", max_tokens=1), headers={"Authorization": value}
        )
    wrong = {name: answer.said for name, answer in told.items() if answer.status not in (401, 403)}
    out.judge("http.keys", claim, not wrong, wrong or sorted(told), "401", remedy="Compare the whole key, always.",
              bad="note" if len(wrong) == len(told) and not ask.ours else "fail")  # fmt: skip


# --- probes and counters


def _health(ask: Ask, out: Checks) -> None:
    for path, claim in (
        ("/health", "/health is 200 while it serves"), ("/ready", "/ready is 200 while it serves"),
        ("/version", "/version tells the version"), ("/metrics", "/metrics are for Prometheus"),
    ):  # fmt: skip
        answer = ask.client.get(path)
        kind = f"probes{path.replace('/', '.')}"
        if answer.status in (404, 405) and not ask.ours:
            out.skip(kind, claim, f"refused with {answer.said}")
            continue
        right = answer.ok
        if path == "/metrics" and right:
            right = samples_of(answer) is not None
        out.judge(kind, claim, right, answer.status if right else answer.said, "200, in the form of its kind",
                  remedy="Answer probes from what is known, without waiting.")  # fmt: skip


def _openapi(ask: Ask, out: Checks) -> None:
    answer = ask.client.get("/openapi.json")
    if not answer.ok:
        raise Refused(answer)
    paths = answer.json.get("paths") if isinstance(answer.json, dict) else None
    if not isinstance(paths, dict):
        raise Malformed("/openapi.json has no paths")
    missing = [PATHS[api] for api in ask.apis if PATHS[api] not in paths]
    out.judge("probes.openapi", "/openapi.json describes what is served", not missing, missing or f"{len(paths)} paths",
              "every endpoint", remedy="Describe the endpoints that are served.")  # fmt: skip


def _tokens(ask: Ask, out: Checks) -> None:
    claim = "the counter of generated tokens counts what usage tells"
    before = read_numbers(ask.client)
    if GENERATED not in before:
        out.skip("metrics.tokens", claim, f"/metrics has no {GENERATED}")
        return
    used = ask.whole(ask.api or "chat", "Count to ten.", temperature=0, max_tokens=9).used.completion
    grown, deadline = 0.0, time.monotonic() + 5
    while grown < used and time.monotonic() < deadline:  # some servers update their counters now and then
        grown = read_numbers(ask.client).get(GENERATED, 0.0) - before[GENERATED]
        time.sleep(0.05)
    out.judge("metrics.tokens", claim, grown == used, f"{grown:.0f} for {used} tokens", "equal",
              remedy="Count tokens where they are sent; let nothing else ask this server meanwhile.")  # fmt: skip


# --- clients that leave, and many of them


def _load(ask: Ask) -> tuple[float, float] | None:
    """(requests running or waiting, share of the cache in use), by /progress or by metrics; None: it tells neither."""
    answer = ask.client.get("/progress")
    seen = answer.json.get("progress") if answer.ok and isinstance(answer.json, dict) else None
    if isinstance(seen, dict):
        return float(seen.get("running", 0)) + float(seen.get("waiting", 0)), float(seen.get("usage", 0.0))
    numbers = read_numbers(ask.client)
    if RUNNING in numbers:
        return numbers[RUNNING], numbers.get(USAGE, 0.0)
    return None


def _cancelled(ask: Ask, out: Checks) -> None:
    claim = "clients that leave in the middle of an answer free what they held"
    if _load(ask) is None:
        out.skip("cancel.freed", claim, "the server does not tell what it holds: no /progress, and no such metrics",
                 "scheduler")  # fmt: skip
        return
    clients, tokens = ask.amount(2, 6, 20), _endless(ask)
    asked = clients * tokens
    for _ in range(TRIES):  # a client on a busy machine may leave when its answer is over
        before = read_numbers(ask.client)
        held, seconds = _left(ask, clients, tokens)
        layer, made = _who_kept(ask, before, clients), next((name for name in MADE if name in before), "")
        spent = _settled(ask, made) - before[made] if made else None
        if any(held) or spent is None or spent < CUT_SHARE * asked or not ask.ignores_stops:
            break
    out.judge(
        "cancel.freed", claim, not any(held), f"{held[0]:.0f} requests and {held[1]:.2%} of the cache held after "
        f"{seconds:.1f} s", f"nothing within {FREED_SECONDS:.0f} s", layer=layer if held[0] else "cache", remedy=ABORT,
    )  # fmt: skip
    claim = "and nothing more is generated for them"
    if spent is None or not ask.ignores_stops:
        why = f"/metrics has no {GENERATED}" if spent is None else "how long an answer gets is the model's to say"
        out.skip("cancel.stopped", claim, why, "scheduler")
        return
    out.judge(
        "cancel.stopped", claim, spent < CUT_SHARE * asked, f"{spent:.0f} of {asked} tokens that they had asked for",
        f"below {CUT_SHARE:.0%} of them, behind the first part of each answer, at one of {TRIES} tries",
        layer=layer, remedy=ABORT,
    )  # fmt: skip


def _endless(ask: Ask) -> int:
    """Tokens of an answer that nobody waits for."""
    limit = ask.card.get("max_model_len")
    return max(64, min(LONGEST, limit - 256 if isinstance(limit, int) else LONGEST // 4))


def _left(ask: Ask, clients: int, tokens: int) -> tuple[tuple[float, float], float]:
    """(what is held behind clients that left, at best nothing, and after how many seconds)."""
    api, ignore = ask.api or "chat", {"ignore_eos": True} if ask.ignores_stops else {}
    for _ in range(clients):
        body = ask.body(api, "Count as far as you can.", temperature=0, max_tokens=tokens, stream=True, **ignore)
        ask.client.leave(PATHS[api], body, num_bytes=1)
    began, held = time.monotonic(), (1.0, 1.0)
    while any(held) and time.monotonic() < began + FREED_SECONDS:
        held = _load(ask) or (0.0, 0.0)
        time.sleep(0.05)
    return held, time.monotonic() - began


def _who_kept(ask: Ask, before: Mapping[str, float], clients: int) -> str:
    """A server of ours counts the clients that it saw leave: where it saw fewer, nobody told the engine."""
    seen = read_numbers(ask.client).get(GONE, 0.0) - before.get(GONE, 0.0)
    return "server" if GONE in before and seen < clients else "scheduler"


def _settled(ask: Ask, name: str) -> float:
    """A counter of generated tokens, once it no longer grows: some servers update it now and then."""
    last, deadline = -1.0, time.monotonic() + FREED_SECONDS
    while (now := read_numbers(ask.client).get(name, 0.0)) != last and time.monotonic() < deadline:
        last = now
        time.sleep(0.3)
    return now


def _many(ask: Ask, out: Checks) -> None:
    api = ask.api or "chat"
    prompts = [f"Write the number {number} in words." for number in range(4)]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": MANY_TOKENS}
    alone = [ask.whole(api, prompt, **fields) for prompt in prompts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda n: ask.post(api, prompts[n % 4], **ask.extended(fields)), range(AT_ONCE)))
    busy = [answer for answer in answers if answer.status in (429, 503)]
    told = [(number % 4, whole(answer, api)) for number, answer in enumerate(answers) if answer not in busy]
    parts = [greedy.parted(ask, api, prompts[which], alone[which], reply) for which, reply in told]
    odd = [one for one in parts if one is not None]
    # batches of other sizes may turn over near ties, on kernels that are not the same for all sizes
    real = [one for one in odd if one.margin is not None and not one.tie]
    real = real or (odd if len(odd) > RARE * len(told) else [])
    out.judge(
        "many.same", f"{AT_ONCE} at once get the answers they get alone", not odd,
        f"{len(odd)} of {len(told)} differ, {len(busy)} were refused for now"
        + (f" ({greedy.shown(odd)})" if odd else ""),
        f"none, but at rare places where the two likeliest lie within {ask.rounding:.2g} nat",
        layer="server" if any(one.drawn for one in real) else "scheduler",
        bad="fail" if real else "note", remedy="Look for rows that see each other: slots, masks, block tables.",
    )  # fmt: skip
    claim = "an answer of 429 or 503 says when to come back"
    if not busy:
        out.skip("overload.retry", claim, f"{AT_ONCE} at once were all answered")
        return
    silent = [answer.status for answer in busy if not answer.headers.get("retry-after", "").isdigit()]
    out.judge("overload.retry", claim, not silent, silent or len(busy), "Retry-After in seconds",
              remedy="Send Retry-After with 429 and 503.")  # fmt: skip


def _alive(ask: Ask, out: Checks) -> None:
    reply = ask.whole(ask.api or "chat", "Hello.", temperature=0, max_tokens=4)
    out.judge("alive", "after all of this the server answers as before", bool(reply.choices), reply.one.finish,
              "an answer", remedy="Find the request after which it no longer does: they are in order.")  # fmt: skip
