"""Heads of grouped-query attention from their projections to where attention reads them: norm of queries and keys,
their turn, keys and values in the cache.

T tokens, H query heads, K key heads, D head width, F frequencies, N block numbers, P tokens of a page.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dayzero.ops.bounds import NORM_ROPE
from dayzero.ops.contract import contract
from dayzero.ops.latent_write import STYLES, Turn
from dayzero.ops.line import KV_RECORDS
from dayzero.ops.norm import rms
from dayzero.ops.records import RowCodec, write
from dayzero.ops.rope import apply


class HeadNorms(NamedTuple):
    """weights [D] of queries and of keys; eps, offset, scale_in: as in ``norm.rms``."""

    q_D: Tensor
    k_D: Tensor
    eps: float
    offset: bool = False
    scale_in: str = "dtype"


class Kept(NamedTuple):
    """Where keys and values are written. keys, values: [N, P, K, D] as ``rows`` in ``cache.write``, with a codec uint8
    [N, P, bytes]; blocks, offsets: [T] int64, the same places for both."""

    keys: Tensor
    values: Tensor
    blocks_T: Tensor
    offsets_T: Tensor


@contract(
    "attention.norm_rope_write",
    bound=NORM_ROPE,
    traits={"norm": (False, True), "style": STYLES, "mrope": (False, True), "record": KV_RECORDS},
    mutates=("kept",),
    composed=True,
)
def norm_rope_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kept: Kept,
    codec: RowCodec | None = None,
    norms: HeadNorms | None = None,
    turn: Turn | None = None,
) -> Tensor:
    """Queries [T, H, D] as attention takes them; keys and values are written to ``kept``, which is mutated.

    ``norm.rms`` of each head of q and k, as they are without norms; ``rope.apply`` of those, as they are without a
    turn; ``cache.write`` of keys and of values. All is rounded to q's dtype where the operators in turn round it.
    """
    heads = [q_THD, k_TKD]
    if norms is not None:
        options = {"eps": norms.eps, "offset": norms.offset, "scale_in": norms.scale_in}
        heads = [rms.body(x, w, **options) for x, w in zip(heads, (norms.q_D, norms.k_D), strict=True)]
    if turn is not None:
        heads = [
            apply.body(
                x, turn.positions, turn.inv_freq_F, style=turn.style, part=turn.part, factor=turn.factor,
                sections=turn.sections,
            )
            for x in heads
        ]  # fmt: skip
    for x, rows in ((heads[1], kept.keys), (v_TKD, kept.values)):
        write.body(x, rows, kept.blocks_T, kept.offsets_T, codec)
    return heads[0]
