"""Norms, residuals, sampling and plain products at true sizes: what the small cases do not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dayzero.ops import residual as reference
from dayzero.ops.cases_sample import drawn
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.cuda import linear
from dayzero.ops.cuda import sample as drawing
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.sample import draw
from dayzero.ops.triton import activation, embed, norm, residual, rope, sample
from dayzero.ops.vendor import torch_cuda
from tests.gpu.graph import replayed

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=F32).to(dtype)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("width", [2304, 7168])
def test_what_is_fused_gives_the_bits_of_its_parts(tokens: int, width: int) -> None:
    stream, out, weight = normal(tokens, width) * 9, normal(tokens, width), normal(width)
    total, normed = residual.add_rms(stream, out, weight, eps=1e-6, scale_in="dtype")
    assert torch.equal(total, activation.add(stream, out))
    assert torch.equal(normed, norm.rms(total, weight, eps=1e-6, scale_in="dtype"))


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_row_does_not_depend_on_how_many_come_with_it(tokens: int) -> None:
    x, weight = normal(5000, 7168), normal(7168)
    assert torch.equal(norm.rms(x, weight, eps=1e-6)[:tokens], norm.rms(x[:tokens], weight, eps=1e-6))
    heads = normal(300, 32, 128)
    assert torch.equal(norm.rms(heads, weight[:128], eps=1e-6)[:1], norm.rms(heads[:1], weight[:128], eps=1e-6))


def test_a_bank_beyond_31_bits_of_elements() -> None:
    tokens, width = 38_000, 7168
    bank = torch.empty(8, tokens, width, dtype=BF16, device="cuda")
    assert bank.numel() > 2**31
    for row in bank:
        row.normal_()
    partial, keys = normal(tokens, width), (normal(width), normal(1, width) / 64)
    got = residual.attn_mix(partial, bank, *keys, eps=1e-5)
    some = slice(tokens - 40, tokens)
    want = reference.attn_mix(partial[some], bank[:, some], *keys, eps=1e-5)
    assert relative_l2(got[some], want) <= CONTRACTS["residual.attn_mix"].bound["bf16"].value


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 500])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 12288), (384, 7168), (4097, 2304)])
def test_products_at_true_widths(rows: int, outputs: int, inputs: int) -> None:
    x, w, bias = normal(rows, inputs), normal(outputs, inputs) / inputs**0.5, normal(outputs)
    want = x.double() @ w.double().T + bias.double()
    for module in (linear, torch_cuda):
        assert relative_l2(module.matmul(x, w, bias), want) <= CONTRACTS["linear.matmul"].bound["bf16"].value
        assert relative_l2(module.matmul_f32(x, w, bias), want) <= CONTRACTS["linear.matmul_f32"].bound["bf16"].value


def test_few_rows_of_a_wider_matrix() -> None:
    x, w = normal(3, 3 * 4096)[:, 4096:8192], normal(640, 2 * 4096)[:, 4096:]
    want = x.double() @ w.double().T
    assert relative_l2(linear.matmul_f32(x, w), want) <= CONTRACTS["linear.matmul_f32"].bound["bf16"].value


@pytest.mark.parametrize("vocab", [151_936, 262_144])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_greedy_at_true_vocabularies(rows: int, vocab: int) -> None:
    logits = normal(rows, vocab, dtype=BF16).float()  # many ties
    logits[0, [7, vocab - 1, 90_000]] = 50.0
    got = sample.greedy(logits)
    assert torch.equal(got, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    assert got[0] == 7
    logits[-1, vocab - 2] = float("nan")
    assert sample.greedy(logits)[-1] == vocab


@pytest.mark.parametrize("dtype", [F32, BF16])  # logits that were bf16 have thousands of ties
def test_draws_at_a_true_vocabulary(dtype: torch.dtype) -> None:
    logits = (normal(64, 151_936, dtype=F32) * 3).to(dtype).float()
    given = drawn(Inputs(1), logits.cpu())
    want = draw(**given)
    got = drawing.draw(**{k: v.cuda() for k, v in given.items()})
    assert torch.equal(got.cpu(), want)


def test_graphs_replay_what_runs_eagerly() -> None:
    x, weight, ids = normal(4, 4096), normal(4096), torch.tensor([3, 1, 900, 7], device="cuda")
    table, logits = normal(1000, 4096), normal(4, 151_936, dtype=F32)
    options = {k: v.cuda() for k, v in drawn(Inputs(2), logits.cpu()).items()}
    freq = 1e6 ** (-torch.arange(64, device="cuda") / 64)
    keys = (weight, normal(1, 4096))
    calls: list[Callable[[], Tensor]] = [
        lambda: norm.rms(x, weight, eps=1e-6), lambda: residual.add_rms(x, x, weight, eps=1e-6)[1],
        lambda: residual.attn_mix_norm(x, x[None], *keys, weight, eps=1e-6), lambda: embed.lookup(ids, table),
        lambda: rope.apply(x.view(4, 32, 128), ids, freq, style="half"), lambda: linear.matmul(x, table),
        lambda: activation.glu(x, x), lambda: sample.greedy(logits), lambda: drawing.draw(**options),
    ]  # fmt: skip
    for call in calls:
        assert torch.equal(replayed(call), call())


def test_an_id_beyond_the_table_is_no_row_of_it() -> None:
    table = normal(10, 64)
    out = embed.lookup(torch.tensor([-1, 3, 10], device="cuda"), table)
    assert out[[0, 2]].isnan().all() and torch.equal(out[1], table[3])
