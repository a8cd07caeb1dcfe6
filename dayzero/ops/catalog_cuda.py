"""The catalog's lines for NVIDIA GPUs. Data only, no torch: see ``ops/catalog``.

needs: ``sm90`` is a Hopper; ``triton`` and ``cuda_bindings`` are packages that run kernels in Triton and in CUDA C++.
"""

from __future__ import annotations

from dayzero.ops.line import Line

_TRITON = "dayzero.ops.triton"
_CUDA = "dayzero.ops.cuda"
_VENDOR = "dayzero.ops.vendor"

# --- norms, rope, activations, residuals, sampling, plain products ---------------------------------------------------
_PLAIN: tuple[Line, ...] = ()
# --- paged attention, dense: grouped heads and latent rows -----------------------------------------------------------
_ATTENTION: tuple[Line, ...] = ()
# --- the delta rule --------------------------------------------------------------------------------------------------
_DELTA: tuple[Line, ...] = ()
# --- the sparse index and attention to what it lists -----------------------------------------------------------------
_INDEX: tuple[Line, ...] = ()
_SPARSE: tuple[Line, ...] = ()
# --- routed experts --------------------------------------------------------------------------------------------------
_EXPERTS: tuple[Line, ...] = ()
# --- writing cache records -------------------------------------------------------------------------------------------
_CACHE: tuple[Line, ...] = ()

LINES: tuple[Line, ...] = (*_PLAIN, *_ATTENTION, *_DELTA, *_INDEX, *_SPARSE, *_EXPERTS, *_CACHE)
