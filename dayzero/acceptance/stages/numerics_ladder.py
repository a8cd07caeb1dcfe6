"""Findings and pictures of one alignment: by kind of module, choices, KL against its floor, flips, perplexity, records.

The alignment itself, its bounds and what it names are those of ``dayzero align``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dayzero.acceptance.accept.stage import Figure
from dayzero.acceptance.align import AlignReport
from dayzero.acceptance.findings import CHOICE_REMEDY, LOGITS_REMEDY
from dayzero.acceptance.ladder import hint
from dayzero.acceptance.stages.numerics_floor import Floor
from dayzero.acceptance.walk import ChoiceResult, SiteResult
from dayzero.arch.spec import ModelSpec, channel_word, mixer_word
from dayzero.finding import Finding

FLOOR_FACTOR = 4.0  # an error twice as large as the floor's gives four times its KL
NO_CHOICE = {
    "experts": "no layer routes to experts",
    "index": "no layer has a sparse index",
}
BINS = 24


def ladder_findings(prefix: str, spec: ModelSpec, report: AlignReport) -> Iterator[Finding]:
    """One finding for each kind of module, then the first that diverges."""
    kinds: dict[str, list[SiteResult]] = {}
    for site in report.sites:
        kinds.setdefault(_kind(spec, site.site), []).append(site)
    for kind, sites in kinds.items():
        yield _of_kind(prefix, spec, kind, sites)
    first = report.first_diverging
    at = next((f for f in report.findings if f.kind == "align.module"), None)
    assert at is not None
    yield Finding(
        f"{prefix}.first_diverging",
        "operator",
        at.verdict,
        "no module diverges from the oracle when it reads the oracle's stream",
        f"first: {first}" if first else f"none of {len(report.sites)}",
        "none: what follows a module that diverges is judged on the oracle's stream again",
        at.evidence if first else (),
        at.remedy,
    )


def _of_kind(prefix: str, spec: ModelSpec, kind: str, sites: Sequence[SiteResult]) -> Finding:
    def share(site: SiteResult) -> float:
        ratio = site.distance.rel_l2 / site.bound.value
        return math.inf if math.isnan(ratio) else ratio

    bad = [site for site in sites if not site.passed]
    worst = max(bad or sites, key=share)
    number = "output" if len(sites) == 1 else "outputs"
    return Finding(
        f"{prefix}.ladder.{_word(kind)}",
        "operator",
        "fail" if bad else "pass",
        f"{len(sites)} {number} of {kind} agree with the oracle, teacher-forced",
        f"relative L2 {worst.distance.rel_l2:.2e}, worst token {worst.distance.worst_token:.2e}, at {worst.site}",
        f"{worst.bound.value:.2e}: {worst.bound.why}",
        tuple(site.site for site in bad),
        hint(spec, bad[0]) if bad else "",
    )


def _kind(spec: ModelSpec, site: str) -> str:
    parts = site.split(".")
    if parts[0] != "layers":
        return {"embed": "the embedding", "final_norm": "the final norm", "vision": "the vision tower"}.get(
            parts[0], "the head"
        )
    if len(parts) == 2:
        return "the stream behind a layer"
    if parts[2] == "carry":
        return f"the carry's {parts[3]}"
    layer = spec.layers[int(parts[1])]
    return mixer_word(layer.mixer) if parts[2] == "mixer" else channel_word(layer.channel)


def _word(kind: str) -> str:
    """A kind of module as part of a finding's kind: ``latent + index top 8`` -> ``latent_index_top_8``."""
    kept = "".join(c if c.isalnum() else " " for c in kind.removeprefix("the ").replace("'s", ""))
    return "_".join(kept.split())


def choice_findings(prefix: str, report: AlignReport) -> Iterator[Finding]:
    """Agreement of expert sets and of index sets; not applicable to a model without."""
    by_word: dict[str, list[ChoiceResult]] = {word: [] for word in NO_CHOICE}
    for choice in report.choices:
        by_word[choice.site.rpartition(".")[2]].append(choice)
    for word, results in by_word.items():
        claim = f"every token chooses the oracle's {word} set, ties apart"
        if not results:
            yield Finding(f"{prefix}.sets.{word}", "operator", "not applicable", claim, NO_CHOICE[word])
            continue
        found = next(f for f in report.findings if f.kind == f"align.{word}")
        total = sum(c.choice.num_tokens for c in results)
        same = total - sum(len(c.choice.differing) for c in results)
        yield replace(
            found,
            kind=f"{prefix}.sets.{word}",
            claim=claim,
            measured=f"{same / total:.2%} of {total} sets in {len(results)} layers agree; {found.measured}",
            remedy=CHOICE_REMEDY[word] if found.verdict == "fail" else "",
        )


def logit_findings(prefix: str, report: AlignReport, floor: Floor) -> Iterator[Finding]:
    """Free-running: error over spread, KL mean, p99 and max against the measured floor, flips, perplexity."""
    logits, exact = report.logits, report.logits.exact_tokens
    good = logits.error_over_spread <= logits.bound
    yield Finding(
        f"{prefix}.logits", "operator", "pass" if good else "fail",
        "free-running logits agree with the oracle's",
        f"largest error over spread {logits.error_over_spread:.2e} over {exact} of {report.num_tokens} tokens",
        f"{logits.bound:.2e}: {logits.why}", (), "" if good else LOGITS_REMEDY,
    )  # fmt: skip
    yield from _kl_findings(prefix, report, floor)
    bins = ", ".join(f"margin {name} nat: {n - same} of {n} differ" for name, (n, same) in logits.top1.items() if n)
    flips = logits.flips_beyond_noise
    yield Finding(
        f"{prefix}.top1", "operator", "fail" if flips else "pass",
        "the likeliest token is the oracle's, but where two are closer than rounding",
        bins, f"none whose margin is above twice {logits.bound:.1e} of the logits' spread, up to token {exact}",
        tuple(f"token {t}" for t in flips), LOGITS_REMEDY if flips else "",
    )  # fmt: skip
    yield _perplexity(prefix, report, floor)


def _kl_findings(prefix: str, report: AlignReport, floor: Floor) -> Iterator[Finding]:
    exact = report.logits.exact_tokens
    kl_T, floor_T = torch.tensor(report.logits.kl_T[:exact], dtype=torch.float64), floor.kl_T
    claim = "KL to the oracle's distribution is float32's noise"
    if not exact:
        why = "a discrete choice turned over by rounding at the first token"
        yield Finding(f"{prefix}.kl", "operator", "not applicable", claim, why)
        return
    pairs = (
        ("mean", float(kl_T.mean()), float(floor_T.mean())),
        ("p99", float(kl_T.quantile(0.99)), float(floor_T.quantile(0.99))),
        ("max", float(kl_T.max()), float(floor_T.max())),
    )
    for name, value, by_floor in pairs:
        good = value <= FLOOR_FACTOR * by_floor
        yield Finding(
            f"{prefix}.kl.{name}", "operator", "pass" if good else "fail", f"{claim}: {name}",
            f"{value:.2e} nat over {exact} tokens",
            f"{FLOOR_FACTOR * by_floor:.2e}: {FLOOR_FACTOR:g} x {by_floor:.2e}, measured with every operator's result "
            "moved by eight units of float32",
            (), "" if good else LOGITS_REMEDY,
        )  # fmt: skip


def _perplexity(prefix: str, report: AlignReport, floor: Floor) -> Finding:
    logits = report.logits
    moved = math.log(logits.perplexity_ours / logits.perplexity_oracle)
    size = float((floor.noisy_TV - floor.clean_TV).double().square().mean().sqrt())
    whole = logits.exact_tokens == report.num_tokens
    bound = FLOOR_FACTOR * size
    good = abs(moved) <= bound or not whole
    return Finding(
        f"{prefix}.perplexity",
        "operator",
        "pass" if good else "fail",
        f"perplexity of {report.text} is the oracle's",
        f"{logits.perplexity_ours:.5f} against {logits.perplexity_oracle:.5f}, {moved:+.1e} in its logarithm",
        f"{bound:.1e}: {FLOOR_FACTOR:g} x what float32's noise moves a logit by"
        if whole
        else f"none: a choice turned over by rounding at token {logits.exact_tokens}",
        (),
        "" if good else LOGITS_REMEDY,
    )


def carried_over(prefix: str, report: AlignReport) -> Iterator[Finding]:
    """What an alignment finds besides, under names of this stage."""
    kinds = {"align.floor": "chunks", "align.tensors": "tensors", "align.vision": "vision", "align.sites": "sites"}
    for found in report.findings:
        if found.kind in kinds:
            yield replace(found, kind=f"{prefix}.{kinds[found.kind]}")


def record_findings(prefix: str, report: AlignReport) -> Iterator[Finding]:
    """Of an alignment with quantised records: what rows lose, and every site behind them."""
    for found in report.findings:
        if found.kind == "align.records":
            record = found.claim.removeprefix("rows kept in ").partition(" ")[0]
            yield replace(found, kind=f"{prefix}.record.{record}")
        elif found.kind in (
            "align.module",
            "align.logits",
            "align.floor",
            "align.index",
            "align.experts",
            "align.rounding",
        ):
            yield replace(found, kind=f"{prefix}.quantised.{found.kind.removeprefix('align.')}", layer="cache")


# --- pictures ---------------------------------------------------------------------------------------------------------


def ladder_figure(title: str, report: AlignReport) -> Figure:
    rows = [
        {
            "name": site.site,
            "value": site.distance.rel_l2,
            "bound": site.bound.value,
            "verdict": "pass" if site.passed else "fail",
        }
        for site in report.sites
    ]
    return Figure("ladder", title, {"rows": rows}, "relative L2 error, teacher-forced", "module output", log_x=True)


def kl_figure(title: str, kl: Sequence[float], marks: Mapping[str, float]) -> Figure:
    """A histogram over logarithmic bins. Zeros stand in the first one."""
    least = 1e-18
    values = [max(v, least) for v in kl if math.isfinite(v)]
    shown: dict[str, Any] = {name: x for name, x in marks.items() if math.isfinite(x) and x > 0}
    low, high = min([*values, *shown.values()], default=least), max([*values, *shown.values()], default=1.0)
    first, last = math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)
    edges = torch.logspace(first, last, BINS + 1, dtype=torch.float64)
    counts = torch.histc(torch.tensor(values, dtype=torch.float64).log10(), BINS, first, last)
    data = {"edges": edges.tolist(), "counts": [int(c) for c in counts], "marks": shown}
    return Figure("histogram", title, data, "KL, nat", "tokens", log_x=True)
