"""A twin: a small seeded checkpoint with the real tensor names, formats and every trait of the real config.

It needs the config alone, so a port can be proven before the weights are out. The paper twin has the full size and no
weights: headers over sparse files, so that a release of terabytes can be rehearsed on a laptop.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dayzero
from dayzero.arch.cost import total_params
from dayzero.arch.mixers import Mixer
from dayzero.arch.raw import Raw
from dayzero.arch.spec import COPIED
from dayzero.checkpoint.config_json import check_sizes
from dayzero.checkpoint.coverage import expected_parts
from dayzero.checkpoint.rules import Expansion, Group
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.write import ShardTensor, split_shards, write_index, write_shard, write_sparse_shard
from dayzero.console import ProgressFactory, no_progress
from dayzero.decl import Format
from dayzero.errors import ConfigError, ModelError, UsageError, UserError
from dayzero.models.blueprint import Blueprint, blueprint, read_config, require_recipe
from dayzero.models.recipe import Recipe, read_spec
from dayzero.rehearse.shrink import apply_changes, refuse_lost, shrink
from dayzero.rehearse.stand_in import FILES, VOCABULARIES, write_stand_in

MARK = "dayzero_twin.json"
SHARD_BYTES = 16_400_000_000  # a paper twin's shards are about as large as the ones publishers upload
TWIN_SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class TwinOptions:
    """seed of the weights; recipe by path; paper: full size, no data; changes: further config keys; num_shards."""

    seed: int = 0
    recipe: str | None = None
    paper: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    num_shards: int | None = None


@dataclass(frozen=True)
class Twin:
    """What was written. traits: contracts with options that the real model uses and the twin keeps."""

    out: str
    family: str
    paper: bool
    num_tensors: int
    num_shards: int
    total_bytes: int
    parameters: int
    config: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        keys = ("out", "family", "paper", "num_tensors", "num_shards", "total_bytes", "parameters")
        return {key: getattr(self, key) for key in keys}


def write_twin(
    source: str, out: str, options: TwinOptions = TwinOptions(), progress: ProgressFactory = no_progress
) -> Twin:
    """Write a twin of ``source`` (a checkpoint or a config.json) into the new folder ``out``.

    Errors: UsageError when out exists, or when the changes make no model or lose a trait; ModelError when no recipe
    covers the config or the recipe's own sizes lose one.
    Nothing is left behind on failure: the folder appears under its name only when complete.
    """
    target = Path(out)
    _refuse_existing(target, out)
    opened = open_source(source)
    config = read_config(opened)
    recipe = require_recipe(config, options.recipe)
    try:
        small = _twin_config(config, opened, recipe, options)
        plan = blueprint(small, recipe)
    except (ConfigError, ModelError) as error:
        raise _blamed(error, config, recipe, options.changes) from error
    # A name of its own: two runs to one place must not write into, or remove, each other's files.
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        made = _write_all(partial, opened, plan, recipe, options, progress)
        _refuse_existing(target, out)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Twin(out, recipe.name, options.paper, *made, total_params(plan.spec), small)


def _blamed(error: UserError, config: Mapping[str, Any], recipe: Recipe, changes: Mapping[str, Any]) -> UserError:
    """The error as it is, or a wrong call where the changes brought it about: without them the config can be read."""
    if changes:
        try:
            read_spec(recipe, Raw(config))
        except UserError:
            return error
        return UsageError(f"--set {', '.join(changes)}: {error}")
    return error


def _refuse_existing(target: Path, out: str) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError(f"{out} exists already; give a new folder, a twin never overwrites one.")


def _twin_config(config: dict[str, Any], source: Source, recipe: Recipe, options: TwinOptions) -> dict[str, Any]:
    if options.paper:
        changed = apply_changes(config, options.changes)
        check_sizes(changed, "the paper twin's config.json")
        return changed
    keep_vocab = not source.config_only and any(source.exists(file) for file in VOCABULARIES)
    small = shrink(config, recipe.twin, keep_vocab=keep_vocab, changes=options.changes)
    check_sizes(small, "the twin's config.json")
    refuse_lost(read_spec(recipe, Raw(config)), read_spec(recipe, Raw(small)))
    return small


def _write_all(
    folder: Path, source: Source, plan: Blueprint, recipe: Recipe, options: TwinOptions, progress: ProgressFactory
) -> tuple[int, int, int]:
    _write_json(folder / "config.json", plan.config)
    _copy_or_make_tokenizer(folder, source, plan)
    stops = list(plan.spec.stop_ids)
    _write_json(folder / "generation_config.json", {"eos_token_id": stops} if stops else {})
    made = _write_weights(folder, replace(plan, expansion=_whole(plan.expansion)), options, progress)
    mark = {
        "dayzero": dayzero.__version__,
        "of": recipe.name,
        "paper": options.paper,
        "seed": options.seed,
        "changes": dict(options.changes),
        "parameters": total_params(plan.spec),
    }
    _write_json(folder / MARK, mark)
    return made


def _whole(expansion: Expansion) -> Expansion:
    """With the groups of the layers beside the plain forward among the others."""
    beside = (part.groups for part in (expansion.extra, expansion.copies) if part is not None)
    return replace(expansion, groups=[*expansion.groups, *(group for groups in beside for group in groups)])


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _copy_or_make_tokenizer(folder: Path, source: Source, plan: Blueprint) -> None:
    present = [] if source.config_only else [f for f in FILES if source.exists(f)]
    if any(file in present for file in VOCABULARIES) or (present and plan.spec.vocab > 4096):
        for file in present:
            (folder / file).write_bytes(source.read(file, 0, source.size(file)))
    elif plan.spec.vocab >= 260:
        write_stand_in(folder, plan.spec.family, plan.spec.vocab, plan.spec.stop_ids)


def _write_weights(
    folder: Path, plan: Blueprint, options: TwinOptions, progress: ProgressFactory
) -> tuple[int, int, int]:
    tensors = [
        ShardTensor(part.name, part.dtype[0], shape)
        for _, part, shape in expected_parts(plan.expansion, plan.quant, plan.plain)
        if not part.optional
    ]
    total = sum(t.num_bytes for t in tensors)
    size = SHARD_BYTES if options.paper else TWIN_SHARD_BYTES
    wanted = options.num_shards or max(-(-total // size), 1 if options.paper or len(tensors) < 24 else 3)
    shards = split_shards(tensors, min(wanted, len(tensors)), total)
    named = [(_shard_name(i, len(shards)), shard) for i, shard in enumerate(shards)]
    draw = None if options.paper else _Values(plan, options.seed)
    label = "writing the paper twin" if options.paper else "writing the twin"
    with progress(label, total, "B") as shown:
        for file, shard in named:
            if draw is None:
                write_sparse_shard(folder / file, shard)
            else:
                write_shard(folder / file, shard, draw.data)
            shown.advance(sum(t.num_bytes for t in shard))
    if len(named) > 1:
        write_index(folder, named, "model.safetensors.index.json")
    return len(tensors), len(named), total


def _shard_name(number: int, num_shards: int) -> str:
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


class _Values:
    """Bytes of each physical tensor, made when its shard is written; keeps the parts of one logical tensor."""

    def __init__(self, plan: Blueprint, seed: int) -> None:
        self._seed = seed
        self._of_part = {
            part.name: (logical, part.role)
            for logical, part, _ in expected_parts(plan.expansion, plan.quant, plan.plain)
            if not part.optional
        }
        self._groups = {name: group for group in plan.expansion.groups for name in group.names()}
        self._filled_by = {t.decl.name: group.name for group in plan.expansion.groups for t in group.targets}
        self._plan = plan
        self._made: tuple[str, dict[str, Any]] = ("", {})

    def data(self, tensor: ShardTensor) -> memoryview:
        """Little-endian bytes of ``tensor``, as its header entry says."""
        import torch

        logical, role = self._of_part[tensor.name]
        if self._made[0] != logical:
            self._made = (logical, self._make(logical, self._groups[logical]))
        value = self._made[1][role].contiguous()
        assert value.numel() * value.element_size() == tensor.num_bytes, tensor
        return memoryview(value.reshape(-1).view(torch.uint8).numpy())

    def _make(self, logical: str, group: Group) -> dict[str, Any]:
        from dayzero.checkpoint.dequant import quantize
        from dayzero.rehearse.values import logical_values

        fmt = self._format(logical, group)
        tied, name = self._plan.spec.tie.tied, self._original(group) or logical
        values = logical_values(group, name, self._seed, tied=tied, mixer=self._mixer(group), block=fmt.block)
        if not fmt.quantized:
            values = values.reshape(group.plain_shapes[0]) if not _transposed(group) else values.transpose(-1, -2)
        return quantize(fmt, values)

    def _original(self, group: Group) -> str | None:
        """The tensor that a draft layer's copy of the embedding or the head repeats."""
        first, _, word = group.targets[0].decl.name.rpartition(".")
        return self._filled_by.get(word, self._filled_by["embed"]) if first and word in COPIED else None

    def _mixer(self, group: Group) -> Mixer | None:
        """The mixer that the tensor belongs to."""
        spec, words = self._plan.spec, group.targets[0].decl.name.split(".")
        if words[2:3] != ["mixer"]:
            return None
        layers = spec.layers if words[0] == "layers" else spec.extra.layers if spec.extra is not None else ()
        return layers[int(words[1])].mixer

    def _format(self, logical: str, group: Group) -> Format:
        from dayzero.checkpoint.coverage import stored_format

        return stored_format(group, logical, self._plan.expansion, self._plan.quant, self._plan.plain)


def _transposed(group: Group) -> bool:
    return bool(getattr(group.rule, "transpose_plain", False))
