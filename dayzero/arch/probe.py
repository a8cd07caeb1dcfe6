"""A config that answers a recipe's every question, so that a reading goes on past what the recipe refuses.

For models that no recipe covers, and for configs with a fault: what is absent or refused is remembered together with
the value that stood in for it. The strict reading is Raw's; nothing is ever loaded from a probe's answers.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dayzero.arch.raw import _MISSING, Ledger, Raw
from dayzero.errors import ConfigError

INVENTED: Any = object()  # value of a key that a config lacks: there, but every getter has to guess what it is
MAX_DIGITS, MAX_LAYERS = 15, 10_000  # of a number in quotes that is taken for one
WIDTHS = ("size", "dim", "rank", "width", "length", "position", "window")  # words in names of large numbers
LISTS = ("list", "ints")  # getters of lists
UNKNOWN_ENTRY = "?"  # of an invented list: no recipe knows it, so the refusal names the entries that it does know


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer that the config does not give. key: dotted, as the config spells it. said: the sentence.

    stated: the config's value, None when absent. used: what stood in for it; None where the key was left out instead.
    choices: further values that the recipe would have taken. guessed: nothing said what to use, so what follows from
    it is not known. of_kind: the value has a kind that the recipe could take, but is none it knows. misshapen: the
    recipe asks for a list and the value is none. follows: told only because another value is refused.
    """

    key: str
    said: str
    stated: Any = None
    used: Any = None
    choices: tuple[Any, ...] = ()
    guessed: bool = False
    of_kind: bool = False
    misshapen: bool = False
    follows: bool = False


@dataclass
class Session:
    """What one reading shares with the parts of the config that it opens.

    refusals, asked: filled as the recipe asks; asked has (dotted key, kind of question). second: guess other numbers
    than the first reading did. picks: dotted key -> the choice to stand in for a refused value.
    """

    second: bool = False
    picks: Mapping[str, Any] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)


class Probe(Raw):
    """A Raw whose getters never raise. places: dotted names of keys that stand in another object than this one.

    invented: the config has no such object, so that a default would be a guess like any other value.
    """

    def __init__(
        self,
        data: Mapping[builtins.str, Any],
        *,
        path: builtins.str = "",
        ledger: Ledger | None = None,
        session: Session | None = None,
        places: Mapping[builtins.str, builtins.str] = MappingProxyType({}),
        invented: builtins.bool = False,
    ) -> None:
        super().__init__(data, path=path, ledger=ledger)
        self.session = session if session is not None else Session()
        self._places = places
        self._invented = invented

    def full(self, name: builtins.str) -> builtins.str:
        return self._places.get(name) or super().full(name)

    def _guess(self, name: builtins.str) -> builtins.int:
        """A number to use for ``name``: widths above counts, and not all in the same proportion a second time.

        Widths are squares, as a grid of positions must be.
        """
        wide = any(word in name for word in WIDTHS)
        if not self.session.second:
            return 256 if wide else 2
        more = len(self.session.refusals) % 2
        return 1024 << 2 * more if wide else 4 << more

    def _note(self, kind: builtins.str, names: Iterable[builtins.str]) -> None:
        self.session.asked.extend((self.full(name), kind) for name in names)

    def has(self, name: builtins.str) -> builtins.bool:
        self._note("has", (name,))
        return super().has(name)

    def ignore(self, *names: builtins.str, why: builtins.str) -> None:
        self._note("ignore", names)
        super().ignore(*names, why=why)

    def whole(self, name: builtins.str, default: Any = None) -> Any:
        self._note("whole", (name,))
        return super().whole(name, default)

    def int(self, *names: builtins.str, default: Any = _MISSING, least: builtins.int = 0) -> builtins.int:
        ask = _Question("int", names, default, max(least, self._guess(names[0])))
        return self._answer(ask, lambda asked, value: Raw.int(asked, *value, default=default, least=least))

    def float(self, *names: builtins.str, default: Any = _MISSING) -> builtins.float:
        # Above 1, so that a rope of this base still has a logarithm to divide by.
        ask = _Question("float", names, default, 3.0 if self.session.second else 2.0)
        return self._answer(ask, lambda asked, value: Raw.float(asked, *value, default=default))

    def bool(self, *names: builtins.str, default: Any = _MISSING) -> builtins.bool:
        ask = _Question("bool", names, default, self.session.second, choices=(False, True))
        return self._answer(ask, lambda asked, value: Raw.bool(asked, *value, default=default))

    def str(self, *names: builtins.str, default: Any = _MISSING) -> builtins.str:
        return self._answer(
            _Question("str", names, default, ""), lambda asked, value: Raw.str(asked, *value, default=default)
        )

    def list(self, *names: builtins.str, default: Any = _MISSING) -> builtins.list[Any]:
        ask = _Question("list", names, default, [UNKNOWN_ENTRY] if INVENTED in map(self.peek, names) else [])
        return self._answer(ask, lambda asked, value: Raw.list(asked, *value, default=default))

    def ints(self, *names: builtins.str, default: Any = _MISSING) -> tuple[builtins.int, ...]:
        ask = _Question("ints", names, default, (4, 4) if self.session.second else (2, 2))
        return self._answer(ask, lambda asked, value: Raw.ints(asked, *value, default=default))

    def one_of(self, *names: builtins.str, allowed: Iterable[Any], default: Any = _MISSING) -> Any:
        choices = tuple(allowed)
        default = _MISSING if self._invented and len(choices) > 1 else default
        ask = _Question("one_of", names, default, choices[0] if choices else None, choices=choices)
        return self._answer(ask, lambda asked, value: Raw.one_of(asked, *value, allowed=choices, default=default))

    def sub(self, name: builtins.str) -> Raw:
        if name not in self._opened:
            self._note("sub", (name,))
            value = self.peek(name)
            try:
                super().sub(name)
            except ConfigError as error:
                if value is not INVENTED:
                    said = builtins.str(error)
                    self.session.refusals.append(Refusal(self.full(name), said, value, guessed=True))
            there = isinstance(value, Mapping)
            self._opened[name] = Probe(
                value if there else {}, path=self.full(name), ledger=self.ledger, session=self.session,
                invented=self._invented or not there,
            )  # fmt: skip
        return self._opened[name]

    def _answer(self, ask: _Question, read: Callable[[Raw, Sequence[builtins.str]], Any]) -> Any:
        """The config's answer, else what stands in for it."""
        self._note(ask.kind, ask.names)
        try:
            return read(self, ask.names)
        except ConfigError as error:
            said = builtins.str(error)
        self.ledger.read.update(self.full(name) for name in ask.names if name in self._data)
        stated = [name for name in ask.names if Raw.has(self, name)]
        key = self.full((stated or builtins.list(ask.names))[0])
        used, guessed = self._stand_in(ask, stated, key, read)
        value = self.peek(stated[0]) if stated else None
        if value is INVENTED:  # who put it there knows
            return used
        self.session.refusals.append(
            Refusal(
                key, said, value, used, tuple(c for c in ask.choices if c is not used), guessed,
                of_kind=bool(stated) and any(type(c) is type(value) for c in ask.choices),
                misshapen=bool(stated) and ask.kind in LISTS,
            )
        )  # fmt: skip
        return used

    def _stand_in(
        self,
        ask: _Question,
        stated: Sequence[builtins.str],
        key: builtins.str,
        read: Callable[[Raw, Sequence[builtins.str]], Any],
    ) -> tuple[Any, builtins.bool]:
        """(value, whether it is a guess) in place of an answer: the nearest that the recipe allows."""
        if key in self.session.picks:
            return self.session.picks[key], False
        if len(stated) > 1:  # spellings that differ: each on its own may be sound, then the first one counts
            for name in stated:
                try:
                    return read(self, (name,)), False
                except ConfigError:
                    continue
        mended = _number(self.peek(stated[0]), ask.names[0]) if stated and ask.kind in ("int", "float") else None
        if mended is not None:
            try:
                return read(Raw({ask.names[0]: mended}), ask.names[:1]), False
            except ConfigError:
                pass
        if ask.default is not _MISSING:
            return ask.default, False
        if ask.kind == "one_of" and stated and ask.choices:
            return _closest(self.peek(stated[0]), ask.choices), False
        return ask.guess, len(ask.choices) != 1


@dataclass(frozen=True, slots=True)
class _Question:
    """kind: the getter. guess: what to use when nothing else says it."""

    kind: str
    names: tuple[str, ...]
    default: Any
    guess: Any
    choices: tuple[Any, ...] = ()


def _number(value: Any, name: str) -> float | int | None:
    """``"4096"`` is meant as 4096; None for what is no number in quotes, or one that no model has."""
    if not isinstance(value, str) or len(value) > MAX_DIGITS:
        return None
    try:
        number = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
    except ValueError:
        return None
    return None if "layer" in name and number > MAX_LAYERS else number


def _closest(value: Any, choices: Sequence[Any]) -> Any:
    """The choice most like ``value``: the nearest number, the most similar word, else the first."""
    if isinstance(value, str):
        words = [choice for choice in choices if isinstance(choice, str)]
        near = difflib.get_close_matches(value, words, 1, 0.0)
        return near[0] if near else choices[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        numbers = [c for c in choices if isinstance(c, int | float) and not isinstance(c, bool)]
        return min(numbers, key=lambda c: abs(c - value), default=choices[0])
    return choices[0]
