"""``dayzero inspect``: the verdict on a checkpoint from its config, headers and tokenizer files alone.

Steps: open the source, read config.json and every shard's header, find the recipe, let it read the config, join its
rules with the tensors, and hold each claim against what is there. Nothing is loaded and no code of the source runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.coverage import Coverage, cover
from dayzero.checkpoint.index import Index, read_index
from dayzero.checkpoint.likeness import unpacked
from dayzero.checkpoint.quant_claim import fp8_layout, read_claim
from dayzero.checkpoint.quant_config import QuantTable, resolve
from dayzero.checkpoint.rules import Expansion, RuleLike
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.verify import load_manifest, verify_hashes
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import CheckpointError, ConfigError, ModelError, UsageError, UserError
from dayzero.finding import Finding, Verdict, worst
from dayzero.models.nearness import Nearness
from dayzero.models.reading import Reading, read_through
from dayzero.models.recipe import Recipe, read_rules, read_spec
from dayzero.models.registry import Match, find
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.planner import tensors as ledger
from dayzero.planner.config_ledger import config_findings, config_json, fault_findings, unknown_family
from dayzero.planner.nearest_family import Nearest, compare
from dayzero.planner.operators import Operators, from_contracts, from_reading
from dayzero.planner.quantization import ask_all, claim_findings, quantization_json, scale_findings, shape_findings
from dayzero.planner.reading_facts import partial_facts, reading_facts, told_refusals
from dayzero.planner.spec_facts import NO_CACHE, spec_facts
from dayzero.planner.storage import sparse_files, storage_findings
from dayzero.planner.tokenizer_files import TokenizerFiles, no_id_findings, read_tokenizer_files

MAX_TENSORS = 5_000_000  # logical tensors a config may ask for; the largest release has a quarter of a million


@dataclass
class InspectReport:
    """Everything ``--json`` prints, by docs/inspect.md's names. findings, verdict: what the exit code follows."""

    source: str
    family: str | None
    recipe: str | None
    why: str
    reading: str | None = None
    findings: list[Finding] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, int | None] = field(default_factory=lambda: {"total": None, "active": None, "extra": None})
    operators: Operators = field(default_factory=lambda: {"reuse": [], "extend": [], "build": []})
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=lambda: dict(NO_CACHE))
    stop_ids: list[int] = field(default_factory=list)
    stop_id_sources: dict[str, list[str]] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    context_tokens: int | None = None
    modality: str | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0
    bytes_read: int = 0

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        out = {"verdict": self.verdict, "findings": [f.to_json() for f in self.findings]}
        return out | {name: value for name, value in vars(self).items() if name != "findings"}


@dataclass
class _Read:
    """What was read of a source. spec, expansion, coverage: None as long as no recipe could read the config.

    reading: how the reading goes on where the recipe stops or none covers the model; spec stays None then.
    """

    source: Source
    config: dict[str, Any]
    index: Index
    match: Match
    raw: Raw
    quant: QuantTable = field(default_factory=lambda: QuantTable("none"))
    quant_where: str | None = None
    quant_readable: bool = True
    spec: ModelSpec | None = None
    rules: tuple[RuleLike, ...] = ()
    expansion: Expansion | None = None
    coverage: Coverage | None = None
    reading: Reading | None = None
    nearest: Nearest | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def inspect_source(
    source: str,
    *,
    recipe: str | None = None,
    hash_manifest: str | None = None,
    verify_hash: bool = False,
    progress: ProgressFactory | None = None,
    store_options: Mapping[str, Any] | None = None,
    state_folder: Path | None = None,
    catalog: Catalog = CATALOG,
) -> InspectReport:
    """Inspect a folder, a config.json, ``s3://bucket/prefix`` or a hub id; see docs/inspect.md for the report.

    recipe: path of a recipe to use instead of a built-in one. verify_hash: read every byte and compare SHA-256 with
    hash_manifest's values, else the source's own; state_folder remembers finished files (default: the user's cache).
    store_options: arguments of the object store's client. catalog: operators there are.
    Errors: UsageError when ``source`` is no checkpoint, ConfigError when its config.json is no config, CheckpointError
    when it cannot be read. What is wrong with a
    checkpoint that can be read is a finding, never an exception.
    """
    show = progress or no_progress
    expected = load_manifest(Path(hash_manifest)) if hash_manifest is not None else None
    opened = open_source(source, store_options=dict(store_options) if store_options else None)
    read = _read(opened, recipe, show)
    known = read.match.recipe
    tokenizer = read_tokenizer_files(opened, read.config, known.name if known is not None else None)
    read.findings += tokenizer.findings
    _read_model(read)
    read.findings += no_id_findings(_odd_ids(read, tokenizer))
    _cover(read)
    if verify_hash or expected is not None:
        read.findings += _verify(opened, expected, state_folder, show)
    return _report(read, tokenizer, catalog)


def _read(source: Source, recipe: str | None, show: ProgressFactory) -> _Read:
    if not source.exists("config.json") and "config.json" not in source.not_files:
        raise CheckpointError(f"{source.name} has weights but no config.json; download the publisher's beside them.")
    config, repeated = read_object(source, "config.json")
    given = find(config, recipe) if recipe is not None else None
    with show("reading headers", None, "shards") as bar:
        index = read_index(source, bar.reach)
    match = given or find(config, names=index.entries)
    read = _Read(source, config, index, match, Raw(config), findings=storage_findings(source, index))
    if repeated:
        claim = f"config.json states {len(repeated)} key(s) twice; readers disagree about which one counts"
        read.findings.append(
            Finding("config.repeated", "config", "fail", claim, evidence=tuple(repeated), remedy="keep the true one")
        )
    return read


def _read_model(read: _Read) -> None:
    """Spec and rules by the recipe; or, without one, the comparison with the nearest family."""
    recipe = read.match.recipe
    try:
        read.quant_where, read.quant = _quantization(read)
    except ConfigError as error:
        read.quant_readable = False
        read.findings += fault_findings([str(error)])
    if recipe is None:
        assert read.match.nearest is not None
        _read_nearest(read, read.match.nearest)
        return
    try:
        read.spec = read_spec(recipe, read.raw)
    except UserError as error:
        _read_on(read, recipe, str(error))
        return
    try:
        read.rules, expansion = read_rules(recipe, read.spec)
        read.expansion = _bounded(expansion)
        read.facts = spec_facts(read.spec, read.config)
    except UserError as error:
        read.expansion, read.facts = None, partial_facts(read.spec, read.config)
        read.findings += [_recipe_fault(error)] if isinstance(error, ModelError) else fault_findings([str(error)])


def _read_nearest(read: _Read, near: Nearness) -> None:
    """The nearest family's reading, what follows from it, and how its tensors compare."""
    read.reading = near.reading
    read.facts = reading_facts(near.reading, read.config)
    read.nearest = compare(near, read.match.why, read.config, read.index.entries, read.facts.get("layers", []))
    expansion = read.nearest.expansion
    if expansion is not None and _num_tensors(expansion) <= MAX_TENSORS:
        read.expansion = expansion


def _read_on(read: _Read, recipe: Recipe, said: str) -> None:
    """The recipe stops on a fault of the config: tell it and every further one, and what can be read all the same."""
    read.reading = read_through(recipe, read.config)
    read.facts = reading_facts(read.reading, read.config)
    if read.reading.stop:
        read.reading.unread = []  # what it would have read next is not known
    others = [r.said for r in told_refusals(read.reading) if r.said != said]
    read.findings += fault_findings([said, *dict.fromkeys(others)])


def _odd_ids(read: _Read, tokenizer: TokenizerFiles) -> dict[str, Any]:
    """Stop ids that are no ids, but for those that the recipe refuses: that is told already."""
    told = {r.key for r in told_refusals(read.reading)} if read.reading is not None else set()
    keys = {"config.json": "eos_token_id", "config.json text_config": "text_config.eos_token_id"}
    return {where: value for where, value in tokenizer.odd_ids.items() if keys.get(where) not in told}


def _recipe_fault(error: ModelError) -> Finding:
    return Finding("recipe.rules", "weights", "fail", str(error), remedy="mend the recipe; see docs/new-model.md")


def _num_tensors(expansion: Expansion) -> int:
    return sum(group.count or 1 for group in expansion.groups)


def _bounded(expansion: Expansion) -> Expansion:
    wanted = _num_tensors(expansion)
    if wanted > MAX_TENSORS:
        raise ConfigError(f"config.json asks for {wanted} tensors; no model has more than {MAX_TENSORS}.")
    return expansion


def _quantization(read: _Read) -> tuple[str | None, QuantTable]:
    found = read_claim(read.source, read.config)
    if found is None:
        return None, QuantTable("none")
    return found[0], resolve(found[1], found[0], fp8_layout=fp8_layout(read.index.entries))


def _cover(read: _Read) -> None:
    """Join rules and tensors, and turn what is left over into findings."""
    if read.expansion is None:
        return
    if read.index.entries:
        read.coverage = cover(read.expansion, read.index.entries, read.quant)
        if read.nearest is not None:
            fits = read.coverage.misfit.items()
            read.coverage.misfit = {n: why for n, why in fits if unpacked(n) not in read.nearest.unsure}
    ask_all(read.quant, read.expansion, read.coverage)
    if read.spec is None:
        return
    read.findings += ledger.recipe_findings(read.expansion, given=read.match.given)
    if read.coverage is not None:
        read.findings += ledger.coverage_findings(read.coverage, read.spec, read.rules, read.index.entries)
        read.findings += ledger.alias_findings(read.source, read.index.entries, read.coverage, read.spec)
        read.findings += scale_findings(
            read.source, read.index.entries, read.coverage, sparse_files(read.source, read.index)
        )
    if read.quant_readable:
        read.findings += claim_findings(read.quant, read.coverage)
        read.findings += shape_findings(read.quant, read.expansion)


def _verify(
    source: Source, expected: dict[str, str] | None, state_folder: Path | None, show: ProgressFactory
) -> list[Finding]:
    values = expected if expected is not None else source.hashes()
    if not values:
        raise UsageError(f"{source.name} states no SHA-256 of its files; give a manifest with --hash-manifest.")
    folder = state_folder or Path.home() / ".cache" / "dayzero" / "hashes"
    state = folder / f"{hashlib.sha256(source.name.encode()).hexdigest()[:32]}.json"
    total = sum(source.files().get(file, 0) for file in values)
    with show("verifying SHA-256", total, "B") as bar:
        return verify_hashes(source, values, state, bar.reach)


def _report(read: _Read, tokenizer: TokenizerFiles, catalog: Catalog) -> InspectReport:
    recipe, spec, reading = read.match.recipe, read.spec, read.reading
    seen = spec if spec is not None else reading.spec if reading is not None else None
    stop_ids = sorted({*tokenizer.stop, *(seen.stop_ids if seen else ())})
    why = read.match.why
    if read.nearest is not None and read.facts:
        why += f"; layers, parameters, cache and effective values are {read.nearest.name}'s reading"
        why += ", with stand-ins" if read.nearest.absent else ""
    out = InspectReport(
        read.source.name, recipe.name if recipe else None, recipe.origin if recipe else None, why,
        stop_ids=stop_ids,
        stop_id_sources={str(i): said for i, said in sorted(tokenizer.stop.items())},
        sampling=tokenizer.sampling, tokenizer=tokenizer.tokenizer, chat=tokenizer.chat,
        files=dict(read.index.files), total_bytes=read.index.total_bytes, bytes_read=read.source.bytes_read,
    )  # fmt: skip
    effective: dict[str, Any] = {}
    if read.facts:
        out.reading = recipe.name if recipe else reading.recipe.name if reading else None
        effective = read.facts.pop("effective", {})
        for name, value in read.facts.items():
            setattr(out, name, value)
    if spec is not None:
        out.operators = from_contracts(spec.contracts(), catalog)
    elif reading is not None:
        left = reading.unread if recipe is None else ()  # a known family's are a finding of their own
        out.operators = from_reading(reading, read.config, left, catalog)
    out.config = config_json(read.raw, reading, effective | {"stop_ids": stop_ids} if effective else {})
    out.tensors = ledger.tensors_json(read.coverage, len(read.index.files))
    out.quantization = quantization_json(read.quant, read.quant_where, read.coverage)
    out.findings = list(read.findings)
    if read.nearest is not None:
        out.nearest = read.nearest.to_json()
        out.findings += unknown_family(read.nearest, read.facts, out.operators)
    else:
        out.findings += config_findings(read.raw, spec, reading, read.facts, tokenizer, out.operators)
    return out
