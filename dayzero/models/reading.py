"""A recipe's reading of a config that it need not fit: what it reads, refuses and misses, and the model it would be.

Where a getter refuses, the probe answers with a stand-in and the recipe goes on. Where the recipe itself stops, keys
that its sentence names are changed one at a time (a foreign entry replaced, a list cut to length, a key left out) until
it gets past. Every change is remembered; what hangs on a guess is told apart by reading again and guessing otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from dayzero.arch.probe import INVENTED, UNKNOWN_ENTRY, Probe, Refusal, Session
from dayzero.arch.raw import Ledger
from dayzero.arch.spec import ModelSpec
from dayzero.errors import ConfigError
from dayzero.models.recipe import RECIPE_ERRORS, Recipe

MAX_STOPS = 10  # times one reading is helped past a refusal of the recipe's own
MAX_TRIES = 14  # changes tried at one stop
MAX_CHOICES = 12  # further runs that ask which keys the recipe would read had a refused value been another one
NUM_LATEST = 4  # keys asked just before a stop whose sentence names none
PARTS = ("text_config", "llm_config", "language_config")  # where multimodal configs keep the model that reads text

_WORD = re.compile(r"[A-Za-z_](?:[\w.]*\w)?")
_NUMBER = re.compile(r"(?<![\w.])\d{1,4}(?!\w|\.\d)")

Path = tuple[str, ...]
Patches = Mapping[Path, Any]


@dataclass
class Reading:
    """spec: None when the recipe could not be brought to an end; then ``stop`` says why.

    others: specs of the same reading with other guesses. vague: something was guessed, but no other guess came to an
    end, so that nothing tells what hangs on it.
    refusals: what is absent or refused, each once. ledger: of keys that the config really has.
    unread: dotted keys that the recipe would not read whatever the refused values were. part: key of the object that
    was read as the model's own, "" for the root. entries: key of a list -> {place: entry that another stands in for}.
    """

    recipe: Recipe
    part: str = ""
    spec: ModelSpec | None = None
    others: list[ModelSpec] = field(default_factory=list)
    vague: bool = False
    stop: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    unread: list[str] = field(default_factory=list)
    entries: dict[str, dict[int, Any]] = field(default_factory=dict)

    @property
    def guessed(self) -> list[str]:
        """Keys in whose place something was guessed."""
        return list(dict.fromkeys(r.key for r in self.refusals if r.guessed))


@dataclass(frozen=True, slots=True)
class _View:
    """A config as one recipe is given it: data, and the full names of keys that stand in the part."""

    data: Mapping[str, Any]
    places: Mapping[str, str]
    part: str

    def local(self, dotted: str) -> Path:
        """Path within ``data`` of a key by its full name."""
        return tuple((dotted.removeprefix(f"{self.part}.") if self.part else dotted).split("."))

    def full(self, path: Path) -> str:
        return ".".join((self.places.get(path[0], path[0]), *path[1:]))


@dataclass
class _Run:
    """One run of a recipe. said: why it stopped, "" when it came to its end. patches: changes made to the config."""

    probe: Probe
    spec: ModelSpec | None
    said: str
    patches: Patches

    @property
    def rank(self) -> tuple[bool, int]:
        return self.spec is not None, len(self.probe.session.asked)


_GONE = object()  # in place of a value: the key is left out


def read_through(recipe: Recipe, config: Mapping[str, Any]) -> Reading:
    """The reading of ``config``, or of the text model inside it where the recipe does not look there by itself."""
    part = next((p for p in PARTS if isinstance(config.get(p), Mapping)), None)
    root = _View(config, MappingProxyType({}), "")
    if part is None:
        return _settled(recipe, root)
    if any(key == part for key, _ in _run(recipe, root, {}).probe.session.asked):
        return _settled(recipe, root)
    outer = {k: v for k, v in config.items() if k != part}
    places = MappingProxyType({name: f"{part}.{name}" for name in config[part]})
    return _settled(recipe, _View({**outer, **config[part]}, places, part))


def _settled(recipe: Recipe, view: _View) -> Reading:
    """Read until the end or the bound; read again with other guesses; then ask what any allowed value would read."""
    first, mended, before = _brought_through(recipe, view, second=False)
    out = Reading(recipe, view.part, first.spec, stop=first.said)
    out.refusals = _once([*mended, *before[0].probe.session.refusals, *first.probe.session.refusals])
    out.refusals = _traced(out.refusals, mended, {view.full(path) for path in first.patches})
    runs = [first]
    if first.spec is not None and out.guessed:
        again, mended, origins = _brought_through(recipe, view, second=True)
        runs.append(again)
        out.vague = again.spec is None
        # What only one of two readings refuses, it refuses because of a guess.
        both = {(r.key, r.said) for run in (origins[0], again) for r in (*mended, *run.probe.session.refusals)}
        out.refusals = [r for r in out.refusals if (r.key, r.said) in both]
    picks = [(r, choice) for r in out.refusals for choice in r.choices][:MAX_CHOICES]
    tried = [_run(recipe, view, first.patches, Session(picks={r.key: choice})) for r, choice in picks]
    guesses = [run for (r, _), run in zip(picks, tried, strict=True) if r.guessed]
    out.others = [run.spec for run in (*runs[1:], *guesses) if run.spec is not None]
    _account(out, view, [*runs, *before, *tried])
    numbers = {r.key: r.used * 2 for r in out.refusals if _is_default_number(r)}
    if numbers and len(out.refusals) > 1:
        # What is refused only beside the default of a refused number follows from that one.
        other = _run(recipe, view, first.patches, Session(picks=numbers)).probe.session.refusals
        still = {r.said for r in other} | {r.said for r in mended}
        out.refusals = [replace(r, follows=r.follows or r.said not in still) for r in out.refusals]
    return out


def _is_default_number(refusal: Refusal) -> bool:
    """Whether a default stands in for a number that is stated otherwise; not the number in quotes itself."""
    plain = type(refusal.used) in (int, float) and refusal.stated is not None and not refusal.choices
    return plain and not refusal.guessed and str(refusal.used) != str(refusal.stated).strip()


def _account(out: Reading, view: _View, runs: Sequence[_Run]) -> None:
    """Fill what is read, ignored and unread from all runs, and the entries that others stand in for."""
    first = runs[0]
    changed = {view.full(path) for path in first.patches}
    left = [set(run.probe.unread()) - changed for run in runs]
    # Where the recipe never came to an end, what it asked about at all is not foreign to it.
    asked = {key for key, _ in first.probe.session.asked} if first.said else set()
    out.unread = [k for k in first.probe.unread() if all(k in unread for unread in left) and k not in asked]
    kept = first.probe.ledger
    read = {key for run in runs for key in run.probe.ledger.read} | changed | {r.key for r in out.refusals}
    read = {key for key in read if _get(view.data, view.local(key)) is not _GONE}
    ignored = {key: why for key, why in kept.ignored.items() if key not in read or key in kept.read}
    out.ledger = Ledger(read - set(ignored), ignored, dict(kept.defaulted))
    for path, value in first.patches.items():
        stated, key = _get(view.data, path), view.full(path)
        if isinstance(value, list) and stated is _GONE:
            out.entries[key] = dict.fromkeys(range(len(value)))
        elif isinstance(value, list) and isinstance(stated, list) and len(stated) == len(value):
            pairs = enumerate(zip(stated, value, strict=True))
            out.entries[key] = {i: entry for i, (entry, other) in pairs if entry != other}
        elif value is _GONE and isinstance(stated, list):
            said = [r.said for r in out.refusals if r.key == key]
            out.entries[key] = {i: entry for i, entry in enumerate(stated) if any(repr(entry) in s for s in said)}


def _traced(refusals: Sequence[Refusal], mended: Sequence[Refusal], changed: set[str]) -> list[Refusal]:
    """The refusals, with those marked that only follow from another: the recipe stops over a key that was refused
    before, or misses one that was left out, under this or another of its spellings.

    mended: from stops of the recipe's own, in the order in which they came. changed: keys that were changed for them.
    """
    lost = [r for r in refusals if r.stated is None and any(word in changed for word in _WORD.findall(r.said))]
    inside = [r for r in refusals if any(r.key.startswith(f"{key}.") for key in changed)]
    causes = [r for r in refusals if r not in mended and r not in lost and r not in inside]
    out = []
    for refusal in refusals:
        if refusal not in mended:
            follows = refusal in lost
            out += [replace(refusal, follows=follows)] if refusal.guessed or not follows else []
            continue
        out.append(replace(refusal, follows=any(_speaks_of(refusal, cause) for cause in causes)))
        causes.append(refusal)
    return out


def _speaks_of(refusal: Refusal, cause: Refusal) -> bool:
    """Whether a sentence names the key of another refusal, or an object above it; a foreign entry has its own fault."""
    if refusal.said == cause.said:
        return False
    entries = refusal.stated if isinstance(refusal.stated, list) else []
    if any(isinstance(entry, str) and repr(entry) in refusal.said for entry in entries):
        return False
    parts = [part for part in cause.key.split(".") if part not in PARTS] or [cause.key]
    words = {word.removeprefix(f"{part}.") for word in _WORD.findall(refusal.said) for part in PARTS}
    above = {".".join(parts[: i + 1]) for i in range(len(parts))}
    return bool(words & above) or parts[-1] in {word.rpartition(".")[2] for word in words}


def _once(refusals: Iterable[Refusal]) -> list[Refusal]:
    out: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        out.setdefault((refusal.key, refusal.said), refusal)
    return list(out.values())


def _brought_through(recipe: Recipe, view: _View, *, second: bool) -> tuple[_Run, list[Refusal], list[_Run]]:
    """The run that got furthest, what had to be changed for it, and the first run, with those before a list that is
    none was left out.

    second: guess otherwise.
    """
    run = _run(recipe, view, {}, Session(second=second))
    mended: list[Refusal] = []
    before = [run]
    seen: set[str] = set()
    for _ in range(MAX_STOPS):
        misshapen = [r for r in run.probe.session.refusals if r.misshapen and view.local(r.key) not in run.patches]
        if misshapen:  # as good as absent
            mended += [replace(r, used=None, guessed=False) for r in misshapen]
            gone = {view.local(r.key): _GONE for r in misshapen}
            before.append(run)
            run = _run(recipe, view, {**run.patches, **gone}, Session(second=second))
            continue
        if run.spec is not None:
            break
        seen.add(run.said)
        best: _Run | None = None
        for changes in _changes(run, view, second):
            for patches in changes:
                tried = _run(recipe, view, {**run.patches, **patches}, Session(second=second))
                if tried.said not in seen and (best is None or tried.rank > best.rank):
                    best = tried
                if tried.spec is not None:
                    break
            if best is not None:
                break
        if best is None:
            break
        mended += _mended(run, best, view)
        run = best
    return run, mended, before


def _mended(stopped: _Run, best: _Run, view: _View) -> Iterator[Refusal]:
    """What was changed between two runs, with the sentence that made it necessary."""
    for path, used in best.patches.items():
        if path in stopped.patches and stopped.patches[path] is used:
            continue
        stated = _get(view.data, path)
        stated, used = (None if value is _GONE else value for value in (stated, used))
        entries = stated if isinstance(stated, list) else []
        invented = used is INVENTED or (isinstance(used, list) and not any(entry in used for entry in entries))
        resized = isinstance(used, list) and len(entries) != len(used)
        used = None if used is INVENTED else used
        known = stated is not None and not resized
        yield Refusal(view.full(path), stopped.said, stated, used, guessed=invented, of_kind=known)


def _run(recipe: Recipe, view: _View, patches: Patches, session: Session | None = None) -> _Run:
    data = view.data
    for path, value in patches.items():
        data = _put(data, path, value)
    probe = Probe(data, session=session, places=view.places)
    try:
        spec = recipe.make_spec(probe)
        if isinstance(spec, ModelSpec):
            return _Run(probe, spec, "", patches)
        said = f"spec() of the recipe {recipe.name} gives a {type(spec).__name__}, not a ModelSpec."
    except ConfigError as error:
        said = str(error)
    except (*RECIPE_ERRORS, SystemExit) as error:
        said = f"config.json does not fit the recipe {recipe.name}: {type(error).__name__}: {str(error)[:200]}."
    return _Run(probe, None, said, patches)


def _changes(run: _Run, view: _View, second: bool) -> tuple[list[Patches], list[Patches]]:
    """What to try at a stop: first changes that keep most of what the config states; if none gets on, the others."""
    kinds: dict[str, set[str]] = {}
    for key, kind in run.probe.session.asked:
        kinds.setdefault(key, set()).add(kind)
    early: list[Patches] = []
    late: list[Patches] = []
    stated: dict[Path, Any] = {}
    for key in _suspects(run, view):
        path = view.local(key)
        value = run.patches[path] if path in run.patches else _get(view.data, path)
        if value is _GONE or value is None:
            # ``has`` alone does not tell what kind of value a key would have.
            early += [{path: True}] if kinds[key] & {"bool", "one_of"} else []
            late.append({path: INVENTED})
            continue
        if value is INVENTED and "list" in kinds[key]:
            value = [UNKNOWN_ENTRY]
        if isinstance(value, list):
            # Without an entry that the recipe knows, what it takes where there is no list is less of a guess.
            texts = [entry for entry in value if isinstance(entry, str)]
            early += [{path: _GONE}] if texts and all(repr(entry) in run.said for entry in texts) else []
            early += [{path: made} for made in _lists(value, run.said, second)]
        stated[path] = value
        late.append({path: _GONE})
    together: list[Patches] = [dict.fromkeys(stated, _GONE)] if len(stated) > 1 else []
    return early[:MAX_TRIES], [*late[:MAX_TRIES], *together]


def _lists(value: list[Any], said: str, second: bool) -> Iterator[list[Any]]:
    """Lists of known entries or of the right length, in place of one that is refused."""
    texts = [entry for entry in value if isinstance(entry, str)]
    foreign = next((entry for entry in texts if repr(entry) in said), None)
    if foreign is not None:
        own = [entry for entry, _ in Counter(texts).most_common() if repr(entry) not in said]
        # A refusal ends with the words that are known.
        told = [word for word in _WORD.findall(said) if word != foreign and word not in own]
        for other in (*own, *(told[-2:] if second else reversed(told[-2:]))):
            yield [other if entry == foreign else entry for entry in value]
    for number in map(int, _NUMBER.findall(said)):
        if value and number not in (0, len(value)):
            yield [value[min(i, len(value) - 1)] for i in range(number)]


def _suspects(run: _Run, view: _View) -> list[str]:
    """Dotted keys that a stop may be about: those its sentence names, in its order, else those asked last."""
    asked = list(dict.fromkeys(key for key, _ in reversed(run.probe.session.asked)))
    out: dict[str, None] = {}
    for word in _WORD.findall(run.said):
        out.update(dict.fromkeys(key for key in asked if key == word or key.endswith(f".{word}")))
    if not out:
        there = [key for key in asked if _get(view.data, view.local(key)) not in (_GONE, None)]
        out.update(dict.fromkeys(there[:NUM_LATEST]))
    return list(out)


def _get(data: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return _GONE
        data = data[part]
    return data


def _put(data: Mapping[str, Any], path: Sequence[str], value: Any) -> Mapping[str, Any]:
    """A copy of ``data`` with another value at ``path``, or without it."""
    first, *rest = path
    out = dict(data)
    if rest:
        inner = out.get(first)
        out[first] = _put(inner if isinstance(inner, Mapping) else {}, rest, value)
    elif value is _GONE:
        out.pop(first, None)
    else:
        out[first] = value
    return out
