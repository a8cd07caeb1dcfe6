"""Bytes of the widest activations that one layer makes for a chunk of tokens, beside the residual carry."""

from __future__ import annotations

from dayzero.arch.index import AnyIndex, Index
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec
from dayzero.ops import latent_forms, tiles
from dayzero.ops.latent_forms import Widths


def activation_bytes(spec: ModelSpec, tokens: int, context: int, element: int = 2, tp: int = 1) -> int:
    """Of the layer that needs most. context: tokens a sequence may have; element: bytes of an activation's number.

    Six rows of the model's width a token, beside the lists that layers share; or what a layer of latent attention takes
    where that is more.
    """
    latent = [
        latent_bytes(layer.mixer, tokens, context, element, tp)
        for layer in dict.fromkeys(spec.layers)
        if isinstance(layer.mixer, MLA)
    ]
    shared = [tiles.chosen_bytes(tokens, index.width) for index in _indexes(spec) if index.shared]
    return max([6 * element * spec.dim * tokens + max(shared, default=0), *latent])


def _indexes(spec: ModelSpec) -> list[AnyIndex]:
    mixers = [layer.mixer for layer in spec.layers]
    return [mixer.index for mixer in mixers if isinstance(mixer, MLA) and mixer.index is not None]


def latent_bytes(mixer: MLA, tokens: int, context: int, element: int, tp: int) -> int:
    """Latent attention: its input and projections, and attention after it, with an index its lists and selection."""
    index = mixer.index
    heads, record = -(-mixer.heads // tp), mixer.kv_rank + mixer.shared
    rows = mixer.dim + (mixer.q_rank or 0) + heads * mixer.q_dim + 2 * record
    kept = tokens * rows * element
    if index is None:
        widths = Widths(heads, mixer.nope, mixer.shared, mixer.kv_rank, mixer.v_dim)
        return kept + latent_forms.attend_bytes(widths, tokens, context, element)
    kept += tiles.chosen_bytes(tokens, index.width)
    attend = tiles.attend_bytes(tokens, heads, record, mixer.kv_rank, index.width, element)
    select = 0
    if isinstance(index, Index) and not index.shared:
        projected = tokens * ((index.heads + 1) * index.head_dim * element + 4 * index.heads)
        select = projected + tiles.select_bytes(tokens, index.heads, index.head_dim, index.top_k, context)
    return kept + max(attend, select)
