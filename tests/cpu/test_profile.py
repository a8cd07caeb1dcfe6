"""``dayzero profile``: parts add up to the step, work is what the paper counts, a planted slow operator is found."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slow_operator
import torch
from cli_support import run_json

from dayzero.acceptance.profile import plot
from dayzero.acceptance.profile.report import PhaseReport, ProfileReport, Reporter, findings_of
from dayzero.acceptance.profile.show import show
from dayzero.arch.cost import flops_per_token
from dayzero.blocks.moe import expert_sites
from dayzero.blocks.site import reference
from dayzero.commands.profile import ProfileArguments, phases_of
from dayzero.console import Console
from dayzero.decl import Fp8Blocks
from dayzero.engine import graphs, load
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.profiling import ceilings, measure
from dayzero.engine.profiling.hooks import Hooks
from dayzero.engine.profiling.measure import WARM_STEPS, Bench, Measured, Phase
from dayzero.engine.profiling.work import Call, Counter, Work
from dayzero.engine.residency import FetchedStack, Residency
from dayzero.engine.step_driver import StepDriver
from dayzero.errors import MachineError, UsageError
from dayzero.hardware import HARDWARE
from dayzero.models.blueprint import require_recipe
from dayzero.ops.catalog import CATALOG, Catalog, Line
from dayzero.ops.heads_write import Kept
from dayzero.rehearse.shrink import shrink
from dayzero.view import Paged, Span

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
REFERENCE = (("*", "reference"),)
CEILINGS = {"copy": 1e10, "f32": 1e11, "bf16": 1e11}


def bench_of(where: str, bindings: tuple[tuple[str, str], ...] = (), **more: Any) -> Bench:
    config = EngineConfig(
        max_running=4, max_step_tokens=256, pool_bytes=64 << 20, prefix_cache=False, bindings=bindings, **more
    )
    return Bench(LaunchSpec(source=where, config=config, device="cpu", threads=1), lambda done, total: None)


def twin(name: str, folder: Path) -> str:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(shrink(config, require_recipe(config).twin, keep_vocab=False, changes={}))
    )
    return f"seeded:{folder}"


def report_of(bench: Bench, measured: Measured, catalog: Catalog = CATALOG) -> PhaseReport:
    info = bench.runner.info
    reporter = Reporter(bench.runner.stack.spec, bench.hardware, info.dtype, info.facts["bindings"], CEILINGS, catalog)
    return reporter.phase(measured)


# --- the parts and the whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase(True, 2, 32), Phase(False, 1, 64)], ids=lambda phase: phase.name)
def test_operators_account_for_the_step(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(f"seeded:{CONFIGS / 'smollm2_135m.json'}?layers=3&vocab_size=20000", REFERENCE)
    # The thread's own time: that of other processes, which come between operators as they like, does not count.
    own = SimpleNamespace(perf_counter=time.thread_time)
    monkeypatch.setattr(graphs, "time", own)
    monkeypatch.setattr(measure, "time", own)
    measured = bench.measure(phase)
    share = report_of(bench, measured).accounted
    assert 0.9 <= share <= 1.0, "parts of a step are not longer than the step"
    assert measured.tokens == (phase.rows if phase.decode else phase.tokens)
    assert measured.step_seconds > 0 and measured.device_seconds <= measured.step_seconds
    assert measured.launches is None and measured.replays == 0 and measured.evenness is None
    if phase.decode:  # the prompt's last token is computed, the steps before have added theirs
        assert phase.tokens <= measured.context <= phase.tokens + 2 * phase.rows + WARM_STEPS + measured.num_steps


@pytest.mark.parametrize("name", ["qwen3_8b", "kimi_linear_48b_a3b", "deepseek_v32", "gpt_oss_20b", "kimi_k3_1"])
def test_work_adds_up_to_what_the_paper_counts(name: str, tmp_path: Path) -> None:
    bench = bench_of(twin(name, tmp_path), dtype="float32")
    seen: list[Any] = []
    submit = bench.runner.submit
    bench.runner.submit = lambda step: seen.append(step) or submit(step)  # type: ignore[method-assign, func-returns-value]
    measured = bench.measure(Phase(True, 3, 40))
    counted, *_ = [step for step in seen[-1:] if all(row.count == 1 for row in step.rows)]  # counted last
    spec = bench.runner.stack.spec
    want = sum(flops_per_token(spec, row.start + 1) for row in counted.rows)
    got = sum(work.flops for works in measured.works.values() for work in works)
    # What the paper counts beyond products: norms, biases, convolutions, mixes; a few in a hundred at a twin's widths.
    assert 0.93 * want < got < 1.001 * want, (got, want)
    assert measured.times.keys() == measured.works.keys()
    assert all(work.num_bytes > 0 for works in measured.works.values() for work in works)


def test_a_planted_slow_operator_is_ranked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = next(line for line in CATALOG.lookup("rope.apply") if line.variant == "reference")
    catalog = CATALOG.copy()
    catalog.add(Line("rope.apply", "waiting", "any", (), "slow_operator:waiting", known.traits))
    monkeypatch.setattr(load, "load_entry_points", lambda: (catalog, ()))
    bench = bench_of(twin("qwen3_8b", tmp_path), (("rope.apply", "waiting"),))
    before = slow_operator.calls
    for phase in (Phase(True, 1, 16), Phase(False, 1, 32)):
        measured = bench.measure(phase)
        first = report_of(bench, measured, catalog).rows[0]
        assert (first.contract, first.variant) == ("rope.apply", "waiting")
        assert first.calls == 8, "queries and keys of four layers"
        assert first.recoverable >= 0.95 * first.calls * slow_operator.SECONDS
        assert first.seconds <= measured.looked_at_seconds
        assert {one.variant for one in first.next if one.ready} >= {"native_cpu"} or first.next == ()
    assert slow_operator.calls > before


def test_a_model_that_is_not_looked_at_runs_as_it_is(tmp_path: Path) -> None:
    where = twin("kimi_k3", tmp_path)
    answers = []
    for bench in (bench_of(where), None):
        if bench is None:
            from dayzero.engine.build import executor_of

            runner: Any = executor_of(
                LaunchSpec(
                    source=where, device="cpu",
                    config=EngineConfig(max_running=4, max_step_tokens=256, pool_bytes=64 << 20, prefix_cache=False),
                ),
                lambda done, total: None,
            )  # fmt: skip
            runner.load()
        else:
            runner = bench.runner
        driver = StepDriver(runner, EngineConfig(max_running=4, max_step_tokens=256, prefix_cache=False))
        driver.add(driver.random_prompts(2, 20, 1), 5)
        tokens = []
        while (taken := driver.turn()) is not None:
            tokens.append([row.token for row in taken.result.rows])
        driver.close()
        answers.append(tokens)
    assert answers[0] == answers[1] and len(answers[0]) == 5


def test_references_that_are_other_operators_stay_so() -> None:
    hooks = Hooks("cpu")
    spec = bench_spec()
    bound = hooks.watch(spec, reference)
    from dayzero.ops.residual import add_norm

    assert bound("residual.add_norm", "layers.0.mixer_add_norm") is add_norm.body
    assert bound("norm.rms", "layers.0.mixer_norm") is not reference("norm.rms", "layers.0.mixer_norm")


def bench_spec() -> Any:
    from dayzero.engine.seeded import open_seeded

    return open_seeded(f"seeded:{CONFIGS / 'smollm2_135m.json'}?layers=1").spec


# --- work by hand ---------------------------------------------------------------------------------------------------


def test_work_of_attention_by_hand() -> None:
    counter = Counter(bench_spec())
    rows = torch.zeros(9, 64, 2, 8)  # 2 heads of 8
    spans = (Span(0, 0, 1, 9), Span(1, 1, 3, 2))
    paged = Paged(rows, *(torch.zeros(1, dtype=torch.int32),) * 4, spans)  # type: ignore[arg-type]
    q = torch.zeros(4, 6, 8)
    call = Call("attention.paged", "s", (q, paged, paged), {"scale": 1.0, "window": None}, (q, torch.zeros(4, 6)))
    found = counter.work(call)
    pairs = 10 + (3 + 4 + 5)
    assert found.flops == 4.0 * 6 * 8 * pairs and found.element == "f32"
    records = 2 * (10 + 5) * 2 * 8 * 4
    assert found.num_bytes == records + q.numel() * 4 + 4 * 6 * 4
    call = Call("attention.paged", "s", (q, paged, paged), {"scale": 1.0, "window": 4}, (q, torch.zeros(4, 6)))
    assert counter.work(call).flops == 4.0 * 6 * 8 * (4 + 3 + 4 + 4)


def test_work_of_products_and_others_by_hand() -> None:
    counter, bf16 = Counter(bench_spec()), torch.bfloat16
    x, w, out = torch.zeros(5, 16, dtype=bf16), torch.zeros(24, 16, dtype=bf16), torch.zeros(5, 24, dtype=bf16)
    found = counter.work(Call("linear.matmul", "s", (x, w, None), {}, out))
    assert (found.flops, found.num_bytes, found.element) == (2 * 5 * 16 * 24, 2 * (80 + 384 + 120), "bf16")
    ids = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    found = counter.work(Call("moe.matmul_route", "s", (x,), {"w_ED": w}, ids))
    assert (found.flops, found.num_bytes) == (2 * 5 * 16 * 24, 2 * (80 + 384) + 10 * (8 + 4))
    q, k = torch.zeros(5, 4, 8, dtype=bf16), torch.zeros(5, 2, 8, dtype=bf16)
    pool, places = torch.zeros(9, 64, 2, 8, dtype=bf16), torch.zeros(5, dtype=torch.int64)
    kept = Kept(pool, torch.zeros_like(pool), places, torch.ones_like(places))
    found = counter.work(Call("attention.norm_rope_write", "s", (q, k, torch.ones_like(k), kept), {}, q))
    assert (found.flops, found.num_bytes) == (0, 2 * (160 + 2 * 80 + 2 * 80) + 2 * 5 * 8), "not the pool"
    found = counter.work(Call("norm.rms", "s", (x, w[0]), {"eps": 1e-5}, x))
    assert (found.flops, found.num_bytes) == (0, 2 * (80 + 16)), "a result in its input's place is moved once"
    found = counter.work(Call("embed.lookup", "s", (torch.zeros(5, dtype=torch.int64), w), {}, x))
    assert found.num_bytes == 5 * 8 + 2 * 160, "rows of the table, not the table"
    assert Work(1e9, 5e7, "f32").floor(CEILINGS) == pytest.approx(1e-2)
    assert Work(1e9, 5e8, "f32").floor(CEILINGS) == pytest.approx(5e-2)
    assert Work(1e9, 0, "e4m3").floor(CEILINGS) == pytest.approx(1e-2), "the bf16 rate where there is none of its own"


def test_work_of_experts_counts_the_bytes_that_are_stored() -> None:
    """Of those that were chosen; codes and scales, whatever the rows are."""
    from dayzero.engine.seeded import open_seeded

    spec = open_seeded(f"seeded:{CONFIGS / 'deepseek_v32.json'}?layers=4").spec
    site, moe = next(iter(expert_sites(spec).items()))
    num = moe.router.experts
    x, ids = torch.zeros(5, 64, dtype=torch.bfloat16), torch.tensor([[0, 7]] * 3 + [[7, 9], [-1, 9]])
    plain = [torch.zeros(num, *shape, dtype=torch.bfloat16) for shape in ((200, 64), (200, 64), (64, 200))]
    blocks = [(2, 1), (2, 1), (1, 2)]
    packed = [Fp8Blocks(w.to(torch.float8_e4m3fn), torch.ones(num, *b)) for w, b in zip(plain, blocks, strict=True)]
    counter, rows = Counter(spec), 2 * 5 * 64 * 2 + 10 * (8 + 4)
    tier = SimpleNamespace(expert_bytes=3 * 12_345, num_experts=num)
    away = Residency({3: tier}, 1 << 20)
    fetched = [FetchedStack(away, 3, name, (num, 1, 1)) for name in ("gate", "up", "down")]
    for stacks, each in ((plain, 2 * 3 * 200 * 64), (packed, 3 * 200 * 64 + 4 * 6), (fetched, 3 * 12_345)):
        found = counter.work(Call(moe.contract, site, (x, ids, torch.zeros(5, 2), *stacks), {}, torch.zeros_like(x)))
        assert found.num_bytes == rows + 3 * each and found.element == "bf16"
        assert found.flops == 6.0 * moe.inner * moe.width * 9


# --- the report -----------------------------------------------------------------------------------------------------


def _measured(seconds: dict[tuple[str, str], float], whole: float) -> Measured:
    times = {key: (value, 1) for key, value in seconds.items()}
    works = {key: [Work(0.0, 1e7, "f32")] for key in seconds}  # 1 ms at the ceiling
    return Measured(Phase(True, 1, 8), 1, 3, whole, 0.8 * whole, whole, times, works, None, 0.0, None)


def test_rows_are_summed_over_layers_and_ranked_by_what_is_above_the_floor(tmp_path: Path, capsys: Any) -> None:
    spec = bench_spec()
    reporter = Reporter(spec, HARDWARE["cpu"], "f32", {"norm.rms@layers.0.mixer_norm": "fast"}, CEILINGS, CATALOG)
    seconds = {
        ("norm.rms", "layers.0.mixer_norm"): 0.003, ("norm.rms", "layers.1.mixer_norm"): 0.004,
        ("linear.matmul", "layers.0.mixer.q"): 0.02, ("linear.matmul", "layers.1.mixer.q"): 0.03,
        ("linear.matmul_f32", "head"): 0.001,
    }  # fmt: skip
    phase = reporter.phase(_measured(seconds, 0.1))
    shown = [(row.contract, row.sites, row.num_sites, row.variant, round(row.recoverable, 6)) for row in phase.rows]
    assert (
        shown[:3]
        == [
            ("linear.matmul", "layers.*.mixer.q+k+v", 1, "reference", 0.019),
            ("linear.matmul", "layers.*.mixer.q", 1, "reference", 0.029),
            ("norm.rms", "layers.*.mixer_norm", 1, "reference", 0.003),
        ]
        or shown[0][4] == 0.029
    )
    assert shown[-1] == ("linear.matmul_f32", "head", 1, "reference", 0.0)
    assert ("norm.rms", "layers.*.mixer_norm", 1, "fast", 0.002) in shown
    assert phase.accounted == pytest.approx(0.58) and phase.host_share == pytest.approx(0.2)
    report = ProfileReport("x", "llama", HARDWARE["cpu"], "f32", CEILINGS, [], [phase])
    report.findings = findings_of(report, made=True)
    assert [f.verdict for f in report.findings] == ["note"] and report.verdict == "note"
    show(report, Console())
    out = capsys.readouterr().out
    assert out.index("linear.matmul") < out.index("norm.rms") and "accounted for: 58%" in out
    assert phase.longer_context is None and "rows hold" not in out
    report.phases = [replace(phase, measured=replace(phase.measured, context=11.0))]
    show(report, Console())
    assert "rows hold 11 tokens" in capsys.readouterr().out, "eight were asked for"
    plot.draw(report, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_gives_one_object_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    where, picture = twin("qwen3_30b_a3b", tmp_path / "twin"), tmp_path / "p.png"
    options = ["--device", "cpu", "--batch", "1,2", "--context", "24", "--prefill", "48", "--pool-bytes", "32MiB"]
    code, report = run_json("profile", where, *options, "--threads", "1", "--plot", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert [one["phase"] for one in report["phases"]] == [
        "decode, batch 1, context 24", "decode, batch 2, context 24", "prefill, 48 tokens",
    ]  # fmt: skip
    for phase in report["phases"]:
        above = [row["recoverable_seconds"] for row in phase["operators"]]
        assert above == sorted(above, reverse=True) and phase["step_seconds"] > 0
        assert phase["expert_choice"]["share"] > 0.8
    assert set(report["ceilings"]) == {"copy", "f32", "bf16"} and report["ceilings"]["copy"] > 1e8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": "0", "prefill": "0"}, "nothing to measure"), ({"batch": "1,x"}, "--batch"),
        ({"batch": "2,2"}, "twice"), ({"prefill": "-1"}, "--prefill"), ({"prefill": "99999999"}, "--prefill"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        phases_of(ProfileArguments("x", **options))


def test_phases_from_options() -> None:
    found = phases_of(ProfileArguments("x", batch="1,16", prefill="8192", context=512))
    assert found == [Phase(True, 1, 512), Phase(True, 16, 512), Phase(False, 1, 8192)]
    assert phases_of(ProfileArguments("x", batch="0", prefill="8")) == [Phase(False, 1, 8)]


def test_what_the_pool_cannot_hold_is_said(tmp_path: Path) -> None:
    bench = bench_of(twin("qwen3_8b", tmp_path))
    with pytest.raises(MachineError, match="cannot be run"):
        bench.measure(Phase(True, 1, 1 << 19))


def test_ceilings_are_measured() -> None:
    found = ceilings.measure("cpu", 1)
    assert found["bf16"] >= found["f32"] > 1e8 and found["copy"] > 1e8
