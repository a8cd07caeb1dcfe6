"""What one app holds: the engine, the chat side, its config, its numbers, and who is being served. No globals."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from dayzero.chat.service import ChatService
from dayzero.engine.api import Engine, EngineInfo
from dayzero.server.config import ServerConfig
from dayzero.server.errors import ApiError, unavailable
from dayzero.server.generation import Choice
from dayzero.server.logs import Log
from dayzero.server.metrics import Metrics
from dayzero.server.sampling import Defaults, read_defaults


class ServerState:
    """engine, chat, config, metrics, log; created: seconds since the epoch. chat is None when nobody opened a folder
    (then why_no_chat says why)."""

    def __init__(self, engine: Engine, chat: ChatService | None, config: ServerConfig) -> None:
        self.engine, self.chat, self.config = engine, chat, config
        self.created = int(time.time())
        self.metrics = Metrics(engine, config.served_names[0], config.engine)
        engine.on_step(lambda tokens: self.metrics.observe("iteration_tokens_total", tokens))
        self.log = Log(config.write)
        self._defaults: tuple[EngineInfo, Defaults] | None = None
        self._draining = False
        self._serving = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- who is served -----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    def enter(self) -> None:
        self._serving += 1
        self._idle.clear()

    def leave(self) -> None:
        self._serving -= 1
        if not self._serving:
            self._idle.set()

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests (/ready is 503 from now on) and wait until those being served have their answers.
        Returns whether all had within ``timeout`` seconds."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # --- the engine --------------------------------------------------------------------------------------------------

    def ready(self) -> EngineInfo:
        """What is known of the loaded model. ApiError 503 while there is no engine that takes requests."""
        status = self.engine.status()
        if self._draining or status.state == "draining":
            raise unavailable("the server is shutting down and takes no new requests.", "draining")
        if status.state == "loading":
            raise unavailable("the model is being loaded; try again later.", "loading")
        if status.state == "restarting":
            raise unavailable(f"the engine is being started again: {status.why}", "restarting")
        if status.state == "dead":
            raise unavailable(f"there is no engine: {status.why}", "engine_died")
        if self.chat is not None and self.chat.tokenizer is not None:
            self.chat.tokenizer.limit(self.engine.info.max_model_len)
        return self.engine.info

    def known(self) -> EngineInfo:
        """What is known of the model, also while it serves nobody. ApiError 503 before it has been loaded."""
        status = self.engine.status()
        if status.state == "loading":
            raise unavailable("the model is being loaded; try again later.", "loading")
        if status.state == "dead":
            raise unavailable(f"there is no engine: {status.why}", "engine_died")
        return self.engine.info

    @property
    def defaults(self) -> Defaults:
        """What requests are sampled with unless they say otherwise; once a model has been loaded."""
        info = self.engine.info
        if self._defaults is None or self._defaults[0] is not info:
            self._defaults = (info, read_defaults(info))
        return self._defaults[1]

    def why_no_chat(self) -> str:
        return self.chat.why_no_chat if self.chat is not None else "this server was started without a chat template."

    def check_model(self, name: str | None) -> str:
        """The served name an answer carries. ApiError 404 for a name that is not served here."""
        names = self.config.served_names
        if name is None or name in names:
            return name or names[0]
        shown = ", ".join(names)
        raise ApiError(
            404, f"the model {name[:200]!r} is not served here; this server has {shown}.", param="model",
            code="model_not_found",
        )  # fmt: skip


@dataclass(slots=True)
class RequestNumbers:
    """Observer of one request's generation: feeds the metrics."""

    metrics: Metrics

    def output(self, choice: Choice, num_tokens: int, now: float) -> None:
        metrics = self.metrics
        if choice.last_output is None:
            metrics.prompt_tokens.inc(len(choice.request.prompt))
        elif num_tokens:
            metrics.observe("inter_token_latency_seconds", now - choice.last_output)
        choice.last_output = now
        metrics.generation_tokens.inc(num_tokens)

    def ended(self, choice: Choice) -> None:
        metrics, times = self.metrics, choice.times
        metrics.finished(choice.finish or "abort")
        if choice.problems:
            metrics.tool_problems.inc(choice.problems)
        if choice.finish not in ("stop", "length"):
            return
        arrival, end = times.get("arrival", choice.request.arrival), times.get("finished", time.time())
        metrics.observe("e2e_request_latency_seconds", end - arrival)
        metrics.observe("request_prompt_tokens", len(choice.request.prompt))
        metrics.observe("request_generation_tokens", choice.num_tokens)
        if choice.request.params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", choice.request.params.max_tokens)
        scheduled, first = times.get("scheduled"), times.get("first_token")
        if scheduled is not None:
            metrics.observe("request_queue_time_seconds", scheduled - arrival)
            metrics.observe("request_inference_time_seconds", end - scheduled)
        if first is None:
            return
        metrics.observe("time_to_first_token_seconds", first - arrival)
        metrics.observe("request_decode_time_seconds", end - first)
        if scheduled is not None:
            metrics.observe("request_prefill_time_seconds", first - scheduled)
        if choice.num_tokens > 1:
            for name in ("request_time_per_output_token_seconds", "time_per_output_token_seconds"):
                metrics.observe(name, (end - first) / (choice.num_tokens - 1))
