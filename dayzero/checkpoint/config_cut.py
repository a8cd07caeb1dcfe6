"""A config with fewer layers or experts than the publisher's, so that a model of true width fits on a device.

The first layers are kept, so the pattern of kinds stays as it begins. What a config lists by layer is recognised by its
form: a list with one entry a layer, or a list of numbers of layers. What is not recognised is left as it is; the recipe
then refuses a list that is too long.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from dayzero.errors import UsageError

LAYERS = "num_hidden_layers"
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")  # experts that a token chooses
GROUPS, TOP_GROUPS = ("n_group", "num_expert_group"), "topk_group"  # of experts, and how many of them it chooses from
BY_LAYER = ("layer", "types", "pattern", "freq", "ratios")  # a key of a list by layer holds one of these words
NUMBERS = "layers"  # and one of a list of their numbers this one
APART = ("vision_config", "quantization_config")  # have layers, and lists, of their own


def put(config: dict[str, Any], key: str, value: Any, *, create: bool) -> bool:
    """Set a key in place: a plain one wherever the config has it, at the root and in text_config; a dotted one at that
    place alone. create: where it is absent, too. False: there is no such key."""
    parts = key.split(".")
    if len(parts) > 1:
        inner: Any = config
        for part in parts[:-1]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or (parts[-1] not in inner and not create):
            return False
        inner[parts[-1]] = value
        return True
    text = config.get("text_config")
    places = [c for c in (config, text) if isinstance(c, dict) and key in c]
    if not places and create:
        places = [text if isinstance(text, dict) else config]
    for place in places:
        place[key] = value
    return bool(places)


def cut_config(
    config: Mapping[str, Any], layers: int | None, experts: int | None, changes: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """A copy of ``config`` with its first ``layers`` layers, so many routed experts, and ``changes`` by key, which come
    last. None leaves what there is. name: of the source, for messages. UsageError where the config has no such number
    or key, for more than it has or fewer experts than a token chooses, and where it cannot be told what a list of layer
    numbers counts from."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    if layers is not None:
        _cut_layers(out, layers, changes, name)
    if experts is not None:
        _cut_experts(out, experts, name)
    for key, value in changes.items():
        if not put(out, key, value, create=False):
            raise UsageError(f"{name}: its config.json has no key {key}; give layers, experts, seed or a key it has.")
    if experts is not None:
        _check_choice(_text_of(out), experts, name)
    return out


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _cut_layers(config: dict[str, Any], layers: int, changes: Mapping[str, Any], name: str) -> None:
    text = _text_of(config)
    found = text.get(LAYERS)
    if type(found) is not int:
        raise UsageError(f"{name}: its config.json states no {LAYERS}, so its layers cannot be cut; leave layers out.")
    if not 1 <= layers <= found:
        raise UsageError(f"{name}: layers={layers}, but the model has {found}; give 1 to {found}.")
    places = list(_lists(text, ""))
    numbered = [one for one in places if _is_numbers(*one, found)]
    by_layer = [one for one in places if one not in numbered and any(word in one[1] for word in BY_LAYER)]
    for holder, key, _ in by_layer:
        if len(holder[key]) == found:
            holder[key] = holder[key][:layers]
    counted_from = _base([n for holder, key, _ in numbered for n in holder[key]], found)
    for holder, key, dotted in numbered:
        full = f"text_config.{dotted}" if text is not config else dotted
        if counted_from is not None:
            holder[key] = [n for n in holder[key] if n < layers + counted_from]
        elif not {full, key} & changes.keys():
            raise UsageError(
                f"{name}: {full} lists layers, but nothing tells whether it counts from 0 or 1: add {full}=[…], the "
                f"list for {layers} layers."
            )
    text[LAYERS] = layers


def _lists(inner: dict[str, Any], prefix: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(object, key, dotted key) of every list that is not empty."""
    for key, value in inner.items():
        if isinstance(value, dict) and key not in APART:
            yield from _lists(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield inner, key, prefix + key


def _is_numbers(holder: dict[str, Any], key: str, dotted: str, num_layers: int) -> bool:
    """Whether the list names layers by number: whole numbers, all different, none beyond the model."""
    values = holder[key]
    whole = NUMBERS in key and all(type(n) is int and 0 <= n <= num_layers for n in values)
    return whole and len(set(values)) == len(values)


def _base(numbers: list[int], num_layers: int) -> int | None:
    """What the numbers of all lists together count from: they hold 0, or the last layer's; None where neither."""
    if 0 in numbers:
        return None if num_layers in numbers else 0
    return 1 if num_layers in numbers else None


def _cut_experts(config: dict[str, Any], experts: int, name: str) -> None:
    text = _text_of(config)
    keys = [key for key in EXPERTS if type(text.get(key)) is int]
    if not keys:
        raise UsageError(f"{name}: its config.json states no number of experts; leave experts out.")
    for key in keys:
        if not 1 <= experts <= text[key]:
            raise UsageError(f"{name}: experts={experts}, but the model has {text[key]}; give 1 to {text[key]}.")
        text[key] = experts


def _check_choice(text: dict[str, Any], experts: int, name: str) -> None:
    """UsageError where a token cannot choose as many of the experts as it has to, in the groups that the config has."""
    chosen, groups = (next((k for k in keys if type(text.get(k)) is int), None) for keys in (TOP_K, GROUPS))
    if chosen is not None and experts < text[chosen]:
        raise UsageError(
            f"{name}: experts={experts}, but a token chooses {text[chosen]} of them ({chosen}); give at least so many."
        )
    num = text[groups] if groups is not None else 1
    if num < 2:  # no groups, or a number that the recipe refuses
        return
    if experts % num or experts // num < 2:
        raise UsageError(
            f"{name}: experts={experts}, but they come in {num} groups ({groups}) that are judged by their best two; "
            f"give a multiple of {num} from {2 * num} on, or {groups} too."
        )
    within = experts // num * text[TOP_GROUPS] if type(text.get(TOP_GROUPS)) is int else experts
    if chosen is not None and within < text[chosen]:
        raise UsageError(
            f"{name}: experts={experts}, but a token chooses {text[chosen]} ({chosen}) out of {text[TOP_GROUPS]} "
            f"groups ({TOP_GROUPS}), which then hold {within}; give more experts."
        )
