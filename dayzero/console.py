"""What a person or a program sees of a command: lines, tables, findings, progress, one JSON object.

Results go to stdout, progress and errors to stderr. With ``json_mode`` stdout carries exactly one JSON object. With
``quiet`` only the verdict, failed findings and what the caller asked for by name (``result``) are printed.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from dayzero.errors import UserError
from dayzero.finding import LAYERS, Finding, Verdict
from dayzero.terminal import column_widths, harmless
from dayzero.terminal import columns as columns_of
from dayzero.units import bytes_text

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

SHOW_AFTER_SECONDS = 2.0
PIPED_INTERVAL_SECONDS = 10.0
NUM_EVIDENCE_SHOWN = 8
MOST_OF_A_KIND = 3
PIPED_WIDTH = 120
STYLES: Mapping[str, str] = {"pass": "green", "note": "yellow", "fail": "bold red", "not applicable": "dim"}


class Bar(Protocol):
    """How far one long piece of work has come."""

    def advance(self, count: float = 1) -> None:
        """``count`` more units are done."""

    def reach(self, done: float, total: float | None = None) -> None:
        """``done`` units are done in all, of ``total`` where that is known only now: for callbacks that report both."""

    def note(self, text: str) -> None:
        """What is being worked on now, e.g. a file name; shown behind the bar."""


class ProgressFactory(Protocol):
    """Makes a context with a Bar. total: units, None when unknown; unit: ``B`` for bytes or a plural noun."""

    def __call__(self, label: str, total: float | None = None, unit: str = "", /) -> AbstractContextManager[Bar]: ...


class _NoBar:
    def advance(self, count: float = 1) -> None:
        pass

    def reach(self, done: float, total: float | None = None) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def no_progress(label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Bar]:
    """A ProgressFactory that shows nothing: for library calls and tests."""
    return _NoBar()


def clean(text: str) -> str:
    """``text`` with control characters written out: names come from files that nobody has vouched for."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def duration_text(seconds: float) -> str:
    """65 -> '1:05', 3671 -> '1:01:11'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """A bar with an ETA on ``stream`` once the work has taken more than two seconds.

    On a terminal the line is redrawn four times a second; elsewhere a line is written then and every ten seconds. It is
    drawn by a thread, so work that does not call ``advance`` for long still shows that it is alive.
    """

    def __init__(self, stream: TextIO, label: str, total: float | None = None, unit: str = "") -> None:
        self._stream, self._label, self._total, self._unit = stream, label, total, unit
        self._terminal = stream.isatty()
        self._done = 0.0
        self._note = ""
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def advance(self, count: float = 1) -> None:
        self._done += count

    def reach(self, done: float, total: float | None = None) -> None:
        self._done = done
        self._total = total if total is not None else self._total

    def note(self, text: str) -> None:
        self._note = clean(text)

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def text(self, elapsed_seconds: float) -> str:
        """The line as it stands after ``elapsed_seconds``."""
        parts = [self._label]
        if self._total:
            share = min(self._done / self._total, 1.0)
            filled = round(20 * share)
            parts.append(f"[{'#' * filled}{'.' * (20 - filled)}] {share:4.0%} {self._amount()}")
            if share > 0:
                parts.append(f"ETA {duration_text(elapsed_seconds * (1 - share) / share)}")
        elif self._unit:
            parts.append(f"{self._amount()} in {duration_text(elapsed_seconds)}")
        else:
            parts.append(duration_text(elapsed_seconds))
        return "  ".join([*parts, self._note] if self._note else parts)

    def _amount(self) -> str:
        if self._unit == "B":
            done = bytes_text(self._done)
            return f"{done} of {bytes_text(self._total)}" if self._total else done
        done = f"{self._done:.0f}"
        return f"{done} of {self._total:.0f} {self._unit}".rstrip() if self._total else f"{done} {self._unit}".rstrip()

    def _run(self) -> None:
        if self._stop.wait(SHOW_AFTER_SECONDS):
            return
        while True:
            line = self.text(time.monotonic() - self._began)
            # a line that is longer than the terminal is wide cannot be drawn over
            if not self._write(f"\r\x1b[2K{line[: columns_of(self._stream) - 1]}" if self._terminal else line + "\n"):
                return
            if self._stop.wait(0.25 if self._terminal else PIPED_INTERVAL_SECONDS):
                break
        if self._terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> bool:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed stderr must not end the work it tells of
            return False
        return True


def plain(value: Any) -> Any:
    """``value`` as JSON knows it: dataclasses, structs and ``to_json`` objects as objects, sets sorted, NaN as text.

    JSON has neither NaN nor infinities, and null would hide that a number was measured.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "__struct_fields__"):  # of a msgspec.Struct, a library that this room does not need otherwise
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def short_list(names: Sequence[str], show_all: bool = False) -> str:
    """At most eight names, then how many more there are; between semicolons where a name holds a comma itself."""
    shown = names if show_all else names[:NUM_EVIDENCE_SHOWN]
    left = len(names) - len(shown)
    gap = "; " if any(", " in name for name in shown) else ", "
    return gap.join([*shown, f"+{left} more"] if left else shown)


class Console:
    """One command's output. ``show_all`` lifts the limit on evidence names."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        json_mode: bool = False,
        show_all: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.quiet, self.json_mode, self.show_all = quiet, json_mode, show_all
        self._stdout, self._stderr = stdout or sys.stdout, stderr or sys.stderr
        self._made: RichConsole | None = None

    @property
    def _rich(self) -> RichConsole:
        # rich takes a third of the time that the command line has for its own import, and JSON never needs it
        if self._made is None:
            from rich.console import Console as RichConsole

            class Strict(RichConsole):
                def on_broken_pipe(self) -> None:
                    raise  # rich would exit with 1, which is a verdict here

            self._made = Strict(file=self._stdout, width=self._width, highlight=False, markup=False, emoji=False)
        return self._made

    @property
    def _width(self) -> int:
        return columns_of(self._stdout) if self._stdout.isatty() else PIPED_WIDTH

    def _print(self, *pieces: tuple[str, str]) -> None:
        """One line made of (text, style) pieces, never wrapped and never read as markup."""
        from rich.text import Text

        line = Text()
        for text, style in pieces:
            line.append(clean(text), style)
        self._rich.print(line, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        """One line for a person; nothing with ``quiet`` or ``json_mode``."""
        if not (self.quiet or self.json_mode):
            self._print((text, style))

    def headline(self, verdict: Verdict, text: str, findings: Iterable[Finding]) -> None:
        """The first line of a report: the verdict, what it is about, how many findings fail and are notes."""
        if self.quiet or self.json_mode:
            return
        listed = list(findings)
        counts = ", ".join(f"{sum(f.verdict == v for f in listed)} {v}" for v in ("fail", "note"))
        self._print((f"{verdict}: {text} ({counts})", STYLES[verdict]))

    def words(self, label: str, words: Iterable[str]) -> None:
        """``label: a, b, c`` for a person, wrapped between words and set in below the first line."""
        text = f"{label}: {', '.join(words)}"
        wrapper = textwrap.TextWrapper(
            self._width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        self.line(wrapper.fill(text))

    def result(self, text: str) -> None:
        """A line the caller asked for by name, printed as it is even when quiet; nothing with ``json_mode``."""
        if not self.json_mode:
            self._stdout.write(text + "\n")

    def stream(self, text: str, *, dim: bool = False) -> None:
        """A piece of a streamed answer, flushed at once; nothing with ``json_mode``. Only a pipe gets it as it is."""
        if not self.json_mode:
            if self._stdout.isatty():
                text = f"\x1b[2m{harmless(text)}\x1b[22m" if dim else harmless(text)
            self._stdout.write(text)
            self._stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; columns whose cells are all numbers are set flush right. Without column names it has no head."""
        if self.quiet or self.json_mode:
            return
        from rich.table import Table
        from rich.text import Text

        cells = [[_cell(value) for value in row] for row in rows]
        table = Table(
            title=Text(clean(title)) if title else None,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
            show_header=any(columns),
        )
        widths = column_widths([columns, *cells], self._width)
        for index, column in enumerate(columns):
            numeric = bool(cells) and all(row[index][:1].isdigit() for row in cells)
            justify: Literal["left", "right"] = "right" if numeric else "left"
            table.add_column(Text(clean(column)), justify=justify, overflow="fold", width=widths[index])
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        with self._rich.capture() as capture:
            self._rich.print(table)
        # rich fills every line up to the table's width
        self._stdout.write("\n".join(line.rstrip(" ") for line in capture.get().split("\n")))

    def progress(self, label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Bar]:
        """A ProgressFactory: context that shows how far the work is, on stderr. Nothing when quiet."""
        return _NoBar() if self.quiet else Progress(self._stderr, label, total, unit)

    def news(self, text: str) -> None:
        """A line about work that goes on, on stderr; nothing when quiet."""
        if not self.quiet:
            self._stderr.write(clean(text) + "\n")
            self._stderr.flush()

    def emit_json(self, value: object) -> None:
        """The one JSON object of a ``json_mode`` run; nothing otherwise."""
        if self.json_mode:
            self._stdout.write(json.dumps(plain(value), allow_nan=False, ensure_ascii=False) + "\n")
            self._stdout.flush()

    def findings(self, findings: Iterable[Finding], verdict: Verdict) -> None:
        """Findings grouped by layer, worst first, then the verdict. A pass is one line; quiet shows fails only.

        Of many findings of one kind the first three stand for all, unless every name was asked for.
        """
        if self.json_mode:
            return
        listed = list(findings)
        order = {"fail": 0, "note": 1, "pass": 2, "not applicable": 3}
        for layer in LAYERS:
            group = sorted((f for f in listed if f.layer == layer), key=lambda f: order[f.verdict])
            shown = [f for f in group if f.verdict == "fail" or not self.quiet]
            if shown:
                self._print((layer, "bold"))
            for finding in self._few_of_each_kind(shown):
                self._finding(finding)
        numbers = {v: sum(f.verdict == v for f in listed) for v in order}
        counts = ", ".join(f"{n} {v}" for v, n in numbers.items() if n or v != "not applicable")
        self._print((f"verdict: {verdict}", STYLES[verdict]), (f" ({counts})", ""))

    def _few_of_each_kind(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        of_kind: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            of_kind.setdefault((finding.verdict, finding.kind), []).append(finding)
        for same in of_kind.values():
            rest = [] if self.show_all or len(same) <= MOST_OF_A_KIND + 1 else same[MOST_OF_A_KIND:]
            yield from same[: len(same) - len(rest)]
            if rest:
                claim = f"{len(rest)} more findings like the last ones ({rest[0].kind}); --all shows them"
                names = tuple(dict.fromkeys(name for finding in rest for name in finding.evidence))
                yield replace(rest[0], claim=claim, measured=None, bound=None, evidence=names, remedy="")

    def _finding(self, finding: Finding) -> None:
        self._print(("  ", ""), (f"{finding.verdict:<4}", STYLES[finding.verdict]), (f"  {finding.claim}", ""))
        if finding.verdict == "pass":
            return
        rows = [
            ("measured", "" if finding.measured is None else _cell(finding.measured)),
            ("bound", "" if finding.bound is None else _cell(finding.bound)),
            ("evidence", short_list(finding.evidence, self.show_all)),
            ("remedy", finding.remedy),
        ]
        for name, text in rows:
            if text:
                self._print((f"        {name}: {text}", ""))

    def error(self, error: UserError) -> None:
        """One sentence on stderr, and with ``json_mode`` the same as an object on stdout."""
        self.problem(type(error).__name__, str(error), error.exit_code)

    def problem(self, kind: str, message: str, exit_code: int) -> None:
        """As ``error``, for what is no UserError: wrong options, an interrupted run, a bug."""
        self._stderr.write(f"error: {clean(message)}\n")
        self.emit_json({"error": {"kind": kind, "message": message, "exit_code": exit_code}})


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return short_list([_cell(item) for item in value])
    return clean(str(value))
