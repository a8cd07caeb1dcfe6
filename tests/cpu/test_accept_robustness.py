"""The robustness stage finds what is planted: leaks, answers that depend on their company, hangs, unseen deaths."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dayzero.acceptance.accept.http import Answer
from dayzero.acceptance.accept.stage import Context, StageResult, Subject
from dayzero.acceptance.load.figures import Figures
from dayzero.acceptance.stages import robust_ask, robust_load, robust_memory, robust_process, robust_soak, robustness
from dayzero.acceptance.stages import robust_findings as judge
from dayzero.acceptance.stages.long_known import Known, look
from dayzero.acceptance.stages.robust_ask import Asker, Completion, completion_of
from dayzero.acceptance.stages.robust_load import Burst, Storm
from dayzero.acceptance.stages.robust_process import Drained, Frozen, Killed
from dayzero.acceptance.stages.robust_same import Difference, difference, extended
from dayzero.acceptance.stages.robust_soak import Soak
from dayzero.engine.api import EngineStatus
from dayzero.engine.events import Output
from dayzero.engine.request import NewRequest
from tests.cpu.accept_fakes import FakeServer, FakeServices, failed, foreign, named, over_fake_engine, real, scripted
from tests.paper.server_support import ScriptedEngine, World, make, serving

SMALL = robustness.Size(2.5, 20, 40, 24, (1, 4, 12), 1024, 20.0)
MIB = 1 << 20


def steady(request: NewRequest) -> Sequence[int]:
    return [65 + (sum(request.prompt) + i) % 26 for i in range(600)]


@dataclass
class Busy(ScriptedEngine):
    """step: seconds before each token. crowd: the same for each other request that runs. running, usage: what it says
    it holds when nothing runs. drifts: an answer depends on how many run."""

    step: float = 0.001
    crowd: float = 0.0
    running: int = 0
    usage: float = 0.0
    drifts: bool = False

    def status(self) -> EngineStatus:
        found = super().status()
        assert found.progress is not None
        running, usage = found.progress.running or self.running, self.usage
        return msgspec.structs.replace(
            found, progress=msgspec.structs.replace(found.progress, running=running, usage=usage)
        )

    async def generate(self, request: NewRequest) -> AsyncIterator[Output]:
        async for output in super().generate(request):
            await asyncio.sleep(self.step + self.crowd * len(self.live) ** 2)
            if self.drifts and len(self.live) > 2:
                output = msgspec.structs.replace(output, tokens=[token + 1 for token in output.tokens])
            yield output


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(robustness.SIZES, "quick", SMALL)


def known_of(context: Context) -> Known:
    return look(context, context.services.shared(), 20.0)


# --- under load


def test_a_sound_server_passes_what_can_be_asked_of_a_foreign_one(tmp_path: Path) -> None:
    with scripted(make(Busy(reply=steady)), tmp_path) as context:
        result = robustness.run(context)
    assert failed(result) == {}, [f for f in result.findings if f.verdict == "fail"]
    for kind in ("soak.same", "soak.mixed", "storm.held", "malformed.refused", "malformed.health", "burst.refused"):
        assert named(result, f"robust.{kind}")[0].verdict == "pass", kind
    for kind in ("soak.memory", "frozen.told", "killed.streams", "drain.running", "restart.same"):
        (finding,) = named(result, f"robust.{kind}")
        assert finding.verdict == "not applicable" and "ours" in finding.measured, kind
    assert result.figures == () and result.facts["requests"]["answers"] > 5


def test_a_server_of_another_make_is_loaded_as_well(tmp_path: Path) -> None:
    with foreign(tmp_path) as context:
        result = robustness.run(context)
    assert failed(result).keys() <= {"robust.scale.cliff"}, [f for f in result.findings if f.verdict == "fail"]
    assert named(result, "robust.soak.held")[0].verdict == "not applicable"
    assert named(result, "robust.malformed.refused")[0].verdict == "pass"
    turns = iter(range(10**6))
    with foreign(tmp_path, lambda prompt: f"{next(turns)} {prompt}") as context:
        known = known_of(context)
        load = robust_soak.load_of(known, 0)
        seen = robust_soak.soak(known, load, 1.0, list, 0.125, 0)
    # without ids and margins nobody can tell a tie from a fault
    assert named(judge.soak(seen, load, known, 0.125), "robust.soak.same")[0].verdict == "note"


def soaked(engine: ScriptedEngine, folder: Path, seconds: float = 1.5) -> list[Any]:
    with scripted(make(engine), folder) as context:
        known = known_of(context)
        load = robust_soak.load_of(known, 0)
        seen = robust_soak.soak(known, load, seconds, list, 0.125, 0)
    return judge.soak(seen, load, known, 0.125)


def test_an_answer_that_depends_on_its_company_fails(tmp_path: Path) -> None:
    assert failed(soaked(Busy(reply=steady, drifts=True), tmp_path)) == {"robust.soak.same": "scheduler"}


def test_a_request_that_gets_no_answer_fails(tmp_path: Path) -> None:
    @dataclass
    class Dying(Busy):
        count: int = 0

        async def generate(self, request: NewRequest) -> AsyncIterator[Output]:
            self.count += 1
            self.dies_after = 1 if self.count > 40 and self.count % 5 == 0 else None
            async for output in super().generate(request):
                yield output

    assert failed(soaked(Dying(reply=steady), tmp_path)) == {"robust.soak.answered": "server"}


def test_every_kind_of_request_comes_however_slow_the_server_is(tmp_path: Path) -> None:
    with scripted(make(Busy(reply=steady, step=0.05)), tmp_path) as context:
        known = known_of(context)
        load = robust_soak.load_of(known, 0)
        seen = robust_soak.soak(known, load, 0.0, list, 0.125, 0)
    assert failed(judge.soak(seen, load, known, 0.125)) == {} and set(seen.counts) == {"answers", "left", "bad"}
    seen.counts["left"] = 0
    assert failed(judge.soak(seen, load, known, 0.125)) == {"robust.soak.mixed": "scheduler"}


# --- what is slow is no fault


@dataclass
class Slow:
    """Stands for an Asker: seconds an answer takes before its first token, and for each one; then for all the same."""

    first: float
    each: float
    hiccup: float = 0.0

    def complete(self, prompt: Any, tokens: int) -> Completion:
        taken, self.hiccup = self.hiccup, 0.0
        return Completion(200, seconds=self.first + tokens * self.each + taken)


def test_the_pace_of_an_answer_leaves_out_what_comes_before_it() -> None:
    assert robust_ask.pace(Slow(1.0, 0.01), [1], 1, 11) == pytest.approx(1.11 / 11 / 8)  # type: ignore[arg-type]
    assert robust_ask.pace(Slow(0.1, 0.5), [1], 1, 11) == pytest.approx(0.5)  # type: ignore[arg-type]
    hidden = robust_ask.pace(Slow(0.0, 0.5, hiccup=9.0), [1], 1, 11)  # type: ignore[arg-type]
    assert hidden == pytest.approx(0.5 / 8), "no answer of a thousand tokens for a moment's sake"
    assert robust_ask.pace(Slow(0.0, 0.0), [1], 1, 1) > 0  # type: ignore[arg-type]


def test_a_slow_server_is_waited_for_longer() -> None:
    asker = Asker(FakeServer("http://127.0.0.1:9"), timeout=60.0)
    assert asker.patient(5.0) is asker and asker.patient(90.0).client.timeout == 90.0
    alone = [Completion(200, seconds=seconds) for seconds in (40.0, 2.0, 3.0)] + [Completion(0, "none", seconds=99.0)]
    load = robust_soak.Load([[1]] * 4, [1] * 4, alone)
    assert robust_soak.patience(load, 20) == 2 * 4 * 20 * 3.0, "the first one may wait for a compiler"
    assert robust_soak.patience(replace(load, alone=alone[3:]), 20) == 0.0
    assert robustness._ready_seconds(2.0) == 120.0 and robustness._ready_seconds(400.0) == 1200.0


def test_levels_end_where_the_queue_does() -> None:
    levels = robustness.SIZES["release-day"].levels
    assert robustness._levels(levels, 20) == (1, 4, 16, 20) and robustness._levels(levels, None) == levels


def test_a_slow_client_is_no_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    seen = [Burst(48, Counter({200: 48}), 0, [], 1.0), Burst(48, Counter({200: 20, 429: 28}), 0, [], 9.0)]

    def burst(known: Known, clients: int, seed: int, holding: int = 8) -> Burst:
        asked.append(holding)
        return seen[len(asked) - 1]

    monkeypatch.setattr(robust_load, "burst", burst)
    known = Known(True, Asker(FakeServer("http://127.0.0.1:9")))
    assert failed(judge.burst(robustness._burst(known, 48, 0, 20), 20)) == {} and asked == [8, 48]
    asked.clear()
    seen[1] = seen[0]
    assert failed(judge.burst(robustness._burst(known, 48, 0, 20), 20)) == {"robust.burst.refused": "server"}
    asked.clear()
    assert robustness._burst(known, 48, 0, None) is seen[0] and asked == [8], "its room is not known"


def test_clients_that_left_too_late_leave_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Completion(200, tokens=(1, 2), logprobs=(-0.1, -0.1), margins=(3.0, 3.0))
    late = Storm(60, one, one, None, {"abort": 1.0, "length": 50.0})
    good = replace(late, ends={"abort": 50.0, "length": 1.0})
    for rounds, verdict in (([late, good], "pass"), ([late, late, late], "fail"), ([good], "pass")):
        left = iter(rounds)
        monkeypatch.setattr(robust_load, "storm", lambda *given, left=left: next(left))
        seen = robustness._storm(Known(True, Asker(FakeServer("http://127.0.0.1:9"))), 60, 0, lambda text: None)
        assert named(judge.storm(seen, 0.0), "robust.storm.cut")[0].verdict == verdict
        assert next(left, None) is None


@pytest.mark.parametrize(
    ("more", "layer"), [({"running": 1}, "scheduler"), ({"usage": 0.25}, "cache")], ids=["a slot", "blocks"]
)
def test_what_is_held_behind_a_storm_fails(tmp_path: Path, more: dict[str, Any], layer: str) -> None:
    with scripted(make(Busy(reply=steady, **more)), tmp_path) as context:
        left = robust_soak.held(known_of(context).asker, 0.5)
    kinds = {f"robust.{word}.held": layer for word in ("storm", "soak")}
    assert failed([judge.held("storm", left), judge.held("soak", left)]) == kinds


def test_memory_of_many_sizes_of_steps_is_said() -> None:
    """A note: no plan counts it, and what it may be is the machine's to say."""
    assert judge.sizes(0, 4, 512).verdict == "pass"
    assert judge.sizes(4 << 30, 4, 512).verdict == "note"


def test_clients_that_vanish_are_seen_to_vanish(tmp_path: Path) -> None:
    world = make(Busy(reply=steady, step=0.002))
    with scripted(world, tmp_path) as context:
        seen = robust_load.storm(known_of(context), 30, 0)
    assert world.engine.aborted and not world.engine.live
    assert failed(judge.storm(seen, 0.0)) == {}
    assert seen.ends["abort"] > 0 and named(judge.storm(seen, 0.0), "robust.storm.cut")[0].verdict == "pass"


def test_work_for_clients_that_left_must_end() -> None:
    """What is held behind a storm is nothing too where every answer was made to its end for nobody."""
    one = Completion(200, tokens=(1, 2), logprobs=(-0.1, -0.1), margins=(3.0, 3.0))
    storm = Storm(5, one, one, {"num_requests_running": 0.0}, {"abort": 5.0, "length": 1.0, "stop": 0.0})
    assert failed(judge.storm(storm, 0.125)) == {}
    made = replace(storm, ends={"abort": 0.0, "length": 6.0, "stop": 0.0})
    assert failed(judge.storm(made, 0.125)) == {"robust.storm.cut": "scheduler"}
    silent = judge.storm(replace(storm, ends={}), 0.125)
    assert named(silent, "robust.storm.cut")[0].verdict == "not applicable"


def test_clients_that_nobody_counts_say_nothing_of_what_was_done_for_them() -> None:
    """A server may have the counter and never count a client that left; a few answers may be quicker than one."""
    one = Completion(200, tokens=(1, 2), logprobs=(-0.1, -0.1), margins=(3.0, 3.0))
    storm = Storm(60, one, one, None, {"abort": 0.0, "length": 0.0, "stop": 0.0})

    def verdict(**more: Any) -> str:
        return named(judge.storm(replace(storm, **more), 0.125), "robust.storm.cut")[0].verdict

    assert verdict() == "not applicable"
    assert verdict(ends={"abort": 0.0, "length": 2.0}) == "pass"
    assert verdict(ends={"abort": 0.0, "length": 50.0}) == "fail"
    assert verdict(ends={"abort": 20.0, "length": 40.0}) == "fail"
    assert verdict(ends={"abort": 0.0, "stop": 50.0}, exact=False) == "not applicable"


def test_an_endless_request_is_for_our_own_server_alone() -> None:
    asker = Asker(FakeServer("http://127.0.0.1:9"))
    ours, foreign = (robust_soak.bad_requests(Known(own, asker)) for own in (True, False))
    for one in ({"max_tokens": 10**9}, {"max_tokens": -1}, {"model": "nobody"}):
        assert one in ours
    assert len(foreign) > 2 and not any("model" in one or one.get("max_tokens", 1) != 1 for one in foreign)
    asker.api = "chat"
    assert all("prompt" not in body for body in robust_soak.bad_requests(Known(False, asker)))


def test_what_servers_of_other_makes_mean_well_is_a_note() -> None:
    good = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}

    async def post(request: Request) -> Response:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        return JSONResponse(good) if body in robust_load.LENIENT else JSONResponse({"error": {"message": "x"}}, 400)

    routes = [Route("/{path:path}", post, methods=["GET", "POST", "DELETE"])]
    with serving(World(ScriptedEngine(), Starlette(routes=routes), [])) as address:
        found, ours = (judge.flood(robust_load.flood(asker_at(address), 40, 0, own)) for own in (False, True))
    found = [f for f in found if not f.kind.endswith("health")]
    assert failed(found) == {} and named(found, "robust.malformed.lenient")[0].verdict == "note"
    assert "robust.malformed.refused" in failed(ours)


def test_a_storm_that_changes_an_answer_fails() -> None:
    one = Completion(200, tokens=(1, 2), logprobs=(-0.1, -0.1), margins=(3.0, 3.0))
    seen = Storm(5, one, replace(one, tokens=(1, 3)), {"num_requests_running": 0.0})
    assert failed(judge.storm(seen, 0.125)) == {"robust.storm.same": "cache"}


# --- a server that is none


def answering(status: int, body: Any, headers: dict[str, str] | None = None, seconds: float = 0.0) -> World:
    """Every POST gets this; probes are well unless a POST is being read."""

    async def post(request: Request) -> Response:
        await request.body()
        time.sleep(seconds)  # in the loop, as a parser that blocks it would
        return JSONResponse(body, status, headers)

    async def probe(request: Request) -> Response:
        return JSONResponse({}, 200)

    routes = [Route("/health", probe), Route("/{path:path}", post, methods=["GET", "POST", "DELETE"])]
    return World(ScriptedEngine(), Starlette(routes=routes), [])


def asker_at(address: str, **more: Any) -> Asker:
    return Asker(FakeServer(address), ids=True, **more)


@pytest.mark.parametrize(
    ("status", "body", "kinds"),
    [
        (200, {"choices": []}, {"robust.malformed.refused": "server"}),
        (500, {"error": {"message": "x"}}, {"robust.malformed.refused": "server"}),
        (400, {"error": {"message": "x"}}, {}),
        (400, "no", {}),
    ],
)
def test_malformed_requests_that_are_not_refused(status: int, body: Any, kinds: dict[str, str]) -> None:
    with serving(answering(status, body)) as address:
        found = judge.flood(robust_load.flood(asker_at(address), 40, 0))
    assert failed(found) == kinds
    assert (named(found, "robust.malformed.told")[0].verdict == "note") == (body == "no")


def test_a_server_that_takes_anything_or_answers_nobody_is_seen_in_the_soak() -> None:
    good = {"choices": [{"index": 0, "text": "x", "token_ids": [65], "finish_reason": "stop"}]}
    for body, kinds in (
        (good, {"robust.soak.refused": "server"}),
        ({}, {"robust.soak.alone": "server", "robust.soak.answered": "server", "robust.soak.refused": "server"}),
    ):
        with serving(answering(200, body)) as address:
            known = Known(False, asker_at(address))
            load = robust_soak.load_of(known, 0)
            seen = robust_soak.soak(known, load, 1.0, list, 0.125, 0)
        found = failed(judge.soak(seen, load, known, 0.125))
        found.pop("robust.soak.mixed", None)
        assert found == kinds


def test_a_probe_that_fails_during_the_flood_fails() -> None:
    world = answering(400, {"error": "x"})
    turns = iter(range(10**6))

    async def probe(request: Request) -> Response:
        return JSONResponse({}, 200 if next(turns) == 0 else 503)

    world.app.routes.insert(0, Route("/health", probe))
    with serving(world) as address:
        found = judge.flood(robust_load.flood(asker_at(address), 40, 0))
    assert failed(found) == {"robust.malformed.health": "server"}


def burst_at(world: World, folder: Path, clients: int = 24, timeout: float = 10.0) -> Burst:
    with scripted(world, folder) as context:
        known = known_of(context)
        known.asker.client.timeout = timeout
        return robust_load.burst(known, clients, 0)


def test_a_queue_without_an_end_fails(tmp_path: Path) -> None:
    """All are answered, though there is room for no more than eight."""
    seen = burst_at(make(Busy(reply=steady)), tmp_path)
    assert failed(judge.burst(seen, 8)) == {"robust.burst.refused": "server"}
    assert failed(judge.burst(seen, None)) == {} and seen.statuses == Counter({200: 24})


def test_refusals_say_when_to_come_back(tmp_path: Path) -> None:
    seen = burst_at(make(Busy(reply=steady, overloaded=True)), tmp_path)
    assert seen.statuses == Counter({429: 24}) and failed(judge.burst(seen, 8)) == {}
    with serving(answering(429, {"error": "x"})) as address:
        bare = robust_load.burst(Known(False, asker_at(address)), 8, 0)
    assert failed(judge.burst(bare, 4)) == {"robust.burst.retry_after": "server"}


def test_a_request_that_hangs_fails(tmp_path: Path) -> None:
    seen = burst_at(make(Busy(reply=steady, step=5.0)), tmp_path, clients=4, timeout=0.5)
    assert seen.statuses == Counter({0: 4})
    assert failed(judge.burst(seen, None)) == {"robust.burst.refused": "server"}


def scaled(engine: ScriptedEngine, folder: Path) -> list[list[Figures]]:
    with scripted(make(engine), folder) as context:
        return robust_load.scale(context.services.shared(), known_of(context), SMALL.levels, 20.0, 0)


def test_one_look_at_a_busy_machine_is_no_cliff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round that falls is measured again; the medians of all rounds decide."""
    levels = (1, 4)

    def round_of(rate: float) -> Any:
        return [SimpleNamespace(output_tok_s=100.0, errors=0), SimpleNamespace(output_tok_s=rate, errors=0)]

    assert judge.falls(levels, [round_of(10)])
    assert failed(judge.scale(levels, [round_of(10), round_of(90), round_of(95)])) == {}
    assert failed(judge.scale(levels, [round_of(10), round_of(90), round_of(12)])) == {
        "robust.scale.cliff": "scheduler"
    }
    asked: list[int] = []

    def measured(*args: Any) -> Any:
        asked.append(args[5] if len(args) > 5 else 1)
        return [[SimpleNamespace(output_tok_s=100.0 if first else 10.0, errors=0) for first in (1, 0, 0)]] * asked[-1]

    monkeypatch.setattr(robust_load, "scale", measured)
    with scripted(make(Busy(reply=steady)), tmp_path) as context:
        result = robustness.run(context)
    assert asked == [1, 2] and failed(result) == {"robust.scale.cliff": "scheduler"}


def test_throughput_that_falls_off_a_cliff_fails(tmp_path: Path) -> None:
    assert failed(judge.scale(SMALL.levels, scaled(Busy(reply=steady, step=0.004), tmp_path))) == {}
    steep = scaled(Busy(reply=steady, crowd=0.004), tmp_path)
    assert failed(judge.scale(SMALL.levels, steep)) == {"robust.scale.cliff": "scheduler"}


def test_errors_as_load_grows_fail(tmp_path: Path) -> None:
    found = failed(judge.scale(SMALL.levels, scaled(Busy(reply=steady, dies_after=2), tmp_path)))
    assert found["robust.scale.answered"] == "server"


# --- memory


def grown(rate: float, seconds: int = 120, process: int = 1) -> Soak:
    """Samples every 0.2 s, of two processes of 100 and 600 MiB; rate: bytes a second."""
    noise, out = random.Random(0), Soak(seconds=float(seconds))
    for i in range(seconds * 5):
        held = [100 * MIB + noise.randrange(MIB), 600 * MIB + noise.randrange(MIB)]
        held[process] += int(rate * i / 5)
        out.memory.append((i / 5, held))
    return out


def test_growth_is_told_from_noise() -> None:
    assert judge.memory(grown(0), True).verdict == "pass"
    for process, layer in ((0, "server"), (1, "cache")):
        leak = judge.memory(grown(200_000, process=process), True)
        assert (leak.verdict, leak.layer) == ("fail", layer), leak
    assert "MiB an hour" in leak.measured and leak.remedy
    assert judge.memory(grown(200_000), False).verdict == "note", "a pool that fills up for the first time"
    assert judge.memory(grown(10_000), True).verdict == "pass", "less than arenas move by"
    assert judge.memory(grown(0, seconds=2), True).verdict == "not applicable"
    warm = [(i / 5, 6e8 + 1e8 * min(1.0, i / 150)) for i in range(600)]  # a warm-up of 30 of 120 seconds
    long_warm = [(i / 5, 6e8 + 1e8 * (1 - 0.99**i)) for i in range(600)]
    assert not robust_memory.grows(warm) and not robust_memory.grows(long_warm)
    slope, t = robust_memory.slope([(float(i), 10.0 * i) for i in range(100)])
    assert slope == pytest.approx(36_000) and t > 1e6
    assert robust_memory.slope([(float(i), 5.0) for i in range(100)]) == (0.0, 0.0)


def test_what_each_size_of_a_step_costs_is_told() -> None:
    assert judge.sizes(32 * MIB, 32, 512).verdict == "pass"
    dear = judge.sizes(224 * MIB, 32, 512)
    assert dear.verdict == "note" and "7.00 MiB for each of 32 sizes: 3.50 GiB" in dear.measured


def test_memory_of_real_processes_is_read() -> None:
    import os

    found = robust_memory.resident((os.getpid(), 2**22 + 1))
    assert found[0] > 10 * MIB and found[1] == 0


def test_lost_room_behind_the_soak_fails() -> None:
    assert judge.fragmentation("", "", 500).verdict == "pass"
    lost = judge.fragmentation("", "400: the pool is full", 500)
    assert (lost.verdict, lost.layer) == ("fail", "cache")
    assert judge.fragmentation("no", "no", 500).verdict == "not applicable"


# --- the same answer


def test_a_log_probability_that_is_no_number_is_none() -> None:
    """A record of NaN could not be read back as JSON."""
    for value in ("NaN", "-Infinity"):
        scores = f'[null, {{"6": {{"logprob": {value}}}}}, {{"7": {{"logprob": -0.5}}}}]'
        choice = '{"index": 0, "text": "x", "finish_reason": "stop"}'
        body = f'{{"choices": [{choice}], "prompt_logprobs": {scores}}}'.encode()
        found = completion_of(Answer(200, {}, body, 0.1), [5, 6, 7])
        assert found.good and found.prompt_logprobs == (None, None, -0.5), value


def answer(tokens: tuple[int, ...], logprob: float = -0.5, margin: float = 3.0) -> Completion:
    return Completion(200, "", "x", tokens, (logprob,) * len(tokens), (margin,) * len(tokens))


def test_what_counts_as_the_same_answer() -> None:
    one = answer((1, 2, 3))
    assert difference(one, one, 0.0).same
    assert not difference(one, answer((1, 2, 4)), 0.1).same
    tie = difference(answer((1, 2, 3), margin=0.05), answer((1, 2, 4)), 0.1)
    assert tie.same and tie.tie and tie.parted == 2
    assert not difference(answer((1, 2, 3), margin=0.05), answer((1, 2, 4)), 0.0).same
    assert not difference(one, answer((1, 2, 3), -0.7), 0.1).same
    assert not difference(one, answer((1, 2)), 0.1).same
    assert not difference(one, Completion(error="no"), 0.1).same
    assert not difference(Completion(200, text="a"), Completion(200, text="b"), 0.1).same
    read = Completion(200, prompt_logprobs=(None, -1.0, -0.5, -0.5, -0.5))
    assert extended(one, read, 2, 0.1).same and not extended(one, read, 1, 0.1).same
    assert not extended(one, replace(read, prompt_logprobs=()), 2, 0.1).same


# --- frozen, killed, drained, started again


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[FakeServer, Known]]:
    with over_fake_engine(tmp_path / "m", "0.4", "20", "4", "16") as server:
        context = Context(Subject(None, server.address), FakeServices(server), tmp_path)
        yield server, known_of(context)


def case_of(known: Known) -> tuple[list[int], Completion]:
    prompt = [5, 6, 7]
    return prompt, known.asker.complete(prompt, 8, logprobs=2)


@pytest.mark.slow
def test_a_service_of_ours_survives_all_of_it(tmp_path: Path) -> None:
    context = Context(Subject("nowhere", None), FakeServices(folder=tmp_path), tmp_path)
    result: StageResult = robustness.run(context)
    # the fake engine takes no memory worth a slope, and it is too quick for a pool that could be made small
    assert failed(result) == {}, [f for f in result.findings if f.verdict == "fail"]
    for kind in ("frozen.told", "frozen.recovers", "killed.streams", "killed.health", "killed.restart",
                 "drain.running", "drain.refused", "drain.exit", "restart.same", "burst.refused"):  # fmt: skip
        assert named(result, f"robust.{kind}")[0].verdict == "pass", kind
    (memory,) = result.figures
    assert memory.kind == "curves" and set(memory.data["series"]) >= {"HTTP process", "engine process"}
    json.dumps(memory.data)


@pytest.mark.slow
def test_a_small_model_passes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with real("kimi_linear", tmp_path) as context:
        result = robustness.run(context)
    assert failed(result) == {}, [f for f in result.findings if f.verdict == "fail"]
    assert named(result, "robust.soak.memory")[0].verdict == "pass", named(result, "robust.soak.memory")[0].measured


def test_a_frozen_engine_that_nobody_notices_fails(tmp_path: Path) -> None:
    with over_fake_engine(tmp_path / "m", "1000", "20", "4", "16") as server:
        known = known_of(Context(Subject(None, server.address), FakeServices(server), tmp_path))
        found = judge.frozen(robust_process.freeze(server, known, case_of(known), 0.3, 0.0))
    assert failed(found) == {"robust.frozen.told": "server"}


def test_a_server_that_cuts_answers_off_when_it_ends_fails(tmp_path: Path) -> None:
    with over_fake_engine(tmp_path / "m", "10", "0", "4", "16") as server:
        known = known_of(Context(Subject(None, server.address), FakeServices(server), tmp_path))
        found = judge.drained(robust_process.drain(server, known, [5, 6, 7], 20.0), 0.0)
    assert failed(found)["robust.drain.running"] == "server"


def test_streams_of_a_killed_engine_are_told_from_whole_ones(service: tuple[FakeServer, Known]) -> None:
    server, known = service
    seen = robust_process.kill(server, known, case_of(known), 0.0, 30.0)
    assert failed(judge.killed(seen, 30.0)) == {}
    whole = replace(seen, ends=[*seen.ends[:2], Completion(200, finish="stop", tokens=(1,))])
    cut = replace(seen, ends=[Completion(error="was not answered (IncompleteRead)"), *seen.ends[1:]])
    for wrong in (whole, cut):
        assert failed(judge.killed(wrong, 30.0)) == {"robust.killed.streams": "server"}


def test_answers_that_are_over_are_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may answer more quickly than this client looks."""
    gate, asked = threading.Event(), list[int]()

    def complete(prompt: Any, tokens: int, **more: Any) -> Completion:
        asked.append(tokens)
        if len(asked) > 4:
            gate.wait(20.0)
        return Completion(200, output_tokens=tokens)

    known: Any = SimpleNamespace(asker=SimpleNamespace(complete=complete, client=None))
    monkeypatch.setattr(robust_process, "read_numbers", lambda client: {"num_requests_running": 2.0 * (len(asked) > 4)})
    with ThreadPoolExecutor(2) as pool:
        streams = robust_process._begin(pool, known, [1], 2, 7)
        assert len(asked) == 6 and not any(stream.done() for stream in streams)
        gate.set()


def test_whole_answers_say_nothing_of_what_happened_to_them() -> None:
    whole, told = Completion(200, output_tokens=9), Completion(200, "the stream ended with an error: x", ended=True)
    half = Completion(200, output_tokens=4, finish="length")
    kinds = {
        (whole, whole): "not applicable", (told, whole): "pass", (told, told): "pass", (told, half): "fail",
        (whole, half): "fail",
    }  # fmt: skip
    for ends, verdict in kinds.items():
        found = judge.killed(Killed([*ends], 0.5, 3.0, Difference(True), asked=9), 9.0)
        assert named(found, "robust.killed.streams")[0].verdict == verdict, ends
    over = Drained(whole, 9, [503], 0, 3.0, ran=False)
    assert named(judge.drained(over, 60.0), "robust.drain.running")[0].verdict == "not applicable"
    assert failed(judge.drained(replace(over, running=half), 60.0)) == {"robust.drain.running": "server"}


def test_a_health_that_is_never_good_says_nothing_of_a_frozen_engine() -> None:
    sick = Frozen(2.0, 0.1, 0.1, Difference(True), well=False)
    assert failed(judge.frozen(sick)) == {"robust.frozen.told": "server"}


def test_a_death_that_nobody_sees_or_survives_fails() -> None:
    told = Completion(200, "the stream ended with an error: x", ended=True)
    seen = Killed([told], None, None, Difference(False, why="no answer"))
    assert failed(judge.killed(seen, 9.0)) == {"robust.killed.health": "server", "robust.killed.restart": "server"}
    other = Killed([told], 0.5, 3.0, Difference(False, why="another token"))
    assert failed(judge.killed(other, 9.0)) == {"robust.killed.restart": "server"}


def test_being_frozen_must_cost_time_and_nothing_else() -> None:
    lost = Frozen(2.0, 1.0, 0.1, Difference(False, why="no whole answer"))
    assert failed(judge.frozen(lost)) == {"robust.frozen.recovers": "server"}
    stuck = Frozen(2.0, 1.0, None, Difference(True))
    assert failed(judge.frozen(stuck)) == {"robust.frozen.recovers": "server"}


def test_an_end_that_is_not_as_documented_fails() -> None:
    good = Drained(Completion(200, output_tokens=9), 9, [200, 503, 0], 0, 3.0)
    assert failed(judge.drained(good, 60.0)) == {}
    for change, kind in (
        ({"running": Completion(200, output_tokens=4)}, "running"), ({"late": [503, 200]}, "refused"),
        ({"late": [200, 200]}, "refused"),
        ({"code": 137}, "exit"), ({"seconds": 90.0}, "exit"),
    ):  # fmt: skip
        assert failed(judge.drained(replace(good, **change), 60.0)) == {f"robust.drain.{kind}": "server"}


def test_a_second_start_that_answers_otherwise_fails() -> None:
    assert judge.restarted([Difference(True)], "", 3.0).verdict == "pass"
    for seen, error in (([Difference(False, why="x")], ""), ([], "the pool is too small"), ([], "")):
        assert judge.restarted(seen, error, 3.0).verdict == "fail"


def test_a_seed_that_is_drawn_anew_shows_at_the_second_start(tmp_path: Path) -> None:
    """The fake engine's answers follow from its prompt; another engine's would not."""
    services = FakeServices(folder=tmp_path)
    context = Context(Subject("nowhere", None), services, tmp_path)
    with services.private("--stall-seconds", "5", "--drain-seconds", "5", "--max-running", "4", "--max-waiting", "16",
                          ) as server:  # fmt: skip
        known = known_of(replace(context, services=FakeServices(server)))  # type: ignore[arg-type]
        load = robust_soak.load_of(known, 0)
    assert robustness._again(context, SMALL, load).verdict == "pass"
    other = replace(load, alone=[replace(one, tokens=one.tokens[::-1] + (1,)) for one in load.alone])
    assert robustness._again(context, SMALL, other).verdict == "fail"
