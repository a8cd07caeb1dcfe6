"""Dense latent attention by one operator, where one is bound, else by its three operators in turn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.index import LocalIndex
from dayzero.arch.mixers import MLA
from dayzero.arch.residuals import Plain
from dayzero.blocks.latent import LatentBlock
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import Params, Site
from dayzero.engine.profiling.work import Call, Counter
from dayzero.ops import latent, latent_steps
from dayzero.ops.attention import causal, merge
from dayzero.ops.cases import CASES, traits_of
from dayzero.ops.contract import Case
from dayzero.ops.latent_forms import Widths
from dayzero.ops.paged import paged
from dayzero.view import Span
from tests.cpu.called import noting
from tests.cpu.random_models import CHANNELS, DIM, NORM, model, random_params
from tests.cpu.random_models import latent as mixer
from tests.parity import close

FUSED = "latent.attend"
IN_TURN = {"latent.queries", "attention.paged", "latent.values"}


def attended(spec: MLA, fused: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[str]]:
    """What two steps of two sequences give, and which operators were called."""
    whole, called = model((spec,), (CHANNELS["glu"],), Plain(NORM)), list[str]()
    params = Params({k: v.to(dtype) for k, v in random_params(whole).items()}, "layers.0.mixer.")
    block = LatentBlock(spec, params, Site("layers.0.mixer", noting(called, "" if fused else FUSED)))
    assert not params.left_over()
    cache, out = LocalCache(whole, dtype), []
    for step, parts in enumerate([((0, [1] * 5), (1, [2] * 3)), ((0, [1]), (1, [2] * 2))]):
        view = cache.views(parts)
        x_TD = torch.randn(view.tokens.shape[0], DIM, generator=torch.Generator().manual_seed(step))
        out.append(block.forward(x_TD.to(dtype), view))
    return out, called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"q_rank": None, "rope": None, "gate": True}])
def test_one_call_does_what_the_operators_do_in_turn(options: dict[str, Any], dtype: torch.dtype) -> None:
    spec = mixer(**options)
    (got, once), (want, each) = attended(spec, True, dtype), attended(spec, False, dtype)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert once.count(FUSED) == 2 and not IN_TURN & set(once)
    assert FUSED not in each and all(each.count(contract) == 2 for contract in IN_TURN)


def test_with_an_index_there_is_no_such_operator() -> None:
    spec = mixer(index=LocalIndex(5))
    assert FUSED not in {use.contract for use in spec.contracts("layers.0.mixer")}
    assert FUSED not in attended(spec, True, torch.float32)[1]


@pytest.mark.parametrize("record", ["mla_bf16", "mla_fp8_656"])
def test_a_plan_names_it_with_what_the_site_needs(record: str) -> None:
    use = next(use for use in mixer(record=record).contracts("layers.0.mixer") if use.contract == FUSED)
    assert use.site == "layers.0.mixer.attention" and list(use.traits) == sorted(use.traits)
    stored = {} if record == "mla_bf16" else {"record": record}
    assert dict(use.traits) == {"latent_width": mixer().kv_rank, **stored}


@pytest.mark.parametrize("case", CASES[FUSED], ids=lambda case: case.name)
def test_it_is_the_expanded_form_of_each_sequence(case: Case) -> None:
    inputs = case.make(0)
    q_THD, rows, kv_b = inputs["q_THD"], inputs["rows"], inputs["kv_b"]
    got = latent.attend.body(**inputs)
    assert traits_of(inputs)["latent_width"] == kv_b.shape[1] and got.dtype == q_THD.dtype
    for span in rows.spans:
        cache_LC, first = rows.history(span)
        want, _ = latent.attend_expanded.body(
            q_THD[span.rows], cache_LC, kv_b, start=span.start - first, scale=inputs["scale"]
        )
        # Both round once, at the end; only ties differ.
        close(got[span.rows], want, 1e-5 if q_THD.dtype == torch.float32 else 2.0**-8)


def test_a_call_counts_each_row_in_the_form_that_takes_fewer_flops() -> None:
    case = next(case for case in CASES[FUSED] if case.name == "chunks")
    inputs = case.make(0)
    q_THD, rows, kv_b = inputs["q_THD"], inputs["rows"], inputs["kv_b"]
    out = torch.empty(q_THD.shape[0], 2, 32, dtype=q_THD.dtype)
    args = (q_THD, rows, kv_b)
    found = Counter(model((mixer(),), (CHANNELS["glu"],), Plain(NORM))).work(Call(FUSED, "s", args, {}, out))

    def of(span: Span) -> float:
        pairs = sum(span.start + i + 1 for i in range(span.count))
        project, heads = 2 * kv_b.numel(), 2
        absorbed = project * span.count + 2 * heads * (128 + 16 + 128) * pairs
        expanded = project * (span.start + span.count) + 2 * heads * (48 + 32) * pairs
        return min(absorbed, expanded)

    assert found.flops == sum(of(span) for span in rows.spans) and found.element == "bf16"
    records = sum(span.start + span.count for span in rows.spans) * 144 * 2
    assert found.num_bytes == records + 2 * (q_THD.numel() + kv_b.numel() + out.numel())


IN_TURNS = latent_steps.Absorbed(latent.queries_into_latent, paged, latent.values_out_of_latent)


def chunk(
    q_THD: Tensor, keys: latent_steps.Expanded, sums: latent_steps.Sums, out_THV: Tensor, widths: Widths, scale: float
) -> None:
    """A ``Chunk`` of references; lse is kept in base 2."""
    kv_LHX, seen = keys.kv_LX.unflatten(1, (widths.heads, -1)), slice(max(0, -keys.first_own), None)
    shared_LHP = keys.shared_LP[:, None].expand(-1, widths.heads, -1)
    k_LHD = torch.cat((kv_LHX[..., : widths.nope], shared_LHP), dim=-1)
    start = max(keys.first_own, 0)
    out, lse = causal.body(q_THD[seen].double(), k_LHD, kv_LHX[..., widths.nope :], start=start, scale=scale)
    if keys.joins:
        own_T = torch.arange(out.shape[0]) + start
        later_TH = (sums.lse_TH[seen] * math.log(2)).masked_fill((own_T < k_LHD.shape[0])[:, None], -math.inf)
        later_THV = sums.out_THV[seen].masked_fill(later_TH[..., None] == -math.inf, 0)
        out, lse = merge.body(torch.stack((out, later_THV)), torch.stack((lse, later_TH)))
    if keys.last:
        out_THV[seen] = out.to(out_THV.dtype)
    else:
        sums.out_THV[seen], sums.lse_TH[seen] = out.float(), lse / math.log(2)


@pytest.mark.parametrize("case", CASES[FUSED], ids=lambda case: case.name)
@pytest.mark.parametrize("at_once", [16, 64, 0])
def test_chunks_are_expanded_some_keys_at_a_time(case: Case, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed records too; all rows of several tokens, however short, and rows of one token among them."""
    monkeypatch.setattr(latent_steps, "expands", lambda count, start, widths: count > 1)
    if at_once:
        monkeypatch.setattr(latent_steps, "keys_at_once", lambda widths, page: -(-at_once // page) * page)
    inputs = case.make(0)
    got = latent_steps.attend_by(IN_TURNS, chunk, inputs["q_THD"], inputs["rows"], inputs["kv_b"], inputs["scale"])
    bound = latent.attend.bound["f32" if got.dtype == torch.float32 else "bf16"].value
    close(got, latent.attend.body(**inputs), bound)
