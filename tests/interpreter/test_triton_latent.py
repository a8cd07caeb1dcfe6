"""``latent.attend`` in Triton's interpreter: chunks in the expanded form over few keys at once, so that sums are
joined, among rows of one token and behind odd histories; and a whole engine over it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.engine.request import SamplingParams
from dayzero.ops import latent, latent_steps
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.rehearse.twin import TwinOptions, write_twin
from dayzero.view import Paged
from tests.cpu.engine_support import REFERENCE, Engine, ask, prompt_ids
from tests.parity import close

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

from dayzero.ops.latent_forms import Widths  # noqa: E402
from dayzero.ops.triton import latent_attend  # noqa: E402

BF16 = torch.bfloat16
BOUND = latent.attend.bound["bf16"].value
SMALL = latent_attend.Tuning(block=16, tile=16, warps=4, stages=1)
KIMI, ODD = Widths(2, 128, 64, 512, 128), Widths(3, 12, 8, 40, 20)


def inputs(
    rows: tuple[tuple[int, int], ...], widths: Widths, page: int = 16, dtype: torch.dtype = BF16
) -> dict[str, Any]:
    """Arguments of ``latent.attend``; NaN where no row has a token."""
    heads, nope, shared, rank, value = widths
    r = Inputs(len(rows))
    keys = paged_inputs(r, rows, (heads, 1), (rank + shared, rank), dtype, page=page)["keys"]
    tokens = sum(count for _, count in rows)
    return {
        "q_THD": strided(r.normal(tokens, heads, nope + shared, dtype=dtype)),
        "rows": Paged(keys.rows[:, :, 0], keys.table, keys.first, keys.query_start, keys.start, keys.spans),
        "kv_b": r.normal(heads * (nope + value), rank, dtype=dtype) / rank**0.5, "scale": (nope + shared) ** -0.5,
    }  # fmt: skip


def expanded(given: dict[str, Any], number: int, widths: Widths, at_once: int, **more: Any) -> Tensor:
    rows, span = given["rows"], given["rows"].spans[number]
    out_THV = torch.full((span.count, widths.heads, widths.value), torch.nan, dtype=given["q_THD"].dtype)
    latent_steps.expanded(
        given["q_THD"][span.rows].contiguous(), rows, span,
        latent_steps.Projection(given["kv_b"], widths, given["scale"]), out_THV, at_once=at_once,
        chunk=partial(latent_attend.chunk, **more),
    )  # fmt: skip
    return out_THV


@pytest.mark.parametrize(
    ("start", "count", "page", "at_once"),
    [
        (0, 2, 16, 16), (0, 200, 16, 32), (300, 2, 32, 64), (31, 129, 8, 40), (250, 70, 16, 112), (1, 33, 16, 0),
        (64, 64, 64, 64), (63, 65, 64, 64), (16, 16, 16, 16), (100, 17, 16, 4096),
    ],
)  # fmt: skip
@pytest.mark.parametrize("widths", [ODD, Widths(2, 32, 0, 64, 16)])
def test_keys_some_at_a_time(start: int, count: int, page: int, at_once: int, widths: Widths) -> None:
    given = inputs(((start, count),), widths, page)
    want = latent.attend.body(**given)
    for more in ({}, {"tuning": SMALL}):
        close(expanded(given, 0, widths, at_once, **more), want, BOUND)


def test_widths_of_a_large_model() -> None:
    given = inputs(((37, 150),), KIMI, 64)
    close(expanded(given, 0, KIMI, 64), latent.attend.body(**given), BOUND)


def test_results_in_float32_are_those_of_the_reference() -> None:
    """All sums are in float32, so nothing is lost where keys are divided."""
    given = inputs(((90, 50),), ODD, dtype=torch.float32)
    want = latent.attend.body(**given)
    for at_once in (16, 48, 1024):
        close(expanded(given, 0, ODD, at_once, tuning=SMALL), want, latent.attend.bound["f32"].value)


MIXED = ((40, 1), (0, 1), (63, 1), (0, 37), (30, 17), (5, 2), (129, 61))


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks from 16 tokens on are expanded, 48 keys at once; two short ones are not absorbed together."""
    monkeypatch.setattr(latent_steps, "expands", lambda count, start, widths: count >= 16)
    monkeypatch.setattr(latent_steps, "keys_at_once", lambda widths, page: 48)
    monkeypatch.setattr(latent_steps, "ABSORBED_TOKENS", 6)


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("rows", [MIXED, (*MIXED[:3], (7, 4), (9, 4), (0, 3), (3, 20), (20, 5)), ((5, 1),), ()])
def test_rows_of_all_kinds_in_one_step(rows: tuple[tuple[int, int], ...]) -> None:
    widths = Widths(3, 12, 8, 64, 20)  # the absorbed form takes powers of two
    given = inputs(rows, widths)
    close(latent_attend.attend(**given), latent.attend.body(**given), BOUND)


@pytest.mark.usefixtures("forms")
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    given = inputs(MIXED, Widths(3, 12, 8, 64, 20))
    together, rows = latent_attend.attend(**given), given["rows"]
    for span in rows.spans:
        alone = latent_steps._some(rows, span.row, span.row + 1)
        got = latent_attend.attend(given["q_THD"][span.rows], alone, given["kv_b"], scale=given["scale"])
        assert torch.equal(got, together[span.rows]), span


def test_runs_of_rows_that_are_computed_at_once() -> None:
    """Long chunks alone; rows of one token never parted; of short chunks up to ``ABSORBED_TOKENS`` with them."""
    most = latent_steps.ABSORBED_TOKENS
    rows = ((9, 1),) * (most + 3) + ((0, 100), (0, 128), (3, 127), (5000, 100), (0, 200), (0, 900)) + ((1, 100),) * 25
    spans = inputs(((9, 1),), ODD)["rows"].spans
    made, first = [], 0
    for number, (start, count) in enumerate(rows):
        made.append(type(spans[0])(number, first, count, start))
        first += count
    runs = list(latent_steps._runs(tuple(made), KIMI))
    singles = most + 3
    large = [(True, singles + 1, singles + 2), (True, singles + 4, singles + 5), (True, singles + 5, singles + 6)]
    assert [run for run in runs if run[0]] == large
    assert runs[0] == (False, 0, singles) and runs[1] == (False, singles, singles + 1)
    assert [begin for _, begin, _ in runs] == [0, *(end for _, _, end in runs[:-1])] and runs[-1][2] == len(rows)
    assert [end - begin for large, begin, end in runs[-2:]] == [20, 5]


GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
CONFIGS = Path(__file__).parents[1] / "paper" / "configs"


@pytest.mark.usefixtures("forms")
def test_an_engine_whose_prompts_are_expanded_gives_what_references_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "config"
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / "kimi_linear_48b_a3b.json").read_bytes())
    write_twin(str(source), str(tmp_path / "twin"), TwinOptions(changes={"kv_lora_rank": 64}))
    options: dict[str, Any] = {
        "page_tokens": 16, "max_running": 4, "max_step_tokens": 48, "prefix_cache": False, "record": True,
    }  # fmt: skip
    asked: list[tuple[int, int]] = []
    expanding = latent_steps.expanded

    def noted(q_THD: Tensor, rows: Paged, span: Any, *args: Any, **more: Any) -> None:
        asked.append((span.start, span.count))
        expanding(q_THD, rows, span, *args, **more)

    monkeypatch.setattr(latent_steps, "expanded", noted)
    plain = Engine(tmp_path / "twin", graphs="off", **options)
    made = Engine(tmp_path / "twin", graphs="off", bindings=(*REFERENCE, ("latent.attend", "triton")), **options)
    requests = [ask(str(n), prompt_ids(n, n), GREEDY) for n in (7, 130, 61)]
    want, got = plain.run(requests), made.run(requests)
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens
        for one, other in zip(got[name].logits, answer.logits, strict=True):
            assert float((one - other).abs().max()) <= 1e-5 * float(other.max() - other.min())  # sums in float32
    assert max(start for start, _ in asked) >= 48
