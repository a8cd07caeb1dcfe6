"""Token mixers as data: grouped-query attention, latent attention, and the gated delta rule.

Every spec answers params(prefix) · cache(prefix) · contracts(prefix) · flops(context), where prefix is
``layers.3.mixer`` and flops are per token at a context of that many tokens. Shapes: matrices are [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.arch.index import AnyIndex
from dayzero.arch.norms import Norm
from dayzero.arch.outside import OutsideMixer
from dayzero.arch.records import record_trait
from dayzero.arch.rope import Rope
from dayzero.decl import CacheNeed, Cut, OpUse, ParamDecl, packed_row


def linear_use(site: str) -> OpUse:
    return OpUse("linear.matmul", site)


def rope_use(rope: Rope, site: str) -> OpUse:
    return OpUse("rope.apply", site, (("place", rope.place), ("style", rope.style)))


def turn_traits(rope: Rope | None) -> tuple[tuple[str, object], ...]:
    """Of an operator that turns heads among other things."""
    return ("mrope", rope is not None and rope.sections is not None), ("style", None if rope is None else rope.style)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query softmax attention (Llama, Qwen3, gpt-oss, Qwen3.5's full layers).

    window: tokens visible, the current one included. sinks: a learned logit per head joins the softmax and is dropped.
    qk_norm: RMS norm over each head's q and k. gate: q's rows are [q | gate] per head, σ(gate) multiplies the output.
    bias: q, k, v have biases; out_bias: the output projection has one. softmax_scale multiplies q·k.
    kv_layer: number of the earlier layer whose keys and values this one reads (cross-layer attention, arXiv 2405.12981;
    Gemma 3n); it makes and stores none of its own. record: what keys and values are kept in (``arch.records``).
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    softmax_scale: float
    window: int | None = None
    sinks: bool = False
    qk_norm: Norm | None = None
    gate: bool = False
    bias: bool = False
    out_bias: bool = False
    kv_layer: int | None = None
    record: str = "kv_bf16"

    kind = "attention"

    @property
    def made(self) -> tuple[str, ...]:
        """Projections of the input that this layer makes."""
        return ("q", "k", "v") if self.kv_layer is None else ("q",)

    @property
    def enters_at_once(self) -> bool:
        """Whether one operator may norm, turn and write all heads."""
        return self.kv_layer is None and (self.qk_norm is None or self.qk_norm.kind == "rms")

    def params(self, p: str) -> list[ParamDecl]:
        q_unit = self.head_dim * (2 if self.gate else 1)
        q_cut = (Cut(0, "tp", q_unit),)
        kv_cut = (Cut(0, "tp", self.head_dim, repeat=True),)
        sizes = {"q": (self.heads * q_unit, q_cut), **dict.fromkeys("kv", (self.kv_heads * self.head_dim, kv_cut))}
        out = [ParamDecl(f"{p}.{n}", (sizes[n][0], self.dim), cuts=sizes[n][1]) for n in self.made]
        out.append(ParamDecl(f"{p}.o", (self.dim, self.heads * self.head_dim), cuts=(Cut(1, "tp", self.head_dim),)))
        if self.bias:
            out += [ParamDecl(f"{p}.{n}_bias", (sizes[n][0],), "bias", cuts=sizes[n][1]) for n in self.made]
        if self.out_bias:
            out.append(ParamDecl(f"{p}.o_bias", (self.dim,), "bias"))
        if self.qk_norm:
            out += [decl for n in self._normed() for decl in self.qk_norm.params(f"{p}.{n}_norm")]
        if self.sinks:
            out.append(ParamDecl(f"{p}.sinks", (self.heads,), "scalar", cuts=(Cut(0, "tp"),)))
        return out

    def _normed(self) -> tuple[str, ...]:
        return tuple(n for n in self.made if n != "v")

    def cache(self, p: str) -> list[CacheNeed]:
        cut = (Cut(0, "tp", repeat=True),)
        shape = (self.kv_heads, self.head_dim)
        owner = None if self.kv_layer is None else f"layers.{self.kv_layer}.mixer"
        return [
            CacheNeed(
                f"{p}.{part}", shape, "bf16", self.record, cuts=cut, window=self.window,
                shares=owner and f"{owner}.{part}", packed=packed_row(self.record, shape),
            )
            for part in ("k", "v")
        ]  # fmt: skip

    def contracts(self, p: str) -> list[OpUse]:
        record = record_trait(self.record)
        traits = (*record, ("sinks", self.sinks), ("window", self.window is not None))
        out = [linear_use(f"{p}.{n}") for n in (*self.made, "o")]
        out.append(OpUse("attention.paged", f"{p}.attend", traits))
        entering = [OpUse("cache.write", f"{p}.{n}", record) for n in self.made if n != "q"]
        if self.rope:
            entering.append(rope_use(self.rope, f"{p}.rope"))
        if self.qk_norm:
            entering += [self.qk_norm.use(f"{p}.{n}_norm") for n in self._normed()]
        out += entering
        if self.enters_at_once:  # norms, turns and writes in one
            entry = tuple(sorted((*turn_traits(self.rope), ("norm", self.qk_norm is not None), *record)))
            parts = tuple(use.place for use in entering)
            out.append(OpUse("attention.norm_rope_write", f"{p}.qkv", entry, parts))
        if self.gate:
            out.append(OpUse("attention.gate", f"{p}.gate", (("per", "channel"),)))
        return out

    def flops(self, context: float) -> float:
        visible = context if self.window is None else min(context, self.window)
        return 4.0 * self.heads * self.head_dim * visible


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); cached row = [normed latent | shared key].

    q_rank None: q is projected directly. shared: width of the key part that all heads share; rotated when rope is
    given, raw otherwise (Kimi). gate: σ(g_proj x) per channel multiplies the heads' output. index: sparse selection.
    record: what rows are kept in (``arch.records``).
    """

    dim: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    shared: int
    v_dim: int
    rope: Rope | None
    softmax_scale: float
    norm_eps: float
    gate: bool = False
    index: AnyIndex | None = None
    record: str = "mla_bf16"

    kind = "latent"

    @property
    def q_dim(self) -> int:
        return self.nope + self.shared

    def norm(self, rank: int) -> Norm:
        return Norm(rank, self.norm_eps)

    def params(self, p: str) -> list[ParamDecl]:
        by_head = (Cut(0, "tp", self.q_dim),)
        if self.q_rank is None:
            out = [ParamDecl(f"{p}.q", (self.heads * self.q_dim, self.dim), cuts=by_head)]
        else:
            out = [
                ParamDecl(f"{p}.q_a", (self.q_rank, self.dim)),
                *self.norm(self.q_rank).params(f"{p}.q_a_norm"),
                ParamDecl(f"{p}.q_b", (self.heads * self.q_dim, self.q_rank), cuts=by_head),
            ]
        kv_unit = self.nope + self.v_dim
        out += [
            ParamDecl(f"{p}.kv_a", (self.kv_rank + self.shared, self.dim)),
            *self.norm(self.kv_rank).params(f"{p}.kv_a_norm"),
            ParamDecl(f"{p}.kv_b", (self.heads * kv_unit, self.kv_rank), cuts=(Cut(0, "tp", kv_unit),)),
            ParamDecl(f"{p}.o", (self.dim, self.heads * self.v_dim), cuts=(Cut(1, "tp", self.v_dim),)),
        ]
        if self.gate:
            out.append(ParamDecl(f"{p}.gate", (self.heads * self.v_dim, self.dim), cuts=(Cut(0, "tp", self.v_dim),)))
        return out + (self.index.params(f"{p}.index") if self.index else [])

    def cache(self, p: str) -> list[CacheNeed]:
        shape, parts = (self.kv_rank + self.shared,), (self.kv_rank, self.shared)
        packed = packed_row(self.record, shape, parts)
        row = CacheNeed(f"{p}.latent", shape, "bf16", self.record, parts=parts, packed=packed)
        return [row] + (self.index.cache(f"{p}.index") if self.index else [])

    def contracts(self, p: str) -> list[OpUse]:
        names = ("q",) if self.q_rank is None else ("q_a", "q_b")
        out = [linear_use(f"{p}.{n}") for n in (*names, "kv_a", "o")]
        if self.q_rank is not None:
            out.append(self.norm(self.q_rank).use(f"{p}.q_a_norm"))
        record = record_trait(self.record)
        keeping = [self.norm(self.kv_rank).use(f"{p}.kv_a_norm"), OpUse("cache.write", f"{p}.latent", record)]
        turning = [rope_use(self.rope, f"{p}.rope")] if self.rope else []  # of the row, and by itself of the queries
        row = tuple(sorted((*turn_traits(self.rope), *record)))
        parts, beside = (tuple(use.place for use in uses) for uses in (keeping + turning, turning))
        out += [*keeping, OpUse("cache.write_latent", f"{p}.row", row, parts, beside)]  # norm, rope and write in one
        out.append(OpUse("latent.absorb", f"{p}.kv_b"))  # once, when it is loaded; else an operand of attend
        attending = [OpUse("latent.queries", f"{p}.queries"), OpUse("latent.values", f"{p}.values")]
        if self.index is None:
            width = (("latent_width", self.kv_rank), *record)
            attending.append(OpUse("attention.paged", f"{p}.attend", (("latent", True), *width)))
            whole = tuple(use.place for use in attending)
            out.append(OpUse("latent.attend", f"{p}.attention", width, whole))  # the three in one
        out += attending
        if self.index is not None:
            out.append(OpUse("attention.sparse", f"{p}.attend", (("latent", True), *record)))
        out += turning
        if self.gate:
            out += [linear_use(f"{p}.gate"), OpUse("attention.gate", f"{p}.gate", (("per", "channel"),))]
        return out + (self.index.contracts(f"{p}.index") if self.index else [])

    def flops(self, context: float) -> float:
        visible = context if self.index is None else min(context, self.index.width)
        attend = 2.0 * self.heads * (self.kv_rank + self.shared + self.kv_rank) * visible
        return attend + (self.index.flops(context) if self.index else 0.0)


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta rule: Kimi Delta Attention (arXiv 2510.26692) and Gated DeltaNet (arXiv 2412.06464).

    State per head [key_dim, value_dim] float32: S ← decay·S; S ← S + k ⊗ β(v − Sᵀk); o = Sᵀq. q and k come from
    key_heads, v and the state from heads (a multiple). conv: taps of the causal depthwise convolution on q, k, v.
    decay ``channel``: one log-decay per key channel from f (decay_rank: low-rank pair f_a, f_b); ``head``: one per
    head from a. lower None: −e^A·softplus(z + bias); a number: lower·σ(e^A·(z + bias)) (bounded gate).
    out_gate: activation of the output gate; gate_rank None: full-rank projection.
    """

    dim: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: int
    decay: Literal["channel", "head"]
    norm_eps: float
    out_gate: Literal["sigmoid", "silu"]
    decay_rank: int | None = None
    gate_rank: int | None = None
    lower: float | None = None

    kind = "delta"

    def _widths(self) -> dict[str, int]:
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.heads * self.value_dim}

    def params(self, p: str) -> list[ParamDecl]:
        units = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        out: list[ParamDecl] = []
        for part, width in self._widths().items():
            cut = (Cut(0, "tp", units[part]),)
            out.append(ParamDecl(f"{p}.{part}", (width, self.dim), cuts=cut))
            out.append(ParamDecl(f"{p}.{part}_conv", (width, self.conv), "conv", "f32", cuts=cut))
        head_cut = (Cut(0, "tp"),)
        out += self._decay_params(p)
        out.append(ParamDecl(f"{p}.beta", (self.heads, self.dim), cuts=head_cut))
        v_width, v_cut = self.heads * self.value_dim, (Cut(0, "tp", self.value_dim),)
        if self.gate_rank is None:
            out.append(ParamDecl(f"{p}.gate", (v_width, self.dim), cuts=v_cut))
        else:
            out.append(ParamDecl(f"{p}.gate_a", (self.gate_rank, self.dim)))
            out.append(ParamDecl(f"{p}.gate_b", (v_width, self.gate_rank), cuts=v_cut))
        out.append(ParamDecl(f"{p}.o_norm", (self.value_dim,), "norm", "f32", center=1.0))
        out.append(ParamDecl(f"{p}.o", (self.dim, v_width), cuts=(Cut(1, "tp", self.value_dim),)))
        return out

    def _decay_params(self, p: str) -> list[ParamDecl]:
        head_cut = (Cut(0, "tp"),)
        a_log = ParamDecl(f"{p}.a_log", (self.heads,), "scalar", "f32", cuts=head_cut)
        if self.decay == "head":
            bias = ParamDecl(f"{p}.dt_bias", (self.heads,), "scalar", "f32", cuts=head_cut)
            return [ParamDecl(f"{p}.a", (self.heads, self.dim), cuts=head_cut), a_log, bias]
        width, cut = self.heads * self.key_dim, (Cut(0, "tp", self.key_dim),)
        bias = ParamDecl(f"{p}.dt_bias", (width,), "scalar", "f32", cuts=cut)
        if self.decay_rank is None:
            return [ParamDecl(f"{p}.f", (width, self.dim), cuts=cut), a_log, bias]
        pair = [ParamDecl(f"{p}.f_a", (self.decay_rank, self.dim))]
        return [*pair, ParamDecl(f"{p}.f_b", (width, self.decay_rank), cuts=cut), a_log, bias]

    def cache(self, p: str) -> list[CacheNeed]:
        cut = (Cut(0, "tp"),)
        state = (self.heads, self.key_dim, self.value_dim)
        out = [CacheNeed(f"{p}.state", state, "f32", "state_f32", "state", cut, rewind="replay")]
        for part, width in self._widths().items():
            need = (width, self.conv - 1)
            out.append(CacheNeed(f"{p}.{part}_conv", need, "bf16", "conv_bf16", "state", cut, rewind="replay"))
        return out

    def contracts(self, p: str) -> list[OpUse]:
        decay = ("f",) if self.decay == "channel" and self.decay_rank is None else ("f_a", "f_b")
        gates = ("gate",) if self.gate_rank is None else ("gate_a", "gate_b")
        names = ("q", "k", "v", *(decay if self.decay == "channel" else ("a",)), "beta", *gates, "o")
        out = [linear_use(f"{p}.{n}") for n in names]
        traits = (
            ("decay", self.decay), ("gate", "softplus" if self.lower is None else "bounded"), ("act", self.out_gate),
            ("grouped", self.heads != self.key_heads), ("key_width", self.key_dim), ("value_width", self.value_dim),
            ("taps", self.conv),
        )  # fmt: skip
        return [*out, OpUse("recurrence.paged", f"{p}.recur", traits)]

    def flops(self, context: float) -> float:
        del context  # the state does not grow with the context
        return 7.0 * self.heads * self.key_dim * self.value_dim


Mixer = Attention | MLA | Delta | OutsideMixer
