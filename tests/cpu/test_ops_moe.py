"""Routing and experts against transformers' routers, a loop over every token, and ties worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory, randomise  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.ops import activation, linear, moe
from dayzero.ops.cases import CASES
from dayzero.ops.experts_mxfp4 import dense
from dayzero.ops.random_inputs import Inputs


def _by_expert(ids: torch.Tensor, weights: torch.Tensor, num: int) -> torch.Tensor:
    return torch.zeros(ids.shape[0], num).scatter(1, ids, weights.float())


@pytest.mark.parametrize("groups", [(1, 1), (8, 3)])
@pytest.mark.parametrize("bias", [0.0, 7.0])
def test_grouped_sigmoid_routing_equals_transformers(groups: tuple[int, int], bias: float) -> None:
    v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = v3.DeepseekV3Config(
        hidden_size=24, n_routed_experts=48, num_experts_per_tok=6, n_group=groups[0], topk_group=groups[1],
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = randomise(v3.DeepseekV3TopkRouter(config), 1, 1.0)
    router.e_score_correction_bias.copy_(bias + Inputs(2).uniform(48) / 4)
    x = Inputs(3).normal(63, 24)
    logits, weights, ids = router(x)
    ours = linear.matmul_f32(x, router.weight)
    got_ids, got_weights = moe.route(
        ours, 6, score="sigmoid", bias_E=router.e_score_correction_bias, groups=groups, scale=2.5, eps=1e-20
    )
    close(ours, logits, 1e-6)
    close(_by_expert(got_ids, got_weights, 48), _by_expert(ids, weights, 48), 1e-5)


def test_softmax_over_the_chosen_equals_transformers() -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = oss.GptOssConfig(hidden_size=24, num_local_experts=16, num_experts_per_tok=4)
    router = randomise(oss.GptOssTopKRouter(config), 1, 1.0)
    x = Inputs(3).normal(63, 24)
    _, weights, ids = router(x)
    got_ids, got_weights = moe.route(linear.matmul_f32(x, router.weight, router.bias), 4, score="softmax_topk")
    assert torch.equal(got_ids, ids)
    close(got_weights, weights, 1e-5)


def test_softmax_over_all_renormalised() -> None:
    logits = Inputs(0).normal(7, 12)
    ids, weights = moe.route(logits, 3, score="softmax")
    best = logits.softmax(-1).topk(3)
    assert torch.equal(ids, best.indices)
    close(weights, best.values / best.values.sum(-1, keepdim=True), 1e-6)
    close(moe.route(logits, 3, score="softmax", renormalise=False)[1], best.values, 1e-6)


def test_ties_go_to_the_lower_id_and_bias_only_selects() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    assert moe.route(logits, 2, score="sigmoid")[0].tolist() == [[1, 2]]
    ids, weights = moe.route(logits, 2, score="sigmoid", bias_E=torch.tensor([9.0, 0, 0, 0, 9.0]))
    assert ids.tolist() == [[0, 4]]
    close(weights, torch.full((1, 2), 0.5), 1e-6)


def test_a_bias_rounded_to_bf16_would_choose_other_experts() -> None:
    inputs = CASES["moe.route"][0].make(0)
    kept = moe.route(**inputs)[0].sort(-1).values
    rounded = moe.route(**{**inputs, "bias_E": inputs["bias_E"].bfloat16().float()})[0].sort(-1).values
    assert (kept != rounded).any(-1).double().mean() > 0.2
    with pytest.raises(ValueError, match="f32"):
        moe.route(**{**inputs, "bias_E": inputs["bias_E"].bfloat16()})
    with pytest.raises(ValueError, match="f32"):
        moe.route(**{**inputs, "logits_TE": inputs["logits_TE"].bfloat16()})


def test_dropped_groups_are_never_chosen_even_when_every_kept_score_is_negative() -> None:
    logits = torch.zeros(1, 8)
    bias = torch.tensor([-9.0, -9, -9, -9, -20, -20, -20, -20])
    # A fill of 0 instead of -inf for the dropped group would win here.
    ids, _ = moe.route(logits, 4, score="sigmoid", bias_E=bias, groups=(2, 1))
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("case", CASES["moe.experts"], ids=lambda c: c.name)
def test_experts_equal_a_loop_over_tokens(case: Any) -> None:
    inputs = case.make(3)
    got = moe.experts(**inputs)
    x, options, biases = inputs["x_TD"], inputs["activation"], inputs["biases"]
    want = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for expert, weight in sorted(zip(inputs["ids_TN"][t].tolist(), inputs["weights_TN"][t].tolist())):
            if expert < 0:
                continue
            b = [part[expert] for part in biases] if biases else [None, None, None]
            gate = linear.matmul(x[t : t + 1], dense(inputs["gate_EID"][expert], x.dtype), b[0])
            up = linear.matmul(x[t : t + 1], dense(inputs["up_EID"][expert], x.dtype), b[1])
            out = linear.matmul(activation.glu(gate, up, **options), dense(inputs["down_EDI"][expert], x.dtype), b[2])
            want[t] += weight * out[0].float()
    close(got, want.to(x.dtype), 1e-6)


def test_experts_equal_transformers_with_biases_and_clamp() -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = oss.GptOssConfig(hidden_size=24, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3)
    theirs = randomise(oss.GptOssExperts(config), 5, 1.0)
    x, ids = Inputs(1).normal(33, 24) * 3, Inputs(2).normal(33, 8).topk(3).indices
    weights = Inputs(3).uniform(33, 3)
    want = theirs(x, ids, weights)
    rows, bias = theirs.gate_up_proj.transpose(1, 2), theirs.gate_up_proj_bias  # even rows are gates, odd ones ups
    got = moe.experts(
        x, ids, weights, rows[:, ::2], rows[:, 1::2], theirs.down_proj.transpose(1, 2),
        {"kind": "clamped", "limit": theirs.limit, "alpha": theirs.alpha},
        (bias[:, ::2], bias[:, 1::2], theirs.down_proj_bias),
    )  # fmt: skip
    close(got, want, 1e-5)


def test_an_answer_does_not_depend_on_the_batch() -> None:
    inputs = CASES["moe.experts"][-1].make(0)
    whole = moe.experts(**inputs)
    for row in (1, 30, 64):
        alone = {k: v[row : row + 1] if k in ("x_TD", "ids_TN", "weights_TN") else v for k, v in inputs.items()}
        assert torch.equal(moe.experts(**alone)[0], whole[row])


class _Operators(TorchDispatchMode):
    """Names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_rows_of_an_expert_are_found_on_the_host(tokens: int) -> None:
    """On a device each ``nonzero`` waits. Ids are brought over once; some are no expert, some stand twice in a row."""
    draw = torch.Generator().manual_seed(tokens)
    ids, weights = torch.randint(-1, 9, (tokens, 3), generator=draw), torch.rand(tokens, 3, generator=draw)
    x = torch.randn(tokens, 8, generator=draw)
    asked: list[int] = []

    def one(x_RD: torch.Tensor, expert: int) -> torch.Tensor:
        rows = (ids == expert).any(-1)
        assert x_RD.equal(x[rows])
        asked.append(expert)
        return x_RD * (expert + 1)

    with _Operators() as seen:
        out = moe.summed_by_expert(x, ids, weights, lambda x_RD, expert: x_RD * (expert + 1))
    assert "nonzero" not in seen.names
    assert out.equal(moe.summed_by_expert(x, ids, weights, one))
    assert asked == [e for e in range(9) if (ids == e).any()]
    known = torch.zeros_like(x)
    for expert in range(9):
        known += torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True) * (x * (expert + 1))
    assert out.equal(known)
