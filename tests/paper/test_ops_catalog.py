"""The catalog of operator variants answers without torch: what exists, and what a site would lack."""

from __future__ import annotations

import pytest

from dayzero.arch.channels import GLU, MoE, Router
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA, Attention, Delta
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.rope import Rope
from dayzero.errors import UsageError
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, builtin, lacking, lookup, supports


def test_every_contract_has_one_reference_and_it_comes_first() -> None:
    for contract in CATALOG.contracts():
        lines = lookup(contract)
        assert [line.variant for line in lines].count(REFERENCE) == 1
        assert lines[0].variant == REFERENCE
        assert all(":" in line.module for line in lines)


def test_variants_claim_no_option_that_their_reference_lacks() -> None:
    for line in CATALOG.lines.values():
        reference = lookup(line.contract)[0]
        for option, values in line.traits.items():
            allowed = reference.traits[option]
            fits = [value in allowed or (type(value) is int and "int" in allowed) for value in values]
            assert all(fits), (line.contract, line.variant, option)


def test_known_traits_are_supported() -> None:
    wanted = {"window": 128, "sinks": True, "softcap": False, "value_width": "same"}
    assert supports("attention.causal", wanted) == (True, [])
    assert supports("attention.causal", {"softcap": True, "window": True}) == (True, [])


def test_an_unknown_value_option_and_contract_are_named() -> None:
    fits, missing = supports("activation.glu", {"kind": "relu2"})
    assert not fits
    assert "kind" in missing[0]
    assert "relu2" in missing[0]
    fits, missing = supports("attention.causal", {"relative_bias": True, "window": 4})
    assert not fits
    assert len(missing) == 1
    assert "relative_bias" in missing[0]
    fits, missing = supports("attention.casual", {})
    assert not fits
    assert "attention.causal" in missing[0]
    assert lookup("attention.casual") == []


@pytest.mark.parametrize("value", [None, 1.0, "4"])
def test_a_trait_matches_in_type_too(value: object) -> None:
    assert not supports("attention.causal", {"window": value})[0]
    assert supports("attention.causal", {"window": 1})[0]
    assert not supports("attention.causal", {"sinks": 1})[0]


def test_the_variant_that_lacks_least_is_reported() -> None:
    catalog = builtin()
    catalog.add(Line("norm.l2", "narrow", "cpu", (), "m:f", {}))
    catalog.add(Line("norm.l2", "wide", "cpu", (), "m:f", {"clip": ("float",)}))
    assert catalog.supports("norm.l2", {"clip": 3.5}) == (True, [])
    assert len(catalog.supports("norm.l2", {"clip": 3.5, "other": 1})[1]) == 1
    assert len(lacking(catalog.lines["norm.l2", "narrow"], {"clip": 3.5, "other": 1})) == 2


def test_adding_refuses_a_second_name_and_an_orphan() -> None:
    catalog = builtin()
    with pytest.raises(UsageError, match="two variants"):
        catalog.add(Line("norm.rms", REFERENCE, "any", (), "m:f"))
    with pytest.raises(UsageError, match="no reference"):
        catalog.add(Line("norm.nothing", "fast", "cuda", (), "m:f"))
    catalog.add(Line("norm.mine", REFERENCE, "any", (), "m:f"))
    catalog.add(Line("norm.mine", "fast", "cuda", (), "m:f"))
    assert [line.variant for line in catalog.lookup("norm.mine")] == [REFERENCE, "fast"]
    assert CATALOG.lookup("norm.mine") == []  # copies do not share lines
    assert Catalog().contracts() == []


def test_specs_ask_for_contracts_that_exist() -> None:
    norm, rope = Norm(64, 1e-5), Rope(8, 1e4)
    index = Index(64, 24, 8, 16, 5, rope, norm)
    mixers = [
        Attention(64, 4, 2, 16, rope, 0.25, window=4, sinks=True),
        MLA(64, 4, 24, 16, 12, 8, 16, rope, 0.25, 1e-6, gate=True, index=index),
        Delta(64, 4, 2, 16, 16, 4, "head", 1e-6, "silu"),
        Delta(64, 4, 4, 16, 16, 4, "channel", 1e-5, "sigmoid", decay_rank=16, lower=-5.0),
    ]
    router = Router(8, 2, "sigmoid", bias="select", groups=2, top_groups=1)
    channels = [
        GLU(64, 32, Activation("situ", beta=4.0, linear_beta=25.0)),
        MoE(64, 32, router, shared=GLU(64, 32), latent=16, latent_norm=Norm(16, 1e-5), bias=True),
        MoE(64, 32, Router(8, 2, "softmax_topk", bias="logit"), Activation("clamped", limit=7.0, alpha=1.702)),
    ]
    uses = [use for spec in [*mixers, *channels] for use in spec.contracts("x")]
    assert len({use.contract for use in uses}) > 8
    for use in uses:
        assert supports(use.contract, dict(use.traits)) == (True, []), use
