"""Random work on the real engine, with every check on: each answer is the one that the request gets alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("transformers")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_configs import write_tiny

from dayzero.cache.layout import lay_out
from dayzero.engine.request import NewRequest, SamplingParams
from tests.cpu.engine_support import Engine, ask, least_slabs, prompt_ids

FAMILIES = ("qwen3_5", "gpt_oss")  # states beside rows; windows with sinks beside rows
TRUNKS = [prompt_ids(40, seed) for seed in range(2)]  # what prompts share


@dataclass
class Model:
    folder: Path
    lone: Engine
    known: dict[object, list[int]] = field(default_factory=dict)

    def alone(self, request: NewRequest) -> list[int]:
        """By itself, in one chunk, in an engine without a prefix cache."""
        key = (tuple(request.prompt), msgspec.json.encode(request.params))
        if key not in self.known:
            self.known[key] = self.lone.one(request.prompt, request.params).tokens
        return self.known[key]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, folder)
    return Model(folder, Engine(folder, prefix_cache=False, pool_bytes=4 << 20))


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([0, 1, 5, 16, 24]),
    ignore_eos=st.just(True),
)


@dataclass(frozen=True)
class Asked:
    """trunk, cut: the shared part. leads: requests of the same prompt that wait for this one's (an ``n``)."""

    trunk: int
    cut: int
    own: int
    params: SamplingParams
    priority: int
    salt: str | None
    arrive: int
    abort: int | None
    follow: bool


asked = st.builds(
    Asked, trunk=st.integers(0, 1), cut=st.integers(0, 24), own=st.integers(1, 12), params=params,
    priority=st.integers(0, 1), salt=st.sampled_from([None, None, None, "s"]), arrive=st.integers(0, 5),
    abort=st.none() | st.none() | st.integers(0, 25), follow=st.booleans(),
)  # fmt: skip


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    running = draw(st.integers(1, 5))
    return {
        "max_running": running,
        "max_step_tokens": draw(st.integers(max(running, 5), 60)),
        "chunk_tokens": draw(st.sampled_from([None, 1, 3, 8, 17])),
        "page_tokens": draw(st.sampled_from([4, 4, 8, 16])),
        "snapshot_tokens": draw(st.sampled_from([None, 16, 32])),
        "snapshot_bytes": draw(st.sampled_from([None, None, 0, 100_000])),
        "run_ahead": draw(st.booleans()),
    }


def requests_of(work: list[Asked]) -> list[NewRequest]:
    out: list[NewRequest] = []
    for i, one in enumerate(work):
        prompt = TRUNKS[one.trunk][: one.cut] + prompt_ids(one.own, 7 * i)
        leader = None
        if one.follow and out:  # the same prompt again, for another answer
            prompt, leader = out[-1].prompt, out[-1].id
        out.append(ask(str(i), prompt, one.params, priority=one.priority, salt=one.salt, leader=leader))
    return out


def check(model: Model, work: list[Asked], config: dict[str, Any], spare: float) -> None:
    requests = requests_of(work)
    engine = tight_engine(model, config, max(len(r.prompt) + (r.params.max_tokens or 0) for r in requests), spare)
    before = engine.manager.sums()
    answers = engine.run(
        requests,
        arrive={str(i): one.arrive for i, one in enumerate(work)},
        abort={str(i): one.arrive + one.abort for i, one in enumerate(work) if one.abort is not None},
    )
    for i, (one, request) in enumerate(zip(work, requests, strict=True)):
        answer, want = answers[str(i)], model.alone(request)
        if answer.finish == "abort":
            assert one.abort is not None and answer.tokens == want[: len(answer.tokens)], i
        else:
            assert (answer.finish, answer.tokens) == ("length", want), (i, answer.error)
    assert engine.loop.progress().counters["stuck"] == 0
    engine.manager.forget()
    assert engine.manager.sums() == before


def tight_engine(model: Model, config: dict[str, Any], tokens: int, spare: float) -> Engine:
    """With the least pool that takes a sequence of that many tokens, and that times ``spare`` more."""
    layout = lay_out(model.lone.runner._ready.model.spec.cache(), dtype="f32", page_tokens=config["page_tokens"])
    pool_bytes = int(least_slabs(layout, tokens) * (1 + spare)) * layout.slab_bytes
    engine = Engine(model.folder, **{**config, "pool_bytes": pool_bytes})
    assert engine.runner.info.max_model_len >= min(tokens, 256), "what fits is what is promised"
    return engine


work = st.lists(asked, min_size=2, max_size=6)
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=8, suppress_health_check=CHECKS)
@given(work=work, config=engines(), spare=st.sampled_from([0.0, 0.5, 0.8, 1.2, 3.0]))
def test_random_work(model: Model, work: list[Asked], config: dict[str, Any], spare: float) -> None:
    check(model, work, config, spare)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=CHECKS)
@given(work=work, config=engines(), spare=st.sampled_from([0.0, 0.5, 0.8, 1.2, 3.0]))
def test_much_random_work(model: Model, work: list[Asked], config: dict[str, Any], spare: float) -> None:
    check(model, work, config, spare)
