"""Rows of a table by token id. T tokens, V vocabulary, H model width."""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.bounds import EXACT
from dayzero.ops.contract import contract


@contract("embed.lookup", bound=EXACT)
def lookup(ids_T: Tensor, table_VH: Tensor) -> Tensor:
    """table[ids] [T, H] in the table's dtype. Ids outside [0, V) are refused, negative ones too."""
    if ids_T.numel() and (int(ids_T.min()) < 0 or int(ids_T.max()) >= table_VH.shape[0]):
        raise ValueError(
            f"token ids in [{int(ids_T.min())}, {int(ids_T.max())}] for a table of {table_VH.shape[0]} rows"
        )
    return table_VH[ids_T]
