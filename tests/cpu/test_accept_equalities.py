"""Stage 3 of an acceptance: sound models pass, and each claim fails for a fault that breaks it, with its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from align_support import write_dense
from torch import Tensor

from dayzero.acceptance.accept.stage import Context, StageResult, Subject
from dayzero.acceptance.stages import equal_forms, equal_judge, equal_single, equalities
from dayzero.acceptance.stages.equal_array import all_pairs, covering, pairs_of
from dayzero.acceptance.stages.equal_judge import Limit, compare_one
from dayzero.blocks.attention import AttentionBlock
from dayzero.cache.manager import CacheManager
from dayzero.cache.prefix import Chain
from dayzero.engine import buckets, choose, inprocess
from dayzero.engine.answer import RequestOutput
from dayzero.engine.events import Logprobs
from dayzero.engine.fixed import Inputs
from dayzero.engine.live import Live
from dayzero.engine.llm import LLM
from dayzero.finding import Finding
from dayzero.ops import records
from dayzero.ops.contract import CONTRACTS
from dayzero.rehearse.twin import write_twin

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
ONE: Mapping[str, tuple[Any, ...]] = {
    "path": ("reference",), "prefix": (False,), "chunk": (None,), "together": (False,), "tight": (False,),
    "narrow": (False,), "sampled": (False,), "page": (64,),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("equal") / "model")


def run_stage(folder: Path) -> StageResult:
    """The stage reads nothing of services."""
    return equalities.run(Context(Subject(str(folder)), None, folder))  # type: ignore[arg-type]


def by_kind(result: StageResult) -> dict[str, Finding]:
    found = {f.kind: f for f in result.findings}
    assert len(found) == len(result.findings), "two findings of one kind"
    return found


def test_a_sound_model_passes(dense: Path) -> None:
    found = by_kind(run_stage(dense))
    assert not [f for f in found.values() if f.verdict not in ("pass", "not applicable")]
    passed = {kind for kind, f in found.items() if f.verdict == "pass"}
    assert passed >= {
        "equal.prefix", "equal.chunk.7", "equal.chunk.64", "equal.together", "equal.tight", "equal.page.16",
        "equal.sampled", "equal.narrow", "equal.pairs", "equal.near_ties", "equal.streamed", "equal.cancelled",
        "equal.narrow_error", "equal.graphs",
    }  # fmt: skip
    assert all(f.measured for f in found.values() if f.verdict == "not applicable")
    assert "recorded and called again" in str(found["equal.graphs"].measured)


@pytest.mark.slow
def test_a_hybrid_passes(tmp_path: Path) -> None:
    """States beside a sparse index under a bank of earlier sums: every form, and snapshots."""
    write_twin(str(CONFIGS / "kimi_k3_1.json"), str(tmp_path / "twin"))
    found = by_kind(run_stage(tmp_path / "twin"))
    assert not [f for f in found.values() if f.verdict not in ("pass", "not applicable")]
    forms = ("equal.recurrent_chunked", "equal.absorbed_expanded", "equal.gather_masked")
    assert all(found[kind].verdict == "pass" for kind in forms)


# --- the array and the judge ------------------------------------------------------------------------------------------


def test_every_pair_comes_once_in_few_rows() -> None:
    features = {"a": (0, 1), "b": (0, 1, 2), "c": (False, True), "d": (1, 2), "e": (None, 7)}
    possible = lambda row: row["c"] or row["a"] == 0  # noqa: E731
    rows = covering(features, possible)
    assert {pair for row in rows for pair in pairs_of(row)} == all_pairs(features, possible)
    assert all(possible(row) for row in rows) and 6 <= len(rows) <= 10
    assert (("a", 1), ("c", False)) not in all_pairs(features, possible)


def answer(*places: tuple[int, float, float]) -> RequestOutput:
    """(token, log-probability, that of the second) a place."""
    logs = [Logprobs(t, lp, 1, [(t, lp), (t + 1, second)]) for t, lp, second in places]
    return RequestOutput(
        prompt=None, prompt_token_ids=[1], token_ids=[t for t, _, _ in places], text="", finish_reason="length",
        logprobs=logs,
    )  # fmt: skip


def test_answers_part_at_near_ties_alone_and_seldom() -> None:
    limit = Limit(0.1, "", 0.1)
    want = answer((5, -1.0, -1.05), (6, -1.0, -3.0))
    near = compare_one(answer((6, -1.02, -1.04), (8, -1.0, -2.0)), want, limit, False, "x")
    assert near.parted == [("x, token 0", pytest.approx(0.05))] and not near.wrong and near.places == 1
    clear = compare_one(answer((5, -1.0, -1.05), (9, -1.0, -3.0)), want, limit, False, "x")
    assert clear.wrong and "margin" in clear.wrong[0]
    moved = compare_one(answer((5, -1.2, -1.05)), want, limit, False, "x")
    assert "0.2" in moved.wrong[0] or "2.0e-01" in moved.wrong[0]
    assert compare_one(answer((5, -1.0, -1.05)), want, limit, False, "x").wrong, "one of them is shorter"
    near.parted *= 2  # one place is allowed however few there are
    assert not near.passed(limit) and not near.passed(replace(limit, most_parted=0.0))


# --- planted faults ---------------------------------------------------------------------------------------------------


def attention(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Tensor, Any], tuple[Tensor, Any]]) -> None:
    forward = AttentionBlock.forward

    def changed(self: AttentionBlock, x_TD: Tensor, view: Any) -> Tensor:
        return forward(self, *change(self, x_TD, view))

    monkeypatch.setattr(AttentionBlock, "forward", changed)


def stale_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages have one key: a hit is another prompt's page."""

    def grow(self: Chain, tokens: Any, num_pages: int) -> None:
        self.keys += [bytes([i]) for i in range(len(self.keys), num_pages)]

    monkeypatch.setattr(Chain, "grow", grow)


def nothing_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = CacheManager.open
    monkeypatch.setattr(CacheManager, "open", lambda self, name, tokens, **more: opened(self, name, tokens, limit=0))


def chunk_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count from the start of a chunk."""

    def change(block: Any, x_TD: Tensor, view: Any) -> tuple[Tensor, Any]:
        later = any(span.start > 0 and span.count > 1 for span in view.spans)
        return x_TD, replace(view, positions=view.positions - view.positions.min()) if later else view

    attention(monkeypatch, change)


def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's input depends on the other rows of a step."""
    change = lambda block, x, view: (x + 0.1 * x.mean(0) if len(view.spans) > 1 else x, view)  # noqa: E731
    attention(monkeypatch, change)


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request comes back with another token."""
    preempt = Live.preempt

    def changed(self: Live, seq: Any) -> None:
        seq.known[-1] = (seq.known[-1] + 1) % 101
        preempt(self, seq)

    monkeypatch.setattr(Live, "preempt", changed)


def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(block: Any, x_TD: Tensor, view: Any) -> tuple[Tensor, Any]:
        page = view.stores[block.site.part("k")].pages(view).page
        return (x_TD.roll(1, -1) if page == 16 else x_TD), view

    attention(monkeypatch, change)


def seedless(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = count()
    monkeypatch.setattr(choose, "uniform", lambda seed, index: (next(draws) * 0.618) % 1.0)


def shared_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bytes depend on the rows that are written with it."""
    write = records.RowCodec.write

    def changed(self: Any, rows: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        write(self, rows, blocks, offsets, values * (1 + 0.2 * (len(values) > 8)))

    monkeypatch.setattr(records.RowCodec, "write", changed)


def together_in_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(block: Any, x_TD: Tensor, view: Any) -> tuple[Tensor, Any]:
        page = view.stores[block.site.part("k")].pages(view).page
        return (x_TD.roll(1, -1) if page == 16 and len(view.spans) > 1 else x_TD), view

    attention(monkeypatch, change)


FAULTS: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], Mapping[str, Any], str, str]] = {
    # fault: (plant, settings that are tried, the finding that fails, its layer)
    "stale key": (stale_key, {"prefix": (False, True)}, "equal.prefix", "cache"),
    "nothing restored": (nothing_restored, {"prefix": (False, True)}, "equal.prefix", "cache"),
    "positions of a chunk": (chunk_positions, {"chunk": (None, 7)}, "equal.chunk.7", "cache"),
    "neighbours": (neighbours, {"together": (False, True)}, "equal.together", "scheduler"),
    "forgets": (
        forgets, {"together": (False, True), "tight": (False, True), "page": (64, 16)}, "equal.tight", "scheduler",
    ),
    "small pages": (small_pages, {"page": (64, 16)}, "equal.page.16", "cache"),
    "seedless": (seedless, {"sampled": (False, True), "chunk": (None, 7)}, "equal.sampled", "operator"),
    "shared scale": (shared_scale, {"narrow": (False, True), "chunk": (None, 7)}, "equal.narrow", "cache"),
    "two meet": (
        together_in_small_pages, {"together": (False, True), "page": (64, 16)}, "equal.pairs", "scheduler",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_claim(name: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, settings, kind, layer = FAULTS[name]
    monkeypatch.setattr(equalities, "_features", lambda context, model: {**ONE, **settings})
    monkeypatch.setattr(equalities, "single_findings", lambda *given: iter(()))
    plant(monkeypatch)
    found = by_kind(run_stage(dense))
    failed = {k: f for k, f in found.items() if f.verdict == "fail"}
    assert set(failed) == {kind}, {k: f.measured for k, f in failed.items()}
    assert failed[kind].layer == layer and failed[kind].remedy and failed[kind].evidence


def no_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream loses a token."""
    stream = LLM.stream

    def changed(self: LLM, *given: Any) -> Any:
        for number, delta in enumerate(stream(self, *given)):
            yield delta if number != 2 else replace(delta, token_ids=[])

    monkeypatch.setattr(LLM, "stream", changed)


def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was left goes on."""
    monkeypatch.setattr(inprocess.InProcessEngine, "abort", lambda self, name: self._unread.pop(name, None) and None)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = records.decode

    def changed(parts: Any, row: Any) -> Tensor:
        return decode(parts, row) * torch.linspace(-2, 2, row.shape[-1])

    monkeypatch.setattr(records, "decode", changed)


def plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_single, "NARROW", "bf16")


def places_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording goes on reading where its rows stood when it was made."""
    put = Inputs.put

    def changed(self: Inputs, step: Any, *given: Any) -> None:
        put(self, step, *given)
        self.tensors["positions"].zero_()

    monkeypatch.setattr(Inputs, "put", changed)


def padding_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding are written where the first row's are."""
    pad = Inputs._pad

    def changed(self: Inputs, arrays: Any, num: int, bucket: int) -> None:
        pad(self, arrays, num, bucket)
        for name in (name for name in arrays if num and name.endswith((".blocks", ".offsets"))):
            arrays[name][num:bucket] = arrays[name][0]

    monkeypatch.setattr(Inputs, "_pad", changed)


def never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "why_eager", lambda step, widths: "off")


SINGLE = {
    "a token is lost": (no_last_piece, "equal.streamed", "server"),
    "goes on": (goes_on, "equal.cancelled", "scheduler"),
    "wrong scale": (wrong_scale, "equal.narrow_error", "cache"),
    "plain rows": (plain_rows, "equal.narrow_error", "cache"),
    "places of the first step": (places_of_the_first_step, "equal.graphs", "compiler"),
    "padding writes": (padding_writes, "equal.graphs", "compiler"),
    "never recorded": (never_recorded, "equal.graphs", "compiler"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_a_fault_of_one_request_fails_its_claim(name: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, layer = SINGLE[name]
    monkeypatch.setattr(equalities, "_features", lambda context, model: {**ONE, "narrow": (False, True)})
    monkeypatch.setattr(equalities, "covering", lambda features, possible: [])
    monkeypatch.setattr(equalities, "_pairs", lambda board, features: Finding("x", "cache", "pass", ""))
    plant(monkeypatch)
    failed = {f.kind: f for f in run_stage(dense).findings if f.verdict == "fail"}
    assert set(failed) == {kind} and failed[kind].layer == layer and failed[kind].remedy


def test_a_wrong_form_fails() -> None:
    base = torch.randn(9, 30)
    off = base.clone()
    off[4, 7] += 1e-3
    kinds = ("recurrent_chunked", "absorbed_expanded", "gather_masked")
    found = list(equal_forms.form_findings(equal_forms.FormLogits(base, dict.fromkeys(kinds, off))))
    assert [f.verdict for f in found] == ["fail"] * 3 and {f.layer for f in found} == {"operator"}
    assert all(f.evidence == ("token 4",) for f in found)
    found = list(equal_forms.form_findings(equal_forms.FormLogits(base, dict.fromkeys(kinds, base))))
    assert [f.verdict for f in found] == ["pass"] * 3
    found = list(equal_forms.form_findings(equal_forms.FormLogits(base, {})))
    assert [f.verdict for f in found] == ["not applicable"] * 3 and all(f.measured for f in found)


def test_what_rounds_to_few_bits_is_held_to_the_largest_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that turn over are a root mean square, and draws over them move with any shift."""
    spec: Any = SimpleNamespace(contracts=lambda: [SimpleNamespace(contract=name) for name in CONTRACTS])
    plain, narrow = (equal_judge.limit_of(spec, "float32", "f32", 20.0, 3.0, one) for one in (False, True))
    error = plain.nats / (2 * 3.0)
    assert narrow.nats - plain.nats == pytest.approx(4 * 3.0 * (error * equal_judge.CODE_STEP) ** 0.5)
    monkeypatch.setattr(equalities, "dtype_of", lambda *given: "f32")
    board = equalities._Board(SimpleNamespace(spec=spec), SimpleNamespace(spread=20.0, deviation=3.0))  # type: ignore[arg-type]
    for quantised, sampled, most in ((False, False, 0.02), (True, False, 0.02), (False, True, 0.02), (True, True, 1.0)):
        row = {"path": "float32", "narrow": quantised, "sampled": sampled}
        assert board.limit(row).most_parted == most
