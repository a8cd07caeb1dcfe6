"""What console.py prints where, and what it never prints."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass

import msgspec
import pytest

import dayzero.console as console_module
from dayzero.console import Console, Progress, clean, duration_text, no_progress, plain, short_list
from dayzero.errors import CheckpointError
from dayzero.finding import Finding

NAMES = tuple(f"layers.{i}.weight" for i in range(11))
FINDINGS = [
    Finding("tensors.used", "weights", "pass", "every tensor is used", 272, 272),
    Finding("tensors.missing", "weights", "fail", "every parameter is stored", 11, 0, NAMES, "fetch the shard again"),
    Finding("config.defaulted", "config", "note", "keys left to class defaults", ("rope_theta",)),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _console(**options: bool) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(stdout=out, stderr=err, **options), out, err


def test_findings_are_grouped_worst_first_with_short_evidence() -> None:
    console, out, _ = _console()
    console.findings(FINDINGS, "fail")
    text = out.getvalue()
    assert text.index("weights") < text.index("config")
    assert text.index("every parameter is stored") < text.index("every tensor is used")
    assert "layers.7.weight, +3 more" in text
    assert "layers.8.weight" not in text
    assert "remedy: fetch the shard again" in text
    assert text.endswith("verdict: fail (1 fail, 1 note, 1 pass)\n")


def test_all_shows_every_evidence_name() -> None:
    console, out, _ = _console(show_all=True)
    console.findings(FINDINGS, "fail")
    assert all(name in out.getvalue() for name in NAMES)


def test_three_of_a_kind_stand_for_many() -> None:
    many = [Finding("weights.constant", "weights", "fail", f"w{i} is zero", evidence=(f"w{i}",)) for i in range(30)]
    many.insert(7, Finding("weights.other", "weights", "fail", "one of another kind"))
    console, out, _ = _console(quiet=True)
    console.findings(many, "fail")
    text = out.getvalue()
    assert text.count(" is zero") == 3
    assert "27 more findings like the last ones (weights.constant); --all shows them" in text
    assert "evidence: w3, w4, w5, w6, w7, w8, w9, w10, +19 more" in text
    assert "one of another kind" in text and text.endswith("verdict: fail (31 fail, 0 note, 0 pass)\n")
    console, out, _ = _console(show_all=True)
    console.findings(many, "fail")
    assert out.getvalue().count(" is zero") == 30


def test_the_headline_is_the_verdict() -> None:
    console, out, _ = _console()
    console.headline("fail", "model", FINDINGS)
    assert out.getvalue() == "fail: model (1 fail, 1 note)\n"
    for options in ({"quiet": True}, {"json_mode": True}):
        console, out, _ = _console(**options)
        console.headline("fail", "model", FINDINGS)
        assert out.getvalue() == ""


def test_lines_are_narrow_and_have_no_blanks_at_their_end() -> None:
    console, out, _ = _console()
    console.table("title", ["name", "value"], [["a" * 30, "word " * 40], ["b", "c"]])
    console.table("no head", ("", ""), [["left", "right"]])
    console.words("names", ["x" * 20] * 12)
    lines = out.getvalue().split("\n")
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines), lines
    assert lines[lines.index("no head") + 1] == "left  right"


def test_a_narrow_terminal_gets_whole_words_and_a_line_that_can_be_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "columns_of", lambda terminal: 40)
    out = Terminal()
    console = Console(stdout=out)
    console.table("", ["site", "worst token", "value"], [["layers.0.mixer", "1.0e-05", "some words " * 9]])
    console.table("", ["name"], [["z" * 100]])
    console.words("names", ["x" * 20] * 3)
    lines = re.sub(r"\x1b\[\d+m", "", out.getvalue()).split("\n")
    assert all(len(line) <= 40 for line in lines), lines
    assert "layers.0.mixer" in out.getvalue() and "1.0e-05" in out.getvalue()
    assert sum(line.count("z") for line in lines) == 100
    assert sum("x" * 20 in line for line in lines) == 3
    monkeypatch.setattr(console_module, "SHOW_AFTER_SECONDS", 0.01)
    err = Terminal()
    with Progress(err, "reading", 4, "files") as bar:
        bar.note("n" * 100)
        while "n" not in err.getvalue():
            pass
    assert all(len(drawn) < 40 for drawn in err.getvalue().split("\r\x1b[2K"))


def test_quiet_shows_failures_and_the_verdict_only() -> None:
    console, out, err = _console(quiet=True)
    console.line("hello")
    console.table("t", ["a"], [[1]])
    console.findings(FINDINGS, "fail")
    console.result("asked for")
    text = out.getvalue()
    assert "hello" not in text
    assert "class defaults" not in text
    assert "every parameter is stored" in text
    assert text.endswith("asked for\n")
    assert err.getvalue() == ""


def test_json_mode_prints_exactly_one_object() -> None:
    console, out, _ = _console(json_mode=True)
    console.line("hello")
    console.table("t", ["a"], [[1]])
    console.findings(FINDINGS, "fail")
    console.stream("word")
    console.result("path")
    console.emit_json({"findings": FINDINGS})
    read = json.loads(out.getvalue())
    assert read["findings"][1]["evidence"] == list(NAMES)


def test_an_error_is_one_sentence_and_an_object_in_json_mode() -> None:
    console, out, err = _console(json_mode=True)
    console.error(CheckpointError("model.safetensors: the header is cut off"))
    assert err.getvalue() == "error: model.safetensors: the header is cut off\n"
    expected = {"kind": "CheckpointError", "message": "model.safetensors: the header is cut off", "exit_code": 1}
    assert json.loads(out.getvalue()) == {"error": expected}


def test_names_from_files_cannot_steer_the_terminal() -> None:
    console, out, err = _console()
    evil = "w\x1b[2Jx\rfake verdict: pass [bold]m[/bold]"
    console.findings([Finding("a.b", "weights", "fail", evil, evil, None, (evil,), evil)], "fail")
    console.table(evil, [evil], [[evil]])
    console.line(evil)
    console.error(CheckpointError(evil))
    for text in (out.getvalue(), err.getvalue()):
        assert "\x1b" not in text
        assert "\r" not in text
    assert "[bold]m[/bold]" in out.getvalue()


def test_an_answer_cannot_steer_the_terminal_and_a_pipe_gets_it_as_it_is() -> None:
    said = "né\u00a0\u200d日\tx\n\x1b[2J\r\x9b1m\x00"
    out, piped = Terminal(), io.StringIO()
    for dim in (False, True):
        Console(stdout=out).stream(said, dim=dim)
        Console(stdout=piped).stream(said, dim=dim)
    shown = "né\u00a0\u200d日\tx\n\\x1b[2J\\r\\x9b1m\\x00"
    assert out.getvalue() == shown + f"\x1b[2m{shown}\x1b[22m"
    assert piped.getvalue() == said * 2


def test_long_names_are_not_wrapped_or_cut() -> None:
    console, out, _ = _console()
    name = "model.layers." + "x" * 400
    console.findings([Finding("a.b", "weights", "fail", "c", evidence=(name,))], "fail")
    console.table("t", ["name"], [["y" * 100]])
    assert name in out.getvalue()
    assert "y" * 100 in out.getvalue()


def test_plain_writes_what_json_lacks() -> None:
    @dataclass
    class Pair:
        left: float
        right: frozenset[str]

    class Record(msgspec.Struct):
        rows: list[tuple[str, float]]

    value = {"p": Pair(math.nan, frozenset("ba")), 3: (math.inf, 0.5, None, True), "s": Record([("a", math.inf)])}
    shown = {"p": {"left": "nan", "right": ["a", "b"]}, "3": ["inf", 0.5, None, True], "s": {"rows": [["a", "inf"]]}}
    assert plain(value) == shown


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3671, "1:01:11")])
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_short_list_counts_the_rest() -> None:
    assert short_list(["a"] * 8) == ", ".join("a" * 8)
    assert short_list(list("abcdefghij")).endswith("h, +2 more")
    assert short_list(list("abcdefghij"), show_all=True).endswith("i, j")
    assert short_list(["one, two", "three"]) == "one, two; three"
    assert short_list(["one, two", *"abcdefgh"]).endswith("f; g; +1 more")


def test_progress_text_has_share_amount_and_eta() -> None:
    bar = Progress(io.StringIO(), "reading", 8, "files")
    bar.advance(2)
    bar.note("b.safetensors")
    text = bar.text(30.0)
    assert "25% 2 of 8 files  ETA 1:30  b.safetensors" in text
    unknown = Progress(io.StringIO(), "reading", None, "B")
    unknown.advance(2048)
    assert unknown.text(5.0) == "reading  2.00 KiB in 0:05"
    assert Progress(io.StringIO(), "loading").text(5.0) == "loading  0:05"
    unknown.reach(1024, 4096)
    assert "25% 1.00 KiB of 4.00 KiB  ETA 0:15" in unknown.text(5.0)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress_shows_only_after_its_delay(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    with Progress(stream, "quick", 1, "files") as bar:
        bar.advance()
    assert stream.getvalue() == ""
    monkeypatch.setattr(console_module, "SHOW_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(console_module, "PIPED_INTERVAL_SECONDS", 0.01)
    with Progress(stream, "slow", 4, "files") as bar:
        bar.advance(1)
        while "slow" not in stream.getvalue():
            pass
    shown = stream.getvalue()
    assert "1 of 4 files" in shown
    assert shown.endswith("\r\x1b[2K") if stream.isatty() else shown.endswith("\n") and "\r" not in shown


def test_a_closed_stderr_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "SHOW_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(console_module, "PIPED_INTERVAL_SECONDS", 0.01)
    stream = io.StringIO()
    bar = Progress(stream, "slow", 4, "files")
    stream.isatty()
    with bar:
        stream.close()
        bar.advance(1)


def test_no_progress_and_quiet_show_nothing() -> None:
    console, _, err = _console(quiet=True)
    for context in (no_progress("x", 2, "files"), console.progress("x", 2, "files")):
        with context as bar:
            bar.advance()
            bar.reach(2, 3)
            bar.note("y")
    assert err.getvalue() == ""


def test_clean_keeps_text_and_writes_out_controls() -> None:
    assert clean("é 日\n\t") == "é 日\n\t"
    assert clean("a\x1bb\x00\u202e") == "a\\x1bb\\x00\\u202e"
