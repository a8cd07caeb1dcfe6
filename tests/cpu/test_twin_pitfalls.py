"""What ports of bounded delta attention, gated latent attention, attention residuals and latent experts got wrong in
public, by name: each mistake moves the logits of the twin far beyond what forms and chunks may differ by, so a twin
that agrees with its oracle shows that none of them is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from small_models import write_small
from torch import Tensor

from dayzero.arch.channels import GLU, MoE
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.norms import Activation
from dayzero.arch.residuals import AttnRes
from dayzero.arch.rope import Rope
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.open import open_model
from dayzero.blocks.site import reference
from dayzero.blocks.stack import Stack
from dayzero.ops import recurrence
from dayzero.ops.delta_paged import PARTS, by_span

EQUAL = 1e-5  # of the logits' spread: what equal forms may differ by
LEAST = 10 * EQUAL
LENGTH, CHUNK = 40, 24
Params = dict[str, Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Run:
    """A model that a mistake changes: its spec, its parameters, its operators."""

    spec: ModelSpec
    params: Params
    wraps: list[tuple[str, str, Wrap]]

    def logits(self) -> Tensor:
        """[T, V], in two chunks."""
        stack = Stack(self.spec, self._load, bind=self._bind)
        cache = LocalCache(self.spec, torch.float32)
        ids = torch.randint(3, 500, (LENGTH,), generator=torch.Generator().manual_seed(1))
        return torch.cat([stack.head(stack.forward(cache.view(part))) for part in ids.split(CHUNK)])

    def _load(self, prefix: str) -> Params:
        return {n: v for n, v in self.params.items() if n == prefix or n.startswith(f"{prefix}.")}

    def _bind(self, contract: str, site: str) -> Callable[..., Any]:
        made = reference(contract, site)
        for name, end, wrap in self.wraps:
            if name == contract and site.endswith(end):
                made = wrap(made)
        return made

    # -- what a mistake may do: each gives the run back

    def mixers(self, kind: type, change: Callable[[Any], Any]) -> Run:
        layers = [
            replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, kind) else layer
            for layer in self.spec.layers
        ]
        return replace(self, spec=replace(self.spec, layers=tuple(layers)))

    def channels(self, change: Callable[[Any], Any]) -> Run:
        layers = tuple(replace(layer, channel=change(layer.channel)) for layer in self.spec.layers)
        return replace(self, spec=replace(self.spec, layers=layers))

    def values(self, word: str, change: Callable[[Tensor], Tensor]) -> Run:
        """Change every parameter whose name ends with ``word``."""
        found = {n: change(v) for n, v in self.params.items() if n.endswith(word)}
        assert found, word
        return replace(self, params=self.params | found)

    def op(self, contract: str, wrap: Wrap, at: str = "") -> Run:
        return replace(self, wraps=[*self.wraps, (contract, at, wrap)])


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def acts(act: Callable[[Activation], Activation]) -> Callable[[GLU | MoE], GLU | MoE]:
    def change(channel: GLU | MoE) -> GLU | MoE:
        made = replace(channel, act=act(channel.act))
        if isinstance(made, MoE) and made.shared is not None:
            made = replace(made, shared=replace(made.shared, act=act(made.shared.act)))
        return made

    return change


def routers(**over: Any) -> Callable[[GLU | MoE], GLU | MoE]:
    return lambda channel: (
        replace(channel, router=replace(channel.router, **over)) if isinstance(channel, MoE) else channel
    )


def clamped_softplus(_: Any) -> Callable[..., Tensor]:
    return lambda z, a_log, dt_bias, lower: recurrence.gate_softplus(z, a_log, dt_bias).clamp(min=lower)


def heads_by(made: Callable[[Tensor, Tensor], list[Tensor]]) -> Callable[[Tensor], Tensor]:
    """Reorders the [keys | values] rows of each of the four heads."""
    return lambda kv_b: torch.cat([torch.cat(made(*head.split(24))) for head in kv_b.chunk(4)])


def biased_weights(route: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(logits_TE: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
        ids, _ = route(logits_TE, top_k, **options)
        weights = (torch.sigmoid(logits_TE) + options["bias_E"]).gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    return wrong


def norm_of_each_expert(experts: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **options: Any) -> Tensor:
        one_by_one = (experts(x, ids[:, n : n + 1], weights[:, n : n + 1], *rest, **options) for n in range(4))
        return torch.stack([torch.nn.functional.rms_norm(out, (out.shape[-1],)) for out in one_by_one]).sum(0)

    return wrong


def weights_first(experts: Callable[..., Any]) -> Callable[..., Any]:
    """Each expert's input is weighted, in the place of its output."""

    def wrong(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **options: Any) -> Tensor:
        ones = torch.ones_like(weights[:, :1])
        parts = (experts(x * weights[:, n, None], ids[:, n : n + 1], ones, *rest, **options) for n in range(4))
        return torch.stack(list(parts)).sum(0)

    return wrong


def before_its_norm(run: Run, norm_end: str, reader_end: str) -> Run:
    """What reads a norm's output at one site reads its input there."""
    raw: list[Tensor] = []

    def norm(made: Callable[..., Any]) -> Callable[..., Any]:
        def kept(x: Tensor, *rest: Any, **options: Any) -> Tensor:
            raw[:] = [x]
            return made(x, *rest, **options)

        return kept

    def reader(made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest, **options: made(raw[0], *rest, **options)

    return run.op("norm.rms", norm, norm_end).op("linear.matmul", reader, reader_end)


def mix_of_unit_values(mix: Callable[..., Any]) -> Callable[..., Any]:
    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],))

    return lambda partial, bank, norm, proj, eps: mix(unit(partial), unit(bank), norm, proj, eps=eps)


def second_as(change: Callable[[Tensor], Tensor]) -> Wrap:
    """Changes the state that an operator hands on beside its output."""

    def wrap(made: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            out, state = made(*args, **options)
            return out, change(state)

        return wrong

    return wrap


def rounded_input(place: int) -> Wrap:
    """One of an operator's inputs, by its place, rounded to bf16."""
    return lambda made: lambda *args: made(*(rounded(a) if n == place else a for n, a in enumerate(args)))


def inside(part: str, wrap: Wrap) -> Wrap:
    """Wraps one part of the delta rule instead of the whole."""
    wrong = replace(PARTS, **{part: wrap(getattr(PARTS, part))})
    return lambda made: lambda *args, **options: by_span(wrong, *args, **options)


def index_change(**over: Any) -> Callable[[MLA], MLA]:
    return lambda m: m if m.index is None else replace(m, index=replace(m.index, **over))


SWAP = torch.arange(160).view(-1, 2).flip(-1).flatten()  # neighbours exchanged
TURN = Rope(16, 10000.0, "interleaved")
MISTAKES: Mapping[str, Callable[[Run], Run]] = {
    # delta attention
    "the unbounded gate": lambda r: r.mixers(Delta, lambda m: replace(m, lower=None)),
    "the unbounded gate, clamped": lambda r: r.op("recurrence.paged", inside("gate_bounded", clamped_softplus)),
    "rates of other heads": lambda r: r.values(".a_log", lambda v: v.roll(1)),
    "rates rounded to bf16": lambda r: r.values(".a_log", rounded),
    "step biases rounded to bf16": lambda r: r.values(".dt_bias", rounded),
    "taps rounded to bf16": lambda r: r.values("_conv", rounded),
    "the output norm's weight rounded to bf16": lambda r: r.values(".o_norm", rounded),
    "taps from the newest to the oldest": lambda r: r.values("_conv", lambda v: v.flip(-1)),
    "the write strength through a sigmoid twice": lambda r: r.op(
        "linear.matmul", lambda f: lambda x, w, b: torch.sigmoid(f(x, w, b)), "mixer.beta"
    ),
    "the write strength rounded to bf16": lambda r: r.op("recurrence.paged", inside("recur", rounded_input(4))),
    "the decay rounded to bf16": lambda r: r.op("recurrence.paged", inside("recur", rounded_input(3))),
    "a state with values first": lambda r: r.op(
        "recurrence.paged", inside("recur", second_as(lambda s: s.transpose(1, 2).contiguous()))
    ),
    "no state from the chunk before": lambda r: r.op("recurrence.paged", inside("recur", second_as(torch.zeros_like))),
    "a window of inputs behind the activation": lambda r: r.op(
        "recurrence.paged", inside("convolve", second_as(torch.nn.functional.silu))
    ),
    "an output gate of silu": lambda r: r.mixers(Delta, lambda m: replace(m, out_gate="silu")),
    # latent attention
    "turned latent attention": lambda r: r.mixers(MLA, lambda m: replace(m, rope=TURN)),
    "a scale without the shared part": lambda r: r.mixers(MLA, lambda m: replace(m, softmax_scale=m.nope**-0.5)),
    "latent norms with the layers' eps": lambda r: r.mixers(MLA, lambda m: replace(m, norm_eps=1e-5)),
    "no gate on latent attention": lambda r: r.op("attention.gate", lambda f: lambda out, gate: out),
    "gates from the stream before its norm": lambda r: before_its_norm(r, ".mixer_norm", ".mixer.gate"),
    "keys and values exchanged": lambda r: r.values(".kv_b", heads_by(lambda k, v: [v, k])),
    # the sparse index
    "every position": lambda r: r.mixers(MLA, index_change(top_k=4096)),
    "a position fewer": lambda r: r.mixers(MLA, index_change(top_k=7)),
    "a turned index": lambda r: r.mixers(MLA, index_change(rope=TURN)),
    "index queries from the latent before its norm": lambda r: before_its_norm(r, ".q_a_norm", ".index.q"),
    "index keys without the norm's bias": lambda r: r.values(".k_norm_bias", torch.zeros_like),
    # attention residuals
    "a block longer by a layer": lambda r: replace(
        r,
        spec=replace(r.spec, layers=tuple(replace(x, residual=AttnRes(x.residual.norm, 5, 2)) for x in r.spec.layers)),
    ),
    "a mix of normed values": lambda r: r.op("residual.attn_mix", mix_of_unit_values),
    "a mix with the gamma on its values": lambda r: r.op(
        "residual.attn_mix", lambda f: lambda p, b, n, w, eps: f(p, b, n, w, eps=eps) * n
    ),
    "the mix's query rounded to bf16": lambda r: r.op(
        "residual.attn_mix", lambda f: lambda p, b, n, w, eps: f(p, b, torch.ones_like(n), rounded(n * w), eps=eps)
    ),
    "the gamma left out of the query": lambda r: r.values("_mix_norm", torch.ones_like),
    "the closing mix left out": lambda r: r.op("residual.attn_mix", lambda f: lambda p, *_, **__: p, "close_mix"),
    "the closing mix with another site's weights": lambda r: replace(
        r, params=r.params | {f"close_mix_{n}": r.params[f"layers.1.mixer_mix_{n}"] for n in ("norm", "proj")}
    ),
    # experts
    "silu": lambda r: r.channels(acts(lambda a: Activation())),
    "no bound on the linear part": lambda r: r.channels(acts(lambda a: replace(a, linear_beta=1e6))),
    "the router's bias rounded to bf16": lambda r: r.values(".router_bias", rounded),
    "the router's logits rounded to bf16": lambda r: r.op(
        "linear.matmul_f32", lambda f: lambda x, w, b: rounded(f(x, w, b)), ".router"
    ),
    "weights in front of the experts": lambda r: r.op("moe.experts", weights_first),
    "weights with the bias": lambda r: r.op("moe.route", biased_weights),
    "weights not renormalised": lambda r: r.channels(routers(renormalise=False)),
    "another scale of the experts": lambda r: r.channels(routers(scale=2.446)),
    "a norm of each expert": lambda r: r.op("moe.experts", norm_of_each_expert),
    "no norm of the latent sum": lambda r: r.op("norm.rms", lambda f: lambda x, *_, **__: x, "latent_norm"),
    "nibbles exchanged": lambda r: r.values(".experts.down", lambda v: v[..., SWAP[: v.shape[-1]]]),
    "gate and up exchanged": lambda r: replace(
        r,
        params={
            n.replace(".gate", ".@").replace(".up", ".gate").replace(".@", ".up") if ".experts." in n else n: v
            for n, v in r.params.items()
        },
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("kimi_k31", tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def right(folder: Path) -> Run:
    model = open_model(str(folder), dtype=torch.float32)
    names = [d.name for d in model.spec.params() if not d.name.startswith(("vision.", "projector."))]
    prefixes = dict.fromkeys(".".join(n.split(".")[: 2 if n.startswith("layers.") else 1]) for n in names)
    return Run(model.spec, {n: v for p in prefixes for n, v in model.loader.load(p).items()}, [])


@pytest.fixture(scope="module")
def wanted(right: Run) -> Tensor:
    return right.logits()


def distance(got: Tensor, want: Tensor) -> float:
    """Largest difference, of the spread of the wanted logits."""
    return float((got - want).abs().max() / (want.max() - want.min()))


def test_what_is_published_in_float32_stays_so_in_a_model_of_bf16(folder: Path, right: Run) -> None:
    """Rates, step biases, taps, the output norm, the router's bias: to the bit, and of the length without padding."""
    model = open_model(str(folder), dtype=torch.bfloat16)
    loaded = {n: v for i in range(len(model.spec.layers)) for n, v in model.loader.load(f"layers.{i}").items()}
    wide = {n for n, v in loaded.items() if v.dtype == torch.float32}
    words = ("a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "router_bias")
    assert {n.rpartition(".")[2] for n in wide} == set(words)
    assert wide == {n for n in loaded if n.endswith(words)}
    for name in sorted(wide):
        assert torch.equal(loaded[name], right.params[name]), name
        assert not torch.equal(rounded(loaded[name]), loaded[name]), f"{name}: a rounding would not be seen"
    assert {len(v) for n, v in loaded.items() if n.endswith(".a_log")} == {4}


def test_the_right_model_is_the_same_again(right: Run, wanted: Tensor) -> None:
    assert distance(right.logits(), wanted) == 0


@pytest.mark.parametrize("name", MISTAKES)
def test_the_twin_shows(name: str, right: Run, wanted: Tensor) -> None:
    assert distance(MISTAKES[name](right).logits(), wanted) > LEAST
