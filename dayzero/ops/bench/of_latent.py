"""Figures of dense latent attention of chunks of a prompt, over pages of 64 latent rows of 512 + 64.

FLOPs: of the form that takes fewer. Peers, in the same run and held to the same bound: the absorbed form; the expanded
one with other tiles, and with torch's cuDNN attention, which wants the shared key once for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import latent
from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.of_attention import CHECKED_TOKENS, PAGE, pages_of
from dayzero.ops.bench.of_attention import Shape as PagedShape
from dayzero.ops.bind import bind
from dayzero.ops.contract import relative_l2
from dayzero.ops.latent_forms import Widths, keys_at_once
from dayzero.ops.latent_steps import Expanded, Sums, attend_by
from dayzero.view import Paged, Span

NOPE, SHARED, RANK, VALUE = 128, 64, 512, 128
TUNINGS = ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 4))
Attend = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of ``count`` tokens behind ``start`` others."""

    count: int
    start: int
    heads: int

    @property
    def flops(self) -> float:
        pairs, project = self.count * (self.start + (self.count + 1) / 2), RANK * (NOPE + VALUE)
        forms = (self.count, 2 * RANK + SHARED), (self.start + self.count, NOPE + SHARED + VALUE)
        return min(2.0 * self.heads * (project * tokens + width * pairs) for tokens, width in forms)

    @property
    def num_bytes(self) -> int:
        ends = self.count * self.heads * (NOPE + SHARED + VALUE)
        return 2 * ((self.start + self.count) * (RANK + SHARED) + ends + self.heads * (NOPE + VALUE) * RANK)

    def __str__(self) -> str:
        return f"T={self.count} behind {self.start}, {self.heads} heads of {NOPE} + {SHARED} / {VALUE}"


def arguments(shape: Shape) -> dict[str, Any]:
    kept, _ = pages_of(PagedShape(1, shape.start + shape.count, shape.heads, 1, RANK + SHARED, 0, shape.count), 0)
    q = torch.randn(shape.count, shape.heads, NOPE + SHARED, device="cuda").bfloat16()
    kv_b = (torch.randn(shape.heads * (NOPE + VALUE), RANK, device="cuda") / RANK**0.5).bfloat16()
    scale = (NOPE + SHARED) ** -0.5
    return {"q_THD": q, "rows": replace(kept, rows=kept.rows[:, :, 0]), "kv_b": kv_b, "scale": scale}


def prepare(variant: str, shape: Shape) -> Prepared:
    own, given = bind("latent.attend", "bench", {"latent.attend": variant}), arguments(shape)
    peers = {name: one for name, one in _peers(shape).items() if name != "cudnn" or _runs(one, given)}
    return Prepared(
        calls=[partial(own, **given)],
        check=lambda: _check({"out": own, **peers}, given),
        num_bytes=shape.num_bytes,
        flops={"bf16": shape.flops},
        peers={name: [partial(one, **given)] for name, one in peers.items()},
    )


def _check(found: Mapping[str, Attend], given: dict[str, Any]) -> Mapping[str, tuple[float, float]]:
    """Some tokens at the beginning, in the middle and at the end."""
    rows: Paged = given["rows"]
    (span,) = rows.spans
    begins = sorted({0, span.count // 2, max(0, span.count - CHECKED_TOKENS)})
    some = tuple(Span(0, at, min(CHECKED_TOKENS, span.count - at), span.start + at) for at in begins)
    want = latent.attend.body(**given | {"rows": replace(rows, spans=some)})
    at = torch.cat([torch.arange(s.first, s.first + s.count, device=want.device) for s in some])
    bound = latent.attend.bound["bf16"].value
    return {name: (relative_l2(one(**given)[at], want[at]), bound) for name, one in found.items()}


def _peers(shape: Shape) -> dict[str, Attend]:
    """Each as ``latent.attend``."""
    from dayzero.ops.triton.latent_attend import chunk
    from dayzero.ops.triton.paged_prefill import Tuning

    out: dict[str, Attend] = {"absorbed": _absorbed}
    for tuning in (Tuning(*values) for values in TUNINGS):
        name = f"triton {tuning.block}x{tuning.tile} {tuning.warps} warps {tuning.stages} stages"
        out[name] = _by(partial(chunk, tuning=tuning))
    if keys_at_once(Widths(shape.heads, NOPE, SHARED, RANK, VALUE), PAGE) < shape.count:
        return out
    return out | {"cudnn": _by(_in_cudnn)}


def _by(one: Any) -> Attend:
    from dayzero.ops.cuda.latent_attend import ABSORBED

    return lambda q_THD, rows, kv_b, scale: attend_by(ABSORBED, one, q_THD, rows, kv_b, scale)


def _absorbed(q_THD: Tensor, rows: Paged, kv_b: Tensor, scale: float) -> Tensor:
    from dayzero.ops.cuda.latent_attend import ABSORBED

    w_uk_HNR, w_uv_HVR = latent.absorb.body(kv_b, q_THD.shape[1], NOPE, VALUE)
    q_THC = ABSORBED.queries(q_THD, w_uk_HNR)
    out_THR, _ = ABSORBED.paged(q_THC, rows.headed(), None, value_dim=RANK, scale=scale)
    return ABSORBED.values(out_THR, w_uv_HVR, q_THD.dtype)


def _runs(one: Attend, given: dict[str, Any]) -> bool:
    """Whether this build of torch has such widths; it says so by a RuntimeError."""
    try:
        one(**given)
    except RuntimeError:
        return False
    return True


def _in_cudnn(
    q_THD: Tensor, keys: Expanded, sums: Sums, out_THV: Tensor, widths: Widths, scale: float
) -> None:  # fmt: skip
    """A ``Chunk`` of no more queries than keys at once: they see all of these keys or, from one on, end with them."""
    tokens, (num_keys, heads) = q_THD.shape[0], (keys.kv_LX.shape[0], widths.heads)
    kv_LHX = keys.kv_LX.unflatten(1, (heads, -1))
    shared_LHP = keys.shared_LP[:, None].expand(-1, heads, -1)
    k = torch.cat((kv_LHX[..., : widths.nope], shared_LHP), dim=-1).transpose(0, 1)[None]
    v, q = kv_LHX[..., widths.nope :].transpose(0, 1)[None], q_THD.transpose(0, 1)[None]
    own = min(keys.first_own, num_keys)
    assert own == num_keys or (own >= 0 and own + tokens == num_keys)
    parts = [(slice(0, own), False)] * (own > 0) + [(slice(own, num_keys), True)] * (own < num_keys)
    outs, lses = [], []
    for some, causal in parts:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k[:, :, some], v[:, :, some], None, True, 0.0, causal, False, scale=scale
        )
        outs.append(found[0][0].transpose(0, 1).float())
        lses.append(found[1].reshape(heads, tokens).T)
    if keys.joins:
        outs.append(sums.out_THV)
        lses.append(sums.lse_TH)
    lse_PTH = torch.stack(lses)
    lse_TH = torch.logsumexp(lse_PTH, dim=0)
    made = sum(out * weight[..., None] for out, weight in zip(outs, (lse_PTH - lse_TH).exp(), strict=True))
    (out_THV if keys.last else sums.out_THV).copy_(made)
    if not keys.last:
        sums.lse_TH.copy_(lse_TH)


def entries() -> Iterator[Entry]:
    shapes = [Shape(8192, 0, 32), Shape(16_384, 16_384, 32), Shape(8192, 24_576, 32), Shape(512, 32_768, 32)]
    shapes += [Shape(256, 32_768, 32), Shape(128, 0, 32), Shape(8192, 0, 128), Shape(8192, 24_576, 128)]
    for shape in shapes:
        for variant in ("triton", "cuda_chunks"):
            yield Entry("latent.attend", variant, str(shape), partial(prepare, variant, shape))
