"""Numbers that no model can have: heads that do not divide, more chosen experts than there are, a norm without eps.

A recipe checks the type of each key; whether the values go together shows only in the spec. A spec that fails here
would divide by zero, give NaN, or run and mean something else, so it is refused before anything is planned or loaded.
Each fault names what is wrong and the config keys that usually state it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dayzero.arch.channels import GLU, Channel, MoE, Router
from dayzero.arch.index import AnyIndex, Index, LocalIndex, Pool
from dayzero.arch.mixers import MLA, Attention, Delta, Mixer
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.residuals import AttnRes
from dayzero.arch.rope import BandScaling, LinearScaling, Rope, Yarn
from dayzero.arch.spec import ModelSpec
from dayzero.arch.vision import PatchTower

MAX_EPS = 0.1  # the largest published one is 1e-5; above a tenth the norm would no longer be one
MAX_ROTARY_DIMS = 1 << 16
EPS_FAULT = "the eps of the"


def unsound(spec: ModelSpec) -> list[str]:
    """One sentence for each fault, the same fault of several layers told once; empty when the numbers go together."""
    found: dict[str, None] = {}
    if not spec.layers:
        found["the model has no layers (num_hidden_layers)"] = None
    found.update(dict.fromkeys(_sizes(("vocab_size", spec.vocab), ("hidden_size", spec.dim))))
    found.update(dict.fromkeys(_sizes(("max_position_embeddings", spec.max_positions))))
    found.update(dict.fromkeys(_norm(spec.final_norm, "final norm")))
    for layer in dict.fromkeys(spec.layers):
        residual = layer.residual
        found.update(dict.fromkeys(_norm(residual.norm, "layer norms")))
        if isinstance(residual, AttnRes):
            found.update(dict.fromkeys(_sizes(("layers in a residual block", residual.every))))
        found.update(dict.fromkeys(_mixer(layer.mixer)))
        found.update(dict.fromkeys(_channel(layer.channel)))
    indexes = [layer.mixer.index for layer in spec.layers if isinstance(layer.mixer, MLA)]
    owners = [index.shared for index in indexes if isinstance(index, Index)]
    if owners and owners[0]:
        found["the first layer with a sparse index shares one, but none before it owns one (indexer_types)"] = None
    for number, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, Attention) and layer.mixer.kv_layer is not None:
            found.update(dict.fromkeys(_shared(spec, number, layer.mixer)))
    if spec.vision is not None:
        found.update(dict.fromkeys(_tower(spec.vision, spec.vocab)))
    return list(_one_eps(found))


def _one_eps(faults: Iterable[str]) -> Iterator[str]:
    """The faults; of norms with the same bad eps only the first, because they take it from one key."""
    told = set()
    for fault in faults:
        _, _, eps = fault.partition(" is ")
        if fault.startswith(EPS_FAULT):
            if eps in told:
                continue
            told.add(eps)
        yield fault


def _tower(tower: PatchTower, vocab: int) -> Iterator[str]:
    if tower.qkv_dim % tower.heads:
        yield f"the vision tower's width does not divide: {tower.qkv_dim} over {tower.heads} heads"
    elif tower.head_dim % 4:
        yield f"the vision tower's heads have {tower.head_dim} dimensions; rows and columns turn a multiple of 4"
    if tower.pad_id >= vocab:
        yield f"the placeholder of images has id {tower.pad_id}, but the vocabulary has {vocab} (…_token_id)"


def _shared(spec: ModelSpec, number: int, mixer: Attention) -> Iterator[str]:
    """A layer that reads another's keys and values: that one is earlier, has some, and they have the same shape."""
    owner = mixer.kv_layer or 0
    other = spec.layers[owner].mixer if 0 <= owner < number else None
    if not isinstance(other, Attention) or other.kv_layer is not None:
        yield f"layer {number} reads keys and values of layer {owner}, which is no earlier attention layer with its own"
    elif (other.kv_heads, other.head_dim) != (mixer.kv_heads, mixer.head_dim):
        yield f"layer {number} reads keys and values of layer {owner}, whose heads have another shape"


def _sizes(*named: tuple[str, int | None]) -> Iterator[str]:
    for name, value in named:
        if value is not None and value < 1:
            yield f"{name} is {value}, but must be at least 1"


def _positive(name: str, value: float | None) -> Iterator[str]:
    if value is not None and not (value > 0 and math.isfinite(value)):
        yield f"{name} is {value:g}, but must be above 0"


def _norm(norm: Norm, where: str) -> Iterator[str]:
    if not 0 < norm.eps < MAX_EPS:
        yield f"{EPS_FAULT} {where} is {norm.eps:g}, but must lie between 0 and {MAX_EPS} (rms_norm_eps)"


def _mixer(mixer: Mixer) -> Iterator[str]:
    if isinstance(mixer, Attention):
        yield from _attention(mixer)
    elif isinstance(mixer, MLA):
        yield from _latent(mixer)
    elif isinstance(mixer, Delta):
        yield from _delta(mixer)


def _attention(mixer: Attention) -> Iterator[str]:
    yield from _sizes(
        ("num_attention_heads", mixer.heads), ("num_key_value_heads", mixer.kv_heads), ("head_dim", mixer.head_dim),
        ("sliding_window", mixer.window),
    )  # fmt: skip
    if mixer.kv_heads > 0 and mixer.heads % mixer.kv_heads:
        yield (
            f"{mixer.heads} attention heads cannot share {mixer.kv_heads} KV heads evenly "
            "(num_attention_heads, num_key_value_heads)"
        )
    if mixer.qk_norm is not None:
        yield from _norm(mixer.qk_norm, "norms over q and k")
    yield from _positive("the softmax scale", mixer.softmax_scale)
    yield from _rope(mixer.rope, mixer.head_dim)


def _latent(mixer: MLA) -> Iterator[str]:
    yield from _sizes(
        ("num_attention_heads", mixer.heads), ("q_lora_rank", mixer.q_rank), ("kv_lora_rank", mixer.kv_rank),
        ("qk_nope_head_dim", mixer.nope), ("qk_rope_head_dim", mixer.shared), ("v_head_dim", mixer.v_dim),
    )  # fmt: skip
    yield from _norm(mixer.norm(mixer.kv_rank), "latent norms")
    yield from _positive("the softmax scale", mixer.softmax_scale)
    yield from _rope(mixer.rope, mixer.shared)
    if mixer.index is not None:
        yield from _index(mixer.index)


def _index(index: AnyIndex) -> Iterator[str]:
    if isinstance(index, LocalIndex):
        yield from _sizes(("the window of the sparse index", index.window))
        return
    yield from _sizes(
        ("index_n_heads", index.heads), ("index_head_dim", index.head_dim), ("index_topk", index.top_k)
    )  # fmt: skip
    yield from _norm(index.key_norm, "index key norm")
    yield from _rope(index.rope, index.head_dim)
    if index.sinks + index.window > index.top_k:
        yield f"{index.sinks + index.window} rows are forced into the {index.top_k} that the sparse index keeps"
    if index.pool is not None:
        yield from _pool(index, index.pool)


def _pool(index: Index, pool: Pool) -> Iterator[str]:
    yield from _sizes(("the pool of the sparse index", pool.size))
    if pool.size > 0 and index.top_k % pool.size:
        yield f"a sparse index keeps {index.top_k} tokens, which are no whole pools of {pool.size}"
    elif pool.size > 0 and pool.local > index.pools:
        yield f"{pool.local} pools are forced into the {index.pools} that the sparse index keeps"
    if index.sinks or index.window:
        yield "a sparse index over pools forces whole pools, no single rows"
    if pool.how == "gated" and pool.tail == "scored":
        yield "a pool that is not complete has no gated key, so that it cannot compete"


def _delta(mixer: Delta) -> Iterator[str]:
    yield from _sizes(
        ("the number of value heads", mixer.heads), ("the number of key heads", mixer.key_heads),
        ("the key head's width", mixer.key_dim), ("the value head's width", mixer.value_dim),
        ("the convolution's length", mixer.conv), ("the decay's rank", mixer.decay_rank),
        ("the gate's rank", mixer.gate_rank),
    )  # fmt: skip
    if mixer.key_heads > 0 and mixer.heads % mixer.key_heads:
        yield (
            f"{mixer.heads} value heads cannot share {mixer.key_heads} key heads evenly "
            "(linear_num_value_heads, linear_num_key_heads)"
        )
    if mixer.lower is not None and not mixer.lower < 0:
        yield f"the bound of the log-decay is {mixer.lower:g}, but must be below 0 (gate_lower_bound)"
    if not 0 < mixer.norm_eps < MAX_EPS:
        yield f"{EPS_FAULT} gated norm is {mixer.norm_eps:g}, but must lie between 0 and {MAX_EPS} (rms_norm_eps)"


def _rope(rope: Rope | None, width: int) -> Iterator[str]:
    if rope is None:
        return
    if rope.dims < 2 or rope.dims % 2:
        yield f"{rope.dims} dims of a head turn, but must be even and above 0 (head_dim, partial_rotary_factor)"
    elif rope.dims > min(width, MAX_ROTARY_DIMS):
        yield f"{rope.dims} dims turn in a head of {width} (qk_rope_head_dim, partial_rotary_factor)"
    if not rope.theta > 1:
        yield f"rope_theta is {rope.theta:g}, but must be above 1"
    sections = rope.sections if 2 <= rope.dims <= width else None  # else the dims are at fault, not how they divide
    if sections is not None and (sum(sections) != rope.dims // 2 or min(sections, default=0) < 0):
        yield f"mrope_section {list(sections)} does not add up to the {rope.dims // 2} pairs that turn"
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling | BandScaling | Yarn):
        yield from _positive("the rope scaling's factor", scaling.factor)
    if isinstance(scaling, BandScaling | Yarn):
        yield from _sizes(("original_max_position_embeddings", scaling.original))
    if isinstance(scaling, BandScaling) and not 0 < scaling.low < scaling.high:
        yield f"the rope scaling's bands are {scaling.low:g} and {scaling.high:g} (low_freq_factor, high_freq_factor)"
    if isinstance(scaling, Yarn):
        yield from _positive("the rope scaling's attention factor", scaling.magnitude)
        if not 0 < scaling.slow < scaling.fast:
            yield f"YaRN's ramp goes from {scaling.slow:g} to {scaling.fast:g} rotations (beta_slow, beta_fast)"


def _channel(channel: Channel) -> Iterator[str]:
    if isinstance(channel, GLU):
        yield from _dense(channel)
    elif isinstance(channel, MoE):
        yield from _sizes(("an expert's width", channel.inner), ("the experts' latent width", channel.latent))
        yield from _activation(channel.act)
        yield from _router(channel.router)
        if channel.shared is not None:
            yield from _dense(channel.shared)
        if channel.latent_norm is not None:
            yield from _norm(channel.latent_norm, "latent norm")


def _dense(channel: GLU) -> Iterator[str]:
    yield from _sizes(("the width of a dense layer", channel.inner))
    yield from _activation(channel.act)


def _activation(act: Activation) -> Iterator[str]:
    if act.kind in ("clamped", "silu_clamped"):
        yield from _positive("the activation's limit (swiglu_limit)", act.limit)
    if act.kind == "clamped":
        yield from _positive("the activation's slope (swiglu_alpha)", act.alpha)
    if act.kind == "situ":
        yield from _positive("the activation's beta", act.beta)
        yield from _positive("the activation's linear beta", act.linear_beta)


def _router(router: Router) -> Iterator[str]:
    yield from _sizes(
        ("the number of experts", router.experts), ("experts a token", router.top_k), ("expert groups", router.groups),
        ("kept expert groups", router.top_groups),
    )  # fmt: skip
    yield from _positive("the routed experts' scale (routed_scaling_factor)", router.scale)
    if router.groups < 1:
        return
    if router.experts % router.groups:
        yield f"{router.experts} experts do not divide into {router.groups} groups (n_routed_experts, n_group)"
    elif router.groups > 1 and router.experts < 2 * router.groups:
        yield f"{router.groups} groups of {router.experts} experts leave no two in a group to score it by (n_group)"
    elif router.top_groups > router.groups:
        yield f"{router.top_groups} of {router.groups} expert groups are to stay (topk_group, n_group)"
    elif router.top_k > router.top_groups * (router.experts // router.groups):
        left = router.top_groups * (router.experts // router.groups)
        yield f"a token chooses {router.top_k} experts of {left} (num_experts_per_tok, n_routed_experts, topk_group)"
