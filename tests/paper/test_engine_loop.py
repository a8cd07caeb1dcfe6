"""The engine loop over an executor whose answers are known: order of calls, exactly one end, grammars, numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dayzero.engine.build import engine_loop
from dayzero.engine.events import Abort, Batch, Drain, Output, Stop, Submit
from dayzero.engine.loop import EngineLoop
from dayzero.engine.request import NewRequest, SamplingParams
from tests.paper.fake_engine import FakeExecutor, Habits, answer, fake_launch

DEFAULT = Habits()


def start(folder: Path, habits: Habits = DEFAULT, **config: object) -> tuple[EngineLoop, FakeExecutor]:
    launch = fake_launch(folder, habits, **config)
    executor = FakeExecutor(launch)
    executor.load()
    return engine_loop(launch, executor), executor


def request(name: str, prompt: list[int], **params: object) -> NewRequest:
    return NewRequest(id=name, prompt=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]


def run(loop: EngineLoop, turns: int = 10_000) -> list[Batch]:
    batches = []
    for _ in range(turns):
        if not loop.num_live and not loop.busy:
            return batches
        batch = loop.turn(wait=True)
        if batch is not None:
            batches.append(batch)
    raise AssertionError(f"{loop.num_live} requests are still live after {turns} turns")


def collect(batches: list[Batch]) -> dict[str, tuple[list[int], Output]]:
    """id -> (all tokens, last output); exactly one last output each."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, Output] = {}
    for output in (one for batch in batches for one in batch.outputs):
        assert output.id not in last, f"{output.id} goes on after its end"
        tokens.setdefault(output.id, []).extend(output.tokens)
        if output.finish is not None:
            last[output.id] = output
    assert tokens.keys() == last.keys()
    return {name: (tokens[name], last[name]) for name in last}


def prompts(count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 7, 63, 64, 65, 130]) for _ in range(count)]
    return {f"r{i}": [rng.randrange(2, 250) for _ in range(length)] for i, length in enumerate(lengths)}


def test_answers_are_those_of_each_request_alone(tmp_path: Path) -> None:
    loop, executor = start(tmp_path / "m", max_running=5, max_step_tokens=32)
    asked = prompts(23)
    loop.take(Submit([request(name, ids, max_tokens=40) for name, ids in asked.items()]))
    batches = run(loop)
    found = collect(batches)
    assert {n: (t, o.finish) for n, (t, o) in found.items()} == {n: answer(ids, 40) for n, ids in asked.items()}
    assert batches[-1].progress.running == batches[-1].progress.waiting == 0
    assert batches[-1].progress.usage == 0 or loop.progress().usage >= 0
    counters = batches[-1].progress.counters
    assert sum(b.iteration_tokens for b in batches) == counters["computed_tokens"] + counters["dropped_tokens"]


def test_the_next_step_is_submitted_before_the_result_and_sampled_after_it(tmp_path: Path) -> None:
    loop, executor = start(tmp_path / "m", Habits())
    loop.take(Submit([request("a", [5, 6, 7], max_tokens=5, ignore_eos=True)]))
    run(loop)
    assert executor.order[:8] == [
        "submit 1", "sample 1", "submit 2", "result 1", "sample 2", "submit 3", "result 2", "sample 3",
    ]  # fmt: skip
    assert executor.released == [0]


def test_a_late_stop_is_dropped_from_the_step_in_flight(tmp_path: Path) -> None:
    loop, executor = start(tmp_path / "m")
    prompt = next(p for p in prompts(200).values() if answer(p, 30)[1] == "stop" and len(answer(p, 30)[0]) > 2)
    loop.take(Submit([request("a", prompt, max_tokens=30)]))
    found = collect(run(loop))
    assert found["a"][1].stop_id == 1 and found["a"][0] == answer(prompt, 30)[0]
    assert frozenset({"a"}) in [late.dropped for late in executor.late]


@pytest.mark.parametrize("turns", range(6))
def test_an_abort_ends_once_wherever_the_request_stands(tmp_path: Path, turns: int) -> None:
    loop, _ = start(tmp_path / "m", max_step_tokens=64)
    loop.take(Submit([request("a", list(range(2, 132)), max_tokens=50, ignore_eos=True)]))
    batches = [batch for _ in range(turns) if (batch := loop.turn()) is not None]
    loop.take(Abort(["a", "nobody"]))
    loop.take(Abort(["a"]))
    found = collect(batches + run(loop))
    assert found["a"][1].finish == "abort"
    assert found["a"][0] == answer_ignoring(list(range(2, 132)), len(found["a"][0]))


def answer_ignoring(prompt: list[int], count: int) -> list[int]:
    from tests.paper.fake_engine import next_token

    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


def test_drain_serves_what_was_taken_and_refuses_the_rest(tmp_path: Path) -> None:
    loop, _ = start(tmp_path / "m", max_running=1)
    asked = prompts(3)
    loop.take(Submit([request(name, ids, max_tokens=6) for name, ids in asked.items()]))
    loop.turn()
    assert not loop.ended
    loop.take(Drain())
    loop.take(Submit([request("late", [3], max_tokens=2)]))
    found = collect(run(loop))
    assert loop.ended
    assert found["late"][1].error is not None and found["late"][1].error[0] == "overloaded"
    assert {n: found[n][0] for n in asked} == {n: answer(ids, 6)[0] for n, ids in asked.items()}


def test_stop_aborts_everything_at_once(tmp_path: Path) -> None:
    loop, _ = start(tmp_path / "m", max_running=2)
    loop.take(Submit([request(name, ids, max_tokens=60) for name, ids in prompts(5).items()]))
    batches = [loop.turn(), loop.turn()]
    loop.take(Stop())
    assert not loop.ended
    batches.append(loop.turn())
    assert loop.ended
    found = collect([b for b in batches if b is not None])
    assert len(found) == 5 and "abort" in {o.finish for _, o in found.values()}


def test_bad_rows_and_refused_requests_end_alone(tmp_path: Path) -> None:
    loop, _ = start(tmp_path / "m", Habits(poison=299, max_model_len=100))
    loop.take(Submit([
        request("nan", [3, 299, 5], max_tokens=4), request("long", [3] * 99, max_tokens=2),
        request("good", [3, 4], max_tokens=4), request("empty", [], max_tokens=4),
    ]))  # fmt: skip
    found = collect(run(loop))
    kinds = {name: output.error and output.error[0] for name, (_, output) in found.items()}
    assert kinds == {"nan": "nan_logits", "long": "too_long", "good": None, "empty": "too_long"}
    assert found["good"][0] == answer([3, 4], 4)[0]


def test_progress_counts_steps_and_remembers_the_slowest(tmp_path: Path) -> None:
    loop, executor = start(tmp_path / "m", Habits(step_seconds=0.02))
    loop.take(Submit([request("a", [3, 4], max_tokens=4, ignore_eos=True)]))
    batches = run(loop)
    steps = [batch.progress.step for batch in batches]
    assert steps == sorted(set(steps)) and steps[0] == 1
    assert 0.02 <= batches[-1].progress.slowest < 1
    assert 0 <= batches[-1].progress.host_share <= 1
    assert batches[0].progress.running == 1 and batches[-1].progress.state == "ready"
