"""Products of a gated layer with what comes behind them, in one launch where there are few rows: the activation, or the
sum with what another layer has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dayzero.ops.cuda import linear
from dayzero.ops.cuda.linear import pack
from dayzero.ops.triton import activation as numbers
from dayzero.ops.triton import machine

__all__ = ["check_machine", "matmul_add", "matmul_glu", "pack"]


def check_machine() -> None:
    """Raise MachineError where one of the two ways cannot be gone."""
    linear.check_machine()
    machine.check_machine()


def matmul_glu(x_TK: Tensor, w_NK: linear.Weight, activation: Mapping[str, Any]) -> Tensor:
    """``linear.matmul_glu`` of bf16 x. In a graph, as ``linear.matmul``."""
    y_TI = linear.few_gated(x_TK, w_NK, activation)
    return numbers.glu(*linear.matmul(x_TK, w_NK).chunk(2, dim=-1), **activation) if y_TI is None else y_TI


def matmul_add(x_TK: Tensor, w_NK: linear.Weight, added_TN: Tensor) -> Tensor:
    """``linear.matmul_add`` of bf16 x. In a graph, as ``linear.matmul``."""
    y_TN = linear.few_added(x_TK, w_NK, added_TN)
    return numbers.add(added_TN, linear.matmul(x_TK, w_NK)) if y_TN is None else y_TN
