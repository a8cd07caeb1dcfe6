"""EngineConfig: every choice an engine is started with, as one frozen value. Paper.

Nothing is written to a config after it is made; a value that cannot hold is a UsageError that names the field.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dayzero.arch.record_choice import parse_records
from dayzero.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16"]
ExpertInputs = Literal["bf16", "fp8_128"]
Graphs = Literal["auto", "off", "static"]

_MAX_PAGE_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine schedules, caches and computes.

    max_running: requests that hold a slot at once. max_step_tokens: token budget of one step, at least max_running,
    so that every running request gets its next token in every step. chunk_tokens: longest run of tokens one request
    gets in a step; None: what the budget leaves. max_model_len: longest prompt + answer in tokens; None: what the
    model was trained for. page_tokens: tokens of a page of the cache. pool_bytes: bytes of the cache pool; None: what
    the plan leaves. snapshot_tokens: distance between state snapshots in tokens; None: state bytes over token bytes.
    snapshot_bytes: budget of all snapshots; None: a quarter of the pool. prefix_cache: reuse what earlier requests
    computed. image_cache_bytes: what encoded images may take that are kept for later requests. max_waiting: requests
    that may wait for a slot; more are refused as overload. bindings: (site pattern, variant) pairs that overrule the
    plan's choice. expert_bytes: memory for routed experts, the others are read when they are chosen; None: all are
    held. expert_inputs: format that inputs of routed experts are rounded to; linear_inputs: those of linear layers
    whose weights are stored in blocks of FP8. cache: what tokens' rows are kept in: ``bf16`` (the activations' own
    type), ``fp8``, or records by kind of rows (``arch.record_choice``). seed: where requests without one of their own
    draw it from. run_ahead: schedule each step before the result of the one before is known; None: where the executor
    computes while the host goes on. graphs: record steps whose rows have one token each and replay them: ``auto`` on
    accelerators, as far as the plan's operators can be captured; ``static`` calls the same work again, on any device,
    to show that recording changes nothing. debug: check invariants and bounds after every call, slowly.
    """

    max_running: int = 64
    max_step_tokens: int = 512
    chunk_tokens: int | None = None
    max_model_len: int | None = None
    page_tokens: int = 64
    pool_bytes: int | None = None
    snapshot_tokens: int | None = None
    snapshot_bytes: int | None = None
    prefix_cache: bool = True
    image_cache_bytes: int = 1 << 30
    max_waiting: int = 1024
    dtype: Dtype = "auto"
    bindings: tuple[tuple[str, str], ...] = ()
    expert_bytes: int | None = None
    expert_inputs: ExpertInputs = "bf16"
    linear_inputs: ExpertInputs = "bf16"
    cache: str = "bf16"
    seed: int = 0
    run_ahead: bool | None = None
    graphs: Graphs = "auto"
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "page_tokens"):
            _whole(name, getattr(self, name), 1)
        for name in ("chunk_tokens", "max_model_len", "pool_bytes", "snapshot_tokens", "expert_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.snapshot_bytes is not None:
            _whole("snapshot_bytes", self.snapshot_bytes, 0)
        _whole("max_waiting", self.max_waiting, 0)
        _whole("image_cache_bytes", self.image_cache_bytes, 0)
        _whole("seed", self.seed, 0)
        if self.run_ahead not in (None, True, False):
            raise UsageError(f"run_ahead is {self.run_ahead!r}; it must be true, false or left out")
        for name in ("prefix_cache", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.dtype not in get_args(Dtype):
            raise UsageError(f"dtype is {self.dtype!r}; it must be one of {', '.join(get_args(Dtype))}")
        for name in ("expert_inputs", "linear_inputs"):
            if getattr(self, name) not in get_args(ExpertInputs):
                known = ", ".join(get_args(ExpertInputs))
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")
        if self.graphs not in get_args(Graphs):
            raise UsageError(f"graphs is {self.graphs!r}; it must be one of {', '.join(get_args(Graphs))}")
        if not isinstance(self.cache, str):
            raise UsageError(f"cache is {self.cache!r}; it must be bf16, fp8 or KIND=RECORD,…")
        parse_records(self.cache)
        if self.page_tokens > _MAX_PAGE_TOKENS or self.page_tokens & (self.page_tokens - 1):
            raise UsageError(f"page_tokens is {self.page_tokens}; it must be a power of two up to {_MAX_PAGE_TOKENS}")
        if self.max_running > self.max_step_tokens:
            raise UsageError(
                f"max_running is {self.max_running} but max_step_tokens only {self.max_step_tokens}; a step must hold "
                "one token of every running request: raise max_step_tokens or lower max_running"
            )
        if self.snapshot_tokens is not None and self.snapshot_tokens % self.page_tokens:
            raise UsageError(
                f"snapshot_tokens is {self.snapshot_tokens}; snapshots lie at the ends of pages, so it must be a "
                f"multiple of page_tokens ({self.page_tokens})"
            )
        _check_bindings(self.bindings)

    def context(self, trained: int) -> int:
        """Longest prompt + answer in tokens for a model that was trained for so many. UsageError when more is asked."""
        if self.max_model_len is not None and self.max_model_len > trained:
            raise UsageError(
                f"max_model_len is {self.max_model_len}, but the model was trained for {trained} tokens; "
                "ask for at most that"
            )
        return self.max_model_len or trained

    def rows(self) -> list[tuple[str, str]]:
        """(field, value) of every field, for a start-up table."""
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]


def _whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value < 2**63:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _check_bindings(bindings: Any) -> None:
    """Pairs of texts, each site pattern once."""
    pairs = bindings if isinstance(bindings, tuple) else None
    if pairs is None or not all(isinstance(p, tuple) and len(p) == 2 and all(isinstance(t, str) and t for t in p)
                                for p in pairs):  # fmt: skip
        raise UsageError(f"bindings is {bindings!r}; it must be a tuple of (site pattern, variant) pairs")
    sites = [site for site, _ in pairs]
    twice = next((site for site in sites if sites.count(site) > 1), None)
    if twice is not None:
        raise UsageError(f"bindings names the site {twice!r} twice; give it one variant")
