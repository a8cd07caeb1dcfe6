"""Short causal convolution, each channel alone.

T tokens, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.contract import contract


@contract("conv.causal", bound=ELEMENTWISE, traits={"act": ("silu", None), "bias": (False, True)})
def causal(
    x_TC: Tensor,
    weight_CW: Tensor,
    state_SC: Tensor | None = None,
    *,
    act: str | None = "silu",
    bias_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t, c] = act(sum_j w[c, j] x[t - (W-1) + j, c] + bias[c]); the last tap meets the newest token.

    state: the S = W-1 inputs before the first token, oldest first, as they were *before* convolution and activation;
    None means none (zeros). Returns (y [T, C] in x's dtype, the new state [W-1, C] in x's dtype, a copy).
    """
    if act not in ("silu", None):
        raise ValueError(f"act is 'silu' or None, not {act!r}")
    taps = weight_CW.shape[1]
    state_SC = x_TC.new_zeros(taps - 1, x_TC.shape[1]) if state_SC is None else state_SC.to(x_TC.dtype)
    if tuple(state_SC.shape) != (taps - 1, x_TC.shape[1]):
        raise ValueError(f"the state is {tuple(state_SC.shape)}, {taps} taps need {(taps - 1, x_TC.shape[1])}")
    inputs = torch.cat([state_SC, x_TC])
    num_tokens = x_TC.shape[0]
    y_TC = inputs.new_zeros(num_tokens, x_TC.shape[1], dtype=torch.float64)
    for tap in range(taps):
        y_TC = y_TC + weight_CW[:, tap].double() * inputs[tap : tap + num_tokens].double()
    if bias_C is not None:
        y_TC = y_TC + bias_C.double()
    y_TC = F.silu(y_TC) if act == "silu" else y_TC
    return y_TC.to(x_TC.dtype), inputs[num_tokens:].clone()
