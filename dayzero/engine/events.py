"""Messages between the HTTP process and the engine process: msgspec structs, sent as length-prefixed MessagePack.

Paper.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dayzero.engine.request import FinishReason, NewRequest


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests; end when those running have ended."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now; whatever runs is aborted."""


ToEngine = Submit | Abort | Drain | Stop


class Logprobs(msgspec.Struct, frozen=True):
    """Of one token: its id, log-probability and rank (1 = likeliest); top: (id, logprob), likeliest first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, in order; the last message of a request has ``finish`` set, exactly once.

    tokens never holds a stop token that ends the answer: ``stop_id`` names it. cached: prompt tokens that were found
    in the prefix cache (sent with the first output). prompt_logprobs: for prompt tokens 1.., with the first output.
    error: (kind, sentence) when finish is ``error``; kinds: ``nan_logits``, ``grammar``,
    ``grammar_too_complex``, ``engine_died``, ``too_long``, ``overloaded``, ``internal``.
    """

    id: str
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    finish: FinishReason | None = None
    stop_id: int | None = None
    cached: int | None = None
    prompt_logprobs: list[Logprobs] | None = None
    error: tuple[str, str] | None = None
    times: dict[str, float] = {}  # seconds since the epoch: arrival, scheduled (first), first_token, finished


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's numbers after a step, or while it idles. Counters only go up.

    usage: share of the pool in use [0, 1]. last_step: seconds since the epoch at which the newest step ended.
    slowest: the slowest of the last 100 steps, in seconds. host_share: share of step time outside operators.
    """

    state: Literal["loading", "ready", "draining"]
    step: int = 0
    last_step: float = 0.0
    slowest: float = 0.0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    host_share: float = 0.0
    counters: dict[str, float] = {}  # preemptions, prefix_queries, prefix_hits (tokens), recomputed_tokens, bad_rows…
    loaded: float = 0.0  # bytes of weights read so far, while loading
    to_load: float = 0.0
    recorded: int = 0  # steps recorded so far, behind the weights
    to_record: int = 0


class Batch(msgspec.Struct, frozen=True, tag=True):
    """What one step gave. iteration_tokens: tokens computed in it."""

    outputs: list[Output]
    progress: Progress
    iteration_tokens: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once, after loading. info: see EngineInfo in engine/api."""

    info: dict[str, Any]


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine process ends. code: the exit code the command line should end with (errors.py); text: a sentence."""

    code: int
    text: str


FromEngine = Batch | Ready | Fatal
