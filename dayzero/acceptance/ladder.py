"""The error ladder as rows of text, and what a diverging module most likely means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.acceptance.compare import Logits
from dayzero.acceptance.walk import ChoiceResult, SiteResult
from dayzero.arch.channels import MoE
from dayzero.arch.mixers import MLA, Attention, Delta, Mixer
from dayzero.arch.residuals import Plain
from dayzero.arch.spec import ModelSpec, channel_word, mixer_word

MOST_ROWS = 16
LEGEND = (
    "rel L2: |ours - oracle| / |oracle|, held to bound; worst token: the largest token's; max/spread: max error / std",
    "own floor: ours at once against ours in chunks; sets: tokens that choose the oracle's experts or positions",
)
COLUMNS = ("site", "module", "rel L2", "worst token", "max/spread", "1 - cos", "bound", "own floor", "sets", "")


def rows(spec: ModelSpec, sites: Sequence[SiteResult], choices: Sequence[ChoiceResult]) -> list[tuple[str, ...]]:
    """One row a module output, in the order of the forward; set agreement stands beside the output it decides."""
    sets = {c.site: c for c in choices}
    out: list[tuple[str, ...]] = []
    for result in sites:
        d = result.distance
        out.append(
            (
                result.site,
                _module(spec, result.site),
                f"{d.rel_l2:.1e}",
                f"{d.worst_token:.1e}",
                f"{d.max_over_spread:.1e}",
                f"{max(0.0, 1 - d.cosine):.0e}",
                f"{result.bound.value:.1e}",
                f"{result.floor:.0e}",
                _sets(sets, result.site),
                "" if result.passed else "diverges",
            )
        )
    return out


def telling(sites: Sequence[SiteResult], choices: Sequence[ChoiceResult], most: int) -> list[int]:
    """The ``most`` sites worth reading, in the order of the forward: what diverges first, then what is nearest to its
    bound. A choice stands with the output it decides."""
    decided = {"index": "mixer", "experts": "channel"}
    bad = {s.site for s in sites if not s.passed}
    for choice in choices:
        base, _, word = choice.site.rpartition(".")
        if not choice.passed:
            bad.add(f"{base}.{decided[word]}")

    def rank(at: int) -> tuple[bool, float]:
        site = sites[at]
        share = site.distance.rel_l2 / site.bound.value
        return (site.site not in bad, at if site.site in bad else -share)

    return sorted(sorted(range(len(sites)), key=rank)[:most])


def without_empty(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and the rows, without columns that say nothing in any row."""
    kept = [at for at in range(len(COLUMNS)) if any(row[at] for row in rows)]
    return tuple(COLUMNS[at] for at in kept), [tuple(row[at] for at in kept) for row in rows]


def oracle_text(oracle: Mapping[str, Any]) -> str:
    """``transformers X``, ``plain forward of X``: the kind is not said twice."""
    kind, name = str(oracle.get("kind") or ""), str(oracle.get("name") or "")
    return name if name.startswith(kind) else f"{kind} {name}"


def _module(spec: ModelSpec, site: str) -> str:
    parts = site.split(".")
    if parts[0] == "vision":
        return "vision tower"
    if len(parts) < 3 or parts[2] == "carry":
        return "stream" if parts[0] == "layers" else ""
    layer = spec.layers[int(parts[1])]
    return mixer_word(layer.mixer) if parts[2] == "mixer" else channel_word(layer.channel)


def _sets(sets: dict[str, ChoiceResult], site: str) -> str:
    base, _, word = site.rpartition(".")
    found = sets.get(f"{base}.{ {'mixer': 'index', 'channel': 'experts'}.get(word, '') }")
    if found is None:
        return ""
    ties = f" ({len(found.ties)} ties)" if found.ties else ""
    return f"{found.choice.agreement:.1%}{ties}"


def logit_rows(logits: Logits) -> list[tuple[str, ...]]:
    """Top-1 agreement by the oracle's margin, KL and perplexities, as (what, value) rows."""
    rows: list[tuple[str, ...]] = [
        (f"same top-1, oracle's margin {name} nat", f"{same} of {total} tokens")
        for name, (total, same) in logits.top1.items()
        if total
    ]
    rows.append(("KL mean / p99 / max", f"{logits.kl_mean:.2e} / {logits.kl_p99:.2e} / {logits.kl_max:.2e} nat"))
    rows.append(("perplexity ours / oracle", f"{logits.perplexity_ours:.4f} / {logits.perplexity_oracle:.4f}"))
    rows.append(("largest error over spread", f"{logits.error_over_spread:.1e} (bound {logits.bound:.1e})"))
    return rows


def hint(spec: ModelSpec, result: SiteResult) -> str:
    """What to look at when this module is the first that diverges, from its kind and from the first wrong token."""
    parts, first = result.site.split("."), result.distance.first_wrong
    if parts[0] == "vision":
        return _vision_hint(parts)
    if result.site == "embed":
        return "The embedding differs: look at the tensor it is filled from, its root, and an embedding scale."
    if result.site == "final_norm":
        return "The final norm differs: look at its eps, a (1 + w) convention, and which tensor fills it."
    if result.site == "head":
        return "The head differs: look at whether it is tied to the embedding, and at logit scaling or capping."
    layer = spec.layers[int(parts[1])]
    if len(parts) == 2 or parts[2] == "carry":
        kind = "a residual scale, norms on outputs" if isinstance(layer.residual, Plain) else "the carry's other parts"
        return f"Mixer and channel agree but their sum does not: look at the order of the residual, {kind}."
    if parts[2] == "channel":
        return _channel_hint(layer.channel)
    return _mixer_hint(layer.mixer, first)


def _vision_hint(parts: list[str]) -> str:
    if parts[-1] == "embed":
        return "Look at the mean and spread of pixels, the order within a patch, and how positions are stretched."
    if len(parts) == 1:
        return "The blocks agree and the rows do not: look at the order of merged patches, the projector and its gelu."
    return "Look at which of row and column turns which pairs, the fused qkv's order, gelu's form, the norms' eps."


def _mixer_hint(mixer: Mixer, first: int | None) -> str:
    if isinstance(mixer, Delta):
        start = f"Token 0 agrees and token {first} does not: look at the decay, its sign and bias, the state's update"
        if first == 0:
            start = "The first token is wrong already: look at projections, norms and gates"
        return f"{start}; convolution taps and their order, key normalisation and its eps, the output gate."
    if first == 0:
        return (
            "Token 0, which sees only itself, is wrong: positions and windows are not at fault. Look at the input norm "
            "(eps, 1 + w), the value and output projections, biases, an output gate, and how heads are grouped."
        )
    window = mixer.window if isinstance(mixer, Attention) else None
    if window is not None and first is not None and first >= window - 1:
        return f"Wrong from token {first} on, with a window of {window}: look at whether it counts the current token."
    index = mixer.index if isinstance(mixer, MLA) else None
    if index is not None and first is not None and first >= index.top_k - 1:
        return f"Wrong from token {first} on, with top_k {index.top_k}: look at the index, its rope style and norm."
    return (
        f"Token 0 agrees and token {first} does not: what depends on positions is at fault. Look at the rope style "
        "(half-split or interleaved), its rotated width and theta, its scaling, the softmax scale, norms on q and k, "
        "sinks, and which kv head a query head reads."
    )


def _channel_hint(channel: object) -> str:
    common = "which of gate and up is activated, the activation and its clamp"
    if isinstance(channel, MoE):
        return (
            f"Look at {common}; renormalisation and scale of the router's weights, a weight applied before instead of "
            "after the expert, the shared expert and its gate, and transposed or interleaved stacked experts."
        )
    return f"Look at {common}, and at the norm in front (eps, 1 + w)."
