"""Residual kinds by hand: what enters a site, what the carry becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.norms import Norm
from dayzero.arch.residuals import AttnRes, Plain
from dayzero.blocks.residual import Carry, build_residual, close_carry, open_carry
from dayzero.blocks.site import Params, Site, reference

# A norm of width 2 leaves (1, 1) and (1, -1) as they are, up to eps.
NORM = Norm(2, 0.0)
DEPTH = AttnRes(NORM, 2, 3)


def depth_params(proj: tuple[float, float] = (0.0, 0.0)) -> dict[str, Tensor]:
    ones = torch.ones(2)
    names = [f"{s}_norm" for s in ("mixer", "channel")] + [f"{s}_mix_norm" for s in ("mixer", "channel", "close")]
    return {
        **dict.fromkeys(names, ones),
        **{f"{s}_mix_proj": torch.tensor([proj]) for s in ("mixer", "channel", "close")},
    }


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def test_plain_adds_what_a_site_gives() -> None:
    block = build_residual(
        Plain(NORM), Params({"mixer_norm": torch.ones(2), "channel_norm": row(2, 3)[0]}), Site("l"), 0
    )
    carry = open_carry(Plain(NORM), row(1, -1))
    assert torch.equal(block.enter(carry, "mixer"), row(1, -1))
    carry = block.leave(carry, "mixer", row(2, 4))
    assert torch.equal(carry["h"], row(3, 3)) and torch.equal(carry.main, row(3, 3))
    assert torch.equal(block.enter(carry, "channel"), row(2, 3))
    assert torch.equal(close_carry(Plain(NORM), carry, Params({}), Site("")), row(3, 3))


def test_sandwich_norms_the_output() -> None:
    names = ("mixer_norm", "channel_norm", "mixer_out_norm", "channel_out_norm")
    block = build_residual(Plain(NORM, sandwich=True), Params(dict.fromkeys(names, torch.ones(2))), Site("l"), 0)
    carry = block.leave(open_carry(Plain(NORM), row(1, 1)), "channel", row(8, -8))
    assert torch.equal(carry["h"], row(2, 0))


def counting(called: list[str], *fused: str) -> Callable[[str, str], Callable[..., Any]]:
    """Binds references, and as variants of ``fused`` functions of their own; all note that they were called."""

    def bound(contract: str, site: str) -> Callable[..., Any]:
        body = reference(contract, site)

        def call(*args: Any, **options: Any) -> Any:
            called.append(contract)
            return body(*args, **options)

        return body if contract.endswith("_norm") and contract not in fused else call

    return bound


@pytest.mark.parametrize("norm", [Norm(16, 1e-6), Norm(16, 1e-5, offset=True, scale_in="f32")])
def test_a_sum_and_its_norm_are_one_call_where_a_variant_has_both(norm: Norm) -> None:
    weights = {f"{s}_norm": torch.randn(16) for s in ("mixer", "channel")}
    h_TD, out_TD = torch.randn(5, 16).bfloat16(), torch.randn(5, 16).bfloat16()
    seen: list[tuple[Tensor, Tensor]] = []
    for fused, want in (("residual.add_norm",), ["residual.add_norm"]), ((), ["residual.add", "norm.rms"]):
        called: list[str] = []
        block = build_residual(Plain(norm), Params(weights), Site("l", counting(called, *fused)), 0)
        carry = block.leave(Carry({"h": h_TD}), "mixer", out_TD)
        assert not called, "nobody has asked for the sum yet"
        seen.append((block.enter(carry, "channel"), carry["h"]))
        assert called == want and carry.main is seen[-1][1]
        assert torch.equal(block.enter(carry, "channel"), seen[-1][0])  # again: the sum is there now
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


def test_a_sum_that_was_looked_at_is_not_added_again() -> None:
    called: list[str] = []
    params = Params({f"{s}_norm": torch.ones(2) for s in ("mixer", "channel")})
    block = build_residual(Plain(NORM), params, Site("l", counting(called, "residual.add_norm")), 0)
    carry = block.leave(open_carry(Plain(NORM), row(1, -1)), "mixer", row(2, 4))
    assert dict(carry.parts).keys() == {"h"} and "bank" not in carry.parts
    assert torch.equal(carry["h"], row(3, 3))
    assert torch.equal(block.enter(carry, "channel"), row(1, 1))
    assert called == ["residual.add", "norm.rms"]


def test_a_mixture_and_its_norm_are_one_call_where_a_variant_has_both() -> None:
    carry = Carry({"partial": row(6, 0), "bank": torch.tensor([[[0.0, 3.0], [3.0, 3.0]]])})
    entered = []
    for fused, want in (
        (("residual.attn_mix_norm",), ["residual.attn_mix_norm"]),
        ((), ["residual.attn_mix", "norm.rms"]),
    ):
        called: list[str] = []
        block = build_residual(DEPTH, Params(depth_params((0.5, 1.0))), Site("l", counting(called, *fused)), 1)
        entered.append(block.enter(carry, "channel"))
        assert called == want
    assert torch.equal(*entered)


def test_an_empty_bank_is_the_identity() -> None:
    """The first site of the model reads the embedding itself, whatever the mixing weights are."""
    block = build_residual(DEPTH, Params(depth_params((5.0, -3.0))), Site("layers.0"), 0)
    carry = open_carry(DEPTH, row(0.25, -0.25))
    assert carry["bank"].shape == (1, 0, 2)
    assert torch.equal(block.enter(carry, "mixer"), row(1, -1))


def test_the_running_sum_joins_the_bank_at_a_block_start() -> None:
    params = Params(depth_params())
    even, odd = (build_residual(DEPTH, params, Site(f"layers.{i}"), i) for i in (0, 1))
    carry = even.leave(open_carry(DEPTH, row(1, 1)), "mixer", row(5, 7))
    assert torch.equal(carry["partial"], row(5, 7)) and carry["bank"].tolist() == [[[1, 1]]]
    carry = even.leave(carry, "channel", row(1, 1))
    carry = odd.leave(odd.leave(carry, "mixer", row(1, 0)), "channel", row(0, 1))
    assert torch.equal(carry["partial"], row(7, 9)) and carry["bank"].tolist() == [[[1, 1]]]
    carry = even.leave(carry, "mixer", row(-1, -1))
    assert torch.equal(carry["partial"], row(-1, -1)) and carry["bank"].tolist() == [[[1, 1], [7, 9]]]


def test_three_sources_are_mixed_by_softmax_over_unit_keys() -> None:
    """Keys are normed, values are not: sources (3,3), (2,-2) and (-1,1) have keys (1,1), (1,-1), (-1,1)."""
    carry = Carry({"partial": row(-1, 1), "bank": torch.tensor([[[3.0, 3.0], [2.0, -2.0]]])})
    params = depth_params((math.log(2), 0.0))
    got = close_carry(DEPTH, carry, Params(params), Site(""))
    shares = (2 / 4.5, 2 / 4.5, 0.5 / 4.5)  # e^(±log 2), normalised
    want = shares[0] * row(3, 3) + shares[1] * row(2, -2) + shares[2] * row(-1, 1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_without_a_preference_sources_count_alike() -> None:
    carry = Carry({"partial": row(6, 0), "bank": torch.tensor([[[0.0, 3.0], [3.0, 3.0]]])})
    got = close_carry(DEPTH, carry, Params(depth_params()), Site(""))
    torch.testing.assert_close(got, row(3, 2))


def test_the_bank_is_allocated_once_and_earlier_carries_do_not_change() -> None:
    """Each of the later sums goes behind the ones before it, into memory that the first carry brought."""
    block = build_residual(DEPTH, Params(depth_params()), Site("layers.0"), 0)
    carries = [open_carry(DEPTH, row(0, 1))]
    for i in range(3):
        carries.append(block.leave(carries[-1], "mixer", row(i, -i)))
    assert [carry["bank"].tolist() for carry in carries] == [
        [[]], [[[0, 1]]], [[[0, 1], [0, 0]]], [[[0, 1], [0, 0], [1, -1]]],
    ]  # fmt: skip
    assert len({carry["bank"].data_ptr() for carry in carries[1:]}) == 1
    assert carries[-1]["bank"].transpose(0, 1).is_contiguous()
    with pytest.raises(AssertionError, match="full"):
        block.leave(carries[-1], "mixer", row(9, 9))


def test_a_carry_can_be_gone_on_from_more_than_once() -> None:
    """Alignment runs a layer in several ways from one carry: no run may see what another one added."""
    block = build_residual(DEPTH, Params(depth_params()), Site("layers.0"), 0)
    before = block.leave(open_carry(DEPTH, row(1, 1)), "mixer", row(2, 2))
    one = block.leave(before, "mixer", row(5, 5))
    other = block.leave(block.leave(before, "channel", row(1, 0)), "mixer", row(7, 7))
    made = block.leave(Carry({"partial": row(4, 4), "bank": torch.ones(1, 1, 2)}), "mixer", row(8, 8))
    assert before["bank"].tolist() == [[[1, 1]]]
    assert one["bank"].tolist() == [[[1, 1], [2, 2]]]
    assert other["bank"].tolist() == [[[1, 1], [3, 2]]]
    assert made["bank"].tolist() == [[[1, 1], [4, 4]]]
    assert block.leave(one, "mixer", row(0, 0))["bank"].tolist() == [[[1, 1], [2, 2], [5, 5]]]
