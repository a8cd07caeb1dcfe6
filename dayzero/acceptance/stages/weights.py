"""Stage 1, weights: the files, the ledgers of config and tensors, formats, tokenizer and chat files, and the values.

What ``dayzero inspect`` finds is taken as it is; what it has nothing to say about becomes a pass with what was counted,
so that a record shows what was checked. On top come hashes (``weight_hashes``) and statistics (``weight_values``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.stages.weight_hashes import hash_files
from dayzero.acceptance.stages.weight_values import read_values
from dayzero.checkpoint.seeded_source import SEEDED
from dayzero.finding import Finding, worst
from dayzero.ops.bind import load_entry_points
from dayzero.planner.inspect import InspectReport, inspect_source
from dayzero.units import bytes_text, counted

NO_WEIGHTS = "the source holds no weights"
NO_SPEC = "no recipe could read the config, so nothing says what should be there"
NO_TOKENIZER = "the source is a config alone, without a tokenizer"
NO_CLAIM = "the config claims no quantisation"
FAULTS = ("config.value", "config.contradiction", "family.unknown", "recipe.rules")


@dataclass(frozen=True)
class Check:
    """One claim. kinds: findings of ``inspect`` that speak against it, exact or ``name.*``; the first is the kind of a
    pass. measured: what was counted. why_not: why it cannot be checked here, else empty."""

    kinds: tuple[str, ...]
    layer: str
    claim: str
    measured: Callable[[InspectReport], Any]
    why_not: Callable[[InspectReport], str] = lambda report: ""
    bound: Any = None

    def speaks(self, finding: Finding) -> bool:
        return any(
            finding.kind == kind or (kind.endswith(".*") and finding.kind.startswith(kind[:-1])) for kind in self.kinds
        )


def run(context: Context) -> StageResult:
    """Errors: those of ``inspect_source``."""
    assert context.subject.source is not None
    where, recipe = context.subject.source, context.subject.recipe
    report = inspect_source(where, recipe=recipe, progress=context.progress, catalog=load_entry_points()[0])
    if where.startswith(SEEDED):  # its values are made when it is served: that the files have none is no finding
        report.findings = [f for f in report.findings if f.kind != "weights.absent"]
    findings = list(check_report(report))
    hashes = hash_files(where, report.files, context)
    values = read_values(where, report, context)
    facts = {
        "family": report.family,
        "recipe": report.recipe,
        "parameters": report.parameters,
        "formats": report.quantization["formats"],
        "tensor_bytes": report.total_bytes,
        "context_tokens": report.context_tokens,
        "stop_ids": report.stop_ids,
        "sampling": report.sampling,
        "cache": report.cache,
        **hashes.facts,
        **values.facts,
    }
    return StageResult((*findings, *hashes.findings, *values.findings), values.figures, facts)


def check_report(report: InspectReport) -> Iterator[Finding]:
    """Every finding of the report, by the check it speaks against; a pass, or why not, for the other checks."""
    told: set[int] = set()
    for check in CHECKS:
        against = [f for f in report.findings if check.speaks(f)]
        told |= {id(f) for f in against}
        yield from against
        if not against:
            why = check.why_not(report)
            bound = None if why else check.bound
            yield Finding(
                check.kinds[0], check.layer, "not applicable" if why else "pass", check.claim,
                measured=why or check.measured(report), bound=bound,
            )  # fmt: skip
    yield from (f for f in report.findings if id(f) not in told)


def _files(report: InspectReport) -> str:
    return f"{counted(len(report.files), 'shard')}, {bytes_text(report.total_bytes)} of tensors"


def _keys(report: InspectReport) -> str:
    config = report.config
    return f"{len(config['read'])} read, {len(config['ignored'])} ignored with a reason, {len(config['unread'])} unread"


def _tensors(report: InspectReport) -> str:
    held = report.tensors
    ignored = sum(entry["count"] for entry in held["ignored"])
    return f"{held['used'] + held['extra']:,} used, {ignored:,} ignored with a reason"


def _formats(report: InspectReport) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in report.quantization["formats"].items())


def _operators(report: InspectReport) -> str:
    return f"{counted(len(report.operators['reuse']), 'operator')} with their traits"


def _chat(report: InspectReport) -> str:
    chat = report.chat
    return f"{chat['kind']}: {', '.join(chat['encoders'] or chat['templates']) or 'of the family'}"


def _tokenizer(report: InspectReport) -> str:
    found = report.tokenizer
    return f"{found['kind']}, {found['size']} ids, {', '.join(found['files'])}"


def _stops(report: InspectReport) -> str:
    return "; ".join(f"{i}: {', '.join(said)}" for i, said in report.stop_id_sources.items())


# --- why a check cannot be made --------------------------------------------------------------------------------------


def _without_weights(report: InspectReport) -> str:
    return "" if report.files else NO_WEIGHTS


def _without_spec(report: InspectReport) -> str:
    return NO_SPEC if _faulty(report) else ""


def _without_both(report: InspectReport) -> str:
    return _without_spec(report) or _without_weights(report)


def _unquantised(report: InspectReport) -> str:
    return _without_spec(report) or (NO_CLAIM if report.quantization["method"] == "none" else "")


def _no_scales(report: InspectReport) -> str:
    from dayzero.decl import FORMATS

    names = report.quantization["formats"]
    return _without_both(report) or ("" if any(FORMATS[n].quantized for n in names if n in FORMATS) else NO_CLAIM)


def _no_ids(report: InspectReport) -> str:
    if report.tokenizer["size"] is None:
        return "no file tells which ids the tokenizer has"
    return _without_spec(report)


def _no_stops(report: InspectReport) -> str:
    return "" if report.stop_ids else "no stop id is named"


def _faulty(report: InspectReport) -> bool:
    return report.family is None or worst(f for f in report.findings if f.kind in FAULTS) == "fail"


CHECKS: Sequence[Check] = (
    Check(
        ("integrity.files", "integrity.*", "weights.absent"), "weights",
        "every shard is there in full, its header is sound, and index and headers agree", _files,
        _without_weights,
    ),
    Check(("family.unknown", "family.*"), "config", "a recipe covers the model", lambda r: r.family),
    Check(
        ("recipe.rules", "recipe.*"), "weights",
        "the recipe fills each parameter by one rule and reads each tensor by one", lambda r: r.recipe, _without_spec,
    ),
    Check(("config.repeated",), "config", "no key of config.json stands twice", _keys),
    Check(
        ("config.value", "config.contradiction", "config.stand_in"), "config",
        "every value that the recipe needs is there and sound, and no two spellings disagree", _keys,
        lambda r: NO_SPEC if r.family is None else "",
    ),
    Check(("config.unread",), "config", "every key of config.json is read, or ignored with a reason", _keys,
          _without_spec, 0),
    Check(("config.defaulted",), "config", "no default stands in for a key of config.json", _keys, _without_spec),
    Check(("config.layer_count",), "config", "config and files hold the same layers", lambda r: len(r.layers),
          _without_both),
    Check(("tensors.missing",), "weights", "every tensor that the model needs is in the files", _tensors,
          _without_both, 0),
    Check(("tensors.unknown",), "weights", "every tensor in the files is used, or ignored with a reason", _tensors,
          _without_both, 0),
    Check(("tensors.misfit",), "weights", "every tensor has the shape and dtype that the config implies", _tensors,
          _without_both, 0),
    Check(("tensors.narrowed",), "weights", "no tensor is rounded below the precision it is published in", _tensors,
          _without_both, 0),
    Check(("tensors.renamed", "tensors.root"), "weights", "the tensors have the names that the recipe says", _tensors,
          _without_both, 0),
    Check(("tie.head", "tie.*"), "config", "the head is tied to the embedding, or apart from it, as the config says",
          lambda r: r.config["effective"].get("tie"), _without_both),
    Check(("quantization.contradiction", "quantization.acknowledged"), "weights",
          "every module is stored as the config claims", _formats, _without_both, 0),
    Check(("quantization.scale",), "weights", "the scales that were read are finite and not all zero", _formats,
          _no_scales, 0),
    Check(("quantization.shape",), "config", "every shape can be held by the format claimed for it", _formats,
          _unquantised, 0),
    Check(("quantization.unread", "quantization.no_hit"), "config",
          "every key of the quantisation config is read, and its entries name modules of this model",
          lambda r: f"{len(r.quantization['entries'])} entries", _unquantised, 0),
    Check(("operators.build", "operators.extend"), "operator", "every operator that the model needs is there",
          _operators, _without_spec),
    Check(("tokenizer.file", "tokenizer.absent"), "tokenizer+template", "the tokenizer's files are there and sound",
          _tokenizer, lambda r: "" if r.tokenizer["kind"] else NO_TOKENIZER),
    Check(("tokenizer.out_of_range",), "tokenizer+template", "the embedding has a row for every id of the tokenizer",
          lambda r: f"{r.tokenizer['size']} ids", _no_ids),
    Check(("chat.template", "chat.*"), "tokenizer+template",
          "there is one chat template, or an encoder, and it can be read", _chat,
          lambda r: "the source is a config alone" if r.chat["kind"] == "none" else ""),
    Check(("stop_ids.absent",), "tokenizer+template", "a file names the tokens that end an answer", _stops, _no_stops),
    Check(("stop_ids.differ",), "tokenizer+template", "all places that name stop ids name the same", _stops, _no_stops),
    Check(("stop_ids.no_id", "stop_ids.out_of_range"), "config", "every stop id is an id that the model can give",
          lambda r: r.stop_ids, lambda r: _no_stops(r) or _without_spec(r)),
)  # fmt: skip

STAGE = Stage("weights", "Weights", frozenset({"source"}), run)
