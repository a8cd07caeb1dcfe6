"""Bytes of one rank: weights as they are kept, workspace, carry, cache, headroom; and what is left for requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dayzero.arch.records import ELEMENT_BYTES, record_bytes
from dayzero.arch.spec import ModelSpec
from dayzero.decl import CacheNeed
from dayzero.hardware import Hardware
from dayzero.parallel.mesh import Mesh, Place
from dayzero.planner.experts import Swapping
from dayzero.planner.step_memory import activation_bytes

HEADROOM = 0.04  # of device memory: allocator fragments, graphs, communication buffers
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class RankBudget:
    """Bytes of one rank. cache_bytes: what is left for token rows and state after everything else; may be negative.

    experts: of its routed experts as they are kept, whether ``weights`` has all of them or, where swapping is set, as
    many as are held. ring: of the workspace, where experts in 4 bits are converted.
    """

    rank: int
    stage: int
    layers: tuple[int, int]
    weights: int
    workspace: int
    carry: int
    headroom: int
    cache_bytes: int
    token_bytes: int
    sequence_bytes: int
    experts: int = 0
    ring: int = 0
    swapping: Swapping | None = None

    @property
    def fits(self) -> bool:
        return self.cache_bytes > 0

    def max_context(self, concurrency: int, cp: int) -> int:
        """Longest context in tokens that ``concurrency`` sequences on this rank can each have."""
        room = self.cache_bytes // max(1, concurrency) - self.sequence_bytes
        if room < 0:
            return 0
        return cp * (room // self.token_bytes) if self.token_bytes else 1 << 62

    def max_concurrency(self, context: int, cp: int) -> int:
        """Sequences of ``context`` tokens that fit on this rank."""
        each = self.sequence_bytes + self.token_bytes * -(-context // cp)
        return max(0, self.cache_bytes) // each if each else 1 << 62


def stage_bounds(layer_bytes: Sequence[int], first: int, last: int, stages: int) -> list[tuple[int, int]]:
    """Contiguous layer ranges for each stage with the smallest largest stage. first, last: bytes of the embedding and
    of the head, on the outer stages. Every stage has at least one layer."""
    sizes = list(layer_bytes)
    sizes[0] += first
    sizes[-1] += last
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest limit under which few enough stages are needed
        middle = (low + high) // 2
        if len(_pack(sizes, middle)) <= stages:
            high = middle
        else:
            low = middle + 1
    bounds = _pack(sizes, low)
    while len(bounds) < stages:  # split the longest until every stage has work
        longest = max(range(len(bounds)), key=lambda i: bounds[i][1] - bounds[i][0])
        start, stop = bounds[longest]
        bounds[longest : longest + 1] = [(start, (start + stop) // 2), ((start + stop) // 2, stop)]
    return bounds


def _pack(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    out, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit and i > start:
            out.append((start, i))
            start, total = i, 0
        total += size
    return [*out, (start, len(sizes))]


def cache_by_layer(spec: ModelSpec, tp: int, context: int) -> list[tuple[int, int]]:
    """(bytes a token, bytes a sequence) of each layer on one of ``tp`` ranks. Full windows count as sequence."""
    out = []
    for i, layer in enumerate(spec.layers):
        per_token = per_sequence = 0
        for need in layer.cache(f"layers.{i}"):
            if need.shares is not None:
                continue
            size = _cut_bytes(need, tp)
            if need.unit == "state":
                per_sequence += size
            elif need.window is not None:
                per_sequence += size * min(need.window, context)
            else:
                per_token += size
        out.append((per_token, per_sequence))
    return out


def _cut_bytes(need: CacheNeed, tp: int) -> int:
    size = record_bytes(need)
    for cut in need.cuts:
        if cut.axis == "tp" and tp > 1:
            units = need.shape[cut.dim] // cut.unit
            size = size * -(-units // tp) // units
    return size


def workspace_bytes(spec: ModelSpec, mesh: Mesh, ring: int) -> int:
    """Scratch a step needs beside weights and cache: the ring in which 4-bit experts are converted, where a binding
    asks for one (less than two experts in FP8 on the rank), and logits of the sampled rows."""
    return ring + 4 * 256 * -(-spec.vocab // mesh.tp)


def image_bytes(spec: ModelSpec) -> int:
    """Further scratch of the first stage's ranks, which hold the vision tower: what the largest image takes."""
    return 0 if spec.vision is None else spec.vision.workspace_bytes()


def carry_parts(spec: ModelSpec) -> dict[str, int]:
    """Bytes a token of a chunk of each part of the residual carry, in its element type. Nothing of it is cached."""
    return {p.name: prod(p.shape) * ELEMENT_BYTES[p.element] for p in spec.layers[0].residual.carry()}


def carry_bytes(spec: ModelSpec, chunk_tokens: int, tp: int = 1) -> int:
    """The residual carry of a chunk, and one layer's widest activations."""
    return chunk_tokens * sum(carry_parts(spec).values()) + activation_bytes(
        spec, chunk_tokens, spec.max_positions, tp=tp
    )


def rank_budget(
    spec: ModelSpec, mesh: Mesh, place: Place, layers: tuple[int, int], weights: int, scratch: int,
    hardware: Hardware, caches: Sequence[tuple[int, int]],
) -> RankBudget:  # fmt: skip
    """caches: (bytes a token, bytes a sequence) of every layer of the model on a rank; scratch: workspace bytes."""
    need = [sum(sizes) for sizes in zip(*caches[slice(*layers)], strict=True)]
    carry = carry_bytes(spec, CHUNK_TOKENS // mesh.cp, mesh.tp)
    headroom = hardware.reserved_bytes + int(HEADROOM * hardware.memory_bytes)
    left = hardware.memory_bytes - weights - scratch - carry - headroom
    return RankBudget(place.rank, place.stage, layers, weights, scratch, carry, headroom, left, *need)
