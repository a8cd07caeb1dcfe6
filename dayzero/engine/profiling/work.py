"""What one call of an operator must at least do and move, from what it was given and what it gave.

Each number is counted once: operands read, results written, a weight once a call, a cached record once a sequence, an
expert once if a token chose it. Records of the pool, states and stacks of experts are counted as far as the call needs
them. Over a step the FLOPs add up to those of ``arch/cost``.

T tokens, H heads, D key width, V value width, L records of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.moe import expert_sites
from dayzero.decl import Fp8Blocks, Mxfp4
from dayzero.view import Paged, Span

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "bf16"}  # of the rate that a product is held to; others: f32


@dataclass(frozen=True, slots=True)
class Work:
    """element: operand type of the products, by which the rate is chosen."""

    flops: float
    num_bytes: float
    element: str

    def floor(self, ceilings: Mapping[str, float]) -> float:
        """Seconds, by measured ceilings: ``copy`` bytes/s and FLOP/s by element."""
        return max(self.compute(ceilings), self.num_bytes / ceilings["copy"])

    def compute(self, ceilings: Mapping[str, float]) -> float:
        return self.flops / ceilings.get(self.element, ceilings["bf16"])


@dataclass(frozen=True, slots=True)
class Call:
    """site: as it was bound. args, kwargs: of the call; out: its result."""

    contract: str
    site: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    def given(self, place: int, name: str) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs[name]


class Counter:
    """Work of the calls of one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._experts = expert_sites(spec)

    def work(self, call: Call) -> Work:
        """Of one call. Contracts that nothing here knows read their operands and write their results."""
        moe = self._experts.get(call.site)
        if moe is not None and call.contract == moe.contract:
            return _of_experts(call, moe)
        count = _KNOWN.get(call.contract)
        flops, num_bytes = (0.0, _moved(call)) if count is None else count(call)
        return Work(flops, num_bytes, _element(call))


def _element(call: Call) -> str:
    if call.contract.endswith("_fp8_128"):
        return "e4m3"
    first = next(_tensors(call.args), None)
    return "f32" if first is None else ELEMENTS.get(first.dtype, "f32")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors within an argument; of what is cached none, as a call needs a part of it only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mxfp4 | Fp8Blocks):
        yield from (value.codes, value.scales)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list) and not isinstance(value, Paged):
        for inner in value:
            yield from _tensors(inner)


def _bytes_of(values: Iterable[Any]) -> float:
    """Of all tensors within, each storage place once; of packed weights what they say."""
    seen: dict[tuple[int, int], float] = {}
    total = 0.0
    for value in values:
        if not isinstance(value, Tensor | Mxfp4 | Fp8Blocks | tuple | list | Mapping | Paged) and hasattr(
            value, "nbytes"
        ):
            total += float(value.nbytes)
        for tensor in _tensors(value):
            size = float(tensor.numel() * tensor.element_size())
            place = (tensor.data_ptr(), tensor.numel())
            seen[place] = max(size, seen.get(place, 0.0))
    return total + sum(seen.values())


def _moved(call: Call) -> float:
    return _bytes_of([*call.args, *call.kwargs.values(), call.out])


# --- products -------------------------------------------------------------------------------------------------------


def _linear(call: Call) -> tuple[float, float]:
    return 2.0 * call.args[0].numel() * call.out.shape[-1], _moved(call)


def _linear_glu(call: Call) -> tuple[float, float]:
    """Two products, of whose results one is left."""
    return 4.0 * call.args[0].numel() * call.out.shape[-1], _moved(call)


def _router(call: Call) -> tuple[float, float]:
    """Scores of all experts, of which some are chosen."""
    return 2.0 * call.args[0].numel() * call.given(1, "w_ED").shape[0], _moved(call)


def _embed(call: Call) -> tuple[float, float]:
    """Rows of the table, not the table."""
    return 0.0, _bytes_of([call.args[0]]) + 2 * _bytes_of([call.out])


def _heads(call: Call) -> tuple[float, float]:
    """x [T, H, A] times w [H, A, B] or its transpose: A * B multiply-adds a head and token."""
    x, w = call.args[0], call.args[1]
    return 2.0 * x.shape[0] * w.numel(), _moved(call)


def _of_experts(call: Call, moe: MoE) -> Work:
    ids = call.args[1]
    chosen = ids[ids >= 0]
    touched = int(chosen.unique().numel())
    moved = _bytes_of([*call.args[:3], call.out]) + _bytes_of(call.args[3:6]) * touched / moe.router.experts
    return Work(6.0 * moe.inner * moe.width * chosen.numel(), moved, _element(call))


# --- attention ------------------------------------------------------------------------------------------------------


def _record_bytes(pages: Paged) -> float:
    """Of one token."""
    return float(prod(pages.rows.shape[2:]) * pages.rows.element_size())


def _pairs(span: Span, window: int | None) -> float:
    """Query and key pairs that a causal mask, and a window, leave."""
    if window is None:
        return span.count * (span.start + (span.count + 1) / 2)
    return float(sum(min(position + 1, window) for position in range(span.start, span.start + span.count)))


def _records(span: Span, window: int | None) -> int:
    """Records that the span's queries see."""
    length = span.start + span.count
    return length if window is None else min(length, window + span.count - 1)


def _attention(call: Call) -> tuple[float, float]:
    q, keys, values = call.args[0], call.args[1], call.given(2, "values")
    window, out = call.kwargs.get("window"), call.out[0]
    pairs = sum(_pairs(span, window) for span in keys.spans)
    record = _record_bytes(keys) + (0.0 if values is None else _record_bytes(values))
    read = record * sum(_records(span, window) for span in keys.spans)
    return 2.0 * q.shape[1] * (q.shape[2] + out.shape[2]) * pairs, read + _bytes_of([q, *call.out])


def _latent(call: Call) -> tuple[float, float]:
    """Each row in the form that takes fewer FLOPs: W_UK and W_UV meet its own tokens, or all keys that it sees."""
    q, rows, kv_b = call.args[:3]
    heads, rank, value = q.shape[1], kv_b.shape[1], call.out.shape[2]
    absorbed, expanded = 2 * rank + rows.shape[-1] - rank, q.shape[2] + value
    flops, read = 0.0, 0.0
    for span in rows.spans:
        pairs, length = _pairs(span, None), span.start + span.count
        forms = (span.count, absorbed), (length, expanded)
        flops += min(2.0 * kv_b.numel() * projected + 2.0 * heads * width * pairs for projected, width in forms)
        read += _record_bytes(rows) * length
    return flops, read + _bytes_of([q, kv_b, call.out])


def _sparse(call: Call) -> tuple[float, float]:
    q, keys, values, listed = call.args[0], call.args[1], call.given(2, "values"), call.given(3, "listed_TN")
    pairs = float((listed >= 0).sum())
    record = _record_bytes(keys) + (0.0 if values is None else _record_bytes(values))
    counts = (listed >= 0).sum(1).tolist()
    read = sum(min(span.start + span.count, sum(counts[span.first : span.first + span.count])) for span in keys.spans)
    out = call.out[0]
    return 2.0 * q.shape[1] * (q.shape[2] + out.shape[2]) * pairs, record * read + _bytes_of([q, listed, *call.out])


def _index(call: Call) -> tuple[float, float]:
    q, weights, keys = call.args[:3]
    pairs = sum(_pairs(span, None) for span in keys.spans)
    read = _record_bytes(keys) * sum(span.start + span.count for span in keys.spans)
    return 2.0 * q.shape[1] * q.shape[2] * pairs, read + _bytes_of([q, weights, call.out])


# --- cache and states -----------------------------------------------------------------------------------------------


def _write(call: Call) -> tuple[float, float]:
    values, rows = call.args[0], call.args[1]
    record = prod(rows.shape[2:]) * rows.element_size()
    return 0.0, _bytes_of([values, *call.args[2:4]]) + values.shape[0] * record


def _heads_write(call: Call) -> tuple[float, float]:
    """Queries are read and written, keys and values read and their records written."""
    q, k, v, kept = *call.args[:3], call.given(3, "kept")
    records = sum(prod(rows.shape[2:]) * rows.element_size() for rows in (kept.keys, kept.values))
    return 0.0, _bytes_of([q, k, v, call.out, kept.blocks_T, kept.offsets_T]) + q.shape[0] * records


def _recurrence(call: Call) -> tuple[float, float]:
    """The state of each sequence read (unless it begins) and written, windows of the convolutions too."""
    raw, weights, kept = call.args[:3]
    state = kept.state_NHKV
    heads, keys, width = state.shape[1:]
    tokens, rows = raw.q_TC.shape[0], len(kept.start)
    begun = int((kept.start > 0).sum())
    moved = 0.0
    for pool in (state, kept.q_NCS, kept.k_NCS, kept.v_NCS):
        moved += (rows + begun) * prod(pool.shape[1:]) * pool.element_size()
    given = [getattr(raw, name) for name in raw.__slots__] + [getattr(weights, name) for name in weights.__slots__]
    return 7.0 * heads * keys * width * tokens, moved + _bytes_of([*given, call.out])


_KNOWN: Mapping[str, Callable[[Call], tuple[float, float]]] = {
    "linear.matmul": _linear, "linear.matmul_f32": _linear, "embed.lookup": _embed, "latent.queries": _heads,
    "latent.values": _heads, "attention.paged": _attention, "latent.attend": _latent,
    "attention.sparse": _sparse, "sparse_index.tokens": _index,
    "sparse_index.pool": _index, "cache.write": _write, "cache.write_latent": _write, "recurrence.paged": _recurrence,
    "attention.norm_rope_write": _heads_write, "moe.matmul_route": _router, "linear.matmul_glu": _linear_glu,
    "linear.matmul_add": _linear, "linear.matmul_fp8_128": _linear,
}  # fmt: skip
