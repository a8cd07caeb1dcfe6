"""What an alignment claims, each claim with what was measured, its bound and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dayzero.acceptance import ladder as text
from dayzero.acceptance.compare import Logits
from dayzero.acceptance.pictures import has_pictures
from dayzero.acceptance.rounding import LEAST_ROWS, RECORD_FACTOR, by_record
from dayzero.acceptance.trace import Trace
from dayzero.acceptance.walk import Ladder, SiteResult
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.open import LoadedModel
from dayzero.finding import Finding

CHOICE_REMEDY = {
    "experts": "Look at the router's score function, its selection bias (kept in float32?), groups, and top_k.",
    "index": "Look at the index's rope style and rotated width, its key norm (has it a bias?), its scale and top_k.",
}
CHUNK_REMEDY = "Look at what crosses a chunk: cached rows, positions, a window's edge, recurrent and convolution state."
KL_FACTOR = 4.0  # of two errors of one size, over dozens of tokens
RECORD_REMEDY = (
    "Too large: look at the scale's rule, its tile, and whether writing and reading agree on it. Too small: the record "
    "is not what the rows are kept in."
)
LOGITS_REMEDY = (
    "Mend the first diverging module; when none diverges, look at what differs between layers: the carry, a shared "
    "index, or the closing norm."
)
LEDGER_REMEDY = "One side fills a parameter from the wrong tensor, or the oracle's class lacks a part of this model."


def all_findings(model: LoadedModel, aligned: str, trace: Trace, found: Ladder, logits: Logits) -> list[Finding]:
    """Every claim in order: scope, modules, choices, chunks, logits, tensors, and what loading showed."""
    return [
        _scope(aligned, trace.meta.get("oracle") or {}),
        _modules(model.spec, found),
        *_choices(found),
        _chunks(found.sites),
        *_records(found),
        *_rounding_kl(found, logits),
        _logits(logits, len(trace.tokens)),
        *_ledger(model, trace, found),
        *model.loader.findings,
    ]


def first_diverging(found: Ladder) -> str | None:
    """The first site, in the order of the forward, that is outside its bound or chose differently without a tie.

    A layer's index decides its mixer and stands before it; its experts stand between mixer and channel.
    """
    rank = {"index": 0, "mixer": 1, "experts": 2, "channel": 3, "": 4, "carry": 5}
    ends = 1 << 30

    def place(site: str) -> tuple[int, int]:
        parts = site.split(".")
        if parts[0] == "vision":
            return (-2, ends if len(parts) == 1 else -1 if parts[1] == "embed" else int(parts[2]))
        if parts[0] != "layers":
            return ({"embed": -1, "final_norm": ends, "head": 2 * ends}[site], 0)
        return (int(parts[1]), rank[parts[2] if len(parts) > 2 else ""])

    bad = [s.site for s in found.sites if not s.passed] + [c.site for c in found.choices if not c.passed]
    return min(bad, key=place, default=None)


def _scope(aligned: str, oracle: Mapping[str, Any]) -> Finding:
    versions = tuple(f"{name} {version}" for name, version in (oracle.get("versions") or {}).items())
    claim = f"aligned on {'a twin only' if aligned == 'twin only' else aligned} with {text.oracle_text(oracle)}"
    return Finding("align.scope", "operator", "pass", claim, measured=aligned, evidence=versions)


def _modules(spec: ModelSpec, found: Ladder) -> Finding:
    bad = [s for s in found.sites if not s.passed]
    first = first_diverging(found)
    if first is None:
        tightest = max(found.sites, key=lambda s: s.distance.rel_l2 / s.bound.value)
        return Finding(
            "align.module",
            "operator",
            "pass",
            f"all {len(found.sites)} module outputs agree with the oracle within float32 rounding"
            + (f" and that of {_records_text(found)}" if found.records else ""),
            measured=f"{tightest.distance.rel_l2:.2e} at {tightest.site}",
            bound=f"{tightest.bound.value:.2e}",
            evidence=(tightest.bound.why,),
        )
    at = next((s for s in found.sites if s.site == first), None)
    claim = f"{first} is the first module that diverges from the oracle"
    sites = tuple(s.site for s in bad)
    if at is None:
        word = first.rpartition(".")[2]
        return Finding(
            "align.module", "operator", "fail", claim, "its sets differ", "0 beside ties", sites, CHOICE_REMEDY[word]
        )
    return Finding(
        "align.module",
        "operator",
        "fail",
        claim,
        measured=f"relative L2 {at.distance.rel_l2:.2e}, worst token {at.distance.worst_token:.2e} "
        f"(token {at.distance.worst_at}), first wrong token {at.distance.first_wrong}",
        bound=f"{at.bound.value:.2e}: {at.bound.why}",
        evidence=sites,
        remedy=text.hint(spec, at),
    )


def _choices(found: Ladder) -> Iterable[Finding]:
    for word, remedy in CHOICE_REMEDY.items():
        results = [c for c in found.choices if c.site.endswith(f".{word}")]
        if not results:
            continue
        bad = [c for c in results if not c.passed]
        tokens = sum(c.choice.num_tokens for c in results)
        differing = sum(len(c.choice.differing) for c in results)
        ties = sum(len(c.ties) for c in results)
        shown = [c for c in (bad or results) if c.choice.differing]
        yield Finding(
            f"align.{word}",
            "operator",
            "fail" if bad else "pass",
            f"tokens choose other {word} sets than the oracle in {len(bad)} of {len(results)} layers"
            if bad
            else f"every token chooses the oracle's {word} set in {len(results)} layers, ties apart",
            f"{differing} of {tokens} sets differ, {ties} of them by ties that rounding turns over",
            f"{sum(c.allowed for c in results)} ids, as many as rounding of {_records_text(found)} turns over"
            if any(c.allowed for c in results)
            else "0 beside ties",
            tuple(f"{c.site}: tokens {', '.join(map(str, c.choice.differing[:6]))}" for c in shown),
            remedy if bad else "",
        )


def _chunks(sites: list[SiteResult]) -> Finding:
    """Our own result must not move with the shape of a step by more than rounding."""
    bad = [s for s in sites if not s.floor <= s.bound.value]
    at = bad[0] if bad else max(sites, key=lambda s: s.floor)
    return Finding(
        "align.floor",
        "operator",  # rows lie in a cache of the walk's own: what cuts a text in chunks here is the modules' alone
        "fail" if bad else "pass",
        f"our own outputs {'differ between' if bad else 'are the same for'} the whole text and chunks of 7 tokens"
        + (", beyond rounding" if bad else ", within rounding"),
        f"{at.floor:.2e} at {at.site}",
        f"{at.bound.value:.2e}",
        tuple(s.site for s in bad),
        CHUNK_REMEDY if bad else "",
    )


def _records_text(found: Ladder) -> str:
    return ", ".join(by_record(found.records))


def _records(found: Ladder) -> Iterable[Finding]:
    """What rows of quantised records lose must be what their format loses, neither more nor less."""
    for record, results in by_record(found.records).items():
        judged = [r for r in results if r.num_values >= LEAST_ROWS]
        if not judged:
            continue
        at = max(judged, key=lambda r: abs(math.log(max(r.ratio, 1e-9))))
        bad = tuple(r.name for r in judged if not r.passed)
        yield Finding(
            "align.records",
            "cache",
            "fail" if bad else "pass",
            f"rows kept in {record} lose {'other than' if bad else 'what'} the format predicts",
            f"root mean square error {at.measured:.2e} of the values at {at.name}, {at.ratio:.2f} of what is predicted",
            f"{at.predicted:.2e}, by a factor of {RECORD_FACTOR:g} both ways: steps of the format at these values over "
            "the root of 12",
            bad,
            RECORD_REMEDY if bad else "",
        )


def _rounding_kl(found: Ladder, logits: Logits) -> Iterable[Finding]:
    """Holds where a choice turned over at once, so that single logits cannot be held to anything."""
    if not found.rounding_kl:
        return
    bound = KL_FACTOR * found.rounding_kl
    good = logits.kl_mean <= bound
    yield Finding(
        "align.rounding",
        "cache",
        "pass" if good else "fail",
        f"logits lose {'what' if good else 'more than'} rounding of {_records_text(found)} predicts",
        f"mean KL {logits.kl_mean:.2e} nat",
        f"{bound:.2e}: {KL_FACTOR:g} x {found.rounding_kl:.2e}, with rows moved by as much as rounding moves them",
        remedy="" if good else RECORD_REMEDY,
    )


def _logits(logits: Logits, num_tokens: int) -> Finding:
    bins = {name: f"{same}/{n}" for name, (n, same) in logits.top1.items()}
    until = f"; held to the bound up to token {logits.exact_tokens}, where a choice of the free run turned over"
    return Finding(
        "align.logits",
        "operator",
        "pass" if logits.passed else "fail",
        f"free-running logits {'agree with' if logits.passed else 'differ from'} the oracle's"
        + (until if logits.exact_tokens < num_tokens else ""),
        f"error/spread {logits.error_over_spread:.2e}, KL mean {logits.kl_mean:.2e} max {logits.kl_max:.2e} nat, "
        f"top-1 by margin {bins}, perplexity {logits.perplexity_ours:.4f} against {logits.perplexity_oracle:.4f}",
        f"{logits.bound:.1e} of the spread: {logits.why}",
        tuple(f"token {t}" for t in logits.flips_beyond_noise),
        "" if logits.passed else LOGITS_REMEDY,
    )


def _ledger(model: LoadedModel, trace: Trace, found: Ladder) -> Iterable[Finding]:
    """Tensors that we use and the oracle never took, parts that ran on neither side, and outputs it does not give."""
    idle = set() if has_pictures(trace) else _vision_tensors(model)
    lost = sorted((set(trace.meta.get("unused") or ()) & model.coverage.used) - idle)
    yield Finding(
        "align.tensors",
        "weights",
        "fail" if lost else "pass",
        "the oracle leaves tensors unused that the port uses"
        if lost
        else "the oracle takes every tensor that the port uses",
        f"{len(lost)} tensors of the port are unused by the oracle",
        0,
        tuple(lost),
        LEDGER_REMEDY if lost else "",
    )
    if idle:
        yield Finding(
            "align.vision",
            "operator",
            "note",
            "the tokens are text alone: the vision tower ran on neither side and is not compared",
            f"{len(idle)} tensors are not judged",
            0,
            remedy="Leave out what says which text to read, and take an oracle that is given images.",
        )
    if found.unseen:
        yield Finding(
            "align.sites",
            "operator",
            "note",
            "the oracle does not give every output that the port has",
            f"{len(found.unseen)} outputs are not compared",
            0,
            tuple(found.unseen),
            "Name the module in the recipe's ORACLE, or emit the site in the plain forward.",
        )


def _vision_tensors(model: LoadedModel) -> set[str]:
    """Physical tensors that fill nothing but the vision tower and its projector."""
    if model.spec.vision is None:
        return set()
    params = {decl.name for decl in model.spec.vision.params()}
    pairs = zip(model.coverage.groups, model.coverage.sources, strict=True)
    of_vision = [sources for group, sources in pairs if all(t.decl.name in params for t in group.targets)]
    return {name for sources in of_vision for source in sources for _, name in source.parts}
