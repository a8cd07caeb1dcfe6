"""The stack: the only loop over layers.

T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dayzero.arch.channels import GLU, Channel, MoE
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA, Attention, Delta, Mixer
from dayzero.arch.outside import OutsideChannel, OutsideMixer
from dayzero.arch.residuals import Plain
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.blocks.attention import AttentionBlock
from dayzero.blocks.delta import DeltaBlock, Recurrence
from dayzero.blocks.glu import GLUBlock
from dayzero.blocks.latent import Form, LatentBlock
from dayzero.blocks.moe import MoEBlock
from dayzero.blocks.residual import Carry, PlainEntry, build_residual, close_carry, open_carry
from dayzero.blocks.site import Bind, Params, Prepack, Site, Tap, as_stored, reference
from dayzero.blocks.vision import PARTS, Tower
from dayzero.errors import UsageError
from dayzero.extensions import IMPORT_ERRORS, named_object
from dayzero.view import StepView

Load = Callable[[str], dict[str, Tensor]]  # prefix -> full name -> parameter


@dataclass(frozen=True, slots=True)
class Forms:
    """Which of several equal forms the blocks compute in."""

    latent: Form = "absorbed"
    recurrence: Recurrence = "recurrent"


class Block(Protocol):
    """A mixer or channel of one layer."""

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, D] -> [T, D]; reads and extends the view's stores."""


def build_mixer(spec: Mixer, params: Params, site: Site, forms: Forms = Forms(), *, keep_lists: bool = True) -> Block:
    """The block that computes ``spec``. keep_lists: a later layer reads the lists of its sparse index."""
    if isinstance(spec, Attention):
        return AttentionBlock(spec, params, site)
    if isinstance(spec, MLA):
        return LatentBlock(spec, params, site, form=forms.latent, keep_lists=keep_lists)
    if isinstance(spec, Delta):
        return DeltaBlock(spec, params, site, recurrence=forms.recurrence)
    return outside_block(spec, params, site)


def build_channel(spec: Channel, params: Params, site: Site) -> Block:
    """The block that computes ``spec``."""
    if isinstance(spec, GLU):
        return GLUBlock(spec, params, site)
    return MoEBlock(spec, params, site) if isinstance(spec, MoE) else outside_block(spec, params, site)


def outside_block(spec: OutsideMixer | OutsideChannel, params: Params, site: Site) -> Block:
    """The block that a spec of another package names. UsageError when it cannot be imported or is no block."""
    try:
        made = named_object(spec.block)
    except IMPORT_ERRORS as error:
        raise UsageError(
            f"{site.name}: the block {spec.block} of {type(spec).__name__} does not import "
            f"({type(error).__name__}: {error}); repair its package."
        ) from error
    block = made(spec, params, site) if callable(made) else None
    if not callable(getattr(block, "forward", None)):
        raise UsageError(f"{site.name}: {spec.block} makes no block with forward(x, view); repair its package.")
    return cast(Block, block)


def lists_are_shared(spec: ModelSpec, number: int) -> bool:
    """Whether a layer behind ``number`` reads the lists of its sparse index: the next one with an index decides."""
    later = (layer.mixer for layer in spec.layers[number + 1 :])
    indexes = (mixer.index for mixer in later if isinstance(mixer, MLA) and isinstance(mixer.index, Index))
    following = next(indexes, None)
    return following is not None and following.shared


class Layer:
    """One layer: mixer, then channel, each between entering and leaving the residual stream."""

    def __init__(
        self, spec: LayerSpec, params: Params, site: Site, number: int, forms: Forms = Forms(), keep_lists: bool = True
    ) -> None:
        self.site = site
        self.residual = build_residual(spec.residual, params, site, number)
        self.mixer = build_mixer(spec.mixer, params.below("mixer"), site.below("mixer"), forms, keep_lists=keep_lists)
        self.channel = build_channel(spec.channel, params.below("channel"), site.below("channel"))
        assert not params.left_over(), f"{site.name}: no block uses {', '.join(params.left_over())}"

    def forward(self, carry: Carry, view: StepView) -> Carry:
        mixed_TD = self.mixer.forward(self.residual.enter(carry, "mixer"), view)
        self.site.show(self.site.part("mixer"), mixed_TD)
        carry = self.residual.leave(carry, "mixer", mixed_TD)
        out_TD = self.channel.forward(self.residual.enter(carry, "channel"), view)
        self.site.show(self.site.part("channel"), out_TD)
        carry = self.residual.leave(carry, "channel", out_TD)
        if self.site.tap is not None:  # else the next site may add and norm at once
            self.site.show(self.site.name, carry.main)
        return carry


def vocabulary_matrices(spec: ModelSpec, bound: Container[str] = ()) -> frozenset[str]:
    """Parameters [V, D] of which the stack only takes rows and blocks of rows, so that a loader may give them by rows.

    bound: ``contract@site`` of operators that run a variant: those may want the tensor, so theirs are left out.
    """
    head = "embed" if spec.tie.tied else "head"
    taken = {(head, "linear.matmul_f32@head"), ("embed", "embed.lookup@embed")}
    return frozenset(name for name, _ in taken) - {name for name, use in taken if use in bound}


class Stack:
    """A whole model. Activations have the dtype of the parameters that ``load`` gives.

    load: prefix -> every parameter of that name or below it (``Loader.load``). resident: keep what was loaded; else a
    layer's parameters are loaded, used and dropped, each time. tap sees, by site: ``embed``; ``layers.{i}.mixer`` and
    ``.channel`` (outputs, before the residual); ``layers.{i}.experts`` (ids [T, N]); ``layers.{i}.index`` (selected
    positions [T, K], -1 pads); ``layers.{i}`` (main part of the carry after the layer); ``final_norm``; ``logits``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        load: Load,
        *,
        bind: Bind = reference,
        prepack: Prepack = as_stored,
        tap: Tap | None = None,
        resident: bool = True,
        forms: Forms = Forms(),
    ) -> None:
        self.spec, self.load, self.resident, self.forms = spec, load, resident, forms
        self.site = Site("", bind, tap, prepack, spec.rounded)
        self._held: dict[str, dict[str, Tensor]] = {}
        self._layers: dict[int, Layer] = {}
        self._head: Any = None
        self._tower: Tower | None = None

    def load_all(self) -> Iterator[str]:
        """Build everything that a forward needs, in the order of the layers; yields the name of each part once it is
        there. For resident stacks that should not load while they answer."""
        assert self.resident, "what is not resident is loaded when it is used"
        self._params("embed")
        yield "embed"
        for number in range(len(self.spec.layers)):
            self._layer(number)
            yield f"layers.{number}"
        for decl in (*self.spec.layers[-1].residual.close_params(), *self.spec.final_norm.params("final_norm")):
            self._params(decl.name)
        self._head_weight()
        yield "head"
        if self.spec.vision is not None:
            self._vision()
            yield "vision"

    def _params(self, prefix: str) -> dict[str, Tensor]:
        if not self.resident:
            return self.load(prefix)
        if prefix not in self._held:
            self._held[prefix] = self.load(prefix)
        return self._held[prefix]

    @torch.inference_mode()
    def open(self, view: StepView) -> Carry:
        """Embed the step's tokens."""
        embedded_TD = self.site.op("embed.lookup", "embed")(view.tokens, self._params("embed")["embed"])
        if self.spec.embed_scale != 1.0:
            embedded_TD = embedded_TD * self.spec.embed_scale
        for image in view.inserted:
            embedded_TD[image.first : image.first + image.rows.shape[0]] = image.rows
        self.site.show("embed", embedded_TD)
        return open_carry(self.spec.layers[0].residual, embedded_TD)

    def encode_image(self, pixels_YXC: Tensor) -> Tensor:
        """Rows [M, D] of an image, to stand in the place of its placeholders: see ``Tower.forward``."""
        return self._vision().forward(pixels_YXC)

    def _vision(self) -> Tower:
        assert self.spec.vision is not None, f"{self.spec.family} has no vision tower"
        if self._tower is not None:
            return self._tower
        params = {name: value for part in PARTS for name, value in self.load(part).items()}
        tower = Tower(self.spec.vision, params, self.site)
        if self.resident:
            self._tower = tower
        return tower

    @torch.inference_mode()
    def layer(self, number: int, carry: Carry, view: StepView) -> Carry:
        """Run layer ``number``; extends the view's stores."""
        return self._layer(number).forward(carry, view)

    def _layer(self, number: int) -> Layer:
        if number in self._layers:
            return self._layers[number]
        name = f"layers.{number}"
        site = self.site.below(name)
        spec, shared = self.spec.layers[number], lists_are_shared(self.spec, number)
        layer = Layer(spec, Params(self.load(name), f"{name}."), site, number, self.forms, shared)
        if self.resident:
            self._layers[number] = layer
        return layer

    @torch.inference_mode()
    def close(self, carry: Carry) -> Tensor:
        """Hidden states [T, D] behind the final norm."""
        last, norm = self.spec.layers[-1].residual, self.spec.final_norm
        names = [d.name for d in (*last.close_params(), *norm.params("final_norm"))]
        params = Params({name: self._params(name)[name] for name in names})
        if isinstance(last, Plain):
            hidden_TD = PlainEntry(norm, params, self.site, "final")(carry)
        else:
            closed_TD = close_carry(last, carry, params, self.site)
            hidden_TD = self.site.norm(norm, params, "final_norm")(closed_TD)
        self.site.show("final_norm", hidden_TD)
        return hidden_TD

    @torch.inference_mode()
    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] float32."""
        logits_TV = self.site.op("linear.matmul_f32", "head")(hidden_TD, self._head_weight())
        self.site.show("logits", logits_TV)
        return logits_TV

    def _head_weight(self) -> Any:
        """[V, D], laid out as the head's variant takes it. A tied one stays beside it as the embedding."""
        if self._head is not None:
            return self._head
        name = "embed" if self.spec.tie.tied else "head"
        weight = self.site.laid_out("linear.matmul_f32", "head", self._params(name)[name])
        if self.resident:
            self._head = weight
            if not self.spec.tie.tied:
                del self._held[name]
        return weight

    def forward(self, view: StepView) -> Tensor:
        """Hidden states [T, D] of the step's tokens; extends the view's stores."""
        carry = self.open(view)
        for number in range(len(self.spec.layers)):
            carry = self.layer(number, carry, view)
        return self.close(carry)
