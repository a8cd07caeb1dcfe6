"""``dayzero align``: our forward against an independent oracle, layer by layer, on any machine.

Both sides read the same decoded weights in float32 and stream: a layer is filled, run and dropped; an expert is read
when a token chose it. What is compared, the bounds and their reasons, and what was aligned (a twin or real weights) are
part of the result.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dayzero.acceptance import ladder as text
from dayzero.acceptance.compare import Bound, Logits, compare_logits, free_bound
from dayzero.acceptance.findings import all_findings, first_diverging
from dayzero.acceptance.oracle import choose, run_oracle
from dayzero.acceptance.pictures import add_pictures, has_pictures
from dayzero.acceptance.prompt import Ids, is_paper, is_twin, token_ids
from dayzero.acceptance.rounding import ALLOWANCE, RecordResult
from dayzero.acceptance.taken import Taken
from dayzero.acceptance.trace import Trace, add_meta, fingerprint
from dayzero.acceptance.walk import ChoiceResult, Ladder, SiteResult, Walk
from dayzero.arch.record_choice import PLAIN, with_records
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.stack import vocabulary_matrices
from dayzero.console import Console, ProgressFactory, duration_text, no_progress
from dayzero.errors import UsageError
from dayzero.finding import Finding, Verdict, worst
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.planner.memory import available_bytes, peak_rss_bytes


@dataclass(frozen=True)
class AlignOptions:
    """oracle: None (the recipe's), a name it names, ``remote``, or a .py file. trace: read instead of an oracle run.
    record: where the oracle's trace is kept. tokens: file with a JSON list of ids; prompt: a text; num_tokens: how many
    are read. dtype: of the computation, float32. threads: of each process, default the library's. bindings: variants to
    align, ``contract`` or ``contract@site`` -> variant of ``catalog``; everything else runs as its reference. cache:
    records of tokens' rows (``arch.record_choice``); bounds grow by what their formats predict (``rounding``).
    expert_bytes: memory for experts of one layer, kept between the runs of that layer; default a quarter of what is
    available."""

    oracle: str | None = None
    trace: str | None = None
    record: str | None = None
    allow_remote_code: bool = False
    recipe: str | None = None
    tokens: str | None = None
    prompt: str | None = None
    num_tokens: int | None = None
    dtype: str = "float32"
    threads: int | None = None
    expert_bytes: int | None = None
    cache: str = "bf16"
    bindings: Mapping[str, str] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=lambda: CATALOG, repr=False)


JSON_KEYS = (
    "source", "family", "aligned", "oracle", "fingerprint", "text", "num_tokens", "dtype", "first_diverging", "seconds",
    "peak_rss_bytes", "cache", "bindings",
)  # fmt: skip


@dataclass(frozen=True)
class AlignReport:
    """aligned: ``real weights`` or ``twin only``. first_diverging: site of the first module outside its bound, or a
    layer's ``index`` or ``experts`` whose sets differ without being ties. seconds and peak_rss_bytes: ours, oracle.
    bindings: ``contract@site`` -> variant, for each operator that a block took and that is no reference. cache: as
    asked for. records: rows of quantised ones."""

    source: str
    family: str
    aligned: str
    oracle: dict[str, Any]
    fingerprint: str
    text: str
    num_tokens: int
    sites: tuple[SiteResult, ...]
    choices: tuple[ChoiceResult, ...]
    logits: Logits
    first_diverging: str | None
    seconds: dict[str, float]
    peak_rss_bytes: dict[str, int | None]
    findings: tuple[Finding, ...]
    ladder: tuple[tuple[str, ...], ...] = field(repr=False, default=())
    dtype: str = "float32"
    bindings: Mapping[str, str] = field(default_factory=dict)
    cache: str = "bf16"
    records: tuple[RecordResult, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            **{key: getattr(self, key) for key in JSON_KEYS},
            "findings": [f.to_json() for f in self.findings],
            "sites": [_site_json(s) for s in self.sites],
            "choices": [_choice_json(c) for c in self.choices],
            "records": [asdict(r) | {"verdict": "pass" if r.passed else "fail"} for r in self.records],
            "logits": self.logits.to_json(),
        }


def _site_json(result: SiteResult) -> dict[str, Any]:
    return {
        "site": result.site,
        "verdict": "pass" if result.passed else "fail",
        **asdict(result.distance),
        "bound": result.bound.value,
        "why": result.bound.why,
        "floor": result.floor,
    }


def _choice_json(result: ChoiceResult) -> dict[str, Any]:
    return {
        "site": result.site,
        "verdict": "pass" if result.passed else "fail",
        "agreement": result.choice.agreement,
        "differing": list(result.choice.differing),
        "missed": result.choice.missed,
        "ties": list(result.ties),
        "allowed": result.allowed,
    }


def align_source(
    source: str, options: AlignOptions = AlignOptions(), progress: ProgressFactory = no_progress
) -> AlignReport:
    """Align the checkpoint at ``source`` (folder, ``s3://…``, hub id) and return what was found.

    Writes nothing but ``options.record``. Errors: UsageError for options that contradict each other or a trace that
    does not belong to this checkpoint; ModelError when the family has no accepted oracle or the oracle stops;
    CheckpointError for the checkpoint itself; MachineError when a package is missing.
    """
    _check(options)
    model = open_model(source, recipe=options.recipe, dtype=torch.float32)
    model = replace(model, spec=with_records(model.spec, options.cache))
    if is_paper(model):
        raise UsageError(f"{source} is a paper twin: it has no values to compare; make a twin without --paper.")
    taken = Taken(options.bindings, options.catalog, model.spec)
    mark = fingerprint(model.source, model.index, model.config)
    with tempfile.TemporaryDirectory(prefix="dayzero-align-") as folder:
        began = time.monotonic()
        trace, ids = _oracle_side(model, options, mark, Path(folder), progress)
        oracle_seconds = time.monotonic() - began
        with _threads(options.threads):
            kept = available_bytes() // 4 if options.expert_bytes is None else options.expert_bytes
            found, seconds = _our_side(model, trace, taken, kept, progress)
        report = _report(model, options, trace, ids, found, {"ours": seconds, "oracle": oracle_seconds})
        return replace(report, bindings=taken.variants(), cache=options.cache)


def _check(options: AlignOptions) -> None:
    if options.dtype != "float32":
        raise UsageError(f"align computes in float32, not {options.dtype}: only then rounding can be told from faults.")
    if options.trace is not None and (options.oracle is not None or options.record is not None):
        raise UsageError("--trace takes the oracle's side from a file, --oracle and --record make one: give either.")
    if options.num_tokens is not None and options.num_tokens < 2:
        raise UsageError(f"{options.num_tokens} tokens cannot be aligned; give at least 2.")
    if options.record is not None and not Path(options.record).resolve().parent.is_dir():
        raise UsageError(f"--record {options.record}: its folder does not exist; make it first.")
    if options.record is not None and Path(options.record).is_dir():
        raise UsageError(f"--record {options.record} is a folder; give the name of a file.")


def _oracle_side(
    model: LoadedModel, options: AlignOptions, mark: str, folder: Path, progress: ProgressFactory
) -> tuple[Trace, Ids]:
    asked = options.tokens is not None or options.prompt is not None or options.num_tokens is not None
    if options.trace is not None:
        trace = Trace(Path(options.trace))
        ids = _read_ids(model, options, has_pictures(trace))[0] if asked else None
        trace.check(mark, ids.tokens if ids else None)
        return trace, ids or Ids(trace.tokens, f"ids of {options.trace}")
    chosen = choose(model.recipe, options.oracle, options.allow_remote_code, model.config, model.source.files())
    ids, images = _read_ids(model, options, chosen.takes_images)
    made = Path(options.record) if options.record is not None else folder / "trace.safetensors"
    work = made.with_name(made.name + ".partial-run")
    try:
        run_oracle(model, chosen, ids.tokens, work, options.threads, progress, images)
        facts = {"fingerprint": mark, "source": model.source.name, "aligned": aligned_word(model)}
        add_meta(work, {"model": facts})
        os.replace(work, made)
    finally:
        work.unlink(missing_ok=True)
    return Trace(made), ids


def _read_ids(model: LoadedModel, options: AlignOptions, pictured: bool) -> tuple[Ids, tuple[Tensor, ...]]:
    """The ids to read and the images among them. Into a given text or given ids no image is put."""
    ids = token_ids(model, options.tokens, options.prompt, options.num_tokens)
    if not pictured or model.spec.vision is None or options.tokens is not None or options.prompt is not None:
        return ids, ()
    return add_pictures(ids, model.spec.vision, model.spec.vocab)


def aligned_word(model: LoadedModel) -> str:
    return "twin only" if is_twin(model) else "real weights"


class _threads:
    """Torch's thread count for the time of a block; None leaves it."""

    def __init__(self, count: int | None) -> None:
        self._count, self._before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._count is not None:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def _our_side(
    model: LoadedModel, trace: Trace, taken: Taken, expert_bytes: int, progress: ProgressFactory
) -> tuple[Ladder, float]:
    began = time.monotonic()
    lazy = stacked_experts(model.spec, taken.bound) | vocabulary_matrices(model.spec, taken.bound)
    load = partial(model.loader.load, lazy=lazy, keep_bytes=expert_bytes)
    walk = Walk(model.spec, load, trace, trace.tokens, taken)
    with progress("ours, layer by layer", len(model.spec.layers) + 2, "pieces") as bar:
        for piece in walk.steps():
            bar.advance()
            bar.note(piece)
    return walk.ladder, time.monotonic() - began


def _report(
    model: LoadedModel, options: AlignOptions, trace: Trace, ids: Ids, found: Ladder, seconds: dict[str, float]
) -> AlignReport:
    assert found.logits_TV is not None
    bound = free_bound(model.spec, len(trace.tokens))
    if found.rounding:
        by_rounding = f"{ALLOWANCE:g} x {found.rounding:.1e}, which rows moved by their records' rounding make"
        bound = Bound(bound.value + ALLOWANCE * found.rounding, f"{by_rounding}; {bound.why}")
    logits = compare_logits(found.logits_TV, trace.get("logits"), trace.tokens, bound, found.exact_tokens)
    findings = all_findings(model, aligned_word(model), trace, found, logits)
    return AlignReport(
        source=model.source.name,
        family=model.spec.family,
        aligned=aligned_word(model),
        oracle=dict(trace.meta.get("oracle") or {}) | {"trace": options.trace},
        fingerprint=trace.meta["model"]["fingerprint"],
        text=ids.source,
        num_tokens=len(trace.tokens),
        sites=tuple(found.sites),
        choices=tuple(found.choices),
        records=tuple(found.records),
        logits=logits,
        first_diverging=first_diverging(found),
        seconds=seconds,
        peak_rss_bytes={"ours": peak_rss_bytes(), "oracle": trace.meta.get("peak_rss_bytes")},
        findings=tuple(findings),
        ladder=tuple(text.rows(model.spec, found.sites, found.choices)),
    )


def _show_ladder(report: AlignReport, console: Console) -> None:
    num_rows = len(report.ladder)
    title = f"error ladder, teacher-forced: {num_rows} module outputs"
    rows = report.ladder
    if num_rows > text.MOST_ROWS and not console.show_all:
        rows = tuple(rows[at] for at in text.telling(report.sites, report.choices, text.MOST_ROWS // 2))
        title += f", the {len(rows)} nearest to their bounds or beyond"
    console.table(title, *text.without_empty(rows))
    if len(rows) < num_rows:
        console.line(f"+{num_rows - len(rows)} more rows, --all shows them")
    for line in text.LEGEND:
        console.line(f"  {line}")


def show_align(report: AlignReport, console: Console) -> None:
    """Print the ladder, the logits and the findings."""
    what = f"{report.source}, {report.aligned}, against {text.oracle_text(report.oracle)}"
    console.headline(report.verdict, what, report.findings)
    console.line(f"first diverging module: {report.first_diverging or 'none'}")
    took = ", ".join(f"{side} {duration_text(seconds)}" for side, seconds in report.seconds.items())
    console.line(f"family {report.family}; {report.num_tokens} tokens of {report.text}; {report.dtype} on both sides")
    console.line(f"time, minutes:seconds: {took}")
    if report.cache != PLAIN:
        console.line(f"cache rows kept in {report.cache}: bounds include what its rounding is predicted to cost")
    if report.bindings:
        console.table("bindings, all others are references", ("operator@site", "variant"), report.bindings.items())
    _show_ladder(report, console)
    console.table("logits, free-running", ("", ""), text.logit_rows(report.logits))
    console.findings(report.findings, report.verdict)
