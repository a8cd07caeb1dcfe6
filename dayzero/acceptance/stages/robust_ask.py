"""Completions asked of a server by the stages that measure it: whole or streamed, one by one or many at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dayzero.acceptance.accept.http import Answer, Client, NoAnswer
from dayzero.acceptance.accept.stage import RunningServer
from dayzero.acceptance.stages.answers import PATHS, Api, Choice, Ended, Malformed, Refused, Score, streamed, whole

PACE_SHARE, LEAST_PACE = 1 / 8, 1e-4
Prompt = list[int] | str
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request. status: 0 when there was no HTTP answer. error: a sentence when it failed, else empty.
    ended: the stream itself said that it ended with an error.

    tokens: ids, empty where the server sends none. logprobs, margins (best minus second best): one a token, where asked
    for. prompt_logprobs: one a prompt token, None where nothing is said. cached: prompt tokens found in the cache, None
    when it does not say. seconds: from the connection to the last byte.
    """

    status: int = 0
    error: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached: int | None = None
    seconds: float = 0.0
    headers: Mapping[str, str] | None = None
    ended: bool = False

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error


@dataclass
class Asker:
    """Asks one server. ids: it takes prompts of token ids and sends ids back. api: where answers are asked for. usual:
    fields of every request. timeout: seconds a request."""

    server: RunningServer
    ids: bool = False
    timeout: float = 120.0
    api: Api = "completions"
    usual: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    def __post_init__(self) -> None:
        self.client = Client(self.server.address, self.server.headers, self.timeout)

    def patient(self, seconds: float) -> Asker:
        """The same with at least so many seconds for one answer."""
        return self if seconds <= self.timeout else replace(self, timeout=seconds)

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, prompt: Prompt, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy, and of exactly ``max_tokens`` tokens where the server takes ``ignore_eos``, unless ``more`` says
        otherwise; None takes a field away. logprobs: how many of the likeliest tokens, whatever the API."""
        asked = {"model": self.server.model, "max_tokens": max_tokens, "temperature": 0, **self.usual}
        asked |= {"return_token_ids": True} if self.ids else {}
        if self.api == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
            if more.get("logprobs"):
                more = {**more, "logprobs": True, "top_logprobs": more["logprobs"]}
        else:
            asked["prompt"] = prompt
        return {key: value for key, value in (asked | more).items() if value is not None}

    def complete(self, prompt: Prompt, max_tokens: int, **more: Any) -> Completion:
        """One request; never raises for what the server does. more: fields of the body; ``stream`` is read as well."""
        return self.send(self.body(prompt, max_tokens, **more))

    def send(self, body: Mapping[str, Any]) -> Completion:
        """A body as it is."""
        try:
            answer = self.client.post(self.path, body)
        except NoAnswer as error:
            return Completion(error=str(error))
        return completion_of(answer, body.get("prompt", ""), self.api)

    def json(self, path: str) -> Any:
        """What a GET gives as JSON; None when it is no JSON or did not come."""
        try:
            return self.client.get(path).json
        except NoAnswer:
            return None

    def status(self, path: str, timeout: float = 10.0) -> int:
        """Of a GET; 0 without an answer."""
        try:
            return self.client.get(path, timeout=timeout).status
        except NoAnswer:
            return 0


def at_once(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> list[Result]:
    """``work`` on all items, so many at a time; results in the order of the items."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))


def pace(asker: Asker, prompt: Prompt, short: int, long: int) -> float:
    """Seconds that one more token of an answer takes: what an answer of ``long`` tokens takes beyond one of ``short``.
    A moment in which this machine did something else may hide it, so it is no less than PACE_SHARE of the mean."""
    first, second = (asker.complete(prompt, count).seconds for count in (short, long))
    return max((second - first) / max(1, long - short), PACE_SHARE * second / long, LEAST_PACE)


def eventually(holds: Callable[[], bool], seconds: float, every: float = 0.05) -> float | None:
    """Seconds until ``holds`` was true; None when it was not within ``seconds``."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(every)
    return time.monotonic() - began


def completion_of(answer: Answer, prompt: Prompt = "", api: Api = "completions") -> Completion:
    """The completion in an answer to ``prompt``, whole or streamed; one of another shape is one with an error."""
    streams = "text/event-stream" in answer.headers.get("content-type", "")
    failed = Completion(status=answer.status, seconds=answer.seconds, headers=answer.headers)
    try:
        reply = (streamed if streams else whole)(answer, api)
    except Refused:
        return replace(failed, error=answer.said)
    except Malformed as error:
        return replace(failed, error=str(error), ended=isinstance(error, Ended))
    if streams and not (answer.events and answer.events[-1].done):
        return replace(failed, error="the stream ended without [DONE]")
    one, usage, ids = reply.one, reply.usage, prompt if isinstance(prompt, list) else []
    scores, read = one.scores or [], reply.prompt_scores or []
    return replace(
        failed,
        text=one.said,
        tokens=tuple(one.ids or ()),
        logprobs=tuple(score.logprob for score in scores),
        margins=tuple(_margin(score) for score in scores),
        prompt_logprobs=tuple(_of_token(entry, token) for entry, token in zip(read, ids, strict=False)),
        finish=one.finish,
        prompt_tokens=usage.prompt if usage else len(ids) or None,
        output_tokens=usage.completion if usage else _length(one),
        cached=usage.cached if usage else None,
    )


def _length(one: Choice) -> int | None:
    return len(one.ids) if one.ids else None


def _margin(score: Score) -> float:
    best = sorted((logprob for _, logprob in score.top), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _of_token(entry: Any, token: int) -> float | None:
    """The token's own log-probability among the candidates for its place; one that is no number is none."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    value = found.get("logprob") if isinstance(found, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
