"""The gated delta rule, its gates and the short convolution: forms, splits and transformers' implementations agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory, randomise, unwrapped  # noqa: F401
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops import conv, recurrence
from dayzero.ops.cases_mixers import decay
from dayzero.ops.random_inputs import Inputs

KINDS = [("bounded", "channel"), ("softplus", "channel"), ("softplus", "head"), ("bounded", "head")]


def _inputs(tokens: int, kind: str, per: str, heads: tuple[int, int] = (4, 2), seed: int = 0) -> dict[str, Tensor]:
    r = Inputs(seed)
    shape = (tokens, heads[0], 16) if per == "channel" else (tokens, heads[0])
    return {
        "q_TGK": r.normal(tokens, heads[1], 16), "k_TGK": r.normal(tokens, heads[1], 16),
        "v_THV": r.normal(tokens, heads[0], 12), "g": decay(r, kind, *shape),
        "beta_TH": torch.sigmoid(r.normal(tokens, heads[0]) * 2), "state_HKV": r.normal(heads[0], 16, 12),
    }  # fmt: skip


def _part(inputs: dict[str, Tensor], first: int, last: int, state: Tensor | None) -> dict[str, Any]:
    return {k: v[first:last] for k, v in inputs.items() if k != "state_HKV"} | {"state_HKV": state}


@pytest.mark.parametrize("kind, per", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_equals_recurrent(kind: str, per: str, chunk: int) -> None:
    inputs = _inputs(65, kind, per)
    o, state = recurrence.delta_recurrent(**inputs)
    got, last, states = recurrence.delta_chunked(**inputs, chunk=chunk)
    close(got, o, 1e-5)
    close(last, state, 1e-5)
    assert states.shape[0] == -(-65 // chunk)
    assert torch.equal(states[-1], last)
    running: Tensor | None = inputs["state_HKV"]
    for i, chunk_state in enumerate(states):
        first = i * chunk
        running = recurrence.delta_recurrent(**_part(inputs, first, min(first + chunk, 65), running))[1]
        close(chunk_state, running, 1e-5)


@pytest.mark.parametrize("kind, per", KINDS)
@pytest.mark.parametrize("split", [1, 7, 16, 64])
def test_a_carried_state_continues_as_if_never_cut(kind: str, per: str, split: int) -> None:
    inputs = _inputs(65, kind, per)
    o, state = recurrence.delta_recurrent(**inputs)
    head, middle = recurrence.delta_recurrent(**_part(inputs, 0, split, inputs["state_HKV"]))
    tail, end = recurrence.delta_recurrent(**_part(inputs, split, 65, middle))
    assert torch.equal(torch.cat([head, tail]), o)
    assert torch.equal(end, state)
    # Prefill in chunks, then token by token.
    head, middle, _ = recurrence.delta_chunked(**_part(inputs, 0, split, inputs["state_HKV"]), chunk=16)
    tail, end = recurrence.delta_recurrent(**_part(inputs, split, 65, middle))
    close(torch.cat([head, tail]), o, 1e-5)
    close(end, state, 1e-5)


def test_going_on_from_a_chunk_state_gives_the_same_bits() -> None:
    inputs = _inputs(65, "bounded", "channel")
    o, state, states = recurrence.delta_chunked(**inputs, chunk=16)
    tail, end, _ = recurrence.delta_chunked(**_part(inputs, 32, 65, states[1]), chunk=16)
    assert torch.equal(tail, o[32:])
    assert torch.equal(end, state)


@pytest.mark.parametrize("kind, per", KINDS)
def test_the_transition_predicts_the_state_from_any_start(kind: str, per: str) -> None:
    inputs = _inputs(40, kind, per)
    *_, (a_HKK, b_HKV) = recurrence.delta_chunked(**inputs, chunk=16, return_transition=True)
    for seed in (1, 2):
        start = Inputs(seed).normal(4, 16, 12) * 5
        want = recurrence.delta_recurrent(**{**inputs, "state_HKV": start})[1]
        close(a_HKK @ start + b_HKV, want, 1e-5)


def test_transitions_of_segments_compose() -> None:
    inputs = _inputs(40, "softplus", "head")
    state = inputs["state_HKV"]
    for first, last in ((0, 13), (13, 40)):
        part = _part(inputs, first, last, None)
        *_, (a_HKK, b_HKV) = recurrence.delta_chunked(**part, return_transition=True)
        state = a_HKK @ state + b_HKV
    close(state, recurrence.delta_recurrent(**inputs)[1], 1e-5)


@pytest.mark.parametrize("split", [16, 48, 64])
def test_long_runs_may_be_split_behind_whole_chunks_and_short_ones_anywhere(split: int) -> None:
    assert recurrence.LONG_CHUNK == 16, "the splits of this test"
    inputs = _inputs(65, "bounded", "channel")
    o, state = recurrence.delta_by_length(**inputs)
    head, middle = recurrence.delta_by_length(**_part(inputs, 0, split, inputs["state_HKV"]))
    tail, end = recurrence.delta_by_length(**_part(inputs, split, 65, middle))
    close(torch.cat([head, tail]), o, 1e-5)
    close(end, state, 1e-5)
    if split < 64:  # what is left is a long run as well; one token alone goes the other way
        assert torch.equal(torch.cat([head, tail]), o) and torch.equal(end, state)
    short, want = (f(**_part(inputs, 0, 15, inputs["state_HKV"]))
                   for f in (recurrence.delta_by_length, recurrence.delta_recurrent))  # fmt: skip
    assert all(map(torch.equal, short, want))


@pytest.mark.parametrize("form", [recurrence.delta_recurrent, recurrence.delta_chunked], ids=["recurrent", "chunked"])
def test_the_small_number_stands_inside_the_root_of_the_sum(form: Any) -> None:
    """Rows whose squares sum to 1e-6 come out at half: a clamped norm would give one, a mean of squares 16 / 17."""
    row_THK = torch.full((1, 1, 16), 2.5e-4)
    v_THV = Inputs(3).normal(1, 1, 12)
    o_THV, state_HKV, *_ = form(row_THK, row_THK, v_THV, torch.zeros(1, 1, 16), torch.full((1, 1), 0.5), None)
    close(o_THV, 0.5 * 16**-0.5 * 0.5 * v_THV, 1e-6)
    close(state_HKV, (0.5 / 16) ** 0.5 * 0.5 * v_THV[0, :, None, :].expand(1, 16, 12), 1e-6)


@pytest.mark.parametrize("rate", [-80.0, -1e-6, 0.0])
def test_extreme_decay_neither_overflows_nor_loses_the_state(rate: float) -> None:
    inputs = _inputs(64, "bounded", "channel")
    inputs["g"] = torch.full_like(inputs["g"], rate)
    o, state = recurrence.delta_recurrent(**inputs)
    got, last, _ = recurrence.delta_chunked(**inputs)
    close(got, o, 1e-5)
    close(last, state, 1e-5)


def test_channel_decay_equals_transformers() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    for kind in ("bounded", "softplus"):
        inputs = _inputs(65, kind, "channel", (4, 4))
        q, k, v, g, beta, state = (inputs[n] for n in ("q_TGK", "k_TGK", "v_THV", "g", "beta_TH", "state_HKV"))
        for theirs in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
            o, last = unwrapped(theirs)(
                q[None], k[None], v[None], g=g[None], beta=beta[None], initial_state=state[None],
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            ours, end = recurrence.delta_recurrent(**inputs)
            close(ours, o[0], 1e-5)
            close(end, last[0], 1e-5)


def test_head_decay_with_grouped_keys_equals_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    inputs = _inputs(65, "softplus", "head", (4, 2))
    q, k, v, g, beta, state = (inputs[n] for n in ("q_TGK", "k_TGK", "v_THV", "g", "beta_TH", "state_HKV"))
    for theirs in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        o, last = unwrapped(theirs)(
            q[None], k[None], v[None], g=g[None], beta=beta[None], initial_state=state[None],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        ours, end, _ = recurrence.delta_chunked(**inputs)
        close(ours, o[0], 1e-5)
        close(end, last[0], 1e-5)


def test_gates_equal_transformers() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    r = Inputs(3)
    config = SimpleNamespace(hidden_size=20, linear_head_dim=8, linear_num_heads=3, linear_lower_bound=-5.0)
    x = r.normal(33, 20) * 3
    for module in (kimi.KimiLinearForgetGate(config), glm.Glm5NextTextForgetGate(config)):
        randomise(module, 7, 1.0)
        z = (x @ module.f_a_proj.weight.T @ module.f_b_proj.weight.T).unflatten(-1, (3, 8))
        a_log, dt_bias = module.A_log.reshape(3), module.dt_bias.reshape(3, 8)
        if isinstance(module, kimi.KimiLinearForgetGate):
            got = recurrence.gate_softplus(z, a_log, dt_bias)
        else:
            got = recurrence.gate_bounded(z, a_log, dt_bias, lower=-5.0)
            assert float(got.min()) >= -5
        close(got, module(x[None])[0], 1e-5)
    a, a_log, dt_bias = r.normal(33, 3) * 9, r.normal(3), r.normal(3)
    close(recurrence.gate_softplus(a, a_log, dt_bias), -a_log.exp() * F.softplus(a + dt_bias), 1e-6)


def test_the_two_gates_are_different_functions() -> None:
    z, zero = torch.tensor([[[-4.0, 0.0, 4.0]]]), torch.zeros(1)
    bounded = recurrence.gate_bounded(z, zero, torch.zeros(1, 3), lower=-5.0)
    unbounded = recurrence.gate_softplus(z, zero, torch.zeros(1, 3))
    assert float((bounded - unbounded.clamp(min=-5)).abs().max()) > 0.5


def test_padded_transposed_or_rounded_parameters_are_refused() -> None:
    z, dt_bias = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="A_log"):
        recurrence.gate_softplus(z, torch.zeros(4), dt_bias)  # a checkpoint's zero padding, not narrowed
    with pytest.raises(ValueError, match="dt_bias"):
        recurrence.gate_bounded(z, torch.zeros(3), dt_bias.flatten(), lower=-5.0)
    with pytest.raises(ValueError, match="negative"):
        recurrence.gate_bounded(z, torch.zeros(3), dt_bias, lower=5.0)
    inputs = _inputs(2, "bounded", "channel")
    for state in (inputs["state_HKV"].transpose(1, 2), inputs["state_HKV"].bfloat16()):
        with pytest.raises(ValueError, match="K before V"):
            recurrence.delta_recurrent(**{**inputs, "state_HKV": state})


@pytest.mark.parametrize("chunk", [1, 2, 7, 65])
def test_convolution_in_chunks_equals_whole_and_torch(chunk: int) -> None:
    r = Inputs(4)
    x, weight, bias = r.normal(65, 5), r.normal(5, 4), r.normal(5)
    whole, last = conv.causal(x, weight, bias_C=bias)
    want = F.silu(F.conv1d(F.pad(x.T, (3, 0))[None], weight[:, None], bias, groups=5))[0].T
    close(whole, want, 1e-6)
    assert torch.equal(last, x[-3:])  # inputs as they came, before convolution and activation
    outs, state = [], None
    for first in range(0, 65, chunk):
        y, state = conv.causal(x[first : first + chunk], weight, state, bias_C=bias)
        outs.append(y)
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(state, last)


def test_convolution_equals_transformers_decode_step() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    r = Inputs(5)
    x, weight, state = r.normal(1, 6), r.normal(6, 4), r.normal(3, 6)
    kept = state.T[None].clone()
    want = unwrapped(kimi.causal_conv1d_update)(x.T[None], kept, weight, None, "silu")
    got, new = conv.causal(x, weight, state)
    close(got, want[0].T, 1e-6)
    assert torch.equal(new, kept[0].T)
    with pytest.raises(ValueError, match="taps need"):
        conv.causal(x, weight, state[:2])
