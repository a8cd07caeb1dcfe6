"""Figures of long runs of the gated delta rule, in chunks.

Three kinds of entries. ``gate inside``: decay gate, beta's sigmoid and norms in the kernels, no chunk states kept: what
a prefill step runs between its convolutions and its output norm. ``states kept``: the contract as it stands, log-decays
given in f32 and a state of every chunk written. Each beside flash-linear-attention's chunk kernels on the same inputs
with the same parts inside. ``one row`` is ``recurrence.paged`` for a row of many tokens, with convolutions, windows,
output norm and states in a pool; its floor counts each projection once.

The first tokens of two heads are checked against the reference in float64: a state starts at zero, so they do not
depend on what follows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import recurrence
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call, num_rotated
from dayzero.ops.bind import bind
from dayzero.ops.bounds import RECURRENCE
from dayzero.ops.contract import relative_l2
from dayzero.ops.delta_paged import Kept, Raw, Weights, paged_chunked
from dayzero.view import Span

WIDTH, ROWS, TAPS = 128, 64, 4
CHECKED_TOKENS, CHECKED_HEADS = 1024, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """per_head: the decay; else per channel. lower: bound of the decay, None for softplus. gate: inside the kernels."""

    tokens: int
    heads: int
    key_heads: int
    per_head: bool = False
    lower: float | None = None
    gate: bool = True

    def __str__(self) -> str:
        heads = f"H={self.heads}" + (f" G={self.key_heads}" if self.key_heads != self.heads else "")
        kind = "softplus" if self.lower is None else "bounded"
        return f"T={self.tokens} {heads} {kind}, " + ("gate inside" if self.gate else "states kept")

    @property
    def num_bytes(self) -> int:
        """q, k, v, decay, beta read once; o and what is kept written once."""
        rows = 2 * self.key_heads + 2 * self.heads
        decays = self.heads * (1 if self.per_head else WIDTH) * (2 if self.gate else 4)
        kept = 0 if self.gate else -(-self.tokens // ROWS) * self.heads * WIDTH * WIDTH * 4
        return self.tokens * (rows * WIDTH * 2 + decays + self.heads * (2 if self.gate else 4)) + kept

    @property
    def flops(self) -> int:
        """Of a chunk and head: q.k and k.k, w = T k; t v, w S, q S, a u, and k u into the state."""
        pairs, squares, states = 2 * ROWS * ROWS * WIDTH * 2, 3 * ROWS * ROWS * WIDTH * 2, 3 * ROWS * WIDTH * WIDTH * 2
        return -(-self.tokens // ROWS) * self.heads * (pairs + squares + states)


@dataclass(frozen=True, slots=True)
class Inputs:
    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    z: Tensor
    beta_TH: Tensor  # before its sigmoid
    a_log_H: Tensor
    dt_bias: Tensor

    def decay(self, lower: float | None) -> Tensor:
        """g in f32, by thousands of tokens: the reference works in f64."""
        gate = recurrence.gate_softplus.body if lower is None else partial(recurrence.gate_bounded.body, lower=lower)
        return torch.cat([gate(z, self.a_log_H, self.dt_bias) for z in self.z.split(1024)])


def inputs(shape: Shape, seed: int) -> Inputs:
    """Raw decays, rates and biases as in trained models: per token from e^-5 to 0.9999."""
    made = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=made, device="cuda", dtype=torch.bfloat16)

    tokens, per_token = shape.tokens, (shape.heads,) if shape.per_head else (shape.heads, WIDTH)
    rates = torch.log(1 + 15 * torch.rand(shape.heads, generator=made, device="cuda"))
    return Inputs(
        normal(tokens, shape.key_heads, WIDTH), normal(tokens, shape.key_heads, WIDTH),
        normal(tokens, shape.heads, WIDTH), normal(tokens, *per_token), normal(tokens, shape.heads), rates,
        torch.randn(per_token, generator=made, device="cuda") - 3,
    )  # fmt: skip


def _prepare(shape: Shape) -> Prepared:
    function = bind("recurrence.delta_chunked", "bench", {"recurrence.delta_chunked": "cuda"})
    sets = [inputs(shape, seed) for seed in range(num_rotated(shape.num_bytes))]
    ours: list[Call] = [_inside(shape, one) if shape.gate else _given(shape, one, function) for one in sets]

    def check() -> Mapping[str, tuple[float, float]]:
        got: Any = ours[0]()
        few = slice(0, CHECKED_TOKENS), slice(0, CHECKED_HEADS)
        keys = few[0], slice(0, 1 if shape.key_heads < shape.heads else CHECKED_HEADS)
        one = sets[0]
        part = Inputs(one.q_TGK[keys], one.k_TGK[keys], one.v_THV[few], one.z[few], one.beta_TH[few],
                      one.a_log_H[few[1]], one.dt_bias[few[1]])  # fmt: skip
        g, beta_TH = part.decay(shape.lower), torch.sigmoid(part.beta_TH.double()).float()
        want = recurrence.delta_chunked.body(part.q_TGK, part.k_TGK, part.v_THV, g, beta_TH)
        found = {"out": relative_l2(got[0][few], want[0])}
        if not shape.gate:
            found["states"] = relative_l2(got[2][: CHECKED_TOKENS // ROWS, few[1]], want[2])
        return {what: (error, RECURRENCE["bf16"].value) for what, error in found.items()}

    peers: dict[str, list[Call]] = {}
    if importlib.util.find_spec("fla") is not None:
        peers["fla"] = [_fla(shape, one) for one in sets]
    return Prepared(ours, check, num_bytes=shape.num_bytes, flops={"bf16": shape.flops}, peers=peers)


def _inside(shape: Shape, one: Inputs) -> Call:
    """The two kernels with gate and sigmoid inside."""
    from dayzero.ops.cuda.delta_chunk import CUDA
    from dayzero.ops.triton.delta_chunk_run import Gate, Sizes

    sizes = Sizes.of(one.q_TGK, one.k_TGK, one.v_THV, one.z)
    num_chunks = sizes.num_chunks(shape.tokens)
    gate = Gate(one.a_log_H, one.dt_bias, shape.lower)

    def call() -> object:
        tiles = CUDA.local(one.q_TGK, one.k_TGK, one.z, one.beta_TH, sizes, num_chunks, gate)
        return CUDA.run(tiles, one.v_THV, None, sizes, num_chunks, False)

    return call


def _given(shape: Shape, one: Inputs, function: Any) -> Call:
    beta_TH = torch.sigmoid(one.beta_TH.float())
    return partial(function, one.q_TGK, one.k_TGK, one.v_THV, one.decay(shape.lower), beta_TH)


def _fla(shape: Shape, one: Inputs) -> Call:
    """flash-linear-attention with the same inside; where states are kept it keeps them in bf16."""
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    beta_TH = torch.sigmoid(one.beta_TH.float())
    if shape.gate:
        options |= {"use_gate_in_kernel": True, "A_log": one.a_log_H, "dt_bias": one.dt_bias.flatten()}
        g = one.z
    else:
        g = one.decay(shape.lower)
    if shape.per_head:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    else:
        from fla.ops.kda import chunk_kda as rule

        if not shape.gate:
            options |= {"return_intermediate_states": True, "disable_recompute": False}
        if shape.lower is not None:
            options |= {"safe_gate": True, "lower_bound": shape.lower}
    given = [x[None] for x in (one.q_TGK, one.k_TGK, one.v_THV, g, beta_TH)]

    def call() -> object:
        with torch.inference_mode():
            return rule(*given, **options)

    return call


def _paged_inputs(shape: Shape, seed: int) -> tuple[Raw, Weights, Kept]:
    one = inputs(shape, seed)
    made = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (x.flatten(1) for x in (one.q_TGK, one.k_TGK, one.v_THV))
    gate_TC = torch.randn(v.shape, generator=made, device="cuda", dtype=torch.bfloat16)
    q_taps, k_taps, v_taps = (torch.randn(x.shape[1], TAPS, generator=made, device="cuda") / 2 for x in (q, k, v))
    weights = Weights(q_taps, k_taps, v_taps, one.a_log_H, one.dt_bias, torch.ones(WIDTH, device="cuda"))
    return Raw(q, k, v, one.z, one.beta_TH, gate_TC), weights, _empty(shape.heads, shape.tokens)


def _empty(heads: int, tokens: int) -> Kept:
    """A pool of one block, for a row at the start of its sequence."""
    q, k, v = (torch.zeros(1, heads * WIDTH, TAPS - 1, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    block, begins, start = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0], [0, tokens], [0]))
    state = torch.zeros(1, heads, WIDTH, WIDTH, device="cuda")
    return Kept(state, q, k, v, block, begins, start, (Span(0, 0, tokens, 0),))


def _some(raw: Raw, weights: Weights, heads: int, tokens: int) -> tuple[Raw, Weights, Kept]:
    """The first heads and tokens alone."""
    channels = heads * WIDTH
    q, k, v, gate = (x[:tokens, :channels] for x in (raw.q_TC, raw.k_TC, raw.v_TC, raw.gate_TC))
    q_taps, k_taps, v_taps = (x[:channels] for x in (weights.q_taps_CW, weights.k_taps_CW, weights.v_taps_CW))
    few = Raw(q, k, v, raw.z[:tokens, :heads], raw.beta_TH[:tokens, :heads], gate)
    own = Weights(q_taps, k_taps, v_taps, weights.a_log_H[:heads], weights.dt_bias[:heads], weights.norm_V)
    return few, own, _empty(heads, tokens)


def _prepare_paged(shape: Shape) -> Prepared:
    function = bind("recurrence.paged", "bench", {"recurrence.paged": "cuda"})
    options: dict[str, Any] = {"eps": 1e-5, "act": "sigmoid", "lower": shape.lower}
    sets = [_paged_inputs(shape, seed) for seed in range(2)]

    def check() -> Mapping[str, tuple[float, float]]:
        raw, weights, _ = sets[0]
        want = paged_chunked(*_some(raw, weights, CHECKED_HEADS, CHECKED_TOKENS), **options)
        got = function(*sets[0], **options)[:CHECKED_TOKENS, :CHECKED_HEADS]
        return {"out": (relative_l2(got, want), RECURRENCE["bf16"].value)}

    num_bytes = shape.tokens * shape.heads * (6 * WIDTH * 2 + 2)
    return Prepared([partial(function, *one, **options) for one in sets], check, num_bytes, {"bf16": shape.flops})


def entries() -> Iterator[Entry]:
    """96 heads of 128 with a decay per channel, both gates; 32 of them over a long run; 32 heads over 16 key heads with
    a decay per head."""
    shapes = [
        *(Shape(t, h, h, lower=lower) for t, h in ((32768, 96), (4096, 96), (131072, 32)) for lower in (-5.0, None)),
        Shape(32768, 32, 16, per_head=True),
        *(Shape(t, 96, 96, lower=-5.0, gate=False) for t in (4096, 16384)),
    ]
    for shape in shapes:
        yield Entry("recurrence.delta_chunked", "cuda", str(shape), partial(_prepare, shape))
    for shape in (
        Shape(4096, 96, 96, lower=-5.0), Shape(32768, 96, 96, lower=-5.0), Shape(8192, 32, 32), Shape(32768, 32, 32),
    ):  # fmt: skip
        gate = "softplus" if shape.lower is None else "bounded"
        name = f"T={shape.tokens} H={shape.heads} {gate}, one row"
        yield Entry("recurrence.paged", "cuda", name, partial(_prepare_paged, shape))
