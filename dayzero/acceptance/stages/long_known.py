"""What is known of a server before it is measured: its limits, and the lengths at which its work changes its kind."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dayzero.acceptance.accept.cards import capabilities_of, card_of
from dayzero.acceptance.accept.http import NoAnswer
from dayzero.acceptance.accept.stage import Context, RunningServer
from dayzero.acceptance.prompt import TEXT
from dayzero.acceptance.stages.answers import Api
from dayzero.acceptance.stages.asking import OWNER
from dayzero.acceptance.stages.metrics import CACHE, read_labels
from dayzero.acceptance.stages.robust_ask import Asker, Completion, Prompt
from dayzero.arch.index import Index, LocalIndex
from dayzero.arch.mixers import MLA, Attention
from dayzero.arch.rope import BandScaling, Yarn
from dayzero.arch.spec import ModelSpec
from dayzero.engine.config import EngineConfig
from dayzero.errors import UserError
from dayzero.ops.catalog import REFERENCE
from dayzero.planner.placement import PaperModel, read_model

SAFE_VOCAB = 256  # ids that every vocabulary has
APIS: tuple[Api, ...] = ("completions", "chat")  # in the order of what can be measured there
BUSY = (0, 429, 503)  # statuses of a server that may answer the same request a moment later; 0: none came
SETTLE_TRIES, SETTLE_SECONDS = 3, 0.5  # further requests in all, and the pause before each
LEAST_TOKENS = 4  # below, there is no length before and behind a threshold


@dataclass(frozen=True, slots=True)
class Threshold:
    """A length in tokens at which another path is taken. layer: the part of the product that takes it."""

    name: str
    tokens: int
    layer: str


@dataclass(frozen=True)
class Known:
    """dtype: empty when the server does not say. longest: prompt and answer together; None: it does not say. ids: it
    takes and sends token ids. exact: its answers have the length that is asked for (``ignore_eos``). token_bytes: of
    cache that a token takes, as it says. cache: the records it was asked to keep them in. reference: every operator is
    a reference, so that rows do not depend on their company."""

    own: bool
    asker: Asker
    dtype: str = ""
    longest: int | None = None
    page: int | None = None
    pool_tokens: int | None = None
    chunk: int | None = None
    vocab: Sequence[int] = field(default_factory=lambda: range(3, SAFE_VOCAB))
    tokenizer: bool = False
    chat: bool = False
    reference: bool = False
    prefix_cache: bool = True
    token_bytes: int | None = None
    cache: str = "bf16"
    paper: PaperModel | None = None
    why_no_paper: str = ""

    @property
    def ids(self) -> bool:
        return self.asker.ids

    @property
    def exact(self) -> bool:
        return bool(self.asker.usual)

    def prompt(self, rng: random.Random, num_tokens: int) -> Prompt:
        """Of exactly that many tokens where ids are taken, else of about as many."""
        if self.ids:
            return rng.choices(self.vocab, k=num_tokens)
        words = TEXT.read_text(encoding="utf-8").split()
        return " ".join(rng.choice(words) for _ in range(max(1, num_tokens * 3 // 4)))


def look(context: Context, server: RunningServer, timeout: float = 120.0) -> Known:
    """Ask the server, read the source where there is one. Errors: none of the server's; absent facts stay absent."""
    asker = Asker(server, timeout=timeout)
    card, subject = card_of(asker.json("/v1/models"), server.model), context.subject
    own = card.get("owned_by") == OWNER
    paper, why = paper_of(subject.source, subject.recipe)
    cache, told = read_labels(asker.client, CACHE), asker.json("/tokenizer_info") if own else None
    settle(asker)
    told = told if isinstance(told, dict) else {}
    given = subject.serve if context.services.own else ()
    sizes = [n for n in (_whole(told.get("vocab_size")), paper.paper.spec.vocab if paper is not None else None) if n]
    special = {int(token) for token in told.get("special_tokens") or ()}
    vocab = [token for token in range(min(sizes, default=SAFE_VOCAB)) if token not in special]
    page = _whole(cache.get("block_size"))
    blocks = _whole(cache.get("num_gpu_blocks"))
    return Known(
        own=own, asker=asker, dtype=str(card.get("dtype") or ""), longest=_whole(card.get("max_model_len")),
        page=page, pool_tokens=page * blocks if page and blocks else None,
        chunk=chunk_of(given, page) if context.services.own else None,
        vocab=vocab if len(vocab) > 1 else range(3, SAFE_VOCAB), tokenizer=_tokenizes(asker),
        chat=bool(capabilities_of(card).get("chat", not own)), reference=_all_reference(server.told),
        prefix_cache="--no-prefix-cache" not in given,
        token_bytes=_whole((server.told.get("facts") or {}).get("token_bytes")),
        cache=option(given, "--cache") or "bf16", paper=paper, why_no_paper=why,
    )  # fmt: skip


def thresholds(known: Known, answer_tokens: int) -> list[Threshold]:
    """Those that the server can reach with ``answer_tokens`` behind them, shortest first, one for each length."""
    found = []
    if known.page:
        found.append(Threshold("page", known.page, "cache"))
    if known.chunk:
        found.append(Threshold("chunk", known.chunk, "scheduler"))
    if known.paper is not None:
        found += of_spec(known.paper.paper.spec)
    limit = limit_of(known)
    kept: dict[int, Threshold] = {}
    for one in found:
        if one.tokens >= LEAST_TOKENS and (limit is None or one.tokens + 1 + answer_tokens <= limit):
            before = kept.get(one.tokens)
            layer, name = (one.layer, one.name) if before is None else (before.layer, f"{before.name} and {one.name}")
            kept[one.tokens] = Threshold(name, one.tokens, layer)
    return [kept[tokens] for tokens in sorted(kept)]


def of_spec(spec: ModelSpec) -> list[Threshold]:
    """Windows, what a sparse index keeps, and lengths that rope was trained for before it was stretched."""
    found: dict[tuple[str, int], Threshold] = {}
    for layer in spec.layers:
        mixer = layer.mixer
        rope = getattr(mixer, "rope", None)
        scaling = getattr(rope, "scaling", None)
        sizes: list[tuple[str, int | None, str]] = []
        if isinstance(mixer, Attention):
            sizes.append(("window", mixer.window, "operator"))
        if isinstance(mixer, MLA) and isinstance(mixer.index, LocalIndex):
            sizes.append(("window", mixer.index.window, "operator"))
        if isinstance(mixer, MLA) and isinstance(mixer.index, Index):
            sizes.append(("top-k", mixer.index.top_k, "operator"))
        if isinstance(scaling, Yarn | BandScaling):
            sizes.append(("original rope length", scaling.original, "operator"))
        for name, tokens, part in sizes:
            if tokens:
                found[name, int(tokens)] = Threshold(name, int(tokens), part)
    return list(found.values())


def limit_of(known: Known) -> int | None:
    """Longest prompt and answer together that is admitted, as far as is known."""
    sizes = [n for n in (known.longest, known.pool_tokens) if n]
    return min(sizes, default=None)


def option(given: Sequence[str], name: str) -> str | None:
    """The last value of an option on a command line, ``--name value`` or ``--name=value``."""
    found = None
    for i, word in enumerate(given):
        if word == name and i + 1 < len(given):
            found = given[i + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def chunk_of(given: Sequence[str], page: int | None) -> int:
    """Most tokens of one request in a step, by options of ``dayzero serve``: chunks end on page boundaries, the last
    excepted."""
    defaults = EngineConfig()
    step = _whole(option(given, "--max-step-tokens")) or defaults.max_step_tokens
    step = max(step, _whole(option(given, "--max-running")) or defaults.max_running)
    most = min(step, _whole(option(given, "--chunk-tokens")) or step)
    return most // page * page if page and most > page else most


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _all_reference(told: Mapping[str, Any]) -> bool:
    """Whether a server that was started here said that no operator runs a variant."""
    facts = told.get("facts") or {}
    return "bindings" in facts and all(variant == REFERENCE for variant in facts["bindings"].values())


def settle(asker: Asker) -> None:
    """Find out how this server wants to be asked: by token ids where it takes them and sends them back, else by text;
    by completions where there are any, else in conversations; with ``ignore_eos`` where it is not refused. What it
    takes it is asked by, whatever shape its answer has; one that takes nothing stays as it is, and its silence is found
    by whoever asks. A busy moment (BUSY) says nothing of how it wants to be asked: so often it is asked again."""
    left = SETTLE_TRIES

    def asked(prompt: Prompt, **more: Any) -> Completion:
        nonlocal left
        while (found := asker.complete(prompt, 1, **more)).status in BUSY and left > 0:
            left -= 1
            time.sleep(SETTLE_SECONDS)
        return found

    if (found := asked([5, 6, 7], return_token_ids=True)).good and len(found.tokens) == 1:
        asker.ids = True
        return
    was = asker.api, asker.usual
    for api in APIS:
        for usual in (was[1], {}):
            asker.api, asker.usual = api, usual
            if asked("Hi.").status == 200:
                return
    asker.api, asker.usual = was


def _tokenizes(asker: Asker) -> bool:
    try:
        found = asker.client.post("/tokenize", {"model": asker.server.model, "prompt": "a"})
    except NoAnswer:
        return False
    return found.ok and isinstance(found.json, dict) and isinstance(found.json.get("tokens"), list)


@lru_cache(maxsize=2)
def paper_of(source: str | None, recipe: str | None) -> tuple[PaperModel | None, str]:
    """The source on paper, or None and why there is no such thing."""
    if source is None:
        return None, "no checkpoint was given, only the address of a server"
    try:
        return read_model(source, recipe), ""
    except UserError as error:
        return None, str(error)
