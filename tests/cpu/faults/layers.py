"""Faults planted in our own port: its specs, its rules, its blocks, its decoder and its loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from dayzero.arch.channels import MoE
from dayzero.arch.mixers import MLA, Attention, Delta
from dayzero.arch.norms import Activation
from dayzero.arch.rope import Rope
from dayzero.arch.spec import ModelSpec, Tie
from dayzero.blocks import glu, latent, moe, stack
from dayzero.blocks.attention import AttentionBlock
from dayzero.checkpoint import dequant
from dayzero.checkpoint.rules import Beside, Either, Rule, RuleLike, Split
from dayzero.checkpoint.stream import Loader
from dayzero.models.recipe import Recipe
from tests.cpu.faults.catalogue import Fault, Plant, first
from tests.cpu.faults.stand import other_recipe, other_spec, patched

Change = Callable[[Any], Any]


def spec(change: Callable[[ModelSpec], ModelSpec]) -> Plant:
    def plant(into: ExitStack) -> Mapping[str, str]:
        other_spec(into, change)
        return {}

    return plant


def mixers(kind: type, change: Change) -> Plant:
    """Change every mixer of this kind."""

    def all_of(made: ModelSpec) -> ModelSpec:
        return replace(
            made,
            layers=tuple(replace(x, mixer=change(x.mixer)) if isinstance(x.mixer, kind) else x for x in made.layers),
        )

    return spec(all_of)


def channels(kind: type, change: Change) -> Plant:
    def all_of(made: ModelSpec) -> ModelSpec:
        return replace(
            made,
            layers=tuple(
                replace(x, channel=change(x.channel)) if isinstance(x.channel, kind) else x for x in made.layers
            ),
        )

    return spec(all_of)


def rope(kind: type = Attention, /, **changes: Any) -> Plant:
    return mixers(kind, lambda m: replace(m, rope=replace(m.rope, **changes)))


def index(**changes: Any) -> Plant:
    """Change the sparse index of every layer; ``style`` is its rope's."""

    def change(m: MLA) -> MLA:
        assert m.index is not None
        more = dict(changes)
        if "style" in more:
            more["rope"] = replace(m.index.rope, style=more.pop("style"))  # type: ignore[type-var]
        return replace(m, index=replace(m.index, **more))

    return mixers(MLA, change)


def router(**changes: Any) -> Plant:
    return channels(MoE, lambda c: replace(c, router=replace(c.router, **changes)))


def no_offset(made: ModelSpec) -> ModelSpec:
    """Every norm reads w where 1 + w is meant."""

    def plain(norm: Any) -> Any:
        return replace(norm, offset=False)

    def layer(x: Any) -> Any:
        mixer = x.mixer
        if isinstance(mixer, Attention):
            mixer = replace(mixer, qk_norm=plain(mixer.qk_norm))
        return replace(x, mixer=mixer, residual=replace(x.residual, norm=plain(x.residual.norm)))

    return replace(made, layers=tuple(map(layer, made.layers)), final_norm=plain(made.final_norm))


def rules(change: Callable[[RuleLike], RuleLike]) -> Plant:
    """Change rules one by one, those inside others too."""

    def deep(rule: RuleLike) -> RuleLike:
        if isinstance(rule, Beside):
            return replace(rule, rules=tuple(map(deep, rule.rules)))
        if isinstance(rule, Either):
            return replace(rule, options=tuple(tuple(map(deep, option)) for option in rule.options))
        return change(rule)

    def changed(recipe: Recipe) -> Recipe:
        make = recipe.make_rules
        return replace(recipe, make_rules=lambda made: tuple(map(deep, make(made))))

    def plant(into: ExitStack) -> Mapping[str, str]:
        other_recipe(into, changed)
        return {}

    return plant


def _swap(rule: RuleLike, one: str, other: str) -> RuleLike:
    if isinstance(rule, Rule) and rule.param.endswith((one, other)):
        ends = (one, other) if rule.param.endswith(one) else (other, one)
        return replace(rule, param=rule.param.removesuffix(ends[0]) + ends[1])
    return rule


def _keys_first(rule: RuleLike) -> RuleLike:
    if isinstance(rule, Split) and rule.params[0].endswith("mixer.q"):
        return replace(rule, params=(rule.params[1], rule.params[0], rule.params[2]))
    return rule


def _in_halves(rule: RuleLike) -> RuleLike:
    return replace(rule, interleaved=False) if isinstance(rule, Split) else rule


def patch(owner: Any, name: str, make: Change) -> Plant:
    def plant(into: ExitStack) -> Mapping[str, str]:
        patched(into, owner, name, make)
        return {}

    return plant


def _gate_first(queries: Any) -> Any:
    """Rows of q_proj are taken as [gate | q] head by head."""

    def swapped(block: AttentionBlock, x: torch.Tensor) -> Any:
        q, gate = queries(block, x)
        return gate, q

    return swapped


def _no_gate(make: Any) -> Any:
    """The shared expert is added without its gate."""
    return lambda block, shared, x, view: shared.forward(x, view)


def _no_shared(make: Any) -> Any:
    return lambda block, out, ahead: out


def _random_rows(last: Any) -> Any:
    """Layers that share an index get the choice of an indexer of their own, with weights that no file holds."""

    def chosen(view: Any, site: str) -> torch.Tensor:
        rows = last(view, site)
        draw = torch.Generator().manual_seed(3)
        own = torch.as_tensor(view.positions)[:, None]
        scores = torch.rand(len(rows), int(own.max()) + 1, generator=draw)
        scores = scores.masked_fill(torch.arange(scores.shape[1]) > own, -1)
        best = scores.topk(min(rows.shape[1], scores.shape[1]), dim=-1)
        found = best.indices.masked_fill(best.values < 0, -1)
        return torch.nn.functional.pad(found, (0, rows.shape[1] - found.shape[1]), value=-1)

    return chosen


def _zero_head(load: Any) -> Any:
    """The head of a tied model stays as it was allocated."""

    def head(made: Any, hidden_TD: torch.Tensor) -> torch.Tensor:
        logits = load(made, hidden_TD)
        return torch.zeros_like(logits)

    return head


def _reversed_nibbles(codes: Any) -> Any:
    return lambda packed: codes((packed >> 4) | (packed << 4))


def _late_exponent(table: Any) -> Any:
    """e8m0 with a bias of 126."""
    return lambda: table() * 2


def _floor_blocks(decode: Any) -> Any:
    """The number of scale blocks is rounded down: a ragged last block gets the scale of the one before it."""

    def rows(fmt: Any, weight: Any, scale: Any, whole: Any, shape: Any, dtype: Any) -> Any:
        kept = [max(1, shape[-2 + d] // fmt.block[d]) for d in (0, 1)]
        for dim, count in ((-2, kept[0]), (-1, kept[1])):
            last = torch.arange(scale.shape[dim]).clamp(max=count - 1)
            scale = scale.index_select(dim, last)
        return decode(fmt, weight, scale, whole, shape, dtype)

    return rows


def _one_global_scale(read: Any) -> Any:
    """One of gate's and up's global scales is kept for both."""

    def parts(loader: Loader, need: Any, building: Any) -> Any:
        found = read(loader, need, building)
        name = dict(need.stored.parts).get("tensor_scale", "")
        if ".up_proj." in name:
            found["tensor_scale"] = loader._tensor(name.replace(".up_proj.", ".gate_proj."))
        return found

    return parts


def _ignored_tensor_scale(read: Any) -> Any:
    return lambda fmt, parts, tensor: None if fmt.tensor_scale is None else torch.ones_like(read(fmt, parts, tensor))


def _no_index(select: Any) -> Any:
    """The indexer's tensors are loaded and never enter the graph: every row is attended."""

    def every_row(block: Any, x: torch.Tensor, query: torch.Tensor, view: Any) -> torch.Tensor:
        rows = torch.arange(int(view.positions.max()) + 1)
        return rows.expand(x.shape[0], -1).masked_fill(rows > view.positions[:, None], -1)

    return every_row


MIXER, CHANNEL = first("layers.0.mixer"), first("layers.0.channel")

# (name, kind, report, twin, pattern, plant)
TABLE: tuple[tuple[str, str, str, str, str, Plant], ...] = (
    ("indexer loaded and never used", "A", "llama.cpp#25407", "shared_index", MIXER,
     patch(latent.LatentBlock, "_select", _no_index)),
    ("shared index made anew", "A", "ATOM#1260", "shared_index", first("layers.3.mixer"),
     patch(latent, "last_selection", _random_rows)),
    ("shared expert dropped", "A", "", "latent", first("layers.3.channel"),
     patch(glu.GLUBlock, "onto", _no_shared)),
    ("head of a tied model never copied", "B", "vllm#5621", "tied", first("head"),
     patch(stack.Stack, "head", _zero_head)),
    ("tie ignored", "B", "parallax#444", "tied", r"lm_head\.weight",
     spec(lambda s: replace(s, tie=Tie(False, "wrong")))),
    ("untied head taken from the embedding", "B", "pegainfer#544", "latent", r"lm_head\.weight",
     spec(lambda s: replace(s, tie=Tie(True, "wrong")))),
    ("nibbles reversed", "D", "", "sinks", CHANNEL, patch(dequant, "_codes", _reversed_nibbles)),
    ("e8m0 bias off by one", "D", "", "sinks", CHANNEL, patch(dequant, "e8m0_table", _late_exponent)),
    ("scale blocks counted by floor", "D", "FastDeploy#3486", "latent", MIXER,
     patch(dequant, "_rows_of_blocks", _floor_blocks)),
    ("one global scale for gate and up", "D", "vllm#54974", "nvfp4", CHANNEL,
     patch(Loader, "_read", _one_global_scale)),
    ("global scale not applied", "D", "sglang#29151", "nvfp4", MIXER,
     patch(dequant, "_tensor_scale_f32", _ignored_tensor_scale)),
    ("rope interleaved for half-split", "E", "", "tied", MIXER, rope(style="interleaved")),
    ("rope half-split for interleaved", "E", "", "latent", MIXER, rope(MLA, style="half")),
    ("rope base of the class default", "E", "vllm#56066", "tied", MIXER, rope(theta=10000.0)),
    ("rotary dims halved", "E", "transformers#48241", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, rope=replace(m.rope, dims=m.rope.dims // 2)))),
    ("all dims rotated where some are", "E", "transformers#48241", "head_delta", first("layers.3.mixer"),
     mixers(Attention, lambda m: replace(m, rope=replace(m.rope, dims=m.head_dim, sections=None)))),
    ("rope at the wrong end of the head", "E", "", "head_delta", first("layers.3.mixer"), rope(place="last")),
    ("yarn is a no-op", "E", "omlx#3594", "latent", MIXER, rope(MLA, scaling=None)),
    ("yarn ramp rounded where it is not", "E", "omlx#3594", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, rope=replace(m.rope, scaling=replace(m.rope.scaling, truncate=True))))),
    ("yarn cos and sin not magnified", "E", "omlx#3594", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, rope=replace(m.rope, scaling=replace(m.rope.scaling, magnitude=1.0))))),
    ("softmax scale without mscale squared", "E", "Automodel#3792", "latent", MIXER,
     mixers(MLA, lambda m: replace(m, softmax_scale=m.q_dim**-0.5))),
    ("softmax scale of the key part alone", "E", "", "channel_delta", first("layers.3.mixer"),
     mixers(MLA, lambda m: replace(m, softmax_scale=m.nope**-0.5))),
    ("rotation where nothing is rotated", "E", "", "channel_delta", first("layers.3.mixer"),
     mixers(MLA, lambda m: replace(m, rope=Rope(m.shared, 10000.0, "interleaved")))),
    ("window one token short", "E", "vllm#3385", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, window=m.window - 1) if m.window else m)),
    ("window one token long", "E", "vllm#3385", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, window=m.window + 1) if m.window else m)),
    ("windows on the other layers", "E", "", "sinks", MIXER,
     mixers(Attention, lambda m: replace(m, window=None if m.window else 8))),
    ("index rope interleaved for half-split", "E", "vllm#28968", "index", first("layers.0.index"),
     index(style="interleaved")),
    ("index rope half-split for interleaved", "E", "mlx-lm#1463", "shared_index", first("layers.0.index"),
     index(style="half")),
    ("index rope dropped", "E", "", "index", first("layers.0.index"), index(rope=None)),
    ("index attends everything", "E", "mlx-lm#1453", "index", first("layers.0.index"), index(top_k=64)),
    ("query and gate of a fused projection swapped", "E", "", "head_delta", first("layers.3.mixer"),
     patch(AttentionBlock, "_queries", _gate_first)),
    ("query and key of a fused projection swapped", "A", "", "head_delta", MIXER, rules(_keys_first)),
    ("gate and up swapped", "A", "", "tied", CHANNEL, rules(lambda r: _swap(r, "channel.gate", "channel.up"))),
    ("gate and up of experts in halves", "A", "", "sinks", CHANNEL, rules(_in_halves)),
    ("layer norms before and after attention swapped", "A", "", "tied", MIXER,
     rules(lambda r: _swap(r, ".mixer_norm", ".channel_norm"))),
    ("norm reads w for 1 + w", "F", "mlx-vlm#2041", "head_delta", MIXER, spec(no_offset)),
    ("wrong norm convention, by the weights' mean", "F", "llmman#151", "head_delta", r"weights\.norm_mean.*layers\.0",
     spec(no_offset)),
    ("decay bounded for unbounded", "F", "", "channel_delta", MIXER, mixers(Delta, lambda m: replace(m, lower=-5.0))),
    ("norm eps 1e-3 for 1e-5", "F", "", "tied", MIXER,
     spec(lambda s: replace(s, layers=tuple(
         replace(x, residual=replace(x.residual, norm=replace(x.residual.norm, eps=1e-3))) for x in s.layers)))),
    ("norm eps 1e-6 for 1e-5", "F", "", "tied", MIXER,
     spec(lambda s: replace(s, layers=tuple(
         replace(x, residual=replace(x.residual, norm=replace(x.residual.norm, eps=1e-6))) for x in s.layers)))),
    ("activation's alpha dropped", "F", "", "sinks", CHANNEL,
     channels(MoE, lambda c: replace(c, act=replace(c.act, alpha=1.0)))),
    ("plain activation for the clamped one", "F", "sglang-das#118", "sinks", CHANNEL,
     channels(MoE, lambda c: replace(c, act=Activation()))),
    ("shared expert's gate dropped", "F", "", "head_delta", CHANNEL, patch(moe.MoEBlock, "_shared_ahead", _no_gate)),
    ("groups of experts ignored", "G", "vllm#49982", "latent", first("layers.3.experts"),
     router(groups=1, top_groups=1)),
    ("one group of experts too many", "G", "vllm#49982", "latent", first("layers.3.experts"), router(top_groups=3)),
    ("router weights not renormalised", "G", "vllm#49982", "latent", first("layers.3.channel"),
     router(renormalise=False)),
    ("routed scale dropped", "G", "vllm#49982", "latent", first("layers.3.channel"), router(scale=1.0)),
    ("softmax scores for sigmoid", "G", "Automodel#3792", "latent", r"layers\.3\.(experts|channel)$",
     router(score="softmax")),
    ("router softmax over all experts", "G", "", "sinks", CHANNEL, router(score="softmax", renormalise=False)),
    ("one expert too few", "G", "", "nvfp4", first("layers.0.experts"), router(top_k=3)),
)  # fmt: skip

ENCODER = "no command encodes what it then judges: the encoder writes twins, and its tests hold it to the exact table"


def _ties_away(encode: Any) -> Any:
    """Midpoints between two e2m1 values go to the larger one instead of the even one."""
    return lambda values: encode(values * (1 + 2.0**-20))


FAULTS = (
    *(Fault(name, kind, report, twin, "align", names, plant=plant) for name, kind, report, twin, names, plant in TABLE),
    Fault(
        "fp4 encoder rounds ties away", "D", "vllm#41985", "nvfp4", "align", "mixer",
        plant=patch(dequant, "round_to_e2m1", _ties_away), missed=ENCODER,
    ),
)  # fmt: skip
