"""``dayzero inspect``: the verdict on a checkpoint from its config, headers and tokenizer files alone.

Steps: open the source, read config.json and every shard's header, find the recipe, let it read the config, join its
rules with the tensors, and hold each claim against what is there. Nothing is loaded and no code of the source runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.coverage import Coverage, cover
from dayzero.checkpoint.index import Index, read_index
from dayzero.checkpoint.quant_claim import fp8_layout, read_claim
from dayzero.checkpoint.quant_config import QuantTable, resolve
from dayzero.checkpoint.rules import Expansion, RuleLike
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.verify import load_manifest, verify_hashes
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import CheckpointError, ConfigError, ModelError, UsageError, UserError
from dayzero.finding import Finding, Verdict, worst
from dayzero.models.recipe import read_rules, read_spec
from dayzero.models.registry import Match, find
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.planner import tensors as ledger
from dayzero.planner.config_ledger import config_findings, config_json
from dayzero.planner.nearest_family import Nearest, compare
from dayzero.planner.operators import Operators, from_contracts, from_keys
from dayzero.planner.quantization import ask_all, claim_findings, quantization_json, scale_findings, shape_findings
from dayzero.planner.spec_facts import NO_CACHE, spec_facts
from dayzero.planner.storage import sparse_files, storage_findings
from dayzero.planner.tokenizer_files import TokenizerFiles, read_tokenizer_files

MAX_TENSORS = 5_000_000  # logical tensors a config may ask for; the largest release has a quarter of a million


@dataclass
class InspectReport:
    """Everything ``--json`` prints, by docs/inspect.md's names. findings, verdict: what the exit code follows."""

    source: str
    family: str | None
    recipe: str | None
    why: str
    findings: list[Finding] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, int | None] = field(default_factory=lambda: {"total": None, "active": None})
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
    """What was read of a source. spec, expansion, coverage: None as long as no recipe could read the config."""

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
    tokenizer = read_tokenizer_files(opened, read.config)
    read.findings += tokenizer.findings
    _read_model(read)
    _cover(read)
    if verify_hash or expected is not None:
        read.findings += _verify(opened, expected, state_folder, show)
    return _report(read, tokenizer, catalog)


def _read(source: Source, recipe: str | None, show: ProgressFactory) -> _Read:
    if not source.exists("config.json") and "config.json" not in source.not_files:
        raise CheckpointError(f"{source.name} has weights but no config.json; download the publisher's beside them.")
    config, repeated = read_object(source, "config.json")
    match = find(config, recipe)
    with _shards(show) as tell:
        index = read_index(source, tell)
    read = _Read(source, config, index, match, Raw(config), findings=storage_findings(source, index))
    if repeated:
        claim = f"config.json states {len(repeated)} key(s) twice; readers disagree about which one counts"
        read.findings.append(
            Finding("config.repeated", "config", "fail", claim, evidence=tuple(repeated), remedy="keep the true one")
        )
    return read


@contextmanager
def _shards(show: ProgressFactory) -> Iterator[Any]:
    """A progress callback (done, in all) that drives one of the console's bars."""
    with show("reading headers", None, "shards") as bar:
        seen = 0

        def tell(done: int, total: int) -> None:
            nonlocal seen
            bar.advance(done - seen)
            bar.note(f"of {total}")
            seen = done

        yield tell


def _read_model(read: _Read) -> None:
    """Spec and rules by the recipe; or, without one, the comparison with the nearest family."""
    recipe = read.match.recipe
    try:
        read.quant_where, read.quant = _quantization(read)
    except ConfigError as error:
        read.quant_readable = False
        read.findings.append(_config_fault(error))
    if recipe is None:
        assert read.match.nearest is not None
        read.nearest = compare(read.match.nearest, read.match.why, read.config, read.index.entries)
        if read.nearest.expansion is not None and read.index.entries:
            read.expansion = _bounded(read.nearest.expansion)
        return
    try:
        read.spec = read_spec(recipe, read.raw)
        read.rules, expansion = read_rules(recipe, read.spec)
        read.expansion = _bounded(expansion)
        read.facts = spec_facts(read.spec, read.config)
    except UserError as error:
        read.spec = read.expansion = None
        read.findings.append(_recipe_fault(error) if isinstance(error, ModelError) else _config_fault(error))


def _recipe_fault(error: ModelError) -> Finding:
    return Finding("recipe.rules", "weights", "fail", str(error), remedy="mend the recipe; see docs/new-model.md")


def _config_fault(error: UserError) -> Finding:
    contradicts = "contradicts itself" in str(error) or "and they differ" in str(error)
    return Finding(
        "config.contradiction" if contradicts else "config.value", "config", "fail", str(error),
        evidence=("config.json",), remedy="correct config.json, or teach the recipe this value",
    )  # fmt: skip


def _bounded(expansion: Expansion) -> Expansion:
    wanted = sum(group.count or 1 for group in expansion.groups)
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
        seen = 0

        def tell(done: int, _total: int) -> None:
            nonlocal seen
            bar.advance(done - seen)
            seen = done

        return verify_hashes(source, values, state, tell)


def _report(read: _Read, tokenizer: TokenizerFiles, catalog: Catalog) -> InspectReport:
    recipe, spec = read.match.recipe, read.spec
    stop_ids = sorted({*tokenizer.stop, *(spec.stop_ids if spec else ())})
    effective: dict[str, Any] = {}
    out = InspectReport(
        read.source.name, recipe.name if recipe else None, recipe.origin if recipe else None, read.match.why,
        stop_ids=stop_ids,
        stop_id_sources={str(i): said for i, said in sorted(tokenizer.stop.items())},
        sampling=tokenizer.sampling, tokenizer=tokenizer.tokenizer, chat=tokenizer.chat,
        files=dict(read.index.files), total_bytes=read.index.total_bytes, bytes_read=read.source.bytes_read,
    )  # fmt: skip
    if spec is not None:
        effective = read.facts.pop("effective") | {"stop_ids": stop_ids}
        for name, value in read.facts.items():
            setattr(out, name, value)
        out.operators = from_contracts(spec.contracts(), catalog)
    if read.nearest is not None:
        out.nearest = read.nearest.to_json()
        out.operators = from_keys(read.config, read.nearest.ledger.read, catalog)
    out.config = config_json(read.raw, read.nearest, effective)
    out.tensors = ledger.tensors_json(read.coverage, len(read.index.files))
    out.quantization = quantization_json(read.quant, read.quant_where, read.coverage)
    out.findings = read.findings + config_findings(read.raw, read.nearest, spec, tokenizer, out.operators)
    return out
