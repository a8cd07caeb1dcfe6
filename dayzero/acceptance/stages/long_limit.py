"""The ends of what is admitted: the longest prompt works, one token more is refused, and memory is as planned."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dayzero.acceptance.stages import robust_memory
from dayzero.acceptance.stages.long_known import Known, limit_of
from dayzero.acceptance.stages.long_pace import Pace
from dayzero.arch.cost import cache_cost, total_params
from dayzero.finding import Finding
from dayzero.planner.budget import carry_bytes
from dayzero.units import bytes_text

SHORT = 8
F32_FACTOR = 2  # what is counted in two bytes a number takes four
BASE_BYTES = 700 << 20  # an interpreter with torch in it, before it holds a model
SLACK_BYTES = 96 << 20  # an allocator's arenas, and the fp64 tiles of reference operators
WEIGHT_FACTOR = 1.5  # parameters and what is packed for an operator, beside each other
HOLD_FACTOR = (
    2.0  # over a step's planned activations: the plan counts the widest layer, an allocator keeps some of the others
)


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory of the engine process around its longest request, in bytes. None: the system does not say."""

    tokens: int
    before: int
    peak: int | None


def limits(known: Known, pace: Pace, seed: int, process_ids: tuple[int, ...]) -> tuple[list[Finding], Taken | None]:
    """Ask for the longest, and for one token more in two ways."""
    limit = limit_of(known)
    if limit is None or not known.ids:
        why = "the server does not say how long a prompt may be" if limit is None else "it takes no token ids"
        claims = ("the longest admitted prompt is answered", "one token more is refused with 400")
        return [Finding("long.limit", "server", "not applicable", claim, measured=why) for claim in claims], None
    rng = random.Random(f"{seed} limit")
    found = [_refused(known, rng, limit, 1), _refused(known, rng, SHORT, limit - SHORT + 1)]
    engine = process_ids[1] if len(process_ids) > 1 else None
    tokens, claim = limit - 1, f"a prompt of {limit - 1:,} tokens, the longest with an answer, is answered"
    if not pace.affords(tokens, 1):
        why = pace.why_not(tokens, 1)
        return [*found, Finding("long.limit.longest", "scheduler", "not applicable", claim, measured=why)], None
    before = robust_memory.resident([engine])[0] if engine else 0
    counted = engine is not None and robust_memory.forget_peak(engine)
    answer = pace.timed(tokens, 1, lambda: known.asker.complete(known.prompt(rng, tokens), 1))
    top = robust_memory.peak(engine) if engine is not None and counted else None
    good = answer.good and answer.prompt_tokens == tokens and answer.output_tokens == 1
    said = answer.error or f"{answer.prompt_tokens} prompt tokens, {answer.output_tokens} of the answer"
    found.append(
        Finding(
            "long.limit.longest", "scheduler", "pass" if good else "fail", claim, measured=said,
            bound=f"{tokens} prompt tokens and 1 of the answer",
            remedy="" if good else "max_model_len promises more than is served: lower it, or give more --pool-bytes.",
        )
    )  # fmt: skip
    return found, Taken(tokens, before, top)


def _refused(known: Known, rng: random.Random, tokens: int, max_tokens: int) -> Finding:
    """One token more than the limit, in the prompt or in what is asked for."""
    prompt = known.prompt(rng, tokens)
    claim = f"a prompt of {tokens:,} tokens with max_tokens {max_tokens:,}, one beyond the limit, is a clean 400"
    answer = known.asker.complete(prompt, max_tokens)
    clean = answer.status == 400 and len(answer.error) > len("400: ")
    alive = known.asker.status("/health") in (200, 404) if known.own else True
    said = (answer.error or f"{answer.status}: an answer")[:300] + ("" if alive else "; /health is bad after it")
    good = clean and alive
    return Finding(
        "long.limit.beyond", "server", "pass" if good else "fail", claim, measured=said, bound="400 with a sentence",
        remedy="" if good else "A length nobody checks is cut in silence, or ends the engine: refuse it at the door.",
    )  # fmt: skip


def rows(known: Known) -> Finding:
    """Bytes of cache a token, as the server says and as the spec counts them."""
    claim = "a token takes as many bytes of cache as planned"
    if known.token_bytes is None or known.paper is None or known.cache != "bf16":
        why = known.why_no_paper or "the server does not say, or keeps packed rows"
        return Finding("long.memory.token", "cache", "not applicable", claim, measured=why)
    planned = cache_cost(known.paper.paper.spec, known.cache).per_token * _wide(known)
    good = planned == known.token_bytes
    return Finding(
        "long.memory.token", "cache", "pass" if good else "fail", claim, measured=f"{known.token_bytes} bytes",
        bound=f"{planned} bytes: rows of every layer that keeps them, windows left out",
        remedy="" if good else "Rows are kept that no layer needs, or that two share: see the cache groups.",
    )  # fmt: skip


def _wide(known: Known) -> int:
    return F32_FACTOR if known.dtype in ("f32", "float32") else 1


def memory(known: Known, taken: Taken | None, on_device: bool) -> list[Finding]:
    """What the engine process held against what the plan counts."""
    claims = {
        "long.memory.request": "a long prompt takes no more than its rows of the cache and one step's activations",
        "long.memory.peak": "the engine holds no more than weights, pool and one step's activations",
    }
    why = ""
    if taken is None or taken.peak is None:
        why = "no process of ours, no longest prompt, or no peak of its memory"
    elif on_device:
        why = "the model runs on an accelerator, whose memory this process does not see"
    elif known.paper is None:
        why = f"there is no plan: {known.why_no_paper}"
    if why or taken is None or taken.peak is None or known.paper is None:
        return [Finding(k, "hardware", "not applicable", claim, measured=why) for k, claim in claims.items()]
    spec, wide = known.paper.paper.spec, _wide(known)
    cost = cache_cost(spec, "bf16")
    step = wide * carry_bytes(spec, known.chunk or 512)
    kept = wide * cost.per_token * taken.tokens + cost.window + 2 * cost.per_sequence
    pool = wide * cost.per_token * (known.pool_tokens or taken.tokens) + cost.window + 2 * cost.per_sequence
    weights = 2 * wide * total_params(spec)
    request_bound = int(kept + HOLD_FACTOR * step + SLACK_BYTES)
    peak_bound = int(BASE_BYTES + WEIGHT_FACTOR * weights + pool + HOLD_FACTOR * step + SLACK_BYTES)
    grown = max(0, taken.peak - taken.before)
    parts = (
        f"{bytes_text(kept)} of rows, {HOLD_FACTOR:g} x {bytes_text(step)} of a step, {bytes_text(SLACK_BYTES)} slack",
        f"{WEIGHT_FACTOR:g} x {bytes_text(weights)} of weights, {bytes_text(pool)} of pool, {bytes_text(BASE_BYTES)} "
        "of an interpreter, a step and slack",
    )
    return [
        _held(kind, claims[kind], value, limit, said)
        for kind, value, limit, said in (
            ("long.memory.request", grown, request_bound, parts[0]),
            ("long.memory.peak", taken.peak, peak_bound, parts[1]),
        )
    ]


def _held(kind: str, claim: str, value: int, limit: int, said: str) -> Finding:
    over = value > limit
    return Finding(
        kind, "cache" if kind.endswith("peak") else "operator", "fail" if over else "pass", claim,
        measured=bytes_text(value), bound=f"{bytes_text(limit)}: {said}",
        remedy="Something is made in a size that nobody planned: look for scores or masks of prompt x prompt."
        if over else "",
    )  # fmt: skip
