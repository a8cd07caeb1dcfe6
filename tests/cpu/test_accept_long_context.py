"""The long-context stage finds what is planted: in the cache, at a threshold, at the limit, in memory, in needles."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dayzero.acceptance.accept.stage import Context
from dayzero.acceptance.stages import long_context, long_exact, long_grid, long_limit, robust_memory
from dayzero.acceptance.stages.long_known import Known, Threshold, look, of_spec, option, paper_of
from dayzero.acceptance.stages.long_limit import Taken
from dayzero.acceptance.stages.long_needle import Form, Haystack, form_from
from dayzero.acceptance.stages.long_pace import Pace, Speed, speed_of
from dayzero.acceptance.stages.robust_ask import Completion
from dayzero.engine.events import Logprobs, Output
from dayzero.engine.request import NewRequest
from dayzero.errors import UsageError
from dayzero.finding import Finding
from tests.cpu.accept_fakes import failed, foreign, named, real, scripted
from tests.paper.server_support import ScriptedEngine, byte_tokenizer, make

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
_NEEDLE = re.compile(r"secret number of (\w+) is (\d{5})\.")
USUAL = Form()
WINDOW = Threshold("window", 700, "operator")


def steady(request: NewRequest) -> Sequence[int]:
    """An answer that follows from the prompt alone."""
    return [65 + (sum(request.prompt) + i) % 26 for i in range(100)]


def reading(sees: Callable[[list[int]], list[int]]) -> Callable[[NewRequest], Sequence[int]]:
    """A model that finds a needle in what it ``sees`` of the prompt."""

    def reply(request: NewRequest) -> Sequence[int]:
        text = byte_tokenizer().decode(sees(request.prompt))
        found = dict(_NEEDLE.findall(text))
        asked = byte_tokenizer().decode(request.prompt).rsplit("number of ", 1)[-1].split(" ")[0]
        return byte_tokenizer().encode(f" {found.get(asked, 'unknown')}. And")

    return reply


def finder(request: NewRequest) -> Sequence[int]:
    """Both: a needle where there is one, else a steady answer."""
    return reading(lambda ids: ids)(request) if len(request.prompt) > 400 else steady(request)


@dataclass
class Odd(ScriptedEngine):
    """Log-probabilities of decoded tokens are off where the prompt has this many tokens."""

    odd: int = 0

    def _outputs(self, request: NewRequest) -> Iterator[Output]:
        for output in super()._outputs(request):
            logs = output.logprobs
            if len(request.prompt) == self.odd:
                logs = [Logprobs(one.token, one.logprob - 0.9, one.rank, one.top) for one in logs]
            yield msgspec.structs.replace(output, logprobs=logs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def exact(context: Context, seconds: float = 60.0) -> list[Any]:
    known = look(context, context.services.shared())
    at = [Threshold("page", 64, "cache"), Threshold("window", 100, "operator")]
    return long_exact.findings(
        known, long_exact.try_all(known, at, Pace(seconds, Speed(1e-6, 1e-6)), 0, lambda text: None)
    )


def test_a_sound_server_passes_the_whole_stage(folder: Path) -> None:
    with scripted(make(ScriptedEngine(reply=finder)), folder) as context:
        result = long_context.run(context)
    assert failed(result) == {}, result.findings
    assert {f.verdict for f in named(result, "long.threshold.repeated")} == {"pass"}
    assert {f.verdict for f in named(result, "long.threshold.extended")} == {"pass"}
    assert [f.verdict for f in named(result, "long.limit.beyond")] == ["pass", "pass"]
    assert named(result, "long.limit.longest")[0].verdict == "pass"
    assert {f.verdict for f in named(result, "long.needle.length")} == {"pass"}
    assert named(result, "long.memory.peak")[0].verdict == "not applicable"
    (heat,) = result.figures
    assert heat.kind == "heat" and all(value == 1 for row in heat.data["values"] for value in row if value is not None)
    assert all(result.samples["needle found"].values()) and all(result.samples["same answer"].values())
    assert result.facts["thresholds"] == {"page": 64}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "kimi_linear", "deepseek_v32"])
def test_a_small_model_passes(folder: Path, family: str) -> None:
    """Windows, states and a sparse index, each with its threshold."""
    pytest.importorskip("transformers")
    with real(family, folder) as context:
        result = long_context.run(context)
    assert failed(result) == {}, [f for f in result.findings if f.verdict == "fail"]
    assert {f.verdict for f in named(result, "long.threshold.extended")} == {"pass"}
    assert named(result, "long.memory.token")[0].verdict == "pass"


def test_samples_have_the_same_names_in_another_run(folder: Path) -> None:
    seen = []
    for _ in range(2):
        with scripted(make(ScriptedEngine(reply=finder)), folder) as context:
            seen.append(long_context.run(context).samples)
    assert {name: set(items) for name, items in seen[0].items()} == {k: set(v) for k, v in seen[1].items()}


def test_a_cache_that_restores_something_else_is_the_caches_fault(folder: Path) -> None:
    asked: dict[tuple[int, ...], int] = {}

    def second_differs(request: NewRequest) -> Sequence[int]:
        key = tuple(request.prompt)
        asked[key] = asked.get(key, 0) + 1
        return [token + (asked[key] > 1 and len(key) >= 64) for token in steady(request)]

    with scripted(make(ScriptedEngine(reply=second_differs)), folder) as context:
        found = exact(context)
    assert failed(found)["long.threshold.repeated"] == "cache"


@dataclass
class Drifting:
    """An asker whose repeated answers drift: prompts up to a page by ``noise``, longer ones by ``drift``, in nat."""

    noise: float
    drift: float
    ids: bool = True
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def complete(self, prompt: list[int], max_tokens: int, **more: Any) -> Completion:
        again = tuple(prompt) in self.asked
        self.asked.append(tuple(prompt))
        off = (self.noise if len(prompt) <= 16 else self.drift) * again
        logprobs = tuple(-0.5 - off for _ in range(max_tokens))
        return Completion(200, tokens=tuple(range(max_tokens)), logprobs=logprobs, margins=(3.0,) * max_tokens)


def drifted(noise: float, drift: float, dtype: str = "bfloat16") -> list[Finding]:
    known = Known(False, Drifting(noise, drift), dtype=dtype, longest=400, page=16)  # type: ignore[arg-type]
    seen = long_exact.try_all(known, [], Pace(60.0, Speed(1e-6, 1e-6)), 0, lambda text: None)
    return long_exact.findings(known, seen)


def drifting(*given: Any) -> dict[str, str]:
    """Of ``drifted``, kind -> verdict."""
    return {f.kind: f.verdict for f in drifted(*given)}


def test_repeated_answers_are_held_to_measured_noise() -> None:
    """No longer to half a nat, whatever the dtype: to its arithmetic, or to what prompts that no cache holds show."""
    assert drifting(0.0, 0.0) | {"long.noise": "pass", "long.repeat": "pass"} == drifting(0.0, 0.0)
    assert drifting(0.01, 0.4)["long.repeat"] == "fail"  # 0.4 nat is more than bfloat16 rounds
    assert drifting(1e-6, 0.01, "float32") == drifting(1e-6, 0.01, "float32") | {
        "long.noise": "pass", "long.repeat": "fail",
    }  # fmt: skip
    assert drifting(1e-3, 1.5e-3, "float32") == drifting(1e-3, 1.5e-3, "float32") | {
        "long.noise": "note", "long.repeat": "pass",
    }  # fmt: skip
    assert failed(drifted(0.1, 0.1, "float32"))["long.noise"] == "operator"


def test_short_prompts_are_in_no_cache_and_plain_ones_are() -> None:
    for page in (16, 64):
        known = Known(False, Drifting(0, 0), longest=1000, page=page)  # type: ignore[arg-type]
        assert all(n + long_exact.ANSWER_TOKENS < page for n in long_exact.short_lengths(known))
        assert all(n > page for n in long_exact.plain_lengths(known, []))


def test_one_that_is_wrong_behind_another_prompt_only(folder: Path) -> None:
    last: list[list[int]] = []

    def leaks(request: NewRequest) -> Sequence[int]:
        other = bool(last) and last[-1] != request.prompt and request.prompt in last
        last.append(request.prompt)
        return [token + (other and len(request.prompt) in (99, 100, 101)) for token in steady(request)]

    with scripted(make(ScriptedEngine(reply=leaks)), folder) as context:
        found = exact(context)
    assert failed(found) == {"long.threshold.after": "operator"}


def test_decoding_that_differs_from_reading_at_one_length(folder: Path) -> None:
    with scripted(make(Odd(reply=steady, odd=100)), folder) as context:
        found = exact(context)
    # shifted in the same way every time: only the longer prompt tells
    assert failed(found) == {"long.threshold.extended": "operator"}
    (bad,) = [f for f in found if f.verdict == "fail"]
    assert "100 tokens" in bad.evidence[0] and "window" in bad.claim


def test_a_cache_that_is_never_hit_is_seen(folder: Path) -> None:
    with scripted(make(ScriptedEngine(reply=steady, cached=0)), folder) as context:
        assert failed(exact(context)) == {"long.cache.used": "cache"}


def test_what_time_does_not_allow_is_said(folder: Path) -> None:
    with scripted(make(ScriptedEngine(reply=steady)), folder) as context:
        found = exact(context, seconds=0.0)
    skipped = named(found, "long.threshold")
    assert {f.verdict for f in skipped} == {"not applicable"} and "take about" in skipped[0].measured


def test_a_server_of_another_make_is_judged_by_its_text(folder: Path) -> None:
    """Without ids and limits there is less to hold it to, and what there is is said."""
    with foreign(folder, lambda prompt: prompt.rsplit("number of ", 1)[-1]) as context:
        result = long_context.run(context)
    assert failed(result) == {}, result.findings
    assert {f.verdict for f in named(result, "long.limit")} == {"not applicable"}
    assert named(result, "long.repeat")[0].verdict == "pass" and named(result, "long.needle")[0].verdict == "note"

    def recall(prompt: str) -> str:
        return dict(_NEEDLE.findall(prompt)).get(prompt.rsplit("number of ", 1)[-1].split(" ")[0], "unknown")

    with foreign(folder, recall) as context:
        assert {f.verdict for f in named(long_context.run(context), "long.needle.length")} == {"pass"}
    turns = iter(range(10**6))
    with foreign(folder, lambda prompt: f"{prompt} {next(turns)}"[::-1]) as context:
        assert failed(long_context.run(context))["long.repeat"] == "cache"


# --- the limit and its memory


@pytest.mark.parametrize(
    ("says", "fails"),
    [(1500, {"long.limit.beyond": "server"}), (2100, {"long.limit.longest": "scheduler"}), (2000, {})],
)
def test_a_limit_that_is_not_the_one_it_says(folder: Path, says: int, fails: dict[str, str]) -> None:
    """The server takes 2,000 tokens, whatever it says."""
    with scripted(make(ScriptedEngine(reply=steady)), folder) as context:
        known = replace(look(context, context.services.shared()), longest=says)
        found, taken = long_limit.limits(known, Pace(60, Speed()), 0, ())
    assert failed(found) == fails
    assert taken is not None and taken.peak is None


def test_memory_beyond_the_plan_fails(folder: Path) -> None:
    paper, why = paper_of(str(CONFIGS / "qwen3_8b.json"), None)
    assert paper is not None, why
    with scripted(make(ScriptedEngine()), folder) as context:
        known = replace(look(context, context.services.shared()), paper=paper, pool_tokens=4096, dtype="bf16")
    gib = 1 << 30
    fine = long_limit.memory(known, Taken(4000, 17 * gib, 17 * gib + gib // 2), on_device=False)
    assert [f.verdict for f in fine] == ["pass", "pass"]
    wide = long_limit.memory(known, Taken(4000, 17 * gib, 21 * gib), on_device=False)
    assert failed(wide) == {"long.memory.request": "operator"}
    high = long_limit.memory(known, Taken(4000, 40 * gib, 40 * gib), on_device=False)
    assert failed(high) == {"long.memory.peak": "cache"}
    assert {f.verdict for f in long_limit.memory(known, None, on_device=False)} == {"not applicable"}


def test_rows_that_take_more_than_planned_fail(folder: Path) -> None:
    paper, why = paper_of(str(CONFIGS / "qwen3_8b.json"), None)
    assert paper is not None, why
    with scripted(make(ScriptedEngine()), folder) as context:
        known = replace(look(context, context.services.shared()), paper=paper, dtype="bf16")
    assert long_limit.rows(replace(known, token_bytes=147_456)).verdict == "pass"
    assert long_limit.rows(replace(known, token_bytes=2 * 147_456, dtype="f32")).verdict == "pass"
    assert failed([long_limit.rows(replace(known, token_bytes=147_456 + 4096))]) == {"long.memory.token": "cache"}
    assert long_limit.rows(known).verdict == "not applicable"


def test_the_peak_of_a_process_is_counted_anew() -> None:
    pid = os.getpid()
    if not robust_memory.forget_peak(pid):
        pytest.skip("this system does not forget peaks")
    before = robust_memory.peak(pid)
    held = np.ones(64 << 20, np.uint8)
    after = robust_memory.peak(pid)
    assert before is not None and after is not None and after - before > 60 << 20
    del held
    assert robust_memory.forget_peak(pid) and robust_memory.peak(pid) < after  # type: ignore[operator]


# --- needles


def grid_of(context: Context, at: list[Threshold], form: Form = USUAL) -> tuple[long_grid.Grid, Haystack, Known]:
    known = look(context, context.services.shared())
    hay = Haystack(known, form, 0)
    return long_grid.run(known, hay, "quick", at, Pace(120, Speed()), lambda text: None), hay, known


def judged(context: Context, at: list[Threshold], form: Form = USUAL) -> list[Any]:
    grid, hay, _ = grid_of(context, at, form)
    return long_grid.findings(grid, hay)


def test_prompts_have_the_length_they_say_and_hide_their_needle(folder: Path) -> None:
    with scripted(make(ScriptedEngine()), folder) as context:
        hay = Haystack(look(context, context.services.shared()), Form(), 0)
        for tokens in (hay.least(), 700, 1500):
            for needle in long_grid.needles_of(long_grid.SIZES["quick"], tokens):
                prompt = hay.prompt(needle)
                assert isinstance(prompt, list) and len(prompt) == tokens
                text = byte_tokenizer().decode(prompt)
                assert hay.value(needle) in text and text.endswith(" is")


def test_an_engine_that_loses_what_is_beyond_a_window_fails_at_the_window(folder: Path) -> None:
    blind = reading(lambda ids: ids if len(ids) <= WINDOW.tokens else ids[-120:])
    with scripted(make(ScriptedEngine(reply=blind)), folder) as context:
        found = judged(context, [WINDOW])
    assert failed(found) == {"long.needle.threshold": "operator"}


def test_a_model_that_forgets_slowly_is_no_fault_of_the_engine(folder: Path) -> None:
    """What it sees ends at 500 tokens, far from the threshold, which then tells nothing."""
    forgetful = reading(lambda ids: ids if len(ids) <= 500 else ids[-120:])
    with scripted(make(ScriptedEngine(reply=forgetful)), folder) as context:
        found = judged(context, [WINDOW])
    assert failed(found) == {}
    assert "note" in {f.verdict for f in named(found, "long.needle.length")}


def test_a_model_that_finds_nothing_says_nothing_about_the_engine(folder: Path) -> None:
    with scripted(make(ScriptedEngine(reply=steady)), folder) as context:
        found = judged(context, [WINDOW])
    (note,) = named(found, "long.needle")
    assert note.verdict == "note" and "does not retrieve at all: the grid says nothing" in note.measured


def test_a_model_that_wants_to_be_asked_is_asked(folder: Path) -> None:
    def only_chat(request: NewRequest) -> Sequence[int]:
        text = byte_tokenizer().decode(request.prompt)
        found = dict(_NEEDLE.findall(text))
        asked = text.partition("What is the secret number of ")[2].split("?")[0]
        return byte_tokenizer().encode(f"It is {found[asked]}." if asked in found else "Hello.")

    with scripted(make(ScriptedEngine(reply=only_chat)), folder) as context:
        grid, hay, _ = grid_of(context, [])
    assert grid.chat and grid.able, [f.said for f in grid.found]


def test_what_the_checkpoint_promises_is_held(folder: Path) -> None:
    half = reading(lambda ids: ids if sum(ids) % 2 else ids[-120:])
    form = form_from({"promised": 0.95, "promised_tokens": 4096}, "file")
    with scripted(make(ScriptedEngine(reply=half)), folder) as context:
        found = judged(context, [], form)
    if "long.needle.promised" not in failed(found):
        pytest.fail(str(found))
    with scripted(make(ScriptedEngine(reply=reading(lambda ids: ids))), folder) as context:
        assert failed(judged(context, [], form)) == {}


def test_a_prompt_that_is_not_answered_fails(folder: Path) -> None:
    world = make(ScriptedEngine(reply=reading(lambda ids: ids), dies_after=0))
    with scripted(world, folder) as context:
        assert failed(judged(context, [])) == {"long.needle.answered": "server"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "object"), ({"depth": 1}, "object"), ({"names": []}, "names"), ({"digits": 0}, "digits"),
        ({"sentence": "The {name}."}, "value"), ({"question": "What?"}, "question"), ({"promised": 2}, "promised"),
    ],
)  # fmt: skip
def test_a_form_that_is_none_names_its_field(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        form_from(given, "file")


def test_mcnemar_by_hand() -> None:
    def found(pattern: str) -> list[Any]:
        return [type("F", (), {"right": one == "1"}) for one in pattern]

    assert long_grid.fall(found("1111"), found("1111")) == 1
    assert long_grid.fall(found("11111111"), found("00000000")) == pytest.approx(2**-8, rel=1e-12)
    assert long_grid.fall(found("1110"), found("0001")) == pytest.approx(5 / 16)  # 3 or 4 heads of 4


# --- what is known


@pytest.mark.parametrize(
    ("config", "wanted"),
    [("gpt_oss_120b", {("window", 128), ("original rope length", 4096)}), ("deepseek_v32", {("top-k", 2048)})],
)
def test_thresholds_come_from_the_config(config: str, wanted: set[tuple[str, int]]) -> None:
    paper, why = paper_of(str(CONFIGS / f"{config}.json"), None)
    assert paper is not None, why
    assert wanted <= {(one.name, one.tokens) for one in of_spec(paper.paper.spec)}


def test_options_are_read_as_the_command_line_does() -> None:
    given = ["--page-tokens", "16", "--page-tokens=32", "--device"]
    assert option(given, "--page-tokens") == "32" and option(given, "--device") is None


def test_a_pace_knows_what_it_affords() -> None:
    now = [0.0]
    pace = Pace(10, speed_of(lambda prompt, answer: 0.01 * prompt + 0.1 * answer, 4, 104, 4), lambda: now[0])

    def work() -> None:
        now[0] += 4.4

    assert pace.speed.prompt == pytest.approx(0.01) and pace.speed.answer == pytest.approx(0.1)
    assert pace.affords(500, 39) and not pace.affords(500, 41)  # 1.2 for the length
    pace.timed(100, 10, work)  # foreseen: 2.2 seconds
    assert pace.left == pytest.approx(5.6) and pace.affords(0, 27) and not pace.affords(0, 29)
    part = pace.part(0.5)
    assert part.left == pytest.approx(2.8) and "take about" in part.why_not(500, 0)
    assert part.speed is pace.speed, "a part shares its speed"
