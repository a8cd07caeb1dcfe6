"""What came of one request, whoever asked it. Paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dayzero.acceptance.load.workload import LoadRequest


@dataclass(slots=True)
class Outcome:
    """Times are of time.perf_counter. sent: when the request went out; in an open loop, when it was due. times: of each
    chunk that carried tokens. prompt_tokens, output_tokens, cached_tokens: as the server counted them, None when it did
    not say. token_ids: ids received, None when the server sends none. error: (kind, sentence) when it failed; kinds:
    ``refused`` (the request itself was wrong), ``http 5xx`` and ``http 429``, ``connection``, ``timeout``, ``stream``,
    ``engine``, ``tokens`` (not the counts that were asked for). finish: why the answer ended, as the server
    says. short: it ended of itself before it was as long as was asked, at a server that is not held to that."""

    request: LoadRequest
    sent: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: int | None = None
    error: tuple[str, str] | None = None
    finish: str | None = None
    short: bool = False

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token behind the first; None for an answer of one token."""
        count = (self.output_tokens or 0) - 1
        return (self.times[-1] - self.times[0]) / count if count > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk with tokens and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:])]


class Driver(Protocol):
    """Puts requests to a server or an engine."""

    async def ask(self, request: LoadRequest, due: float | None = None) -> Outcome:
        """One request to its end. Never raises for what the server does: that is the outcome's ``error``. due: when it
        should have gone out, by time.perf_counter."""

    async def close(self) -> None:
        """Let go of connections."""


def check_counts(outcome: Outcome, held: bool = True) -> None:
    """Hold the counts of a finished request to what was asked. Sets ``outcome.error``. held: False for a server that
    may not know ``ignore_eos`` and take it without a word: an answer that ends of itself is ``outcome.short`` there."""
    asked, out = outcome.request, outcome
    if out.error is not None:
        return
    wrong = []
    if not held and out.finish == "stop" and out.output_tokens is not None:
        out.short = out.output_tokens < asked.output_tokens
    if out.output_tokens != asked.output_tokens and not out.short:
        wrong.append(f"{_said(out.output_tokens)} answer tokens instead of {asked.output_tokens}")
    if asked.prompt_tokens is not None and out.prompt_tokens != asked.prompt_tokens:
        wrong.append(f"{_said(out.prompt_tokens)} prompt tokens instead of {asked.prompt_tokens}")
    if out.token_ids is not None and out.token_ids != out.output_tokens:
        wrong.append(f"{out.token_ids} token ids streamed, {_said(out.output_tokens)} answer tokens counted")
    if not out.times:
        wrong.append("no chunk that carried text or tokens")
    if wrong:
        out.error = ("tokens", f"the server gave {'; '.join(wrong)}")


def _said(count: int | None) -> str:
    return "no count of" if count is None else str(count)
