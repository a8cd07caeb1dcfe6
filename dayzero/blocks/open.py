"""From a path to a model that can be run: config, recipe, rules, index, coverage, loader. Everything or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_json import read_object, stated_dtype
from dayzero.checkpoint.coverage import Coverage, cover
from dayzero.checkpoint.index import Index, read_index
from dayzero.checkpoint.seeded_source import SeededSource
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.stream import Loader
from dayzero.errors import CheckpointError, ConfigError, UsageError
from dayzero.models.blueprint import blueprint, refuse, require_recipe
from dayzero.models.recipe import Recipe

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that covers its recipe exactly. config: config.json as parsed; raw: the same, with its ledger."""

    source: Source
    index: Index
    config: Mapping[str, Any]
    raw: Raw
    recipe: Recipe
    spec: ModelSpec
    coverage: Coverage
    loader: Loader


def open_model(where: str, *, recipe: str | None = None, dtype: torch.dtype | None = torch.float32) -> LoadedModel:
    """Open the checkpoint at ``where`` (folder, ``s3://…``, hub id). No parameter is read yet.

    recipe: path or module of a recipe; default: the built-in one that the config fits. dtype: of the parameters;
    None: bfloat16 where the config states it, else float32.
    Errors: UsageError when ``where`` is no checkpoint, ConfigError for the config (unread keys included), ModelError
    when no recipe fits, CheckpointError when files are damaged or tensors are missing, unknown or stored otherwise
    than claimed.
    """
    source = open_source(where)
    if isinstance(source, SeededSource):
        raise UsageError(f"{where} has no files of weights to read or compare; serve, chat, bench and profile run it.")
    if not source.exists(CONFIG) and CONFIG not in source.not_files:
        raise ConfigError(f"{where} has no {CONFIG}; download the publisher's beside the weights.")
    config, repeated = read_object(source, CONFIG)
    refuse(f"{CONFIG} of {where} states keys twice", repeated, ConfigError)
    chosen = require_recipe(config, recipe)
    index = read_index(source)
    refuse(f"{where} is damaged", [p.claim for p in index.problems if p.verdict == "fail"], CheckpointError)
    plan = blueprint(config, chosen, source=source, entries=index.entries)
    coverage = cover(plan.expansion, index.entries, plan.quant)
    _check_coverage(where, coverage)
    if dtype is None:
        dtype = torch.bfloat16 if stated_dtype(config) in ("bfloat16", "torch.bfloat16") else torch.float32
    loader = Loader(source, index, coverage, dtype)
    return LoadedModel(source, index, config, plan.raw, chosen, plan.spec, coverage, loader)


def _check_coverage(where: str, coverage: Coverage) -> None:
    def near(names: Mapping[str, str], word: str) -> list[str]:
        return [f"{name} ({word} {other})" if other else name for name, other in names.items()]

    refuse(f"{where} lacks tensors", near(coverage.missing, "nearest:"), CheckpointError)
    refuse(f"{where} holds tensors that no rule uses", near(coverage.unknown, "nearest:"), CheckpointError)
    refuse(f"{where} holds tensors that do not fit", near(coverage.misfit, "-"), CheckpointError)
    refuse(f"{where} stores tensors too narrowly", near(coverage.narrowed, "-"), CheckpointError)
    claims = [f"{c.name} (claimed {c.claimed}, stored {c.stored})" for c in coverage.contradictions if c.why is None]
    refuse(f"{where} stores tensors otherwise than its config claims", claims, CheckpointError)
