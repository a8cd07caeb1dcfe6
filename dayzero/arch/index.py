"""The sparse index as data: which generator names the rows that a layer's queries attend to.

Three generators, each a contract: ``tokens`` (the best tokens by an indexer's scores), ``pool`` (the best pools of
tokens), ``window`` (the newest tokens, by position alone). Rows are forced only where a family's config says so; a plan
adds none. Every spec answers params · cache · contracts · flops as mixers do; ``width`` is the length of its lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.arch.norms import Norm
from dayzero.arch.records import record_trait
from dayzero.arch.rope import Rope
from dayzero.decl import CacheNeed, OpUse, ParamDecl, packed_row

PoolScore = Literal["max", "gated"]
Tail = Literal["always", "never", "scored"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Selection by pools of ``size`` tokens, counted from the start of the sequence.

    how ``max``: a pool scores what its best visible token scores (MiniMax-M3). ``gated``: its key is the sum of its
    tokens' keys, weighted channel by channel with the softmax over the pool of gate + bias, where gate is a projection
    of the token and bias a parameter of the place in the pool (GLM-5.3-Flash).
    tail: the rows of the pool that the query leaves incomplete are ``always`` attended on top, ``never``, or compete as
    a pool of what is visible (``scored``). local: so many of the newest pools that compete are forced and take the
    place of others.
    """

    size: int
    how: PoolScore
    local: int = 0
    tail: Tail = "always"


@dataclass(frozen=True, slots=True)
class Index:
    """The lightning indexer (DeepSeek-V3.2): score(t, s) = Σ_h w[t,h]·relu(q[t,h]·k[s])·scale, keep top_k causal s.

    query_dim: width that wq reads (the normed q latent). key_norm: LayerNorm or RMS over the key. rope None: no
    rotation. shared: this layer owns no indexer and reuses the selection of the last layer that has one.
    pool: whole pools are kept, top_k tokens of them. sinks, window: of the generator ``tokens``: the first and the last
    so many tokens are forced and count towards top_k (LongCat). record: what keys are kept in (``arch.records``).
    """

    dim: int
    query_dim: int
    heads: int
    head_dim: int
    top_k: int
    rope: Rope | None
    key_norm: Norm
    shared: bool = False
    pool: Pool | None = None
    sinks: int = 0
    window: int = 0
    record: str = "idx_bf16"

    @property
    def generator(self) -> str:
        return "tokens" if self.pool is None else "pool"

    @property
    def scale(self) -> float:
        """heads^-1/2 · head_dim^-1/2, applied to the summed score."""
        return self.heads**-0.5 * self.head_dim**-0.5

    @property
    def pools(self) -> int:
        """Pools that a query keeps."""
        assert self.pool is not None
        return self.top_k // self.pool.size

    @property
    def width(self) -> int:
        """Rows a query can attend to."""
        if self.pool is None:
            return self.top_k
        return self.pools * self.pool.size + (self.pool.size - 1 if self.pool.tail == "always" else 0)

    @property
    def gated(self) -> bool:
        return self.pool is not None and self.pool.how == "gated"

    def params(self, p: str) -> list[ParamDecl]:
        if self.shared:
            return []
        out = [
            ParamDecl(f"{p}.q", (self.heads * self.head_dim, self.query_dim)),
            ParamDecl(f"{p}.k", (self.head_dim, self.dim)),
            *self.key_norm.params(f"{p}.k_norm"),
            ParamDecl(f"{p}.weights", (self.heads, self.dim), "router"),
        ]
        if self.pool is not None and self.gated:
            out.append(ParamDecl(f"{p}.pool_gate", (self.head_dim, self.dim)))
            out.append(ParamDecl(f"{p}.pool_bias", (self.pool.size, self.head_dim), "bias"))
        return out

    def cache(self, p: str) -> list[CacheNeed]:
        if self.shared:
            return []
        shape = (self.head_dim,)
        out = [CacheNeed(f"{p}.k", shape, "bf16", self.record, packed=packed_row(self.record, shape))]
        return [*out, CacheNeed(f"{p}.pool_gate", shape, "bf16", "gate_bf16")] if self.gated else out

    def contracts(self, p: str) -> list[OpUse]:
        if self.shared:
            return []
        linear = ("q", "k", "pool_gate") if self.gated else ("q", "k")
        out = [*(OpUse("linear.matmul", f"{p}.{n}") for n in linear), OpUse("linear.matmul_f32", f"{p}.weights")]
        out.append(self.key_norm.use(f"{p}.k_norm"))
        out.append(OpUse("cache.write", f"{p}.k", record_trait(self.record)))
        if self.gated:
            out.append(OpUse("cache.write", f"{p}.pool_gate"))
        out.append(OpUse(f"sparse_index.{self.generator}", f"{p}.select", self._traits()))
        if self.rope:
            out.append(OpUse("rope.apply", f"{p}.rope", (("place", self.rope.place), ("style", self.rope.style))))
        return out

    def _traits(self) -> tuple[tuple[str, object], ...]:
        record = record_trait(self.record)
        if self.pool is None:
            return (*record, ("sinks", self.sinks > 0), ("window", self.window > 0))
        return (("how", self.pool.how), ("local", self.pool.local > 0), *record, ("tail", self.pool.tail))

    def flops(self, context: float) -> float:
        keys = context / self.pool.size if self.pool is not None and self.gated else context
        return 0.0 if self.shared else 2.0 * self.heads * self.head_dim * keys


@dataclass(frozen=True, slots=True)
class LocalIndex:
    """The generator ``window``: each query attends to the last ``window`` tokens, its own included, and to the first
    ``sinks`` of the sequence. It has no parameters and keeps nothing."""

    window: int
    sinks: int = 0

    generator = "window"
    shared = False

    @property
    def width(self) -> int:
        return self.window + self.sinks

    @property
    def top_k(self) -> int:
        return self.width

    def params(self, p: str) -> list[ParamDecl]:
        return []

    def cache(self, p: str) -> list[CacheNeed]:
        return []

    def contracts(self, p: str) -> list[OpUse]:
        return [OpUse("sparse_index.window", f"{p}.select", (("sinks", self.sinks > 0),))]

    def flops(self, context: float) -> float:
        return 0.0


AnyIndex = Index | LocalIndex
