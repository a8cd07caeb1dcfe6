"""Stage 3, equalities that need no judge: the same requests under other settings of the engine give the same answers.

Every pair of settings of two features comes once (``equal_array``), on the path that is served and on an exact one;
each row is held to answers that were given alone, at once and without reuse. A row that fails is taken apart: its
settings are tried one at a time, and the one that fails alone is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.prompt import is_paper
from dayzero.acceptance.stages.equal_array import Row, all_pairs, covering, pairs_of
from dayzero.acceptance.stages.equal_engine import (
    BASE,
    FLOAT32,
    REFERENCE,
    SERVED,
    TIGHT_LENGTHS,
    TIGHT_PAGE,
    Ran,
    Subject,
    dtype_of,
    run_row,
)
from dayzero.acceptance.stages.equal_forms import FormLogits, form_findings, form_logits
from dayzero.acceptance.stages.equal_judge import Limit, Tally, compare_all, limit_of
from dayzero.acceptance.stages.equal_single import single_findings
from dayzero.arch.cost import total_params
from dayzero.arch.record_choice import NARROW, with_records
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.cache.layout import Dtype
from dayzero.errors import UsageError
from dayzero.finding import Finding
from dayzero.planner.memory import available_bytes

LENGTHS = (70, 45, 67, 70)  # pages of 64 and 16, chunks and tiny windows lie below; three begin alike
ANSWER_TOKENS = {"quick": 20, "release-day": 32, "long": 64}
CHUNKS: Mapping[str, tuple[int | None, ...]] = {
    "quick": (None, 7, 64), "release-day": (None, 1, 7, 64), "long": (None, 1, 7, 16, 63, 64, 65),
}  # fmt: skip
EXACT_PARAMS = 50_000_000  # up to which the exact path is the reference's, which is slow


@dataclass(frozen=True, slots=True)
class Claim:
    """One equality: which setting of which feature it is about, and whose fault it is when it does not hold."""

    feature: str
    layer: str
    claim: str
    remedy: str


CLAIMS = {
    "prefix": Claim(
        "prefix", "cache", "cold = prefix-cached",
        "Look at what a hit restores: pages up to the match, the state's snapshot at exactly that token, key and salt.",
    ),
    "chunk": Claim(
        "chunk", "cache", "one chunk = any chunks",
        "Look at what crosses a chunk: cached rows, positions, a window's edge, recurrent and convolution state.",
    ),
    "together": Claim(
        "together", "scheduler", "alone = batched under load",
        "Look at which rows of a step belong to whom: block tables, slots, late rows; then at variants that look at "
        "other rows.",
    ),
    "tight": Claim(
        "tight", "scheduler", "preempted = not preempted",
        "Look at what a request keeps when it is sent back to the queue: known and computed tokens, its seed's place.",
    ),
    "page": Claim(
        "page", "cache", "pages of 16 = pages of 64",
        "Look at block tables and offsets within a page, and at groups whose pages differ.",
    ),
    "sampled": Claim(
        "sampled", "operator", "a seed draws the same in any company",
        "Look at the sampler: draws must depend on the request's seed and the token's place alone.",
    ),
    "narrow": Claim(
        "narrow", "cache", "all of it holds for quantised rows too",
        "Look at the record's codec: a row's bytes must not depend on the rows that are written with it.",
    ),
}  # fmt: skip


@dataclass(slots=True)
class _Board:
    """What is known so far. base: answers by path and prompts; blamed: (feature, setting) -> the rows it spoils;
    together: rows that fail though none of their settings fails alone, with what is said of them. untried: rows that
    gave no answers, and why. engines: that were started."""

    subject: Subject
    logits: FormLogits
    base: dict[tuple[Any, ...], Ran] = field(default_factory=dict)
    tallies: list[tuple[Row, Tally]] = field(default_factory=list)
    blamed: dict[tuple[str, Any], list[str]] = field(default_factory=dict)
    together: list[tuple[Row, str]] = field(default_factory=list)
    untried: dict[str, str] = field(default_factory=dict)
    engines: int = 0

    def limit(self, row: Row) -> Limit:
        dtype, spread, deviation = dtype_of(self.subject, row["path"]), self.logits.spread, self.logits.deviation
        found = limit_of(self.subject.spec, row["path"], dtype, spread, deviation, row["narrow"])
        # A draw falls at a place of the summed chances, and its token is as wide there as it is likely: where a model
        # is unsure, codes that turn over move nearly every draw to a neighbour. Log-probabilities are held as ever.
        return replace(found, most_parted=1.0) if row["narrow"] and row["sampled"] else found

    def baseline(self, row: Row) -> Ran:
        """Alone, at once, without reuse, in a wide pool."""
        key = row["path"], row["narrow"], row["sampled"], row["tight"]
        if key not in self.base:
            plain = dict(BASE) | {"path": row["path"], "narrow": row["narrow"], "sampled": row["sampled"]}
            self.base[key] = self._ran(plain, row["tight"])
        return self.base[key]

    def _is_base(self, row: Row) -> bool:
        return all(row[feature] == BASE[feature] for feature in BASE if feature not in ("narrow", "sampled"))

    def judge(self, row: Row) -> Tally:
        want = self.baseline(row)
        got = want if self._is_base(row) else self._ran(row, row["tight"])
        tally = Tally()
        if got.problem:
            self.untried[_text(row)] = got.problem
        for answers in got.rounds:
            tally.add(compare_all(answers, want.rounds[0], self.limit(row), row["sampled"]))
        if row["prefix"] and not row["tight"] and not got.cached:
            tally.wrong.append("nothing was found in the cache when the prompts came again")
        return tally

    def _ran(self, row: Row, short: bool) -> Ran:
        """short: with the prompts of tight pools."""
        self.engines += 1
        return run_row(replace(self.subject, lengths=TIGHT_LENGTHS) if short else self.subject, row)


def run(context: Context) -> StageResult:
    """Errors: those of opening a checkpoint and of an engine."""
    source = context.subject.source
    assert source is not None, "the stage needs a source"
    model = open_model(source, recipe=context.subject.recipe)
    if is_paper(model):
        raise UsageError(f"{source} is a paper twin: it has no values to compute with; give a small twin.")
    served = open_model(source, recipe=context.subject.recipe, dtype=None)
    subject = _subject(context, model, str(served.loader.dtype))
    tokens = subject.prompts()[0]
    board = _Board(subject, form_logits(model, tokens, available_bytes() // 4))
    features = _features(context, model)
    rows = covering(features, _possible)
    with context.progress("equalities", len(rows), "engines") as bar:
        for row in rows:
            tally = board.judge(row)
            board.tallies.append((row, tally))
            if not tally.passed(board.limit(row)):
                _blame(board, row, tally)
            bar.advance()
    findings = [*_claims(board, features), _pairs(board, features), _ties(board)]
    findings += form_findings(board.logits)
    served_row = dict(BASE) | {"path": SERVED}
    findings += single_findings(
        subject, board.baseline(served_row), board.limit(served_row), len(features["narrow"]) > 1
    )
    return StageResult(tuple(findings), (), _facts(board, features))


def _subject(context: Context, model: LoadedModel, dtype: str) -> Subject:
    source, answer = context.subject.source, ANSWER_TOKENS[context.profile]
    assert source is not None
    room = model.spec.max_positions - answer
    lengths = tuple(min(length, room) for length in LENGTHS)
    element: Dtype = "bf16" if dtype.endswith("bfloat16") else "f32"
    return Subject(source, context.subject.recipe, model.spec, element, lengths, answer, context.seed)


def _features(context: Context, model: LoadedModel) -> dict[str, tuple[Any, ...]]:
    """Settings by feature, the baseline's first. Quantised rows only where the model keeps rows that can be."""
    exact = REFERENCE if total_params(model.spec) <= EXACT_PARAMS else FLOAT32
    packed = any(need.packed is not None for need in with_records(model.spec, NARROW).cache())
    return {
        "path": (SERVED, exact),
        "prefix": (False, True),
        "chunk": CHUNKS[context.profile],
        "together": (False, True),
        "tight": (False, True),
        "narrow": (False, True) if packed else (False,),
        "sampled": (False, True),
        "page": (64, 16),
    }


def _possible(row: Row) -> bool:
    """One request alone is never preempted, and pages of 64 are outgrown too seldom. Draws are compared on the exact
    path: in bfloat16 a draw may fall to either side of a boundary."""
    preempted = row["together"] and row["page"] == TIGHT_PAGE
    return (preempted or not row["tight"]) and (row["path"] != SERVED or not row["sampled"])


def _text(row: Row) -> str:
    changed = [f"{k} {'' if v is True else v}".strip() for k, v in row.items() if k not in BASE or v != BASE[k]]
    return ", ".join(changed) or "nothing changed"


def _blame(board: _Board, row: Row, tally: Tally) -> None:
    """Which of the row's settings are at fault: one without which the row holds, else those that fail alone; none:
    the row as a whole."""
    said = f"{_text(row)}: {(tally.wrong or ['parted at too many places'])[0]}"

    def holds(tried: Row) -> bool:
        return board.judge(tried).passed(board.limit(tried))

    guilty = [f for f in ("narrow", "sampled") if row[f] and holds(dict(row) | {f: False})]
    if not guilty:
        kept = {"path": row["path"], "narrow": row["narrow"], "sampled": row["sampled"]}
        for feature in ("prefix", "chunk", "page", "together", "tight"):
            if row[feature] == BASE[feature] or (feature == "tight" and guilty):
                continue
            alone = dict(BASE) | kept | {feature: row[feature]}
            if feature == "tight":
                alone |= {"together": True, "page": TIGHT_PAGE}
            if not holds(alone):
                guilty.append(feature)
    for feature in guilty:
        board.blamed.setdefault((feature, row[feature]), []).append(said)
    if not guilty:
        board.together.append((row, said))


def _claims(board: _Board, features: Mapping[str, tuple[Any, ...]]) -> Iterator[Finding]:
    for feature, claim in CLAIMS.items():
        settings = [value for value in features[feature] if value != BASE[feature]]
        if not settings and feature == "narrow":
            why = "this model keeps no rows that a plan could quantise"
            yield Finding(f"equal.{feature}", "cache", "not applicable", claim.claim, why)
        for value in settings:
            yield _of_setting(board, feature, value, claim)


def _of_setting(board: _Board, feature: str, value: Any, claim: Claim) -> Finding:
    """Rows with this setting; one that fails counts here only if this setting is at fault."""
    own = [(row, tally) for row, tally in board.tallies if row[feature] == value]
    blamed = board.blamed.get((feature, value), [])
    places, parted = sum(t.places for _, t in own), sum(len(t.parted) for _, t in own)
    apart = max((t.largest for _, t in own), default=0.0)
    word = f".{value}" if not isinstance(value, bool) else ""
    untried = "" if places else next(iter(board.untried.values()), "no row has it")
    paths = {row["path"]: board.limit(row) for row, _ in own}
    return Finding(
        f"equal.{feature}{word}",
        claim.layer,  # type: ignore[arg-type]
        "fail" if blamed else "note" if untried else "pass",
        claim.claim + (f": {value}" if word else ""),
        blamed[0]
        if blamed
        else untried or f"{places} tokens in {len(own)} rows; {parted} parted at near ties, {apart:.1e} nat apart",
        "; ".join(f"{path}: {limit.nats:.1e} nat ({limit.why})" for path, limit in paths.items()),
        tuple(blamed),
        claim.remedy if blamed else "Try other lengths, or put it to a server under load." if untried else "",
    )


def _pairs(board: _Board, features: Mapping[str, tuple[Any, ...]]) -> Finding:
    wanted = all_pairs(features, _possible)
    seen = {pair for row, tally in board.tallies for pair in pairs_of(row) if tally.places}
    bad = tuple(said for _, said in board.together)
    missing = len(wanted - seen)
    return Finding(
        "equal.pairs",
        "cache" if bad and all(_of_cache(row) for row, _ in board.together) else "scheduler",
        "fail" if bad else "note" if missing else "pass",
        "every pair of settings gives the same answers as none of them",
        f"{len(wanted) - missing} of {len(wanted)} pairs in {len(board.tallies)} rows, {len(bad)} fail only together",
        "all pairs, none failing",
        bad,
        "Run the row alone; two settings that hold each by itself meet in the cache manager or the scheduler."
        if bad or missing
        else "",
    )


def _of_cache(row: Row) -> bool:
    """Whether all settings that meet in a row are the cache's."""
    return all(
        claim.layer == "cache" for name, claim in CLAIMS.items() if name != "sampled" and row[name] != BASE[name]
    )


def _ties(board: _Board) -> Finding:
    """Answers that part at near ties are no faults; too many are. Where draws part, the claim on seeds says so."""
    bad = []
    places = parted = 0
    for row, tally in board.tallies:
        places += tally.places
        parted += len(tally.parted)
        if not row["sampled"] and not tally.wrong and not tally.passed(board.limit(row)):
            bad.append(f"{_text(row)}: {len(tally.parted)} of {tally.places}")
    where = tuple(f"{_text(row)}: {name}, margin {m:.1e} nat" for row, t in board.tallies for name, m in t.parted)
    return Finding(
        "equal.near_ties",
        "operator",
        "fail" if bad else "pass",
        "answers part only at near ties, and seldom",
        f"{parted} of {places} tokens",
        "shares of a row's tokens: reference 0, float32 2 %, bfloat16 10 %, at least one place",
        tuple(bad) or where[:6],
        "Look at variants whose result depends on other rows of the step." if bad else "",
    )


def _facts(board: _Board, features: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    subject = board.subject
    return {
        "prompt_tokens": list(subject.lengths),
        "answer_tokens": subject.answer_tokens,
        "served_dtype": subject.served_dtype,
        "features": {name: [str(v) for v in values] for name, values in features.items()},
        "rows": [{"row": _text(row), "tokens": t.places, "parted": len(t.parted)} for row, t in board.tallies],
        "engines": board.engines,
    }


STAGE = Stage("equalities", "Equalities that need no judge", frozenset({"source"}), run)
