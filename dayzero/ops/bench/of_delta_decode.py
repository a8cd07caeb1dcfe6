"""Figures of one token a row of the gated delta rule: convolutions, gates, rule and output norm over states in a pool.

The floor counts the states alone, read once and written once. Peers: flash-linear-attention's recurrent kernel, which
leaves convolutions, output norm and gate out; and an in-place product of the same states, which only moves them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.timing import Call
from dayzero.ops.bind import bind
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.view import Span

UNIT_BYTES = 256  # what block numbers of a pool count in
WIDTH, TAPS = 128, 4
CHECKED_ROWS = 8  # of a step, against the reference: it goes row by row in float64


@dataclass(frozen=True, slots=True)
class Shape:
    """rows: of one token each. heads: of values. per_head: the decay; else per channel. lower: bound of the decay."""

    rows: int
    heads: int
    key_heads: int
    per_head: bool = False
    lower: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": 1e-5, "act": "silu" if self.per_head else "sigmoid", "lower": self.lower}

    @property
    def state_bytes(self) -> int:
        return self.rows * self.heads * WIDTH * WIDTH * 4


def inputs(shape: Shape, seed: int, *, first_block: int = 0) -> tuple[Raw, Weights, Kept]:
    """One layer's inputs on the current GPU: states and windows of a row in one block of a pool, blocks out of order.

    Raw decays, rates and biases are as in trained models. Every start is above 0; ``settled`` is set.
    """
    made = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, generator=made, device="cuda").to(dtype)

    rows, heads, keys, f32 = shape.rows, shape.heads, shape.key_heads * WIDTH, torch.float32
    values = heads * WIDTH
    per_token = (heads,) if shape.per_head else (heads, WIDTH)
    raw = Raw(normal(rows, keys), normal(rows, keys), normal(rows, values), normal(rows, *per_token),
              normal(rows, heads), normal(rows, values))  # fmt: skip
    rates = torch.log(1 + 15 * torch.rand(heads, generator=made, device="cuda"))
    q_taps, k_taps, v_taps = (normal(size, TAPS, dtype=f32) / 2 for size in (keys, keys, values))
    bias, norm = normal(*per_token, dtype=f32) - 3, 1 + normal(WIDTH, dtype=f32) / 8
    weights = Weights(q_taps, k_taps, v_taps, rates, bias, norm)
    needs: list[tuple[tuple[int, ...], torch.dtype]] = [((heads, WIDTH, WIDTH), f32)]
    needs += [((size, TAPS - 1), torch.bfloat16) for size in (keys, keys, values)]
    offsets, end = [], 0
    for sizes, dtype in needs:
        offsets.append(end)
        end += -(-torch.Size(sizes).numel() * dtype.itemsize // UNIT_BYTES) * UNIT_BYTES
    pool = torch.empty((first_block + rows) * end, dtype=torch.uint8, device="cuda")
    views = [_view(pool, offset, *need) for offset, need in zip(offsets, needs, strict=True)]
    order = torch.randperm(rows, generator=made, device="cuda") + first_block
    table = (order * (end // UNIT_BYTES)).int()
    for view in views:
        for block in table.tolist():
            view[block] = normal(*view.shape[1:], dtype=view.dtype)
    spans = tuple(Span(i, i, 1, 1000 + i) for i in range(rows))
    starts = torch.arange(1000, 1000 + rows, dtype=torch.int32, device="cuda")
    begins = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    state, q, k, v = views
    return raw, weights, Kept(state, q, k, v, table, begins, starts, spans, settled=True)


def _view(pool: Tensor, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size, numel = dtype.itemsize, torch.Size(sizes).numel()
    strides = torch.empty(sizes, device="meta").stride()
    num = (pool.numel() - offset - numel * size) // UNIT_BYTES + 1
    return pool.view(dtype).as_strided((num, *sizes), (UNIT_BYTES // size, *strides), offset // size)


def copied(kept: Kept) -> Kept:
    """The same states in a pool of their own."""
    storage = kept.state_NHKV.untyped_storage()
    pool = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).clone()
    views = (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS)
    fresh = [pool.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset()) for x in views]
    return replace(kept, state_NHKV=fresh[0], q_NCS=fresh[1], k_NCS=fresh[2], v_NCS=fresh[3])


def some_rows(raw: Raw, kept: Kept, rows: int) -> tuple[Raw, Kept]:
    """The first rows of a step of single tokens."""
    few = Raw(*(getattr(raw, name)[:rows] for name in Raw.__slots__))
    return few, replace(kept, table_R=kept.table_R[:rows], query_start=kept.query_start[: rows + 1],
                        start=kept.start[:rows], spans=kept.spans[:rows])  # fmt: skip


def _prepare(shape: Shape, variant: str) -> Prepared:
    function = bind("recurrence.paged", "bench", {"recurrence.paged": variant})
    sets = [inputs(shape, seed) for seed in range(12 if shape.rows <= 64 else 3)]
    options = shape.options

    def check() -> Mapping[str, tuple[float, float]]:
        raw, weights, kept = sets[0]
        few, kept_few = some_rows(raw, copied(kept), min(CHECKED_ROWS, shape.rows))
        want = CONTRACTS["recurrence.paged"].body(few, weights, kept_few, **options)
        got = function(raw, weights, kept, **options)
        blocks = kept_few.table_R.long()
        bound = CONTRACTS["recurrence.paged"].bound
        pairs = {"windows": (kept.v_NCS, kept_few.v_NCS), "state": (kept.state_NHKV, kept_few.state_NHKV)}
        found = {what: relative_l2(one[blocks], two[blocks]) for what, (one, two) in pairs.items()}
        found["out"] = relative_l2(got[: len(blocks)], want)
        return {what: (error, bound["f32" if what == "state" else "bf16"].value) for what, error in found.items()}

    calls: list[Call] = [partial(function, *one, **options) for one in sets]
    states = [_states(kept) for _, _, kept in sets]
    peers: dict[str, list[Call]] = {"mul_": [partial(state.mul_, 0.9999) for state in states]}
    if importlib.util.find_spec("fla") is not None:
        peers["fla"] = [_fla(shape, raw, weights, state) for (raw, weights, _), state in zip(sets, states, strict=True)]
    return Prepared(calls, check, num_bytes=2 * shape.state_bytes, peers=peers)


def _states(kept: Kept) -> Tensor:
    """The states of the step's rows side by side, for peers that know no pool."""
    return kept.state_NHKV[kept.table_R.long()]


def _fla(shape: Shape, raw: Raw, weights: Weights, state: Tensor) -> Call:
    """flash-linear-attention on the same projections and states: gate and normed keys inside, nothing else."""
    keys = (shape.rows, 1, shape.key_heads, WIDTH)
    given = {
        "q": raw.q_TC.view(keys), "k": raw.k_TC.view(keys), "v": raw.v_TC.view(shape.rows, 1, shape.heads, WIDTH),
        "g": raw.z[:, None], "beta": torch.sigmoid(raw.beta_TH)[:, None], "initial_state": state,
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    rules = importlib.import_module("fla.ops.gated_delta_rule" if shape.per_head else "fla.ops.kda")
    rule = rules.fused_recurrent_gated_delta_rule if shape.per_head else rules.fused_recurrent_kda
    own: dict[str, Any] = {"A_log": weights.a_log_H, "dt_bias": weights.dt_bias.flatten(), "use_gate_in_kernel": True}
    if shape.lower is not None:
        own["lower_bound"] = shape.lower
    return partial(rule, **given, **own)


def entries() -> Iterator[Entry]:
    """96 heads of 128 with a bounded decay per channel; 32 value heads over 16 key heads with a decay per head."""
    for variant in ("cuda", "triton"):
        for rows in (1, 4, 16, 64, 256):
            shape = Shape(rows, 96, 96, lower=-5.0)
            yield Entry("recurrence.paged", variant, f"B={rows} H=96", partial(_prepare, shape, variant))
        for rows in (1, 16, 64, 256):
            shape = Shape(rows, 32, 16, per_head=True)
            yield Entry("recurrence.paged", variant, f"B={rows} H=32 G=16 per head", partial(_prepare, shape, variant))
