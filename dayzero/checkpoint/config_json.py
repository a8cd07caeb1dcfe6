"""JSON objects that publishers write (config.json and its like), read with the distrust that any download deserves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from dayzero.checkpoint.source import Source
from dayzero.errors import ConfigError
from dayzero.units import MIB, bytes_text

MAX_CONFIG_BYTES = 32 * MIB
MAX_DEPTH = 24
MAX_NUMBER = 1 << 53  # above, JSON readers disagree about the value
MAX_LAYERS = 10_000  # no model has so many; a larger count would only fill this machine's memory


def read_object(source: Source, file: str, *, sizes: bool = True) -> tuple[dict[str, Any], list[str]]:
    """(the object in ``file``, keys that stand twice in one object). ConfigError in one sentence when it is none.

    sizes: also refuse counts that no model has.
    """
    size, name = source.size(file), source.name if source.config_only else f"{file} of {source.name}"
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name} has {bytes_text(size)}, too much for a config; check the file.")
    value, repeated = parse_object(source.text(file), name)
    if sizes:
        check_sizes(value, name)
    return value, repeated


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The element type that the weights were published in, old spelling or new, e.g. ``bfloat16``."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key])
    return None


def check_sizes(config: dict[str, Any], name: str) -> None:
    """ConfigError for numbers that no model has, and for nesting that no config has. name: how messages call it."""
    for path, number in _numbers(config, "", 0, name):
        _check_number(path, number, name)


def parse_object(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """``read_object`` on text. name: how messages call the file."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            repeated.extend(sorted({k for k, _ in items if sum(k == other for other, _ in items) > 1}))
        return out

    def constant(word: str) -> NoReturn:
        raise ConfigError(f"{name} holds {word}, which is not JSON; give a number or null.")

    def number(digits: str) -> float:
        found = float(digits)
        if found in (float("inf"), float("-inf")):
            raise ConfigError(f"{name} holds the number {digits[:40]}, which is too large.")
        return found

    try:
        value = json.loads(
            text.removeprefix("\ufeff"), object_pairs_hook=pairs, parse_constant=constant, parse_float=number
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from error
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a config.") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{name} is not JSON that can be read: {str(error)[:120]}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must hold an object, not {type(value).__name__}.")
    return value, repeated


def _numbers(value: Any, path: str, depth: int, name: str) -> Iterator[tuple[str, int | float]]:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} is nested too deeply to be a config (at {path[:80]}).")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else key, depth + 1, name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, f"{path}[]", depth + 1, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _check_number(path: str, number: int | float, name: str) -> None:
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{name}: {path} is {number}, which JSON cannot hold; give a number or null.")
    if abs(number) > MAX_NUMBER:
        raise ConfigError(f"{name}: {path} is {str(number)[:24]}…, larger than any size of a model.")
    word = path.rsplit(".", 1)[-1]
    if number > MAX_LAYERS and ("layer" in word or word == "depth") and not word.endswith("[]"):
        raise ConfigError(f"{name}: {path} is {number:g}; no model has more than {MAX_LAYERS} layers.")
