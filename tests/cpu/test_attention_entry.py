"""How heads of attention come to be read: by one operator where one is bound, else by norm, turn and writes in turn."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dayzero.arch.mixers import Attention
from dayzero.arch.norms import Norm
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope
from dayzero.blocks.attention import AttentionBlock
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import Params, Site
from dayzero.view import TokenStore
from tests.cpu.called import noting
from tests.cpu.random_models import CHANNELS, DIM, NORM, attention, model, random_params

FUSED = "attention.norm_rope_write"
IN_TURN = {"norm.rms", "rope.apply", "cache.write"}
FORMS: dict[str, dict[str, Any]] = {
    "norm and turn": {"qk_norm": Norm(12, 1e-6)},
    "1 + w, turned in part": {"qk_norm": Norm(12, 1e-5, offset=True, scale_in="f32"), "rope": Rope(6, 1e4)},
    "no norm, a gate": {"gate": True, "bias": True},
    "no turn": {"rope": None, "qk_norm": Norm(12, 1e-6)},
    "neither": {"rope": None},
    "three axes": {"rope": Rope(12, 1e4, sections=(2, 2, 2))},
}


def entered(spec: Attention, fused: bool) -> tuple[list[Tensor], list[str]]:
    """What two steps of two sequences give and leave in the cache, and which operators were called."""
    whole, called = model((spec,), (CHANNELS["glu"],), Plain(NORM)), list[str]()
    params = Params(random_params(whole), "layers.0.mixer.")
    block = AttentionBlock(spec, params, Site("layers.0.mixer", noting(called, "" if fused else FUSED)))
    assert not params.left_over()
    cache, out = LocalCache(whole, torch.float32), []
    for step, parts in enumerate([((0, [1] * 5), (1, [2] * 3)), ((0, [1]), (1, [2]))]):
        view = cache.views(parts)
        x_TD = torch.randn(view.tokens.shape[0], DIM, generator=torch.Generator().manual_seed(step))
        out.append(block.forward(x_TD, view))
    for part in ("k", "v"):
        out.append(cast(TokenStore, cache.stores[f"layers.0.mixer.{part}"]).pages(view).rows.nan_to_num(7.0))
    return out, called


@pytest.mark.parametrize("form", FORMS)
def test_one_call_does_what_the_operators_do_in_turn(form: str) -> None:
    spec = attention(**FORMS[form])
    (got, once), (want, each) = entered(spec, True), entered(spec, False)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert once.count(FUSED) == 2 and not IN_TURN & set(once)
    turned = 2 if spec.rope is not None else 0
    normed = 2 if spec.qk_norm is not None else 0
    assert FUSED not in each and each.count("cache.write") == 4
    assert each.count("rope.apply") == 2 * turned and each.count("norm.rms") == 2 * normed


def test_what_no_such_operator_has_is_not_asked_of_it() -> None:
    """Keys and values of another layer, and norms of another kind."""
    for spec in attention(kv_layer=0), attention(qk_norm=Norm(12, 1e-6, "layer")):
        assert FUSED not in {use.contract for use in spec.contracts("layers.1.mixer")}
    assert entered(attention(qk_norm=Norm(12, 1e-6, "layer")), True)[1].count("cache.write") == 4


def test_a_plan_names_it_with_what_the_site_needs() -> None:
    spec = attention(qk_norm=Norm(12, 1e-6), rope=Rope(12, 1e4, sections=(2, 2, 2)), record="kv_fp8")
    use = next(use for use in spec.contracts("layers.0.mixer") if use.contract == FUSED)
    assert use.site == "layers.0.mixer.qkv"
    assert dict(use.traits) == {"mrope": True, "norm": True, "record": "kv_fp8", "style": "half"}
