"""The chunked delta rule on a GPU at the width of models: equalities that need no judge, and fast decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.ops import recurrence
from dayzero.ops.bind import bind
from dayzero.ops.cases_delta import Rows, delta_inputs
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.delta_paged import Kept
from dayzero.ops.random_inputs import Inputs
from dayzero.view import Span
from tests.delta_rows import check_alone, check_convolutions, check_pieces, joint
from tests.parity import close, moved

pytestmark = pytest.mark.gpu
VARIANTS = ("triton", "cuda")
BOUND = recurrence.delta_chunked.bound["bf16"].value
KINDS = ("bounded", "mixed", "fast", "slow", "wild in places")


def made(tokens: int, heads: int, key_heads: int, kind: str, per_head: bool = False) -> list[Tensor]:
    """q, k, v, g, beta, state on the GPU. mixed: channels from e^-5 a token to 0.9999; beta near 0 and 1."""
    r = Inputs(tokens + heads)
    shape = (tokens, heads) if per_head else (tokens, heads, 128)
    rates = torch.logspace(-4, 0.7, shape[-1])
    g = {
        "bounded": -5 * torch.sigmoid(r.normal(*shape) * 3),
        "mixed": -(rates * (0.5 + r.uniform(*shape))).clamp(max=5.0),
        "fast": torch.full(shape, -80.0),
        "slow": torch.full(shape, -1e-4),
        "wild in places": -(r.uniform(*shape) ** 40) * 200,
    }[kind]
    q, k = (r.normal(tokens, key_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    v, beta = r.normal(tokens, heads, 128, dtype=torch.bfloat16), torch.sigmoid(r.normal(tokens, heads) * 4)
    return [x.cuda() for x in (q, k, v, g, beta, r.normal(heads, 128, 128))]


def rule(variant: str) -> Any:
    return bind("recurrence.delta_chunked", "test", {"recurrence.delta_chunked": variant})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_decay_is_right(variant: str, kind: str) -> None:
    given = made(333, 2, 2, kind)
    for got, want in zip(rule(variant)(*given), recurrence.delta_chunked.body(*given), strict=True):
        assert relative_l2(got, want) <= BOUND


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 129])
def test_any_length_is_right_with_one_decay_a_head(variant: str, tokens: int) -> None:
    given = made(tokens, 4, 2, "mixed", per_head=True)
    got, want = (f(*given, return_transition=True) for f in (rule(variant), recurrence.delta_chunked.body))
    for one, two in zip((*got[:3], *got[3]), (*want[:3], *want[3]), strict=True):
        assert relative_l2(one, two) <= BOUND


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads", [2, 70])
def test_one_run_is_any_chunking(variant: str, heads: int) -> None:
    q, k, v, g, beta, state = made(1000, heads, heads, "mixed")
    whole = rule(variant)(q, k, v, g, beta, state)
    for at in (64, 640):
        first = rule(variant)(*(x[:at] for x in (q, k, v, g, beta)), state)
        second = rule(variant)(*(x[at:] for x in (q, k, v, g, beta)), first[1])
        assert torch.equal(first[1], whole[2][at // 64 - 1])
        assert torch.equal(second[1], whole[1])
        for i in (0, 2):
            assert torch.equal(torch.cat([first[i], second[i]]), whole[i])


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_kept_at_the_span_that_was_asked_for(variant: str) -> None:
    given = made(300, 2, 2, "bounded")
    for chunk in (16, 64, 100, 128):
        got, want = (f(*given, chunk=chunk)[2] for f in (rule(variant), recurrence.delta_chunked.body))
        assert got.shape == want.shape
        assert relative_l2(got, want) <= BOUND


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("decay", ["channel", "head"])
def test_packed_rows_are_rows_alone(variant: str, decay: str) -> None:
    rows = ((0, 130), (7, 64), (0, 2), (70, 200), (3, 63))
    lower = -5.0 if decay == "channel" else None
    made_here = delta_inputs(Inputs(5), rows, (4, 2), (128, 128), torch.bfloat16, decay=decay)
    given, alone = moved(made_here, "cuda"), moved(made_here, "cuda")
    paged = bind("recurrence.paged", "test", {"recurrence.paged": variant})
    together = paged(**given, lower=lower)
    for i, span in enumerate(alone["kept"].spans):
        kept = alone["kept"]
        raw = type(alone["raw"])(*(getattr(alone["raw"], name)[span.rows] for name in alone["raw"].__slots__))
        part = Kept(
            kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS, kept.table_R[i : i + 1],
            torch.tensor([0, span.count], dtype=torch.int32, device="cuda"), kept.start[i : i + 1],
            (Span(0, 0, span.count, span.start),),
        )  # fmt: skip
        out = paged(raw, alone["weights"], part, eps=alone["eps"], act=alone["act"], lower=lower)
        assert torch.equal(out, together[span.rows])
    for name in ("state_NHKV", "q_NCS", "k_NCS", "v_NCS"):
        assert torch.equal(getattr(given["kept"], name).nan_to_num(), getattr(alone["kept"], name).nan_to_num())


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_are_right(variant: str) -> None:
    rows = ((9, 1), (0, 130), (7, 64), (0, 2), (70, 200))
    made_here = delta_inputs(Inputs(6), rows, (2, 2), (128, 128), torch.bfloat16) | {"lower": -5.0}
    given, mine = moved(made_here, "cuda"), moved(made_here, "cuda")
    want = CONTRACTS["recurrence.paged"].body(**given)
    got = bind("recurrence.paged", "test", {"recurrence.paged": variant})(**mine)
    assert relative_l2(got, want) <= BOUND
    assert relative_l2(mine["kept"].state_NHKV.nan_to_num(), given["kept"].state_NHKV.nan_to_num()) <= BOUND


def test_longer_rows_of_the_variant_in_cuda_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from dayzero.ops.triton import delta_chunk_run

    monkeypatch.delattr(delta_chunk_run, "scan")
    made_here = delta_inputs(Inputs(7), ((9, 1), (0, 130)), (2, 2), (128, 128), torch.bfloat16) | {"lower": -5.0}
    bind("recurrence.paged", "test", {"recurrence.paged": "cuda"})(**moved(made_here, "cuda"))


def true_size(rows: Rows, heads: int, lower: float | None, more: int = 128) -> dict[str, Any]:
    """Inputs as the engine has them: q, k, v and beta in one product's rows."""
    return moved(joint(delta_inputs(Inputs(8), rows, (heads, heads), (128, 128), torch.bfloat16), more), "cuda") | {
        "lower": lower
    }


def paged_by(variant: str) -> Any:
    bound = bind("recurrence.paged", "test", {"recurrence.paged": variant})
    return lambda given: bound(**given)


@pytest.mark.parametrize("heads, more", [(96, 128), (32, 256), (12, 4), (9, 1)])
def test_convolutions_at_true_width(heads: int, more: int) -> None:
    """12 heads and 4 more columns: tokens a multiple of 4 numbers apart; the last: odd."""
    check_convolutions(true_size(((0, 700), (9, 1), (7, 64), (0, 2), (70, 129), (5, 1030)), heads, None, more))


@pytest.mark.parametrize("variant, tried", [("triton", ""), ("cuda", ""), ("cuda", "NORM"), ("cuda", "APART")])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("heads, lower", [(96, -5.0), (32, None)])
def test_rows_at_true_width_are_rows_alone_and_right(
    monkeypatch: pytest.MonkeyPatch, variant: str, tried: str, act: str, heads: int, lower: float | None
) -> None:
    """32 heads alone are scanned by other blocks of threads than beside other rows."""
    from dayzero.ops.cuda.delta_chunk import TRIED

    for word in TRIED:
        monkeypatch.setitem(TRIED, word, int(word == tried))
    made_here = true_size(((0, 130), (7, 64), (0, 2), (70, 200), (3, 63)), heads, lower) | {"act": act}
    want = moved(made_here, "cuda")
    close(check_alone(paged_by(variant), made_here), CONTRACTS["recurrence.paged"].body(**want), BOUND)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads, lower", [(96, -5.0), (32, None)])
def test_a_prompt_in_pieces_leaves_the_same(variant: str, heads: int, lower: float | None) -> None:
    check_pieces(paged_by(variant), true_size(((64, 1000),), heads, lower), (0, 64, 640, 1000))


@pytest.mark.parametrize("chunk", [64, 100])
def test_outputs_made_apart_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    from dayzero.ops.cuda.delta_chunk import TRIED

    given = made(1000, 2, 2, "mixed")
    want = rule("cuda")(*given, chunk=chunk)
    monkeypatch.setitem(TRIED, "APART", 1)
    for one, two in zip(rule("cuda")(*given, chunk=chunk), want, strict=True):
        assert torch.equal(one, two)
