"""Write traces.safetensors: what flash-linear-attention's plain PyTorch references give for seeded inputs.

Run it with an interpreter that has torch, safetensors, triton, einops and fla-core 0.6.0; no accelerator is needed:

    python tests/data/fla/record.py

The tests read the file only, because a library that finds fla beside triton binds its kernels at import, and those
need a device. fla-core is MIT-licensed (Copyright (c) 2023-2026 Songlin Yang, Yu Zhang, Zhiyuan Li); no code of it is
here, only numbers that it computed.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from fla.ops.attnres.naive import naive_attnres
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from safetensors.torch import save_file
from torch import Tensor

TOKENS, HEADS, KEY, VALUE = 70, 3, 16, 12  # the chunked form takes whole chunks: the first 64 tokens, by 32
WIDTH, SOURCES, ROWS, EPS = 33, 9, 7, 1e-5


def delta(out: dict[str, Tensor], draw: torch.Generator) -> None:
    """Inputs, both gates, and for each gate outputs and last states of both forms."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q, k, v = normal(TOKENS, HEADS, KEY), normal(TOKENS, HEADS, KEY), normal(TOKENS, HEADS, VALUE)
    z, beta, state = 2 * normal(TOKENS, HEADS, KEY), torch.sigmoid(2 * normal(TOKENS, HEADS)), normal(HEADS, KEY, VALUE)
    a_log, dt_bias = 0.5 * normal(HEADS), 2 * normal(HEADS * KEY) - 2
    out |= {"q": q, "k": k, "v": v, "z": z, "beta": beta, "state": state, "a_log": a_log, "dt_bias": dt_bias}
    unit_q, unit_k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    gates = {
        "bounded": naive_kda_lowerbound_gate(z, a_log, dt_bias, lower_bound=-5.0),
        "softplus": naive_kda_gate(z, a_log, dt_bias),
    }
    for name, g in gates.items():
        inputs = [x[None] for x in (unit_q, unit_k, v, g, beta)]
        o, last = naive_recurrent_kda(*inputs, initial_state=state[None], output_final_state=True)
        some = [x[:, :64] for x in inputs]
        chunked, middle = naive_chunk_kda(*some, initial_state=state[None], output_final_state=True, chunk_size=32)
        out |= {f"{name}.g": g, f"{name}.o": o[0], f"{name}.last": last[0]}
        out |= {f"{name}.chunked_o": chunked[0], f"{name}.chunked_last": middle[0]}


def depth(out: dict[str, Tensor], draw: torch.Generator) -> None:
    """Sources of growing size, oldest first, and for 1 to 9 of them the mixture and its weights."""
    sources = torch.randn(SOURCES, ROWS, WIDTH, generator=draw) * torch.arange(1, SOURCES + 1)[:, None, None]
    norm, proj = 1 + 0.3 * torch.randn(WIDTH, generator=draw), 0.2 * torch.randn(WIDTH, generator=draw)
    out |= {"depth.sources": sources, "depth.norm": norm, "depth.proj": proj}
    for count in range(1, SOURCES + 1):
        mixed, share = naive_attnres(proj, list(sources[:count]), norm, rms_eps=EPS, return_weights=True)
        out |= {f"depth.mixed.{count}": mixed, f"depth.share.{count}": share}


def main() -> None:
    out: dict[str, Tensor] = {}
    draw = torch.Generator().manual_seed(0)
    delta(out, draw)
    depth(out, draw)
    made = {"fla-core": version("fla-core"), "torch": torch.__version__}
    save_file({k: v.contiguous() for k, v in out.items()}, Path(__file__).with_name("traces.safetensors"), made)


if __name__ == "__main__":
    main()
