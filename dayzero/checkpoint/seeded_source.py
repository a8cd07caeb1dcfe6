"""``seeded:CONFIG``: a checkpoint that has a config and no weights; whoever runs it makes them from a seed.

``seeded:PLACE?layers=8&experts=128&seed=3``: PLACE is anything else that is a source (a config.json, a folder, a hub
id). layers, experts: a cut of the model. seed: of the weights. Any other key is one of config.json, its value JSON.
Weights that lie at PLACE are not seen; tokenizer files are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dayzero.checkpoint.config_cut import cut_config
from dayzero.checkpoint.config_json import check_sizes, read_object
from dayzero.checkpoint.source import CONFIG, Source, is_marker, open_source
from dayzero.errors import ConfigError, UsageError

SEEDED = "seeded:"


@dataclass(frozen=True, slots=True)
class Seeded:
    """place: where the config is. layers, experts: how many are kept; None: all. changes: config key -> value."""

    place: str
    seed: int = 0
    layers: int | None = None
    experts: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        return self.layers is not None or self.experts is not None or bool(self.changes)


def parse_seeded(where: str) -> Seeded:
    """``seeded:PLACE?key=value&…`` as data. UsageError for what has another form."""
    assert where.startswith(SEEDED), where
    place, _, query = where[len(SEEDED) :].partition("?")
    if not place or place.startswith(SEEDED):
        raise UsageError(f"{where}: give the config that weights are made for: seeded:CONFIG, CONFIG a config.json.")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"{where}: behind the ? stand KEY=VALUE with & between, such as layers=8&seed=1.") from error
    values: dict[str, Any] = {}
    for key, text in pairs:
        if key in values:
            raise UsageError(f"{where}: {key} is given twice.")
        try:
            values[key] = json.loads(text)
        except ValueError as error:
            raise UsageError(f'{where}: {key}={text}: the value must be JSON, such as 8 or [1,2] or "text".') from error
    numbers = {}
    for key, least in (("seed", 0), ("layers", 1), ("experts", 1)):
        value = values.pop(key, None)
        if value is not None and (type(value) is not int or not least <= value < 2**63):
            raise UsageError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}.")
        numbers[key] = value
    return Seeded(place, numbers["seed"] or 0, numbers["layers"], numbers["experts"], values)


class SeededSource(Source):
    """config.json, cut as asked, and what lies beside it but weights. See ``Source``.

    asked: what the name says. full: the config as its publisher wrote it.
    """

    config_only = True

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.asked = parse_seeded(where)
        self._inner = open_source(self.asked.place)
        if not self._inner.exists(CONFIG):
            raise UsageError(f"{where}: {self.asked.place} has no {CONFIG}; weights are made for a config.")
        self.full, repeated = read_object(self._inner, CONFIG)
        if repeated:
            raise ConfigError(f"{CONFIG} of {self.asked.place} states keys twice: {', '.join(repeated[:5])}.")
        self._made: dict[str, bytes] = {}
        if self.asked.cut:
            cut = cut_config(self.full, self.asked.layers, self.asked.experts, self.asked.changes, where)
            check_sizes(cut, f"the config of {where}")
            self._made[CONFIG] = json.dumps(cut, indent=1).encode()

    def add(self, texts: Mapping[str, str]) -> None:
        """Further files, by name. They stand before what lies at the place."""
        self._made |= {name: text.encode() for name, text in texts.items()}
        self._sizes = None

    def _list(self) -> dict[str, int]:
        inner = {file: size for file, size in self._inner.files().items() if file == CONFIG or not is_marker(file)}
        return inner | {file: len(data) for file, data in self._made.items()}

    def _fetch(self, file: str, start: int, length: int) -> bytes:
        made = self._made.get(file)
        return self._inner.read(file, start, length) if made is None else made[start : start + length]

    def stamp(self, file: str) -> str:
        return f"{self.name} {'' if file in self._made else self._inner.stamp(file)}"

    def path(self, file: str) -> Path | None:
        return None if file in self._made else self._inner.path(file)


def served_name(where: str) -> str:
    """What the place of ``where`` is called: of a config.json the folder's name, of another file its own."""
    place = Path(parse_seeded(where).place)
    return (place.parent.name if place.name == CONFIG else place.stem) or "model"
