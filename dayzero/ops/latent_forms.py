"""In which form dense latent attention computes a row of a step, and what that takes of memory. No torch.

H heads, N key width from the latent, P key width that all heads share, R latent width, V value width. Absorbed, all
heads read the cached rows: keys of R + P, values of R. Expanded, each head has keys of N + P and values of V, made for
as many keys at once as a scratch holds. Both give the same numbers but for roundings.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

LEAST_QUERIES = 128  # of a row in the expanded form: a block of them, worth launches of its own
SCRATCH_BYTES = 256 << 20  # of expanded keys and values
LEAST_KEYS, MOST_KEYS = 1024, 16_384  # at once, however many or few heads there are
TILE_KEYS = 128  # that keys at once are a multiple of: sums are joined behind whole tiles
ABSORBED_TOKENS = 2048  # of chunks in one call of the absorbed form, whose queries and results are f32 and wide
_F32, _COPIES = 4, 4  # of the cached rows of these keys: codes, scales, what they are widened to, and the last keys'


class Widths(NamedTuple):
    heads: int
    nope: int
    shared: int
    rank: int
    value: int


def expands(count: int, start: int, widths: Widths) -> bool:
    """Whether a row of ``count`` tokens behind ``start`` others is computed in the expanded form.

    By FLOPs. For its own tokens a row pays the same in both forms, as W_UK and W_UV meet either queries and results or
    keys and values. Expanding the history costs 2 R (N + V) FLOPs a key and head; each pair of query and key then saves
    2 (2 R - N - V). So with 512 and 128, of a long history, it pays from 171 queries on; of none, at once. It follows
    from the row alone, so that its numbers do not depend on what else is in the step.
    """
    if count < LEAST_QUERIES:
        return False
    saved = 2 * widths.rank - widths.nope - widths.value
    return saved * count * (2 * start + count + 1) >= 2 * start * widths.rank * (widths.nope + widths.value)


def keys_at_once(widths: Widths, page: int = 1) -> int:
    """Keys that are expanded at once, in bf16: a whole number of pages, and of tiles."""
    most = SCRATCH_BYTES // (2 * widths.heads * (widths.nope + widths.value))
    unit = lcm(page, TILE_KEYS)
    return max(unit, min(MOST_KEYS, max(LEAST_KEYS, most)) // unit * unit)


def attend_bytes(widths: Widths, tokens: int, context: int, element: int) -> int:
    """Most that attention of one step takes beside its inputs: results, and what either form needs. element: bytes of
    an activation's number."""
    heads, nope, shared, rank, value = widths
    keys = min(context, keys_at_once(widths))
    expanded = keys * (heads * (nope + value) * element + (rank + shared) * _COPIES * _F32)
    if keys < context:  # sums are kept from some keys to the next
        expanded += tokens * heads * (value + 1) * _F32
    absorbed = min(tokens, ABSORBED_TOKENS) * heads * (2 * rank + shared) * 2 * element
    return tokens * heads * value * element + max(expanded, absorbed)
