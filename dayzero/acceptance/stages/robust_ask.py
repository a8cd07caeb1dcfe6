"""Completions asked of a server by the stages that measure it: whole or streamed, one by one or many at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dayzero.acceptance.accept.http import Answer, Client, NoAnswer
from dayzero.acceptance.accept.stage import RunningServer

PATH = "/v1/completions"
ENDED_WITH_ERROR = "the answer ended with an error"
Prompt = list[int] | str
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request. status: 0 when there was no HTTP answer. error: a sentence when it failed, else empty.

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

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error


class Asker:
    """Asks one server. ids: it takes prompts of token ids and sends ids back. timeout: seconds a request."""

    def __init__(self, server: RunningServer, *, ids: bool = False, timeout: float = 120.0) -> None:
        self.server, self.ids, self.timeout = server, ids, timeout
        self.client = Client(server.address, server.headers, timeout)

    def body(self, prompt: Prompt, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy, and of exactly ``max_tokens`` tokens unless ``more`` says otherwise."""
        asked = {"model": self.server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        asked |= {"ignore_eos": True} | ({"return_token_ids": True} if self.ids else {}) | more
        return {key: value for key, value in asked.items() if value is not None}

    def complete(self, prompt: Prompt, max_tokens: int, **more: Any) -> Completion:
        """One request; never raises for what the server does. more: fields of the body; ``stream`` is read as well."""
        return self.send(self.body(prompt, max_tokens, **more))

    def send(self, body: Mapping[str, Any]) -> Completion:
        """A body as it is."""
        try:
            answer = self.client.post(PATH, body)
        except NoAnswer as error:
            return Completion(error=str(error))
        return completion_of(answer, body.get("prompt", ""))

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


def eventually(holds: Callable[[], bool], seconds: float, every: float = 0.05) -> float | None:
    """Seconds until ``holds`` was true; None when it was not within ``seconds``."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(every)
    return time.monotonic() - began


def completion_of(answer: Answer, prompt: Prompt = "") -> Completion:
    """The completion in an answer to ``prompt``, whole or streamed."""
    streamed = "text/event-stream" in answer.headers.get("content-type", "")
    parts = answer.chunks if streamed else [answer.json] if isinstance(answer.json, dict) else []
    error = _error_in(answer, parts, streamed)
    choices = [choice for part in parts for choice in part.get("choices") or () if isinstance(choice, dict)]
    usage: dict[str, Any] = next((part["usage"] for part in reversed(parts) if isinstance(part.get("usage"), dict)), {})
    said = [choice["logprobs"] for choice in choices if isinstance(choice.get("logprobs"), dict)]
    tops = [top for one in said for top in one.get("top_logprobs") or ()]
    read: list[Any] = next((c["prompt_logprobs"] for c in choices if isinstance(c.get("prompt_logprobs"), list)), [])
    ids = prompt if isinstance(prompt, list) else []
    tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    if not error and not choices:
        error = f"an answer without choices: {answer.said}"
    return Completion(
        status=answer.status,
        error=error,
        text="".join(choice.get("text") or "" for choice in choices),
        tokens=tokens,
        logprobs=tuple(value for one in said for value in one.get("token_logprobs") or () if value is not None),
        margins=tuple(_margin(top) for top in tops if top is not None),
        prompt_logprobs=tuple(_of_token(entry, token) for entry, token in zip(read, ids, strict=False)),
        finish=next((c["finish_reason"] for c in reversed(choices) if c.get("finish_reason")), None),
        prompt_tokens=usage.get("prompt_tokens", len(ids) or None),
        output_tokens=usage.get("completion_tokens", len(tokens) or None),
        cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        seconds=answer.seconds,
        headers=answer.headers,
    )


def _error_in(answer: Answer, parts: Sequence[Mapping[str, Any]], streamed: bool) -> str:
    """Why an answer is none; empty when it is one."""
    if not answer.ok:
        return answer.said
    told = next((part["error"] for part in parts if part.get("error")), None)
    if told is not None:
        return f"{ENDED_WITH_ERROR}: {told.get('message', told) if isinstance(told, dict) else told}"
    if streamed and not (answer.events and answer.events[-1].done):
        return "the stream ended without [DONE]"
    return "" if streamed or parts else f"the body is no JSON object: {answer.said}"


def _margin(top: Mapping[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _of_token(entry: Any, token: int) -> float | None:
    """The token's own log-probability among the candidates for its place."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    return found.get("logprob") if isinstance(found, dict) else None
