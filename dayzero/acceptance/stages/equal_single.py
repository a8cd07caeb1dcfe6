"""Equalities of single requests: streamed, cancelled, with and without graphs; and what quantised rows cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dayzero.acceptance.compare import MARGIN_BUG_NATS, MARGIN_NOISE_NATS
from dayzero.acceptance.stages.equal_engine import BASE, SERVED, Ran, Subject, engine, options_of, params_of
from dayzero.acceptance.stages.equal_judge import Limit, compare_all
from dayzero.arch.record_choice import NARROW
from dayzero.engine.answer import RequestOutput
from dayzero.engine.events import Logprobs
from dayzero.engine.llm import LLM
from dayzero.engine.request import SamplingParams
from dayzero.finding import Finding
from dayzero.planner.detect import detect

CUTS = (1, 3, 7)  # pieces that are read before an answer is left
NEXT_TOKENS = 3  # of the answer behind them: so few that what was not ended is still there when it has ended
PADDED = 3  # requests at once
GRAPH_STEPS = "graph_steps"  # the engine's counter
MOST_FLIPPED = 0.02  # of the places whose margin is above a nat
STREAM_REMEDY = "Look at how pieces are joined: detokenizing across pieces, and tokens of the last output."
CANCEL_REMEDY = "Look at what ends a request: blocks and slot go back when the last step that names it has retired."


def single_findings(subject: Subject, base: Ran, limit: Limit, narrow: bool) -> Iterator[Finding]:
    """base: answers of the served path; limit: of that path. narrow: whether there are rows to quantise."""
    plain = dict(BASE) | {"path": SERVED}
    with engine(subject, SERVED, **options_of(plain)) as llm:
        yield _streamed(subject, base, llm)
        yield _cancelled(subject, base, llm)
        wide = _prompt_places(subject, llm)
        served = _alone_and_at_once(subject, llm)
    yield _graphs(subject, served, limit)
    if not narrow:
        claim = "quantised rows keep the likeliest token where it is clear"
        yield Finding("equal.narrow_error", "cache", "not applicable", claim, "no rows of this model can be quantised")
        return
    with engine(subject, SERVED, cache=NARROW) as llm:
        yield _narrow_error(wide, _prompt_places(subject, llm), str(llm.info.facts.get("cache_records", NARROW)))


def _streamed(subject: Subject, base: Ran, llm: LLM) -> Finding:
    wrong = []
    for number, (prompt, want) in enumerate(zip(subject.prompts(), base.rounds[0], strict=True)):
        deltas = list(llm.stream(prompt, params_of(subject, BASE, number)))
        ids = [token for delta in deltas for token in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        ends = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
        if (ids, text, ends) != (want.token_ids, want.text, [want.finish_reason]):
            wrong.append(f"answer {number}: {ids[:4]}… {ends}, not {want.token_ids[:4]}… {want.finish_reason}")
    return Finding(
        "equal.streamed",
        "server",
        "fail" if wrong else "pass",
        "streamed = not streamed: ids, text and how it ends",
        wrong[0] if wrong else f"{len(base.rounds[0])} answers",
        "equal",
        tuple(wrong),
        STREAM_REMEDY if wrong else "",
    )


def _cancelled(subject: Subject, base: Ran, llm: LLM) -> Finding:
    """Leave answers after some pieces, others beside them; then nothing is held, and all are answered as before."""
    wrong, layer = [], "cache"
    prompts = subject.prompts()
    for cut in CUTS:
        streams = [llm.stream(prompt, params_of(subject, BASE, n)) for n, prompt in enumerate(prompts)]
        for stream in streams:
            for _ in range(cut):
                next(stream)
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        short = msgspec.structs.replace(params_of(subject, BASE, 0), max_tokens=NEXT_TOKENS)
        again = llm.generate(prompts[0], short)[0]
        now = llm.progress()
        if now.usage or now.running or now.waiting:
            held = f"{now.usage:.1%} of the pool, {now.running} running, {now.waiting} waiting"
            wrong.append(f"left after {cut} pieces: {held}")
            if now.running or now.waiting:  # blocks that one who goes on holds are no leak of the pool's
                layer = "scheduler"
        if again.token_ids != base.rounds[0][0].token_ids[:NEXT_TOKENS]:
            wrong.append(f"left after {cut} pieces: the next answer is another one")
    return Finding(
        "equal.cancelled",
        layer,
        "fail" if wrong else "pass",
        "cancelled anywhere: the pool is as before, and so is the next answer",
        wrong[0] if wrong else f"{len(CUTS) * len(prompts)} answers left after {', '.join(map(str, CUTS))} pieces",
        "no block held, nothing running or waiting",
        tuple(wrong),
        CANCEL_REMEDY if wrong else "",
    )


@dataclass(frozen=True, slots=True)
class _Answers:
    """outputs: of all prompts alone, then of some at once. steps: of them that were recorded ones."""

    outputs: list[RequestOutput]
    steps: int


def _alone_and_at_once(subject: Subject, llm: LLM) -> _Answers:
    """Three at once, so that a recording of four rows has one that is padding."""
    prompts = subject.prompts()
    params = [params_of(subject, BASE, number) for number in range(len(prompts))]
    before = llm.progress().counters.get(GRAPH_STEPS, 0)
    outputs = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    outputs += llm.generate(prompts[:PADDED], params[:PADDED])
    return _Answers(outputs, int(llm.progress().counters.get(GRAPH_STEPS, 0) - before))


def _graphs(subject: Subject, served: _Answers, limit: Limit) -> Finding:
    """A CPU serves without recordings; there the same steps are recorded to be called again: the tables, buckets and
    padding of a graph, at addresses that never change, without the graph itself."""
    claim, cpu = "eager = graph", detect()[0].target == "cpu"
    if not cpu and not served.steps:
        return Finding("equal.graphs", "compiler", "not applicable", claim, "this engine records no step")
    plain = options_of(dict(BASE) | {"path": SERVED})
    with engine(subject, SERVED, graphs="static" if cpu else "off", **plain) as llm:
        other = _alone_and_at_once(subject, llm)
    eager, recorded = (served, other) if cpu else (other, served)
    tally = compare_all(recorded.outputs, eager.outputs, limit, sampled=False)
    if not recorded.steps:
        tally.wrong.append("no step was one that is recorded")
    bad = not tally.passed(limit)
    how = "recorded and called again" if cpu else "of graphs"
    return Finding(
        "equal.graphs", "compiler", "fail" if bad else "pass", claim,
        tally.wrong[0] if tally.wrong
        else f"{tally.places} tokens, {recorded.steps} steps {how}, {len(tally.parted)} parted at near ties",
        f"{limit.nats:.1e} nat: {limit.why}", tuple(tally.wrong),
        "Look at what a graph reads that is not in the step's view, and at its bucket's padding." if bad else "",
    )  # fmt: skip


def _prompt_places(subject: Subject, llm: LLM) -> list[Logprobs]:
    """The two likeliest ids at every place of all prompts, which both engines read alike."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    outputs = llm.generate(subject.prompts(), params)
    for output in outputs:
        output.raise_error()
    return [place for output in outputs for place in output.prompt_logprobs or ()]


def _narrow_error(wide: Sequence[Logprobs], narrow: Sequence[Logprobs], records: str) -> Finding:
    """Top-1 by margin: a quantisation error, not an equality."""
    bins = {f"<{MARGIN_NOISE_NATS:g}": [0, 0], f"{MARGIN_NOISE_NATS:g}-{MARGIN_BUG_NATS:g}": [0, 0], "more": [0, 0]}
    names = list(bins)
    moved = 0.0
    for one, other in zip(wide, narrow, strict=True):
        margin = one.top[0][1] - one.top[1][1]
        counts = bins[names[(margin >= MARGIN_NOISE_NATS) + (margin > MARGIN_BUG_NATS)]]
        counts[0] += one.top[0][0] != other.top[0][0]
        counts[1] += 1
        moved += abs(one.logprob - other.logprob) / len(wide)
    flipped, clear = bins["more"]
    bad = flipped > max(1.0, MOST_FLIPPED * clear)  # of few places, one is no share
    idle = moved == 0.0
    return Finding(
        "equal.narrow_error",
        "cache",
        "fail" if bad or idle else "pass",
        f"rows kept in {records} keep the likeliest token where it is clear",
        "the rows were not quantised: every log-probability is the same"
        if idle
        else ", ".join(f"margin {name} nat: {n} of {total} differ" for name, (n, total) in bins.items() if total)
        + f"; log-probabilities move by {moved:.1e} nat",
        f"at most {MOST_FLIPPED:.0%} of those with a margin above {MARGIN_BUG_NATS:g} nat, and not nothing at all",
        (),
        "Run `dayzero align --cache fp8`: it tells the format's own rounding from a wrong scale."
        if bad or idle
        else "",
    )
