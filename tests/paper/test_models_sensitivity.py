"""A key that a recipe reads is used: any other value of it changes the model, or is refused.

Each real config is read once by a Raw that remembers how every key was asked for, present or not. Then one key at a
time gets another value of its kind. The spec, the rules or the unread keys must differ, or the recipe must refuse;
what changes nothing on purpose stands in UNUSED with the reason.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from model_configs import NAMES, config_of

from dayzero.arch.raw import Raw
from dayzero.errors import ConfigError
from dayzero.models.recipe import Recipe, read_spec
from dayzero.models.registry import find

# (recipe, key without the path of its object) -> why another value may leave the model as it is. "" is any recipe.
UNUSED = {
    ("", "torch_dtype"): "names how weights are stored; the files are held against it elsewhere",
    ("", "dtype"): "names how weights are stored; the files are held against it elsewhere",
    ("", "use_grouped_topk"): "with one group of experts the grouped and the plain choice are the same",
    ("", "type"): "one kind of scaling under two names",
    ("", "rope_type"): "one kind of scaling under two names",
    ("", "eos_token_id"): "the stop ids of the inner and the outer config are united, here equal ones",
    ("deepseek_v32", "rope_interleave"): "true restates what the family always does; false is refused",
    ("qwen3_5", "norm_topk_prob"): "true restates what the family always does; false is refused",
    ("glm5", "index_topk_freq"): "a frequency of one is what its absence means",
    ("glm5", "index_skip_topk_offset"): "without a frequency every layer owns its index, whatever the offset",
    ("gpt_oss", "mscale"): "as in the publisher's code, one of the two mscales alone changes nothing",
    ("gpt_oss", "mscale_all_dim"): "as in the publisher's code, one of the two mscales alone changes nothing",
    ("qwen3", "intermediate_size"): "the width of dense layers, of which the routed release has none",
    ("kimi_k3", "projector_ln_eps"): "the tower is on paper only; its blocks come with the vision part",
    ("kimi_k3", "vt_num_attention_heads"): "the tower is on paper only, and its widths are stated on their own",
}

Path = tuple[str, ...]


class Spy(Raw):
    """A Raw that notes how each key was asked for: (path, names, method, allowed values, answer)."""

    asked: list[tuple[str, tuple[str, ...], str, tuple[Any, ...], Any]]

    def __init__(self, data: Any, **more: Any) -> None:
        super().__init__(data, **more)
        self.asked = []

    def _note(self, method: str, names: Iterable[str], answer: Any, allowed: Iterable[Any] = ()) -> Any:
        self.asked.append((self._path, tuple(names), method, tuple(allowed), answer))
        return answer

    def has(self, name: builtins.str) -> builtins.bool:
        self._note("has", (name,), None)
        return super().has(name)

    def int(self, *names: builtins.str, **more: Any) -> builtins.int:
        return self._note("int", names, super().int(*names, **more))

    def float(self, *names: builtins.str, **more: Any) -> builtins.float:
        return self._note("float", names, super().float(*names, **more))

    def bool(self, *names: builtins.str, **more: Any) -> builtins.bool:
        return self._note("bool", names, super().bool(*names, **more))

    def list(self, *names: builtins.str, **more: Any) -> builtins.list[Any]:
        return self._note("list", names, super().list(*names, **more))

    def ints(self, *names: builtins.str, **more: Any) -> tuple[builtins.int, ...]:
        return self._note("list", names, super().ints(*names, **more))

    def one_of(self, *names: builtins.str, allowed: Iterable[Any], **more: Any) -> Any:
        choices = builtins.list(allowed)
        return self._note("one_of", names, super().one_of(*names, allowed=choices, **more), choices)

    def sub(self, name: builtins.str) -> Raw:
        if name not in self._opened:
            super().sub(name)
            child = Spy(self._data[name], file=self._file, path=self.full(name), ledger=self.ledger)
            child.asked = self.asked
            self._opened[name] = child
        return self._opened[name]


def _others(method: str, value: Any, allowed: tuple[Any, ...]) -> list[Any]:
    """Values of the same kind as ``value``, which the recipe took, that the method could accept. None: it asked only
    whether there is one, and found none."""
    if method == "int":
        return [value + 1, 2 * value + 2]
    if method == "float":
        return [value * 0.5, value * 2] if value else [0.5, 2.0]
    if method == "bool":
        return [not value]
    if method == "one_of":
        return [choice for choice in allowed if choice != value]
    if method == "list":
        return [[*value, value[-1]], list(value)[:-1]] if value else [[1]]
    return [7, 0.5, True, "odd", [1, 2], {"odd": 1}]


def _get(config: dict[str, Any], path: Path) -> Any:
    value: Any = config
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(config: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(config)
    inner = out
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return out


def _read(recipe: Recipe, config: dict[str, Any]) -> tuple[Any, ...]:
    """Everything a config comes to."""
    raw = Raw(config)
    spec = read_spec(recipe, raw)
    blank = sorted(
        key for key, why in raw.ledger.ignored.items() if why.startswith("null") and _get(config, tuple(key.split(".")))
    )
    return spec, recipe.make_rules(spec), tuple(raw.unread()), blank


def _questions(config: dict[str, Any], recipe: Recipe) -> Iterator[tuple[Path, list[Any]]]:
    """(key, other values): each key once for each way it was asked; ``has`` only where nothing else tells its kind."""
    spy = Spy(config)
    recipe.make_spec(spy)
    typed = {(path, name) for path, names, method, *_ in spy.asked if method != "has" for name in names}
    seen = set()
    for path, names, method, allowed, answer in spy.asked:
        for name in names:
            known = (path, name, method, repr(allowed))
            if known in seen or (method == "has" and (path, name) in typed):
                continue
            seen.add(known)
            yield (*path.split("."), name) if path else (name,), _others(method, answer, allowed)


def _unused(config: dict[str, Any], recipe: Recipe) -> list[tuple[str, str]]:
    """(key, sentence) of each value that made no difference."""
    base = _read(recipe, config)
    out: list[tuple[str, str]] = []
    for path, others in _questions(config, recipe):
        for other in others:
            try:
                changed = _read(recipe, _put(config, path, other))
            except ConfigError:
                continue
            if ".".join(path) in changed[3]:
                out.append((path[-1], f"{'.'.join(path)} = {other!r} is ignored as if it were null"))
            elif changed[:3] == base[:3]:
                out.append((path[-1], f"{'.'.join(path)} = {other!r} changes nothing"))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_is_read_is_used(name: str) -> None:
    config = config_of(name)
    recipe = find(config).recipe
    assert recipe is not None
    left = [
        f"{name}: {said}"
        for key, said in _unused(config, recipe)
        if not any((who, key) in UNUSED for who in ("", recipe.name))
    ]
    assert left == [], "\n" + "\n".join(left)
