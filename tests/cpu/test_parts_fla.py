"""The bounded and the unbounded decay, the delta rule and attention over depth against what flash-linear-attention's
plain references gave for the same inputs (tests/data/fla/record.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ops_support import close, poisoned_memory  # noqa: F401
from safetensors.torch import load_file
from torch import Tensor

from dayzero.ops import recurrence, residual

TRACES = load_file(Path(__file__).parents[1] / "data" / "fla" / "traces.safetensors")
# Theirs sums in float32 in an order of its own; the longest sum here has 16 terms, over states that 70 tokens built.
BOUND = 2e-6


def gate(kind: str) -> Tensor:
    z, a_log, dt_bias = TRACES["z"], TRACES["a_log"], TRACES["dt_bias"].view(3, 16)
    if kind == "bounded":
        return recurrence.gate_bounded(z, a_log, dt_bias, lower=-5.0)
    return recurrence.gate_softplus(z, a_log, dt_bias)


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_gates(kind: str) -> None:
    close(gate(kind), TRACES[f"{kind}.g"], BOUND)
    other = TRACES["softplus.g" if kind == "bounded" else "bounded.g"]
    assert float((gate(kind) - other.clamp(min=-5)).abs().max()) > 1, "no one is the other, clamped"


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
@pytest.mark.parametrize("cut", [0, 1, 33, 69])
def test_the_rule_token_by_token_and_in_chunks(kind: str, cut: int) -> None:
    """Key and value widths differ, so no state can pass transposed. cut: the run is interrupted there."""
    q, k, v, beta = (TRACES[name] for name in ("q", "k", "v", "beta"))
    inputs = (q, k, v, gate(kind), beta)
    o, state = recurrence.delta_recurrent(*(x[:cut] for x in inputs), TRACES["state"])
    rest, last = recurrence.delta_recurrent(*(x[cut:] for x in inputs), state)
    close(torch.cat([o, rest]), TRACES[f"{kind}.o"], BOUND)
    close(last, TRACES[f"{kind}.last"], BOUND)
    chunked, middle, _ = recurrence.delta_chunked(*(x[:64] for x in inputs), TRACES["state"], chunk=16 + cut)
    close(chunked, TRACES[f"{kind}.chunked_o"], BOUND)
    close(middle, TRACES[f"{kind}.chunked_last"], BOUND)


@pytest.mark.parametrize("count", range(1, 10))
def test_attention_over_depth(count: int) -> None:
    """count: sources; the last one is the running sum. Theirs norms keys with the weight that is in our query."""
    sources, norm, proj = (TRACES[f"depth.{name}"] for name in ("sources", "norm", "proj"))
    got = residual.attn_mix(sources[count - 1], sources[: count - 1], norm, proj[None], eps=1e-5)
    close(got, TRACES[f"depth.mixed.{count}"], BOUND)
    share = TRACES[f"depth.share.{count}"]
    assert count == 1 or float(share.max(0).values.median()) < 0.9, "no source may drown the others"
