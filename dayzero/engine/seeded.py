"""A model whose weights are made from a seed, as one that could be read from files; and what is told of it."""

from __future__ import annotations

import torch

from dayzero.arch.raw import Raw
from dayzero.blocks.open import LoadedModel
from dayzero.checkpoint.config_json import stated_dtype
from dayzero.checkpoint.seeded_source import SeededSource
from dayzero.models.blueprint import blueprint, read_config, require_recipe
from dayzero.models.recipe import read_spec
from dayzero.rehearse.seeded import SeededLoader
from dayzero.rehearse.shrink import lost_traits


def open_seeded(
    where: str, *, recipe: str | None = None, dtype: torch.dtype | None = None, device: str = "cpu"
) -> LoadedModel:
    """What ``open_model`` gives of files, for ``seeded:…``. Parameters are made on ``device``; none is made yet.

    dtype: of the parameters; None: bfloat16 where the config states it, else float32. Errors: as ``open_model``.
    """
    source = SeededSource(where)
    config = read_config(source)
    chosen = require_recipe(config, recipe)
    plan = blueprint(config, chosen, source=source)
    if dtype is None:
        dtype = torch.bfloat16 if stated_dtype(config) in ("bfloat16", "torch.bfloat16") else torch.float32
    loader = SeededLoader(source, plan, dtype)
    loader.place(device)
    return LoadedModel(source, loader.index, config, plan.raw, chosen, plan.spec, loader.coverage, loader)


def seeded_rows(model: LoadedModel) -> list[tuple[str, str]]:
    """Of the start table: that the weights are made, and what a cut leaves of the model. Empty for files."""
    source, loader = model.source, model.loader
    if not isinstance(source, SeededSource) or not isinstance(loader, SeededLoader):
        return []
    rows = [("made from", f"{source.asked.place}, seed {loader.seed}: nothing was read, no answer means anything")]
    if source.asked.cut:
        whole = read_spec(model.recipe, Raw(source.full))
        lost = lost_traits(whole, model.spec)
        kept = f"{len(model.spec.layers)} of {len(whole.layers)} layers"
        if source.asked.experts is not None:
            kept += f", {source.asked.experts} experts"
        changed = "".join(f", {key}={value}" for key, value in source.asked.changes.items())
        rows.append(("cut", f"{kept}{changed}; {'loses ' + '; '.join(lost) if lost else 'every trait is kept'}"))
    return rows
