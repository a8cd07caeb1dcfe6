"""The chunked delta rule in CUDA C++: ``delta_chunk_local.cu`` and ``delta_chunk_scan.cu``, for heads of 128 key
channels in bf16; any other shape goes to the kernels in Triton, which compute the same.

T tokens, H value heads, G key heads, K key width, V value width, N chunks of 64 tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from dayzero.ops.cuda.build import Kernel, check_machine, load
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton import delta_prefill
from dayzero.ops.triton.delta_chunk_run import TRITON, Finish, Gate, Kernels, Rows, Sizes, normed
from dayzero.ops.triton.machine import num_processors

__all__ = ["CUDA", "check_machine", "delta_chunked", "prefill"]
WIDTH, ROWS = 128, 64
# NORM: the output norm where o is made; where a block has half a head only, in a kernel that adds up the same way.
# APART: in such a block, o by a warpgroup of its own. Either gives the bits that the other paths give.
TRIED = {"NORM": 0, "APART": 0}
_TILE, _SQUARE = ROWS * WIDTH * 2, ROWS * ROWS * 2
_BLOCK = 3 * _TILE + 2 * _SQUARE  # bytes between the kernels, of a chunk and head
_CALM = -5.06  # 16 tokens of such a log-decay together stay above 2^-117
_LOCAL_SHARED = 3 * _TILE + 2 * _SQUARE + 16 * 256 * 8 + 4 * WIDTH * 4 + 4 * ROWS * 4 + ROWS * 4
_CAREFUL_SHARED = _LOCAL_SHARED + 2 * 32 * 128 * 4


def _structure(pointers: str, numbers: str, counts: str, floats: str = "") -> type[ctypes.Structure]:
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (counts, ctypes.c_int32), (floats, ctypes.c_float))
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return type("_Args", (ctypes.Structure,), {"_fields_": fields})


_LocalArgs = _structure(
    "q k g beta tiles last wild a_log bias first count", "q_h k_h g_h beta_t beta_h", "heads group num_tokens span",
    "scale lower",
)  # fmt: skip
_ScanArgs = _structure(
    "v tiles last old_state new_state states out starts chunks slots start gate weight",
    "v_t v_h out_t out_h slot_stride slots_stride gate_t gate_h", "heads width num_tokens num_chunks span", "eps",
)  # fmt: skip
_NormArgs = _structure("out gate weight", "gate_t gate_h", "heads num_pairs", "eps")


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the first kernel leaves for the second: tiles [N * H, bytes], as shared memory has them, last [N * H, K]."""

    tiles: Tensor
    last: Tensor


def takes(sizes: Sizes) -> bool:
    """Whether the kernels have these widths and types, and chunks of 64 tokens."""
    return sizes.narrow and sizes.key == WIDTH and sizes.value % 64 == 0 and sizes.rows == ROWS


def local(
    q_TGK: Tensor, k_TGK: Tensor, g: Tensor, beta_TH: Tensor, sizes: Sizes, num_chunks: int,
    gate: Gate | None = None, rows: Rows | None = None,
) -> Tiles:  # fmt: skip
    """``delta_chunk_run.local``: one launch, and a second that looks for chunks whose decay is too fast for the first,
    unless the gate's bound excludes them."""
    dtype = torch.float32 if gate is None else torch.bfloat16
    q_TGK, k_TGK, g, beta_TH = _packed(q_TGK), _packed(k_TGK), _packed(g.to(dtype)), beta_TH.to(dtype)
    blocks, device = num_chunks * sizes.heads, q_TGK.device
    tiles = torch.empty(blocks, _BLOCK, dtype=torch.uint8, device=device)
    last = torch.empty(blocks, WIDTH, dtype=torch.float32, device=device)
    lower = None if gate is None else gate.lower
    calm = lower is not None and lower >= _CALM
    wild = None if calm else torch.empty(blocks, dtype=torch.int32, device=device)
    biased = (None, None) if gate is None else (gate.a_log_H.float(), gate.dt_bias.float())
    places = (rows.first, rows.count) if rows else (None, None)
    args = _LocalArgs(
        *_addresses(q_TGK, k_TGK, g, beta_TH, tiles, last, wild, *biased, *places),
        q_TGK.stride(1), k_TGK.stride(1), g.stride(1), *beta_TH.stride(),
        sizes.heads, sizes.group, q_TGK.shape[0], sizes.span, sizes.key**-0.5, lower or 0.0,
    )  # fmt: skip
    defines = (
        ("GATE", 0 if gate is None else 1 if lower is None else 2), ("PER_HEAD", int(g.dim() == 2)),
        ("Q_ROW", q_TGK.stride(0)), ("K_ROW", k_TGK.stride(0)), ("G_ROW", g.stride(0)),
    )  # fmt: skip
    _local_kernel(defines, False)((sizes.heads, num_chunks), 256, (args,))
    if wild is not None:
        _local_kernel(defines, True)((min(num_processors(device), blocks),), 256, (args, num_chunks))
    return Tiles(tiles, last)


@cache
def _local_kernel(defines: tuple[tuple[str, int], ...], careful: bool) -> Kernel:
    shared = _CAREFUL_SHARED if careful else _LOCAL_SHARED
    settings = {**dict(defines), "CAREFUL": int(careful)}
    return load("delta_chunk_local.cu", "local", defines=settings, shared_bytes=shared + 1024)


def run(
    tiles: Tiles, v_THV: Tensor, old_HKV: Tensor | None, sizes: Sizes, num_chunks: int, keep_states: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``delta_chunk_run.run``."""
    v_THV = _packed(v_THV)
    num_tokens, heads, width = v_THV.shape
    o_THV = torch.empty(num_tokens, heads, width, dtype=v_THV.dtype, device=v_THV.device)
    new = torch.empty(heads, sizes.key, width, dtype=torch.float32, device=v_THV.device)
    states = new.new_empty(triton.cdiv(num_tokens, sizes.span) if keep_states else 0, *new.shape)
    args = _ScanArgs(
        *_addresses(v_THV, tiles.tiles, tiles.last, old_HKV, new, states if keep_states else None, o_THV),
        *[None] * 6, *v_THV.stride()[:2], *o_THV.stride()[:2], *[0] * 4,
        heads, width, num_tokens, num_chunks, sizes.span, 0.0,
    )  # fmt: skip
    _scan(args, sizes, 1)
    return o_THV, new, states


def run_rows(
    tiles: Tiles, v_THV: Tensor, out_THV: Tensor, states_NHKV: Tensor, sizes: Sizes, rows: Rows, finish: Finish
) -> None:
    """``delta_chunk_run.run_rows``."""
    v_THV = _packed(v_THV)
    own = bool(TRIED["NORM"]) and sizes.value == WIDTH
    inside = own and _groups(sizes, rows.num) * 64 == WIDTH
    gate_THV = _packed(finish.gate_TC.unflatten(-1, out_THV.shape[1:])) if own else None
    gate_steps = (0, 0) if gate_THV is None else gate_THV.stride()[:2]
    weight_V = finish.weight_V.float()
    args = _ScanArgs(
        *_addresses(v_THV, tiles.tiles, tiles.last, states_NHKV, states_NHKV, None, out_THV),
        *_addresses(rows.starts, rows.chunks, rows.slots, rows.start, gate_THV, weight_V),
        *v_THV.stride()[:2], *out_THV.stride()[:2], states_NHKV.stride(0), rows.slots.stride(0), *gate_steps,
        sizes.heads, sizes.value, v_THV.shape[0], 0, 2**30, finish.eps,
    )  # fmt: skip
    _scan(args, sizes, rows.num, inside, finish.silu)
    if gate_THV is None:
        normed(out_THV, finish)
    elif not inside:
        _norm(out_THV[finish.first :], gate_THV[finish.first :], weight_V, finish)


def _groups(sizes: Sizes, num_rows: int) -> int:
    return sizes.value_slice(num_rows) // 64


def _scan(args: Any, sizes: Sizes, num_rows: int, norm: bool = False, silu: bool = False) -> None:
    groups = _groups(sizes, num_rows)
    apart = bool(TRIED["APART"]) and groups == 1
    grid = (triton.cdiv(sizes.value, 64 * groups), sizes.heads, num_rows)
    threads = 384 if groups == 2 else 288 if apart else 160
    _scan_kernel(groups, apart, norm, norm and silu)(grid, threads, (args,))


@cache
def _scan_kernel(groups: int, apart: bool, norm: bool, silu: bool) -> Kernel:
    front, back = _TILE + _SQUARE + groups * _SQUARE, 2 * _TILE + _SQUARE + 1024 + norm * groups * _SQUARE
    shared = 2 * (front + back + apart * (_TILE + _SQUARE)) + groups * _SQUARE + 1024 + norm * 1024
    defines = {"GROUPS": groups, "APART": int(apart), "NORM": int(norm), "SILU": int(silu)}
    return load("delta_chunk_scan.cu", "scan", defines=defines, shared_bytes=shared + 1024)


def _norm(out_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, finish: Finish) -> None:
    """The output norm as the second kernel does it, by itself: to the same bits."""
    pairs, heads = out_THV.shape[0] * out_THV.shape[1], out_THV.shape[1]
    args = _NormArgs(*_addresses(out_THV, gate_THV, weight_V), *gate_THV.stride()[:2], heads, pairs, finish.eps)
    kernel = load("delta_norm.cu", "gated_norm", defines={"SILU": int(finish.silu)})
    kernel((triton.cdiv(pairs, 64),), 256, (args,))


CUDA = Kernels(local, run, run_rows)


def kernels_for(sizes: Sizes) -> Kernels:
    """Those of this file where they have the shape, else those in Triton."""
    return CUDA if takes(sizes) else TRITON


def delta_chunked(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor | None = None,
    *,
    chunk: int = ROWS,
    return_transition: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """``recurrence.delta_chunked``; see there."""
    sizes = Sizes.of(q_TGK, k_TGK, v_THV, g, chunk)
    inputs = (q_TGK, k_TGK, v_THV, g, beta_TH)
    return delta_prefill.chunked(kernels_for(sizes), sizes, inputs, state_HKV, return_transition)


def prefill(out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept, first_row: int, **options: Any) -> None:
    """``triton.delta_prefill.prefill`` with these kernels."""
    delta_prefill.prefill_by(kernels_for, out_THV, raw, weights, kept, first_row, **options)


def _packed(x: Tensor) -> Tensor:
    """With the last dimension contiguous and 16 bytes of a row aligned; per head (two dimensions) as it is."""
    if x.dim() == 2:
        return x
    bytes_apart = [step * x.element_size() for step in x.stride()[:-1]] + [x.data_ptr()]
    return x if x.stride(-1) == 1 and not any(n % 16 for n in bytes_apart) else x.contiguous()


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]
