"""Two numbers first: the floors of TTFT and TPOT from FLOPs over rate and bytes over bandwidth. No latency, no overlap
losses: a step cannot be faster than this, and usually is not as fast."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.arch.cost import CacheCost, expert_share, flops_per_token
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec
from dayzero.hardware import Hardware
from dayzero.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Floors:
    """Seconds, for one prompt of prompt_tokens, and for one step of batch sequences at that context."""

    prompt_tokens: int
    batch: int
    ttft_compute: float
    ttft_memory: float
    tpot_compute: float
    tpot_memory: float

    @property
    def ttft(self) -> float:
        return max(self.ttft_compute, self.ttft_memory)

    @property
    def tpot(self) -> float:
        return max(self.tpot_compute, self.tpot_memory)


@dataclass(frozen=True, slots=True)
class Work:
    """What the floors count of a model, whatever the mesh. tokens: of the prompt, or in the context of a step.

    first_flops, last_flops: for one token that sees nothing, and one that sees them all. visible: tokens whose rows a
    step reads.
    """

    tokens: int
    first_flops: float
    last_flops: float
    visible: int


def work_of(spec: ModelSpec, tokens: int) -> Work:
    """``Work`` for this many tokens."""
    return Work(tokens, flops_per_token(spec, 0), flops_per_token(spec, tokens), _visible(spec, tokens))


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Stored bytes of the whole model: routed experts, the embedding table (rows are looked up), and all else."""

    experts: int
    table: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.table + self.rest


def floors(
    spec: ModelSpec, hardware: Hardware, mesh: Mesh, weights: WeightBytes, cache: CacheCost, element: str,
    work: Work, batch: int,
) -> Floors:  # fmt: skip
    """element: operand type the matmuls run in. Stages run one after another, so their number does not enter.

    Bytes: a rank reads its tp-th of what is not an expert (cp ranks hold the same), and its part of the experts that
    the rows touch, which ep × expert_tp ranks share; rows are those of all groups that share the experts. Cache is
    taken as spread over tp and cp, which is less than a replicated latent costs. FLOPs: spread over all the ranks of a
    stage for a step, over one group and the expert ranks for a prompt.
    """
    expert_ranks = mesh.ep * mesh.expert_tp
    group = mesh.tp * mesh.cp
    rate, bandwidth = hardware.rate(element), hardware.bandwidth

    def read(rows: int) -> float:
        return (weights.rest / mesh.tp + weights.experts * expert_share(spec, rows) / expert_ranks) / bandwidth

    flops = 0.5 * work.tokens * (work.first_flops + work.last_flops)
    rows = max(1, -(-batch // mesh.dp))
    sharing = batch if expert_ranks > mesh.tp else rows
    kept = rows * (cache.per_token * work.visible + 2 * cache.per_sequence)
    return Floors(
        work.tokens,
        batch,
        flops / (rate * max(group, expert_ranks)),
        read(work.tokens),
        batch * work.last_flops / (rate * mesh.stage_ranks),
        read(sharing) + kept / (bandwidth * group),
    )


def _visible(spec: ModelSpec, context: int) -> int:
    """Tokens whose rows a decode step reads: top-k where every token layer selects, else all."""
    token_mixers = [layer.mixer for layer in spec.layers if layer.mixer.kind != "delta"]
    tops = [m.index.width for m in token_mixers if isinstance(m, MLA) and m.index is not None]
    return min(context, max(tops)) if tops and len(tops) == len(token_mixers) else context
