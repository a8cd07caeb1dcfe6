"""``moe.experts`` for up to four tokens at the speed of reading stacks, plain here or in tiles of 4 or 8 bits
(``experts_few_tiles``); for more, the variant in Triton.

Two launches: gate and up with the activation, and down with the weighted sum. A token's experts are read for it alone:
where two tokens chose the same one its matrices are asked for twice, at about the same time, so that the second-level
cache may have them. What a token gets follows neither from how the launches are cut nor from the other tokens.

T tokens, N chosen a token, D model width, I intermediate width, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dayzero.ops.activation import activation_of
from dayzero.ops.cuda import build
from dayzero.ops.cuda.build import Kernel, load
from dayzero.ops.cuda.experts_few_tiles import RINGS, Biases, biases_of, bits_of, few_tiles
from dayzero.ops.cuda.linear import NO_GLU, Constants, at_16_bytes
from dayzero.ops.triton import experts as triton_experts
from dayzero.ops.triton import machine
from dayzero.units import ceil_div

MOST_TOKENS, MOST_CHOSEN = 4, 32
_NUMBERS = 8  # of bf16 in 16 bytes, which a thread reads at once


def check_machine() -> None:
    """Raise MachineError where one of the ways cannot be gone."""
    build.check_machine()
    machine.check_machine()


class Launch(NamedTuple):
    """warps: of a block. stages: of the ring, each 1 KB a warp; all but one are under way. each: of gate and up,
    channels a warp; of down, rows a block."""

    warps: int
    stages: int
    each: int


def experts(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Any,
    up_EID: Any,
    down_EDI: Any,
    activation: Mapping[str, Any],
    biases: Biases = None,
) -> Tensor:
    """``moe.experts`` in bf16, for stacks as ``triton.experts`` takes them. In a graph, stacks must have been there
    before the graph is replayed. Sums in f32; a token's sum runs over experts in ascending id where it is one of few,
    over n where it is not."""
    stacks, rows = (gate_EID, up_EID, down_EDI), (x_TD, ids_TN, weights_TN)
    way = _way(x_TD, ids_TN, stacks)
    if way is None:
        return triton_experts.experts(*rows, *stacks, activation, biases)
    if way:
        return few_tiles(rows, stacks, activation, biases, RINGS[way])
    how = launches_of(ids_TN.shape[1], x_TD.shape[1], gate_EID.shape[1], machine.num_processors(x_TD.device))
    return few(rows, stacks, activation, biases, how)


def _way(x_TD: Tensor, ids_TN: Tensor, stacks: tuple[Any, ...]) -> int | None:
    """Bits of the stacks' codes, 0 of plain ones, where kernels for few tokens take them; else None."""
    tokens, chosen = ids_TN.shape
    if not (1 <= tokens <= MOST_TOKENS and 1 <= chosen <= MOST_CHOSEN and x_TD.dtype == torch.bfloat16):
        return None
    bits = bits_of(stacks)
    if bits:
        return bits if all(stack.shape[0] and stack.shape[2] % 2 == 0 for stack in stacks) else None
    return 0 if all(_plain(stack) for stack in stacks) else None


def _plain(stack: Any) -> bool:
    if not (isinstance(stack, Tensor) and stack.dtype == torch.bfloat16 and stack.numel()):
        return False
    steps = stack.shape[2], stack.stride(0), stack.stride(1)
    return stack.stride(2) == 1 and stack.data_ptr() % 16 == 0 and not any(step % _NUMBERS for step in steps)


def launches_of(chosen: int, width: int, inner: int, processors: int) -> tuple[Launch, Launch]:
    """How both are run, such that with one token the busiest multiprocessor has little more to do than the others: four
    blocks of gate and up have room on one, three of down. More tokens, which are evener, run no kernels of their own.
    Not measured yet."""
    warps = 8
    each = _evenest([1, 2], warps, chosen, inner, processors)
    least = 2 * warps // min(warps, chosen & -chosen)  # rows of which each warp gets as many pairs
    rows = _evenest([least * i for i in (1, 2, 3, 4)], 1, 1, width, processors)
    return Launch(warps, 6, each), Launch(warps, 8, rows)


def _evenest(sizes: list[int], unit: int, times: int, count: int, processors: int) -> int:
    """The size of blocks, in units, that cuts ``times`` runs of ``count`` rows most evenly; a block costs half a row of
    its own. The largest of equals."""

    def busiest(size: int) -> int:
        rows = size * unit
        return ceil_div(times * ceil_div(count, rows), processors) * (2 * rows + 1)

    return min(reversed(sizes), key=busiest)


def few(
    rows: tuple[Tensor, Tensor, Tensor], stacks: tuple[Tensor, ...], activation: Mapping[str, Any], biases: Biases,
    how: tuple[Launch, Launch],
) -> Tensor:  # fmt: skip
    """The two launches. rows: x [T, D], ids [T, N], weights [T, N]. stacks: gate, up, down, plain, of rows that begin
    at 16 bytes. T and N must lie within the limits above."""
    x, (gate, up, down) = at_16_bytes(rows[0]), stacks
    ids, weights = rows[1].long().contiguous(), rows[2].float().contiguous()
    (tokens, chosen), (num_experts, inner, width) = ids.shape, gate.shape
    kind, (gate_bias, up_bias, down_bias) = biases_of(biases)
    glu, numbers = activation_of(activation)
    hidden, out = x.new_empty(tokens * chosen, inner), x.new_empty(tokens, width)
    # In a graph stacks are there already, so down's rows may be asked for while gate and up still run.
    overlap = torch.cuda.is_current_stream_capturing()
    first, second = how
    kernel = _kernel("gate_up", first, {"EACH": first.each, "BIAS": kind, "GLU": glu})
    kernel(
        (tokens * chosen, ceil_div(inner, first.warps * first.each)), 32 * first.warps,
        (x, ids, gate, up, gate_bias, up_bias, hidden, num_experts, chosen, inner, width, *_strides(x, gate, up),
         Constants(*numbers)),
        overlap=overlap,
    )  # fmt: skip
    kernel = _kernel("down_sum", second, {"ROWS": second.each, "CHOSEN": chosen, "BIAS": kind, "GLU": NO_GLU})
    kernel(
        (tokens, ceil_div(width, second.each)), 32 * second.warps,
        (hidden, ids, weights, down, down_bias, out, num_experts, width, inner, *_strides(down)), overlap=overlap,
    )  # fmt: skip
    return out


def _strides(*tensors: Tensor) -> list[Any]:
    """Of all dimensions but the last, one tensor after another."""
    return [ctypes.c_int64(stride) for one in tensors for stride in one.stride()[:-1]]


def _kernel(name: str, how: Launch, forms: Mapping[str, int]) -> Kernel:
    defines: dict[str, object] = {"WARPS": how.warps, "STAGES": how.stages, **forms}
    return load("experts_few.cu", name, defines=defines, shared_bytes=how.warps * how.stages * 1024)
