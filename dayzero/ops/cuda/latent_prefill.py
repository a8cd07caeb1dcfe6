"""Attention of a chunk of one row over expanded keys of 128 + 64 numbers and values of 128, bf16.

T tokens, H heads, V value width, X = 256 numbers of a head, L keys, P = 64 shared key width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dayzero.ops.cuda.build import load
from dayzero.ops.cuda.tensor_map import in_pieces_of_16, map_of_heads, map_of_rows
from dayzero.ops.latent_forms import Widths
from dayzero.ops.latent_steps import Expanded, Sums

TILE, GROUPS, STAGES = 128, 2, 2  # keys at once; computing warpgroups; tiles of keys, and of values, in shared memory
QUERIES, KEY_WIDTH, NOPE, SHARED, VALUE = 64 * GROUPS, 192, 128, 64, 128
_SHARED_BYTES = (QUERIES * KEY_WIDTH + STAGES * TILE * (KEY_WIDTH + VALUE)) * 2 + 1024 + 512  # alignment, barriers
_PTR, _I32 = ctypes.c_void_p, ctypes.c_int32
_NUMBERS = ("heads", "num_tokens", "first_own", "num_keys", "first_block", "num_blocks", "joins", "last")


class _Call(ctypes.Structure):
    _fields_ = (
        [(name, _PTR) for name in ("out", "sums", "lse", "taken")]
        + [(name, _I32) for name in _NUMBERS]
        + [("scale", ctypes.c_float)]
    )


def takes(q_THD: Tensor, keys: Expanded, widths: Widths) -> bool:
    """Whether the kernel has such widths, and keys that it can copy; sums are joined behind whole tiles only."""
    fits = (widths.nope, widths.shared, widths.value) == (NOPE, SHARED, VALUE) and q_THD.dtype == torch.bfloat16
    whole = not keys.joins or keys.kv_LX.shape[0] % TILE == 0
    rows = (keys.kv_LX, keys.shared_LP)
    return fits and whole and all(x.stride(1) == 1 and x.stride(0) % 8 == x.data_ptr() % 16 == 0 for x in rows)


def chunk(q_THD: Tensor, keys: Expanded, sums: Sums, out_THV: Tensor, widths: Widths, scale: float) -> None:
    """``Chunk`` of ``ops/latent_steps`` for what ``takes`` says."""
    q_THD = in_pieces_of_16(q_THD)
    tokens, heads = q_THD.shape[:2]
    first_block = max(0, -keys.first_own) // QUERIES  # those before it see no key
    num_blocks = -(-tokens // QUERIES) - first_block
    taken = torch.zeros(1, dtype=torch.int32, device=q_THD.device)
    call = _Call(
        *(x.data_ptr() for x in (out_THV, sums.out_THV, sums.lse_TH, taken)),
        heads, tokens, keys.first_own, keys.kv_LX.shape[0], first_block, num_blocks, keys.joins, keys.last, scale,
    )  # fmt: skip
    kernel = load(
        "latent_prefill.cu", "latent_prefill", defines={"GROUPS": GROUPS, "STAGES": STAGES}, shared_bytes=_SHARED_BYTES
    )
    maps = map_of_heads(q_THD, 1, QUERIES), map_of_rows(keys.kv_LX, TILE), map_of_rows(keys.shared_LP, TILE)
    most = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    kernel((min(most, num_blocks * heads),), 128 * (GROUPS + 1), (*maps, call))
