"""Recorded steps without a graph: the same work called again at the same addresses. What it gives is, to the bit, what
the eager path gives on reference operators: at every number of rows around a recorded size, across pages, windows and
top-k, with late tokens, preemption, aborts, warm prefixes, drawn tokens, masks and images.

Debug checks are on, so outputs, scratch and what lies behind tables are poisoned before each step, and every tensor a
step reads must lie where it lay when it was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file, save_file
from small_models import NAMES, write_small
from test_engine_images import Model as WithImages
from tiny_configs import write_tiny

from dayzero.cache.views import NOT_A_NUMBER
from dayzero.engine import buckets
from dayzero.engine.choose import USES
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.recorded import Recorded
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step import Step
from dayzero.errors import MachineError
from dayzero.hardware import HARDWARE
from dayzero.ops.catalog import CATALOG
from dayzero.planner.bindings import decide
from tests.cpu.engine_support import Answer, Engine, ask, least_slabs, prompt_ids

PAGE = 16
STANDING_FOR_ALL = ("gpt_oss", "kimi_linear", "deepseek_v32")  # windows and sinks; states; a sparse index
EDGES = (1, 2, 3, 4, 5, 8, 9)  # rows; sizes are 1, 2, 4, 8, 9
LENGTHS = (5, 14, 15, 16, 7, 63, 8, 64, 33)  # windows and top-k are 8, pages 16; three tokens later all have crossed
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SAMPLED = SamplingParams(temperature=5.0, top_p=0.99, top_k=200, min_p=0.001, seed=11, max_tokens=8, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[name if name in STANDING_FOR_ALL else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("kimi_linear", tmp_path_factory.mktemp("kimi_linear"))


def pair(folder: Path, **options: Any) -> tuple[Engine, Engine]:
    """(eager, recorded)"""
    given = {"page_tokens": PAGE, "pool_bytes": 4 << 20, "record": True, "max_running": 9, **options}
    return Engine(folder, graphs="off", **given), Engine(folder, graphs="static", **given)


def assert_same(got: Mapping[str, Answer], want: Mapping[str, Answer], what: object = "") -> None:
    """To the bit: sums run in f64 and are rounded once, so that a row does not depend on the rows that pad its step."""
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens and got[name].finish == answer.finish, (what, name)
        assert got[name].error == answer.error and got[name].cached == answer.cached, (what, name)
        for one, other in zip(got[name].logits, answer.logits, strict=True):
            assert torch.equal(one, other), (what, name)


def watched(engine: Engine) -> list[Step]:
    """Steps as they are submitted from here on."""
    steps, submit = [], engine.runner.submit

    def keeping(step: Step) -> int:
        steps.append(step)
        return submit(step)

    engine.runner.submit = keeping  # type: ignore[method-assign]
    return steps


def counts(engine: Engine) -> dict[str, float]:
    return {name: engine.loop.progress().counters[name] for name in buckets.COUNTERS}


def mask(engine: Engine, words: bytes, *names: str) -> None:
    """These requests may take tokens whose bits are set, as under a grammar."""
    engine.loop._grammars.mask = lambda name: words if name in names else None  # type: ignore[method-assign]


def many(rows: int, params: SamplingParams = GREEDY) -> list[NewRequest]:
    return [ask(str(i), prompt_ids(LENGTHS[i], i), params) for i in range(rows)]


@pytest.mark.parametrize("run_ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_number_of_rows_gives_the_same_and_is_counted(folder: Path, run_ahead: bool) -> None:
    eager, recorded = pair(folder, run_ahead=run_ahead, prefix_cache=False)
    sizes = buckets.sizes(9)
    assert sizes == (1, 2, 4, 8, 9)
    steps = watched(recorded)
    for rows in EDGES:
        assert_same(recorded.run(many(rows)), eager.run(many(rows)), rows)
    single = [len(step.rows) for step in steps if all(row.count == 1 for row in step.rows)]
    assert set(EDGES) <= set(single), "each number of rows was a step of its own"
    found = counts(recorded)
    assert found["graph_steps"] == found["graph_replays"] == len(single)
    assert found["padded_rows"] == sum(buckets.bucket_of(n, sizes) - n for n in single) > 0
    assert found["eager_steps_chunk"] == len(steps) - len(single) > 0
    assert sum(found.values()) == len(steps) + len(single) + found["padded_rows"], "nothing is eager for another reason"
    assert counts(eager)["eager_steps_off"] == eager.loop.progress().step and not counts(eager)["graph_steps"]


def test_prompts_token_by_token_are_recorded_steps_too(folder: Path) -> None:
    """From the first token of a sequence on, where states begin with zeros, whatever lies in their blocks."""
    eager, recorded = pair(folder, chunk_tokens=1, prefix_cache=False)
    requests = [ask(str(n), prompt_ids(n, n), GREEDY) for n in (3, 18, 9)]
    arrive = {"3": 0, "18": 1, "9": 4}
    for _ in range(2):  # the second time blocks hold what the first left
        assert_same(recorded.run(requests, arrive=arrive), eager.run(requests, arrive=arrive))
    assert counts(recorded)["eager_steps_chunk"] == 0 and counts(recorded)["graph_steps"] > 30


def test_a_warm_prefix_and_snapshots_give_the_same(folder: Path) -> None:
    eager, recorded = pair(folder, pool_bytes=16 << 20, max_running=3)
    base = prompt_ids(3 * PAGE, 9)
    requests = [ask(str(cut), base[:cut] + prompt_ids(5, cut), GREEDY) for cut in (PAGE, PAGE + 7, 2 * PAGE)]
    for number in range(2):
        got, want = recorded.run(requests), eager.run(requests)
        assert_same(got, want, number)
    assert any(answer.cached for answer in got.values()) and counts(recorded)["graph_steps"]


@pytest.mark.slow
def test_preempted_and_aborted_give_the_same_in_every_family(folder: Path) -> None:
    check_preempted_and_aborted(folder)


def test_preempted_and_aborted_give_the_same(deltas: Path) -> None:
    check_preempted_and_aborted(deltas)


def check_preempted_and_aborted(folder: Path) -> None:
    """A pool in which four requests do not run together to their ends; the last is aborted on its way."""
    slab = Engine(folder, page_tokens=PAGE, max_running=9).runner.layout
    held = slab.slab_bytes // slab.token_bytes  # tokens; an answer must outgrow a slab, or nobody has to give way
    longest = 24 if held <= 2 * PAGE + 1 else held + PAGE
    params = msgspec.structs.replace(SAMPLED, max_tokens=longest)
    requests = [ask(str(i), prompt_ids(14 + i, i), params) for i in range(4)]
    least = least_slabs(slab, longest + 24) + 1
    for slabs in range(least, 4 * least):
        eager, recorded = pair(folder, pool_bytes=slabs * slab.slab_bytes)
        before = recorded.manager.sums()
        got = recorded.run(requests, abort={"3": 9})
        assert_same(got, eager.run(requests, abort={"3": 9}), slabs)
        assert counts(recorded)["graph_steps"] and recorded.manager.usage() == 0
        recorded.manager.forget()
        assert recorded.manager.sums() == before
        if recorded.loop.progress().counters["preemptions"]:
            return
    raise AssertionError("no pool was tight enough to preempt anybody")


def test_drawn_tokens_and_masks_need_no_host(llama: Path) -> None:
    """Drawn rows beside greedy ones, some under a grammar: by the operators of sampling, as row by row; what changes
    logits otherwise goes row by row, and is counted."""
    eager, recorded = pair(llama)
    half = np.zeros(16, np.uint32)
    half[:8] = 0xAAAAAAAA  # of 512 tokens, every second one of the lower half
    mixed = [ask(str(i), prompt_ids(9, i), msgspec.structs.replace(SAMPLED, seed=i)) for i in range(5)]
    mixed += [ask("greedy", prompt_ids(12, 7), GREEDY)]
    for engine in (eager, recorded):
        mask(engine, half.tobytes(), "1", "greedy")
    got = recorded.run(mixed)
    assert_same(got, eager.run(mixed))
    assert all(token < 256 and token % 2 for token in got["1"].tokens + got["greedy"].tokens)
    assert counts(recorded)["host_sampled_rows"] == 0 < counts(eager)["host_sampled_rows"]
    told = msgspec.structs.replace(SAMPLED, presence_penalty=1.0, logprobs=2)
    shaped = [ask("x", prompt_ids(9, 1), told), *mixed[:2]]
    assert_same(recorded.run(shaped), eager.run(shaped))
    assert counts(recorded)["host_sampled_rows"] > 0


def test_where_no_token_is_allowed_only_that_row_ends(llama: Path) -> None:
    eager, recorded = pair(llama)
    for engine in (eager, recorded):
        mask(engine, bytes(64), "1")
    requests = [ask(str(i), prompt_ids(9, i), msgspec.structs.replace(SAMPLED, seed=i)) for i in range(3)]
    got = recorded.run(requests)
    assert_same(got, eager.run(requests))
    assert got["1"].error is not None and got["1"].error[0] == "grammar" and got["0"].finish == "length"


@pytest.mark.parametrize("name", ["qwen3_5_vl", pytest.param("kimi_k31", marks=pytest.mark.slow)])
def test_behind_images_rows_stand_where_the_grid_puts_them(name: str, tmp_path: Path) -> None:
    model = WithImages(write_small(name, tmp_path))
    requests = [model.ask("x", 5, ((3, 7), 1), 3, ((5, 4), 3), 8), model.ask("y", 9), model.ask("z", 2, ((3, 7), 2), 1)]
    for chunk in (None, 1):  # token by token, rows of images stand in steps of single tokens
        eager, recorded = pair(model.folder, chunk_tokens=chunk, prefix_cache=False)
        assert_same(recorded.run(requests), eager.run(requests))
        found = counts(recorded)
        assert found["graph_steps"] and (found["eager_steps_image"] > 0) == (chunk == 1)
        assert (found["eager_steps_chunk"] > 0) == (chunk is None)


def test_a_row_that_is_no_number_spoils_no_other_and_neither_does_padding(tmp_path: Path) -> None:
    """A token whose embedding is NaN, in a row, and then as the token that all padding rows have."""
    cursed = 511
    write_tiny("kimi_linear", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][cursed] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    eager, recorded = pair(tmp_path, chunk_tokens=1)
    requests = [ask("bad", [*prompt_ids(6, 1), cursed, 5, 6], GREEDY), *many(2)]
    got = recorded.run(requests)
    assert_same({n: got[n] for n in "01"}, {n: a for n, a in eager.run(requests).items() if n in "01"})
    assert got["bad"].error is not None and got["bad"].error[0] == "nan_logits"
    clean = recorded.run(many(5))
    assert recorded.runner._recorded is not None
    recorded.runner._recorded.inputs.pad_id = cursed
    recorded.manager.forget()
    assert_same(recorded.run(many(5)), clean)
    assert counts(recorded)["padded_rows"] > 0


def test_forks_of_replayed_steps_are_counted_and_told(llama: Path) -> None:
    """Work that is called again has none; of a captured step they are as many as its recording says."""
    engine = pair(llama)[1]
    recorded = engine.runner._recorded
    assert recorded is not None and "two streams" not in recorded.row(0)
    engine.run(many(1))
    assert counts(engine)["graph_steps"] > 0 and counts(engine)["graph_forks"] == 0
    recorded._replays[1].num_forks = 3
    before = counts(engine)["graph_steps"]
    engine.run(many(1))
    assert counts(engine)["graph_forks"] == 3 * (counts(engine)["graph_steps"] - before) > 0
    assert "two streams at 3 places" in recorded.row(0)


def test_recording_writes_to_scratch_alone(folder: Path) -> None:
    """Nothing else of a pool full of NaN has changed when the engine is ready."""
    engine = pair(folder)[1]
    views, layout = engine.runner._views, engine.runner.layout
    own = engine.runner.num_slabs * layout.slab_bytes
    assert bool((views.pool[:own] == NOT_A_NUMBER).all()) and views.pool.shape[0] > own
    for name, numbers in views.scratch.items():
        assert numbers.min() * 256 >= own, name


def test_experts_that_are_fetched_cut_a_recording_into_pieces(tmp_path: Path) -> None:
    folder = write_small("kimi_k31", tmp_path)
    options = {"expert_bytes": 1 << 20, "max_running": 4}
    eager, recorded = pair(folder, **options)
    assert_same(recorded.run(many(4)), eager.run(many(4)))
    layers = len(recorded.runner._ready.experts.tiers)
    eager, recorded = pair(folder, **options)
    assert_same(recorded.run(many(3)), eager.run(many(3)))  # at size 4
    asked = [sum(e.loop.progress().counters[f"expert_{w}"] for w in ("hits", "misses")) for e in (recorded, eager)]
    assert asked[0] == asked[1], "no expert is asked for by a row that pads a step"
    found = counts(recorded)
    assert found["padded_rows"] > 0
    assert layers > 1 and found["graph_replays"] == (layers + 1) * found["graph_steps"] > 0
    assert f"{layers + 1} pieces each" in dict(recorded.runner.info.table)["graphs"]


def test_a_step_that_does_not_fit_is_eager_and_says_why(llama: Path) -> None:
    eager, recorded = pair(llama)
    assert recorded.runner._recorded is not None
    recorded.runner._recorded.inputs.widths["tokens"] = 1  # as if a longer context had come than was promised
    assert_same(recorded.run(many(3)), eager.run(many(3)))
    assert counts(recorded)["eager_steps_wide"] > 0
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    eager, recorded = pair(llama, chunk_tokens=1)
    assert_same(recorded.run(many(1, asked)), eager.run(many(1, asked)))
    assert counts(recorded)["eager_steps_logprobs"] == LENGTHS[0] - 1


def test_addresses_stay_and_a_moved_pool_is_found(llama: Path) -> None:
    recorded = pair(llama)[1]
    run = recorded.runner._recorded
    assert run is not None
    fixed = (run.outputs.logits, run.outputs.best, run.inputs.newest, *run.inputs.tensors.values())
    before = [x.data_ptr() for x in fixed]
    recorded.run(many(3))
    assert before == [x.data_ptr() for x in fixed]
    assert run.inputs.newest is recorded.runner._chooser.newest
    store: Any = next(iter(recorded.runner._views.stores.values()))
    store.rows = store.rows.clone()
    with pytest.raises(AssertionError, match="memory that it did not read"):
        recorded.run(many(2))


def test_the_start_table_says_what_keeps_a_plan_from_graphs(llama: Path) -> None:
    row = dict(pair(llama)[1].runner.info.table)["graphs"]
    assert row.startswith("5 sizes up to 9 rows, static")
    cpu = Engine(llama, graphs="auto")
    assert dict(cpu.runner.info.table)["graphs"] == "off: for accelerators only"
    loaded = cpu.runner._ready
    plan = buckets.plan_recording(EngineConfig(graphs="auto"), "cuda", ["moe.experts at 3 sites runs 'x', which reads"])
    assert not plan.how and plan.why == ("moe.experts at 3 sites runs 'x', which reads",)
    assert not loaded.recording.how and not cpu.runner.overlaps


def test_plans_for_a_gpu_name_the_sites_that_keep_them_from_graphs(tmp_path: Path) -> None:
    """float32 has no paged attention of its own on a GPU; bfloat16 has, where latent rows are a power of two wide."""
    spec = Engine(write_small("kimi_linear", tmp_path, 32)).runner.stack.spec
    uses = (*spec.contracts(), *USES)
    hardware = HARDWARE["h200"]
    assert {"sm90", "triton", "cuda_bindings"} <= hardware.features
    wide = buckets.host_sites(spec, uses, decide(uses, hardware, "f32", {}, CATALOG), CATALOG)
    assert any(line.startswith("attention.paged at 1 site runs 'tiled', which goes from row to row") for line in wide)
    narrow = buckets.host_sites(spec, uses, decide(uses, hardware, "bf16", {}, CATALOG), CATALOG)
    assert narrow == []
    assert buckets.plan_recording(EngineConfig(), "cuda", narrow).how == "captured"
    assert buckets.plan_recording(EngineConfig(debug=True), "cuda", narrow).how == ""


def test_a_step_that_cannot_be_captured_is_told_in_one_sentence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Engine(llama, max_running=3, graphs="static", debug=False).runner
    widths = buckets.table_widths(runner.layout, runner._launch.config, 64)
    plan = buckets.RecordingPlan("captured", (), True)
    made = Recorded(runner.stack, runner._views, runner._chooser, runner._launch.config, widths, plan)

    def failing(*given: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\na long story")

    for name, value in {"Captured": failing, "Memory": object, "capturing": lambda memory: nullcontext()}.items():
        monkeypatch.setattr(f"dayzero.engine.recorded.{name}", value)
    with pytest.raises(
        MachineError, match=r"3 rows cannot be captured .* stream is capturing\). Start with --graphs off"
    ):
        made.record()


def test_an_operator_that_asks_where_a_row_stands_is_told_in_one_sentence(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dayzero.engine.load.host_sites", lambda *given: [])  # as if all of them could do without
    with pytest.raises(MachineError, match="asks the host where a row stands .* start with --graphs off"):
        pair(llama, debug=False)


def test_choosing_tokens_on_the_device_is_no_time_of_the_hosts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticks:
        """A mark of a device that takes a nanosecond from one mark to the next."""

        made = 0

        def __init__(self, device: str) -> None:
            Ticks.made += 1
            self.at = Ticks.made

        def wait(self) -> None:
            return

        def seconds_since(self, other: Ticks) -> float:
            return (self.at - other.at) * 1e-9

    engine = Engine(llama, max_running=2, graphs="static", debug=False, run_ahead=False)
    monkeypatch.setattr("dayzero.engine.runner.Mark", Ticks)
    engine.runner.overlaps = True
    result, seen = engine.runner.result, []

    def watching(handle: int) -> Any:
        got = result(handle)
        seen.append((got.seconds - got.host_seconds) * 1e9)
        return got

    engine.runner.result = watching  # type: ignore[method-assign]
    engine.run(many(1, SAMPLED))
    assert seen == pytest.approx([2.0] * len(seen), abs=0.01), "the step, and the choice"
    seen.clear()
    engine.run(many(1, msgspec.structs.replace(SAMPLED, presence_penalty=0.5)))
    assert seen == pytest.approx([1.0] * len(seen), abs=0.01), "the host chooses"


class Told:
    """A progress that wants to know of recordings too."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def __call__(self, loaded_bytes: float, total_bytes: float) -> None:
        assert not self.made, "recording comes behind the weights"

    def recording(self, made: int, wanted: int) -> None:
        self.made.append((made, wanted))


def test_recording_is_told_before_the_engine_is_ready(llama: Path) -> None:
    told = Told()
    config = EngineConfig(dtype="float32", graphs="static", max_running=5, pool_bytes=4 << 20, page_tokens=PAGE)
    LocalRunner(LaunchSpec(source=str(llama), device="cpu", config=config), told).load()
    assert told.made == [(n, 4) for n in range(5)]


def test_sizes_and_widths() -> None:
    assert buckets.sizes(1) == (1,) and buckets.sizes(3) == (1, 2, 3) and buckets.sizes(8) == (1, 2, 4, 8)
    assert buckets.sizes(20) == (1, 2, 4, 8, 16, 20) and len(buckets.sizes(64)) == 11 and len(buckets.sizes(256)) == 35
    for limit in range(1, 70):
        known: Sequence[int] = buckets.sizes(limit)
        assert known[-1] == limit and list(known) == sorted(set(known))
        assert all(0 <= buckets.bucket_of(n, known) - n < 8 for n in range(1, limit + 1))
