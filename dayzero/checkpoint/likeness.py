"""Names that are nearly right: prefixes in which files and rules differ, and the nearest match of what is left over."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

MAX_STRIPPED = 3  # leading segments of a rule's name that another prefix may replace
MIN_TAIL = 3  # segments that must agree where segments were replaced: "norm.weight" alone proves nothing
NUM_SAMPLED = 400  # rule names looked at for each first segment
MAX_SEARCHED = 200  # patterns of left-over names that are compared with all others
MAX_COMPARED = 100  # names of one pattern that are compared by their numbers

_DIGITS = re.compile(r"\d+")
_PACKING = re.compile(r"(?<=weight)_\w+$|(?<=_proj)_(blocks|scales)$|(?<=\w)_scale(_inv|_#)?$")


def rooted(name: str, roots: Mapping[str, str]) -> str:
    """``name`` with the longest prefix that ``roots`` knows replaced by the files' own."""
    best = max((old for old in roots if name.startswith(old)), key=len, default=None)
    return name if best is None else roots[best] + name[len(best) :]


def find_roots(names: Iterable[str], held: Collection[str]) -> dict[str, str]:
    """Prefixes in which the files differ from the rules, e.g. ``model.`` -> ``backbone.``.

    names: what the rules ask for, ``{e}`` allowed (read as expert 0). held: tensor names of the files. A prefix is
    proposed where nothing below a rule's first segment exists under its own name; the mapping that explains most
    names wins, and what it leaves unexplained may get a second one.
    """
    if not held:
        return {}
    by_stem: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_stem[name.split(".", 1)[0]].append(name.replace("{e}", "0"))
    lost = {stem: members for stem, members in by_stem.items() if not any(present(m, held) for m in members)}
    if not lost:
        return {}
    existing = {_module(name) for name in held if name.split(".", 1)[0] in lost}
    sampled = {}
    for stem, members in lost.items():
        modules = list(dict.fromkeys(_module(m) for m in members))
        if not any(m in existing for m in modules):
            sampled[stem] = _spread(modules, NUM_SAMPLED)
    if not sampled:
        return {}
    wanted = {tail for modules in sampled.values() for m in modules for _, tail in _tails(m)}
    prefixes = _prefixes(held, wanted)
    roots: dict[str, str] = {}
    for modules in sampled.values():
        roots |= _vote(modules, prefixes)
    return {old: new for old, new in roots.items() if old != new}


def present(name: str, held: Collection[str]) -> bool:
    """Whether a logical tensor is among the files' names, in whatever format."""
    return any(name + end in held for end in ("", "_packed", "_blocks"))


def _module(tensor: str) -> str:
    """Parent of a tensor: the part that does not depend on how its values are packed."""
    return tensor.rpartition(".")[0] or tensor


def _tails(module: str) -> Iterator[tuple[str, str]]:
    """(prefix that would be replaced, rest that must agree), the shortest prefix first."""
    segments = module.split(".")
    yield "", module
    for k in range(1, min(MAX_STRIPPED, len(segments) - 1) + 1):
        if len(segments) - k >= MIN_TAIL or (k < 2 and len(segments) - k >= MIN_TAIL - 1):
            yield ".".join(segments[:k]) + ".", ".".join(segments[k:])


def _prefixes(held: Collection[str], wanted: set[str]) -> dict[str, Counter[str]]:
    """For each wanted rest of a module name: the prefixes it has in the files."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name in held:
        module = _module(name)
        at = 0
        for _ in range(MAX_STRIPPED + 2):
            tail = module[at:]
            if tail in wanted:
                found[tail][module[:at]] += 1
            dot = module.find(".", at)
            if dot < 0:
                break
            at = dot + 1
    return found


def _vote(members: Sequence[str], prefixes: Mapping[str, Counter[str]]) -> dict[str, str]:
    """Mappings old prefix -> new one that explain the members, the one with most votes first."""
    options: dict[str, set[tuple[str, str]]] = {}
    for member in members:
        stem = member.split(".", 1)[0]
        found = set()
        for old, tail in _tails(member):
            for new in prefixes.get(tail, ()):
                found.add(
                    (old, new) if old else (f"{stem}." if "." in member else stem, new + stem + "." * ("." in member))
                )
        options[member] = found
    roots: dict[str, str] = {}
    left = [m for m in members if options[m]]
    while left:
        votes = Counter(pair for m in left for pair in options[m])
        # Of equally good ones the shortest old prefix: it says most with least.
        (old, new), _ = max(votes.items(), key=lambda kv: (kv[1], -len(kv[0][0]), -len(kv[0][1]), kv[0]))
        roots.setdefault(old, new)
        left = [m for m in left if (old, new) not in options[m] and not m.startswith(old)]
    return roots


def _spread(items: Sequence[str], most: int) -> list[str]:
    """At most ``most`` items, evenly spread."""
    step = max(1, -(-len(items) // most))
    return list(items[::step])


def folded(name: str) -> str:
    """``layers.3.q`` -> ``layers.#.q``: the pattern many names share."""
    return _DIGITS.sub("#", name)


def unpacked(name: str) -> str:
    """``folded`` without the word that says how the values are packed: what a matrix and its scales have in common."""
    return _without_packing(folded(name))


@lru_cache(maxsize=4096)
def _without_packing(pattern: str) -> str:
    return _PACKING.sub("", pattern)


def nearest(names: Sequence[str], candidates: Collection[str]) -> dict[str, str]:
    """Each name with the most similar candidate, "" where none is near.

    Names and candidates are compared with their digits folded, once for each pattern, so that 80,000 experts cost as
    much as one; of a pattern's candidates the one with most equal numbers is taken.
    """
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for candidate in candidates:
        by_pattern[folded(candidate)].append(candidate)
    keys, known = list(by_pattern), set(candidates)
    best: dict[str, str | None] = {}
    out: dict[str, str] = {}
    for name in names:
        pattern = folded(name)
        if pattern not in best:
            close = difflib.get_close_matches(pattern, keys, 1, 0.6) if len(best) < MAX_SEARCHED else []
            best[pattern] = close[0] if close else None
        key = best[pattern]
        out[name] = "" if key is None else _by_numbers(name, by_pattern[key], known)
    return out


def _by_numbers(name: str, candidates: Sequence[str], known: set[str]) -> str:
    numbers = _DIGITS.findall(name)
    given = iter(numbers)
    same_numbers = _DIGITS.sub(lambda m: next(given, m[0]), candidates[0])
    if same_numbers in known:
        return same_numbers
    some = candidates[:MAX_COMPARED]
    return max(some, key=lambda c: sum(a == b for a, b in zip(numbers, _DIGITS.findall(c), strict=False)))
