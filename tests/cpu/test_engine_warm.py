"""Warm-up: which steps are computed before the first request, and that nobody finds anything of them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
import torch
from small_models import write_small

from dayzero.checkpoint.stream import Loader
from dayzero.engine import recorded as recordings
from dayzero.engine import runner as runners
from dayzero.engine.graphs import Memory
from dayzero.engine.packed import Packed, Part
from dayzero.engine.request import SamplingParams
from dayzero.engine.slots import Slots
from dayzero.engine.step import Step
from dayzero.engine.step_driver import StepDriver
from dayzero.engine.warm import lengths, warm_up
from dayzero.errors import MachineError
from dayzero.view import Span
from tests.cpu.engine_support import Engine, ask, least_slabs, prompt_ids

OPTIONS: dict[str, Any] = {
    "page_tokens": 16, "pool_bytes": 4 << 20, "max_running": 6, "max_step_tokens": 40, "graphs": "static",
    "debug": False,
}  # fmt: skip
DRAWN = SamplingParams(temperature=2.0, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True)


def warmed(folder: Path, **options: Any) -> tuple[Engine, list[Step], int]:
    """An engine, the steps of its warm-up, and how many it says they were."""
    engine = Engine(folder, **{**OPTIONS, **options})
    steps, submit = [], engine.runner.submit

    def keeping(step: Step) -> int:
        steps.append(step)
        return submit(step)

    engine.runner.submit = keeping  # type: ignore[method-assign]
    count = warm_up(engine.runner, engine.runner._launch.config)
    engine.runner.submit = submit  # type: ignore[method-assign]
    return engine, steps, count


@pytest.mark.parametrize("name", ["llama", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_each_kind_of_shape_is_computed_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    folder = write_small(name, tmp_path)
    engine, steps, count = warmed(folder)
    assert len(steps) == count
    chunks = [[row.count for row in step.rows] for step in steps if any(row.count > 1 for row in step.rows)]
    alone = {rows[0] for rows in chunks if len(rows) == 1}
    odd = set() if name == "kimi_linear" else {17, 33, 39, 40}  # chunks before a snapshot end with a page
    assert {2, 3, 16, 32} | odd <= alone, "a multiple of 16, none, and the longest"
    assert {1, 2, 3, 4, 5, 6} <= {len(rows) for rows in chunks}, "numbers of rows by powers of two, and the most"
    assert [1, 3] in chunks, "a row that answers beside one that is read"
    single = [len(step.rows) for step in steps if all(row.count == 1 for row in step.rows)]
    assert single and set(single) <= {1, 2}, "recorded steps have been run when they were recorded"
    chooser = engine.runner._chooser
    assert not chooser._states and chooser.take_counts() == {"host_sampled_rows": 0.0}
    assert engine.manager.usage() == 0 and not engine.loop.progress().counters["computed_tokens"]
    cold = Engine(folder, **OPTIONS)
    requests = [ask(str(n), prompt_ids(n, n), DRAWN) for n in (5, 16, 33)]
    assert {k: a.tokens for k, a in engine.run(requests).items()} == {
        k: a.tokens for k, a in cold.run(requests).items()
    }


def test_each_way_of_choosing_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    choose = runners.Chooser.choose

    def choosing(self: Any, rows: Any, logits: Any, late: Any, best: Any = None) -> Any:
        for word in ("_likeliest", "_drawn", "_each"):
            monkeypatch.setattr(self, word, noted(getattr(type(self), word).__get__(self), word))
        calls.extend("mask" for row in rows if row.request_id in late.masks)
        return choose(self, rows, logits, late, best)

    def noted(call: Any, word: str) -> Any:
        def noting(*given: Any) -> Any:
            calls.append(word)
            return call(*given)

        return noting

    monkeypatch.setattr(runners.Chooser, "choose", choosing)
    _, steps, _ = warmed(write_small("llama", tmp_path))
    assert {"_likeliest", "_drawn", "_each", "mask"} == set(calls)
    assert any(row.prompt_logprobs for step in steps for row in step.rows)


def test_an_image_is_among_them(tmp_path: Path) -> None:
    engine, steps, _ = warmed(write_small("qwen3_5_vl", tmp_path))
    images = engine.runner._images
    assert images is not None and any(new.media for step in steps for new in step.new) and not images._slots


def test_experts_that_are_read_are_asked_for_sparingly(tmp_path: Path) -> None:
    engine = Engine(write_small("kimi_k31", tmp_path), expert_bytes=1 << 20, **OPTIONS)
    seen: list[int] = []
    submit = engine.runner.submit

    def keeping(step: Step) -> int:
        seen.append(step.num_tokens)
        return submit(step)

    engine.runner.submit = keeping  # type: ignore[method-assign]
    warm_up(engine.runner, engine.runner._launch.config, sparingly=True)
    assert max(seen) <= 17


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"max_model_len": 12}, [10, 10, 10, 10]),  # 40 tokens of a step
        ({"chunk_tokens": 16, "max_running": 3}, [16, 16, 8]),
        ({"max_model_len": 12, "max_running": 2}, [10, 10]),
        ({"max_model_len": 17, "pool_bytes": None}, [15, 15]),  # four pages: a third would have none to grow
    ],
)
def test_a_whole_step_is_computed_where_no_prompt_has_so_many_tokens(
    options: dict[str, Any], rows: list[int], tmp_path: Path
) -> None:
    folder = write_small("llama", tmp_path)
    if options.get("pool_bytes", 0) is None:
        layout = Engine(folder, **OPTIONS).runner.layout
        options = {**options, "pool_bytes": least_slabs(layout, 4 * 16) * layout.slab_bytes}
    _, steps, _ = warmed(folder, **options)
    largest = max(steps, key=lambda step: step.num_tokens)
    assert [row.count for row in largest.rows] == rows


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_whose_sampling_fails_is_forgotten(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is the one that is told, and who has others to ask may go on."""
    engine = Engine(write_small("llama", tmp_path), **OPTIONS)
    config = engine.runner._launch.config

    def failing(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.runner._chooser, "choose", failing)
    driver = StepDriver(engine.runner, config)
    driver.add([prompt_ids(5, 1)], 2)
    with pytest.raises(torch.OutOfMemoryError):
        (driver.turn_ahead if ahead else driver.turn)()
    driver.close()
    with pytest.raises(MachineError, match="no room for a step of 40 tokens"):
        engine.runner._warm_up()
    monkeypatch.undo()
    assert warm_up(engine.runner, config)


def test_memory_that_only_loading_needs_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[object] = []
    monkeypatch.setattr(Loader, "rest", lambda self: rested.append(self))
    engine = Engine(write_small("llama", tmp_path), **OPTIONS)
    assert rested == [engine.runner._ready.model.loader]
    rested.clear()
    (tmp_path / "experts").mkdir()
    Engine(write_small("kimi_k31", tmp_path / "experts"), expert_bytes=1 << 20, **OPTIONS)
    assert not rested, "experts are read through it as long as the engine runs"


def test_nobody_finds_what_lay_behind_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of an accelerator are wider than their pages, and what they are written into is not cleared before."""
    _, steps, _ = warmed(engine_folder := write_small("llama", tmp_path))
    views = Engine(engine_folder, **OPTIONS).runner._views
    newest = torch.zeros(7, dtype=torch.int64)
    exact = [Slots(views, newest).view(step).where for step in steps]

    def parts(self: Slots, step: Step, late: int) -> list[Part]:
        found = as_on_a_cpu(self, step, late)
        return [replace(one, shape=(one.shape[0], 16)) if one.name.endswith(".table") else one for one in found]

    as_on_a_cpu = Slots._parts
    monkeypatch.setattr(Slots, "_parts", parts)
    monkeypatch.setattr(Packed, "host", lambda self, device: torch.full((self.num_bytes,), 77, dtype=torch.uint8))
    for step, known in zip(steps, exact, strict=True):
        for name, where in Slots(views, newest).view(step).where.items():
            pages = known[name].table.shape[1]
            assert where.table.shape[1] == 16 and where.table[:, :pages].equal(known[name].table)
            assert not where.table[:, pages:].any()


def test_tables_of_an_accelerator_are_of_few_kinds(tmp_path: Path) -> None:
    """Their strides are multiples of 16, so that no kernel is compiled anew for a prompt of another length."""
    engine, steps, _ = warmed(write_small("llama", tmp_path))
    views = engine.runner._views
    for device, kinds in (("cpu", {1, 2, 3}), ("meta", {16})):
        slots = Slots(views, torch.zeros(7, dtype=torch.int64, device=device))
        tables = [part for step in steps for part in slots._parts(step, 0) if part.name.endswith(".table")]
        assert {part.shape[1] for part in tables} == kinds


def test_sizes_of_chunks() -> None:
    assert lengths(1) == [1] and lengths(2) == [1, 2] and lengths(5) == [1, 2, 3, 4, 5]
    assert lengths(512) == sorted({*(1 << i for i in range(10)), *((1 << i) + 1 for i in range(9)), 511})
    assert lengths(32768)[-4:] == [1024, 1025, 32767, 32768]


def test_a_step_for_which_the_device_has_no_room_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object, **options: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(write_small("llama", tmp_path), **OPTIONS)
    monkeypatch.setattr(runners, "warm_up", failing)
    with pytest.raises(MachineError, match="no room for a step of 40 tokens .* smaller --max-step-tokens"):
        engine.runner._warm_up()


def test_a_sentence_that_says_what_to_do_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator that asks the host where a row stands, as it is captured."""
    recorded = Engine(write_small("llama", tmp_path), graphs="static").runner._recorded
    assert recorded is not None
    recorded._memory, recorded._hidden = cast(Memory, object()), True

    def capturing(work: Any, spans: Sequence[Span], memory: object, streams: int) -> None:
        assert spans[0].start

    monkeypatch.setattr(recordings, "Captured", capturing)
    with pytest.raises(MachineError, match="^An operator asks the host where a row stands .* bind another variant"):
        recorded._recording(recorded.sizes[0])
