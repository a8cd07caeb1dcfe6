"""Servers of other makes under each stage that asks one: what they lack is told, answers of no shape are found."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_server import judged
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dayzero.acceptance.accept.cards import capabilities_of, card_of, cards_of, names_of
from dayzero.acceptance.accept.http import Answer
from dayzero.acceptance.accept.stage import Context, Stage
from dayzero.acceptance.stages import (
    contract,
    functional,
    long_context,
    long_known,
    metrics,
    perf_load,
    performance,
    robustness,
)
from dayzero.acceptance.stages.asking import Ask
from dayzero.acceptance.stages.long_known import look
from dayzero.acceptance.stages.perf_load import Plan
from tests.cpu.accept_fakes import Foreign, failed, foreign, named

SERVED = (functional, long_context, performance, robustness, contract)
STAGES: dict[str, Stage] = {one.STAGE.name: one.STAGE for one in SERVED}
MEASURED = ("long_context", "performance", "robustness")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(robustness.SIZES, "quick", robustness.Size(1.0, 8, 30, 8, (1, 2, 4), 512, 10.0, 1))
    monkeypatch.setitem(long_context.SECONDS, "quick", 4.0)
    monkeypatch.setitem(perf_load.PLANS, "quick", Plan(16, 4, (1, 2), 3, 2, 2.0, 10.0, 32, 2))


# --- chat alone


NO_EOS = Foreign(lambda prompt: "it is", chat=True, ends=True, refuses=frozenset({"ignore_eos"}))


@pytest.mark.parametrize(
    ("name", "server"),
    [*((name, Foreign(chat=True)) for name in MEASURED), ("robustness", NO_EOS)],
    ids=[*MEASURED, "robustness without ignore_eos"],
)
def test_a_server_of_chat_alone_is_measured_in_conversations(name: str, server: Foreign, tmp_path: Path) -> None:
    with foreign(tmp_path, make=server) as context:
        found = STAGES[name].run(context)
    # nothing is batched in this fake, so that what concerns speed says nothing
    assert failed(found).keys() <= {"performance.together", "robust.scale.cliff"}, [
        f for f in found.findings if f.verdict == "fail"
    ]
    assert any(f.verdict == "pass" for f in found.findings)
    assert any(isinstance(body, dict) and "messages" in body for body in server.seen)
    if name == "robustness":
        assert named(found, "robust.soak.same")[0].verdict == "pass" and found.facts["requests"]["answers"] > 2
        assert named(found, "robust.scale.answered")[0].verdict == "pass"
        assert (named(found, "robust.scale.cliff")[0].verdict == "not applicable") == (server is NO_EOS)


def test_how_a_server_wants_to_be_asked_is_found_out(tmp_path: Path) -> None:
    for server, api, usual in (
        (Foreign(), "completions", {"ignore_eos": True}),
        (Foreign(chat=True), "chat", {"ignore_eos": True}),
        (Foreign(chat=True, refuses=frozenset({"ignore_eos"})), "chat", {}),
    ):
        with foreign(tmp_path, make=server) as context:
            known = look(context, context.services.shared(), 10.0)
        assert (known.asker.api, known.asker.usual, known.ids) == (api, usual, False)


def test_speeds_of_answers_of_any_length_are_not_held(tmp_path: Path) -> None:
    with foreign(tmp_path, make=Foreign(chat=True, refuses=frozenset({"ignore_eos"}))) as context:
        found = performance.STAGE.run(context)
    assert [f.verdict for f in found.findings] == ["not applicable"] and "ignore_eos" in str(found.findings[0].measured)


def test_answers_that_end_of_themselves_are_a_note_where_ignore_eos_may_be_unknown(tmp_path: Path) -> None:
    """It is taken without a word and not done; nobody says that a server of another make must know it."""
    with foreign(tmp_path, make=Foreign(lambda prompt: "it is", ends=True)) as context:
        found = performance.STAGE.run(context)
    assert failed(found).keys() <= {"performance.together"}, found.findings
    assert {f.verdict for f in named(found, "load.tokens")} == {"note"}
    assert "ended of themselves" in str(named(found, "load.tokens")[0].measured)


@dataclass
class BusyOnce(Foreign):
    """Says ``status`` to the second thing that it is asked, which is the first in words."""

    status: int = 503
    asked: int = 0

    async def _answered(self, request: Request, chat: bool) -> Response:
        self.asked += chat == self.chat
        if chat == self.chat and self.asked == 2:
            return JSONResponse({"error": {"message": "a moment"}}, self.status)
        return await super()._answered(request, chat)


@pytest.mark.parametrize("status", [429, 503])
def test_one_busy_moment_does_not_say_how_a_server_is_asked(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_known, "SETTLE_SECONDS", 0.01)
    with foreign(tmp_path, make=BusyOnce(status=status)) as context:
        known = look(context, context.services.shared(), 10.0)
    assert (known.asker.api, known.asker.usual) == ("completions", {"ignore_eos": True})


# --- what keeps a server busy for good


@pytest.mark.parametrize("name", ["robustness", "contract"])
def test_no_foreign_server_is_asked_for_answers_without_end(name: str, tmp_path: Path) -> None:
    server = Foreign()
    with foreign(tmp_path, make=server) as context:
        STAGES[name].run(context)
    asked = [body.get("max_tokens") for body in server.seen if isinstance(body, dict)]
    counts = [one for one in asked if isinstance(one, int)]
    assert max(counts) < 10**6 and min(counts) > 0, "some read a number below 0 as no limit"


# --- answers of no shape


def _no_dict(body: Any) -> Any:
    return ["no", "object"]


def _choices_of_text(body: Any) -> Any:
    return {**body, "choices": "none"}


def _choices_of_numbers(body: Any) -> Any:
    return {**body, "choices": [7]}


def _usage_of_text(body: Any) -> Any:
    return {**body, "usage": {"prompt_tokens": "three", "completion_tokens": None}}


def _text_of_numbers(body: Any) -> Any:
    return {**body, "choices": [{**one, "text": 5, "message": 5, "delta": 5} for one in body["choices"]]}


def _scores_of_text(body: Any) -> Any:
    odd = {"content": [{"token": 3, "bytes": [900], "logprob": "low", "top_logprobs": 4}], "tokens": [None],
           "token_logprobs": ["low"], "top_logprobs": [[1]]}  # fmt: skip
    return {**body, "choices": [{**one, "logprobs": odd, "token_ids": ["a"]} for one in body["choices"]]}


def _calls_of_text(body: Any) -> Any:
    said = {"role": "assistant", "content": "x", "tool_calls": ["call", {"index": "0", "function": "f"}]}
    return {**body, "choices": [{**one, "message": said, "delta": said} for one in body["choices"]]}


def _drawn(body: Any, deal: random.Random = random.Random(0)) -> Any:  # noqa: B008
    """Any one value, however deep, is another one."""
    if deal.random() < 0.2 or not isinstance(body, dict | list) or not body:
        return deal.choice([None, -1, "x", [], {}, [None], {"a": 1}, 1e300, True])
    if isinstance(body, list):
        return [_drawn(body[0], deal), *body[1:]]
    key = deal.choice(list(body))
    return {**body, key: _drawn(body[key], deal)}


ODD = (
    _no_dict, _choices_of_text, _choices_of_numbers, _usage_of_text, _text_of_numbers, _scores_of_text, _calls_of_text,
    _drawn,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("spoil", ODD)
@pytest.mark.parametrize("name", STAGES)
def test_answers_of_no_shape_are_failed_findings(name: str, spoil: Any, chat: bool, tmp_path: Path) -> None:
    with foreign(tmp_path, make=Foreign(chat=chat, spoil=spoil)) as context:
        found = STAGES[name].run(context)
    # completions have no calls, and a load looks at none; what is drawn may be harmless
    without_calls = spoil is _calls_of_text and (not chat or name == "performance")
    assert failed(found) or spoil is _drawn or without_calls, found.findings


@pytest.mark.parametrize("spoil", ODD)
def test_what_measures_a_server_reads_answers_of_no_shape(spoil: Any, tmp_path: Path) -> None:
    """The quick half of the test above: the reader itself."""
    for chat in (False, True):
        with foreign(tmp_path, make=Foreign(chat=chat, spoil=spoil)) as context:
            known = look(context, context.services.shared(), 10.0)
            known.asker.api = "chat" if chat else "completions"
            for stream in (None, True):
                one = known.asker.complete("Hello.", 3, stream=stream, logprobs=2)
                assert one.status == 200 and (one.error or spoil is _drawn or spoil is _calls_of_text), one


# --- models that reason before they answer


def _ask(context: Context) -> Ask:
    return Ask(context.services.shared(), context.subject)


def test_a_budget_is_what_a_first_answer_measured(tmp_path: Path) -> None:
    with foreign(tmp_path, make=Foreign(chat=True)) as context:
        assert _ask(context).room(300) == 300
    able = Foreign(lambda prompt: "it is 4", chat=True, thinks=40, ends=True)
    with foreign(tmp_path, make=able) as context:
        assert _ask(context).room(300) == 300 + 2 * 43
    with foreign(tmp_path, make=Foreign(chat=True, thinks=10**6)) as context:
        assert _ask(context).room(300) == 300, "nobody waits for reasoning that does not end"


def test_a_budget_leaves_room_for_the_prompt() -> None:
    for limit, room in ((1000, 488), (700, 300), (100_000, 2300), (None, 2300)):
        ask: Any = SimpleNamespace(card={"max_model_len": limit}, thinking=2000)
        assert Ask.room(ask, 300) == room, limit


def test_what_is_lost_in_thought_is_not_judged(tmp_path: Path) -> None:
    """A call that never came since the model was still reasoning says nothing of how calls are made."""
    for thinks, verdict in ((10**6, "not applicable"), (0, "fail")):
        with foreign(tmp_path, make=Foreign(chat=True, thinks=thinks)) as context:
            out = judged(context.services.shared(), context.subject, functional.checks(), "tools.required")
        (found,) = [f for f in out.findings if f.kind == "t.tools.required"]
        assert found.verdict == verdict, found


# --- numbers and cards, whoever sends them


def _exported(text: str) -> Answer:
    return Answer(200, {}, text.encode(), 0.1)


def test_numbers_are_read_by_their_names() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 3.0
dayzero:num_requests_running{engine="0"} 9.0
dayzero:engine_stalled 1.0
vllm:request_success_total{finished_reason="abort",engine="0"} 4.0
vllm:request_success_total{finished_reason="abort",engine="1"} 1.0
vllm:request_success_total{finished_reason="length",engine="0"} 7.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0
other_total 5.0
"""
    samples = metrics.samples_of(_exported(text))
    assert samples is not None
    numbers = metrics.numbers_of(samples)
    assert numbers["num_requests_running"] == 5 and numbers["engine_stalled"] == 1 and "other_total" not in numbers
    assert metrics.sums_by(samples, metrics.ENDS, "finished_reason") == {"abort": 5.0, "length": 7.0}
    assert metrics.labels_of(samples, metrics.CACHE)["block_size"] == "16"
    assert metrics.labels_of(samples, "nothing") == {}
    for broken in ("no numbers at all {", "vllm: _bucket{le=", 'vllm:x_bucket{le="1", ="2"} 1'):
        assert metrics.samples_of(_exported(broken)) is None, broken


@pytest.mark.parametrize("listed", [None, [], {}, {"data": 5}, {"data": [5, None]}, {"data": [{"id": 5}, {"id": ""}]}])
def test_lists_of_models_of_any_shape_are_read(listed: Any) -> None:
    assert names_of(listed) == [] and card_of(listed, "m") == {}
    assert all(isinstance(card, dict) for card in cards_of(listed))


def test_the_card_of_the_model_that_is_asked_for() -> None:
    listed = {"data": [{"id": "a", "capabilities": ["chat"]}, {"id": "b", "capabilities": {"chat": True}}]}
    assert card_of(listed, None)["id"] == "a" and card_of(listed, "b")["id"] == "b" and card_of(listed, "c") == {}
    assert capabilities_of(card_of(listed, "a")) == {} and capabilities_of(card_of(listed, "b")) == {"chat": True}
