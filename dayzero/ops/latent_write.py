"""The row of latent attention from its projection to its place in the cache: norm of the latent, turn of the shared
key, the record's bytes.

T tokens, R latent width, P shared key width, C = R + P, F frequencies, N block numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dayzero.ops.bounds import EXACT
from dayzero.ops.contract import contract
from dayzero.ops.line import LATENT_RECORDS
from dayzero.ops.norm import rms
from dayzero.ops.records import RowCodec, write
from dayzero.ops.rope import apply

STYLES = ("half", "interleaved", None)


class LatentNorm(NamedTuple):
    """weight [R], eps, scale_in: as in ``norm.rms``."""

    weight_R: Tensor
    eps: float
    scale_in: str = "dtype"


class Turn(NamedTuple):
    """positions [T] int64 or [3, T] with sections, frequencies [F] f32, the rest as in ``rope.apply``."""

    positions: Tensor
    inv_freq_F: Tensor
    style: str
    part: str = "first"
    factor: float = 1.0
    sections: tuple[int, ...] | None = None


@contract(
    "cache.write_latent",
    bound=EXACT,
    traits={"record": LATENT_RECORDS, "style": STYLES, "mrope": (False, True)},
    mutates=("rows",),
    composed=True,
)
def write_latent(
    kv_TC: Tensor,
    rows: Tensor,
    blocks_T: Tensor,
    offsets_T: Tensor,
    codec: RowCodec | None,
    norm: LatentNorm,
    turn: Turn | None = None,
) -> None:
    """``cache.write`` of [norm.rms of the first R of kv | rope.apply of the last P, as they are without a turn].

    kv: [T, C], what a layer's projection gives; latent and key are rounded to its dtype before they are written. rows,
    blocks, offsets, codec: as in ``cache.write``; rows are mutated.
    """
    latent_TR, shared_TP = kv_TC.split((norm.weight_R.shape[0], kv_TC.shape[1] - norm.weight_R.shape[0]), dim=-1)
    latent_TR = rms.body(latent_TR, norm.weight_R, eps=norm.eps, scale_in=norm.scale_in)
    if turn is not None:
        shared_TP = apply.body(
            shared_TP[:, None], turn.positions, turn.inv_freq_F, style=turn.style, part=turn.part, factor=turn.factor,
            sections=turn.sections,
        )[:, 0]  # fmt: skip
    write.body(torch.cat((latent_TR, shared_TP), dim=-1), rows, blocks_T, offsets_T, codec)
