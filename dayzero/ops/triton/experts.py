"""``moe.experts`` on a GPU: sort, gate and up with the activation, down, weighted sum. Four launches, six where more
than ``experts_rows.AT_ONCE`` choices are sorted; none depends on which experts were chosen, and the host reads nothing.

T tokens, N chosen a token, D model width, I intermediate width, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks, Mxfp4, Packed
from dayzero.ops.experts_tables import Settings, in_parts, settings_of
from dayzero.ops.triton.experts_matmul import Biases, Stack, bits_of, down_product, gate_up
from dayzero.ops.triton.experts_rows import Sorted, combine, sort_by_expert
from dayzero.ops.triton.fp8_tiles import ByteTiles
from dayzero.ops.triton.fp8_tiles import pack as byte_tiles_of
from dayzero.ops.triton.machine import check_machine, hardware_word, num_processors
from dayzero.ops.triton.mxfp4 import Tiles
from dayzero.ops.triton.mxfp4 import pack as tiles_of

__all__ = ["check_machine", "experts", "pack"]

Given = Stack | Packed


def pack(stack: Any) -> Stack:
    """A stack as ``experts`` takes it: one that is packed in tiles, a plain one without gaps. ValueError for what is
    none, such as experts that are fetched one by one."""
    if isinstance(stack, Fp8Blocks):
        return byte_tiles_of(stack)
    if isinstance(stack, Mxfp4):
        return tiles_of(stack)
    if not isinstance(stack, Tensor | Tiles | ByteTiles):
        raise ValueError("this variant takes whole stacks of experts; bind another one to this site")
    return stack.contiguous() if isinstance(stack, Tensor) else stack


def arranged(inputs: str, ids_TN: Tensor, gate: Stack, down: Stack) -> tuple[Sorted, Settings, Settings]:
    """(choices [T, N] by expert, how gate and up run, how down runs). inputs: what the form of packed stacks, as
    ``experts_tables`` has it, ends with (``a8``); plain ones run as ``bf16``."""
    bits, num_experts = bits_of(gate), len(gate)
    form = f"w{bits}{inputs}" if bits else "bf16"
    run = settings_of(form, ids_TN.numel(), num_experts, hardware_word(ids_TN.device))
    by_expert = sort_by_expert(ids_TN, num_experts, run.rows)
    if not bits:
        return by_expert, run.gate_up, run.down
    # Widening takes time of its own, which more programs hide; plain stacks gain nothing by parts.
    programs = by_expert.most, num_processors(ids_TN.device)
    return by_expert, in_parts(run.gate_up, gate.shape, *programs), in_parts(run.down, down.shape, *programs)


def experts(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Given,
    up_EID: Given,
    down_EDI: Given,
    activation: Mapping[str, Any],
    biases: Biases = None,
) -> Tensor:
    """``moe.experts`` in bf16 for plain stacks and for stacks that are packed.

    These are best laid out once, by ``pack``; a ``decl.Mxfp4`` or ``decl.Fp8Blocks`` is laid out here in each call. A
    token's sum runs over n in ascending order.
    """
    gate, up, down = pack(gate_EID), pack(up_EID), pack(down_EDI)
    if ids_TN.numel() == 0 or len(gate) == 0:
        return torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    by_expert, first, second = arranged("", ids_TN, gate, down)
    hidden = gate_up(x_TD, gate, up, by_expert, activation, biases, first)
    return combine(down_product(hidden, down, by_expert, biases, second), by_expert, weights_TN, x_TD.dtype)
