"""Checkpoints on paper for inspection tests: every tensor that a config asks for, as headers over sparse files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dayzero.models.blueprint import blueprint
from dayzero.models.registry import find
from tests.paper.files import Tensors, write_index, write_safetensors

CONFIGS = Path(__file__).parent / "configs"
Table = dict[str, tuple[str, tuple[int, ...], bytes | None]]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A released config by file name, with dotted keys changed; None removes a key."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        part = config
        for key in path:
            part = part[key]
        if value is None:
            part.pop(last, None)
        else:
            part[last] = value
    return config


def table_of(config: Mapping[str, Any]) -> Table:
    """Name -> (dtype, shape, no bytes) of a complete checkpoint, by the recipe's own rules."""
    from dayzero.checkpoint.coverage import expected_parts

    recipe = find(config).recipe
    assert recipe is not None
    plan = blueprint(dict(config), recipe)
    parts = expected_parts(plan.expansion, plan.quant, plan.plain)
    return {part.name: (part.dtype[0], shape, None) for _, part, shape in parts if not part.optional}


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    table: Mapping[str, Any],
    num_shards: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """config.json, shards and index; ``extra``: further files, objects as JSON and strings as text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(table)
    size = -(-len(names) // num_shards)
    places = {}
    for k in range(num_shards):
        shard = "model.safetensors" if num_shards == 1 else f"model-{k + 1:05d}-of-{num_shards:05d}.safetensors"
        held: Tensors = {name: table[name] for name in names[k * size : (k + 1) * size]}
        write_safetensors(folder / shard, held)
        places |= dict.fromkeys(held, shard)
    if num_shards > 1:
        write_index(folder, places)
    for file, content in (extra or {}).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def renamed(table: Table, rename: Callable[[str], str]) -> Table:
    return {rename(name): entry for name, entry in table.items()}
