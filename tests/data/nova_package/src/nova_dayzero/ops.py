"""Reference bodies and variants. T tokens of the step, L rows of the history, W width, I inner width."""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import ELEMENTWISE, MATMUL
from dayzero.ops.contract import Case, contract


@contract("average.window", bound=MATMUL, traits={"partial": (True,)})
def window_mean(rows_LW: Tensor, num_tokens: int, window: int) -> Tensor:
    """[T, W]: for each of the last ``num_tokens`` rows the mean of it and up to window - 1 rows before it.

    Float64 inside, rounded once to the dtype of the rows. Rows must reach back window - 1 before the first of those
    tokens, or to the start of the sequence; there a mean is over fewer rows.
    """
    length = len(rows_LW)
    ends = range(length - num_tokens + 1, length + 1)
    means = [rows_LW[max(0, end - window) : end].double().mean(0) for end in ends]
    return torch.stack(means).to(rows_LW.dtype)


def window_mean_running(rows_LW: Tensor, num_tokens: int, window: int) -> Tensor:
    """``average.window`` by differences of a running sum, in float64: one pass whatever the window is."""
    sums_LW = torch.cat((rows_LW.new_zeros(1, rows_LW.shape[1], dtype=torch.float64), rows_LW.double().cumsum(0)))
    ends = torch.arange(len(rows_LW) - num_tokens + 1, len(rows_LW) + 1)
    starts = (ends - window).clamp(min=0)
    return ((sums_LW[ends] - sums_LW[starts]) / (ends - starts)[:, None]).to(rows_LW.dtype)


def window_mean_short(rows_LW: Tensor, num_tokens: int, window: int) -> Tensor:
    """Wrong on purpose: a window that is one token too short."""
    return window_mean.body(rows_LW, num_tokens, window - 1)


@contract("activation.relu_squared", bound=ELEMENTWISE)
def relu_squared(x_TI: Tensor) -> Tensor:
    """relu(x)² in f64, rounded once to x's dtype."""
    return x_TI.double().clamp(min=0).square().to(x_TI.dtype)


def _rows(length: int, num_tokens: int, window: int, dtype: torch.dtype) -> Case:
    def make(seed: int) -> dict[str, object]:
        draw = torch.Generator().manual_seed(seed)
        loose = torch.randn(length, 2 * 13, generator=draw).to(dtype)[:, ::2]  # not contiguous
        return {"rows_LW": loose, "num_tokens": num_tokens, "window": window}

    return Case(f"{num_tokens} of {length} rows, window {window}, {dtype}", make)


CASES = {
    "average.window": (
        _rows(1, 1, 5, torch.float32),
        _rows(63, 63, 5, torch.float32),
        _rows(11, 7, 5, torch.bfloat16),
        _rows(9, 9, 1000, torch.float32),
    )
}
