"""ModelSpec: the whole model as data. Everything the paper half computes starts here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dayzero.arch.channels import GLU, Channel, MoE
from dayzero.arch.index import AnyIndex, LocalIndex
from dayzero.arch.mixers import MLA, Attention, Delta, Mixer
from dayzero.arch.norms import Norm
from dayzero.arch.residuals import Residual
from dayzero.arch.vision import Vision
from dayzero.decl import CacheNeed, Cut, OpUse, ParamDecl


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a token mixer, a channel mixer, and how both hang on the residual stream."""

    mixer: Mixer
    channel: Channel
    residual: Residual

    def params(self, p: str) -> list[ParamDecl]:
        return self.residual.params(p) + self.mixer.params(f"{p}.mixer") + self.channel.params(f"{p}.channel")

    def cache(self, p: str) -> list[CacheNeed]:
        return self.mixer.cache(f"{p}.mixer")

    def contracts(self, p: str) -> list[OpUse]:
        return self.residual.contracts(p) + self.mixer.contracts(f"{p}.mixer") + self.channel.contracts(f"{p}.channel")


@dataclass(frozen=True, slots=True)
class Tie:
    """Whether the head is the embedding, and where that came from."""

    tied: bool
    source: str


@dataclass(frozen=True, slots=True)
class Draft:
    """Layers that each predict one token further and that the plain forward does not run (multi-token prediction,
    DeepSeek-V3, arXiv 2412.19437 §2.2): layer(join [norm(embedding of the next token) | norm(hidden state)]), then a
    norm and the head.

    norm: the kind that all three are of. layers: by the number that the checkpoint's names give them. shared: one
    join and one set of norms serve all of them; else each has its own, and a file may hold copies of the embedding
    and the head for each.
    """

    norm: Norm
    vocab: int
    layers: Mapping[int, LayerSpec]
    shared: bool = False

    def params(self) -> list[ParamDecl]:
        """``extra.{number}.…``, what is shared ``extra.…``; copies not included."""
        out, dim = [], self.norm.dim
        for p in ["extra"] if self.shared else [f"extra.{number}" for number in self.layers]:
            out += [decl for n in ("embed_norm", "hidden_norm") for decl in self.norm.params(f"{p}.{n}")]
            out += [ParamDecl(f"{p}.join", (dim, 2 * dim)), *self.norm.params(f"{p}.final_norm")]
        return out + [decl for number, layer in self.layers.items() for decl in layer.params(f"extra.{number}")]

    def copies(self) -> list[ParamDecl]:
        """``extra.{number}.embed`` and ``.head``: what a file may hold a second time."""
        numbers, shape = () if self.shared else self.layers, (self.vocab, self.norm.dim)
        return [ParamDecl(f"extra.{i}.{n}", shape, "embed", cuts=(Cut(0, "tp"),)) for i in numbers for n in COPIED]


COPIED = ("embed", "head")
PRODUCT = "linear.matmul"
LinearInputs = Literal["bf16", "fp8_128"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """family: the recipe's name. dim: width. max_positions: trained context in tokens. stop_ids: from the config only.

    extra: layers stored in the checkpoint that the plain forward does not run; counted apart from everything else.
    facts: further effective values to show, by name. rounded: linear layers whose inputs are rounded to e4m3 with a
    scale for each token and 128 columns; a plan's choice, not the model's.
    """

    family: str
    dim: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    tie: Tie
    max_positions: int
    stop_ids: tuple[int, ...] = ()
    embed_scale: float = 1.0
    vision: Vision | None = None
    extra: Draft | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    rounded: frozenset[str] = frozenset()

    def params(self) -> list[ParamDecl]:
        """Every parameter of the plain forward, in order: embed, layers, closing, head, vision."""
        cut = (Cut(0, "tp"),)
        out = [ParamDecl("embed", (self.vocab, self.dim), "embed", cuts=cut)]
        for i, layer in enumerate(self.layers):
            out += layer.params(f"layers.{i}")
        out += self.layers[-1].residual.close_params()
        out += self.final_norm.params("final_norm")
        if not self.tie.tied:
            out.append(ParamDecl("head", (self.vocab, self.dim), "embed", cuts=cut))
        return out + (self.vision.params() if self.vision else [])

    def cache(self) -> list[CacheNeed]:
        return [need for i, layer in enumerate(self.layers) for need in layer.cache(f"layers.{i}")]

    def contracts(self) -> list[OpUse]:
        uses = [use for i, layer in enumerate(self.layers) for use in layer.contracts(f"layers.{i}")]
        closing = self.layers[-1].residual.close_contracts(self.final_norm, f"layers.{len(self.layers) - 1}")
        uses = [OpUse("embed.lookup", "embed"), *uses, *closing]
        uses += [self.final_norm.use("final_norm"), OpUse("linear.matmul_f32", "head")]
        uses += self.vision.contracts() if self.vision else []
        return [use for one in uses if (use := _with_inputs(one, self.rounded)) is not None]

    @property
    def modality(self) -> str:
        return "text+image" if self.vision else "text"


def _with_inputs(use: OpUse, rounded: Container[str]) -> OpUse | None:
    """The use, of rounded inputs where its site is among those; None for a composed operator that would not round
    them."""
    if any(part.partition("@")[2] in rounded for part in use.parts if part.startswith(f"{PRODUCT}@")):
        return None
    return replace(use, contract=f"{PRODUCT}_fp8_128") if use.contract == PRODUCT and use.site in rounded else use


def mixer_word(mixer: Mixer) -> str:
    """How a layer map names a mixer: window, sparse index and gates included."""
    if isinstance(mixer, Attention):
        word = "attention" if mixer.window is None else f"attention window {mixer.window}"
        return word + (" + sinks" if mixer.sinks else "") + (" + gate" if mixer.gate else "")
    if isinstance(mixer, MLA):
        index = "" if mixer.index is None else _index_word(mixer.index)
        return ("latent" if mixer.rope else "latent no-rope") + index + (" + gate" if mixer.gate else "")
    if isinstance(mixer, Delta):
        return f"delta per-{mixer.decay} " + ("softplus" if mixer.lower is None else "bounded")
    return mixer.word()


def _index_word(index: AnyIndex) -> str:
    if isinstance(index, LocalIndex):
        return f" + window {index.window}" + (f" + first {index.sinks}" if index.sinks else "")
    if index.shared:
        return " + shared index"
    return f" + index top {index.top_k}" + (f" in pools of {index.pool.size}" if index.pool else "")


def channel_word(channel: Channel) -> str:
    if isinstance(channel, MoE):
        router = channel.router
        latent = f" latent {channel.latent}" if channel.latent else ""
        return f"moe {router.experts} top {router.top_k}{latent}" + (" + shared" if channel.shared else "")
    return f"glu {channel.inner}" if isinstance(channel, GLU) else channel.word()
