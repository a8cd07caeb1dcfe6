"""Layouts: the figures of arch.cost, nothing overlaps, little is wasted, shared storage is one allocation."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.arch.cost import cache_cost
from dayzero.cache.layout import ELEMENT_BYTES, Group, Layout, lay_out, layer_of
from dayzero.decl import CacheNeed
from dayzero.errors import ModelError
from tests.paper.cache_world import LAYOUTS, state_need, tokens_need
from tests.paper.model_configs import NAMES, real


def check_offsets(layout: Layout) -> None:
    """Every byte of a slab belongs to one record at most, and every place is aligned."""
    for group in layout.groups:
        end = 0
        for place in group.places:
            assert place.offset % 256 == 0 and place.offset >= end, (group.name, place)
            end = place.offset + prod(place.shape) * ELEMENT_BYTES[place.element] * (group.page_tokens or 1)
        assert end <= group.block_bytes < end + 256 and group.block_bytes % 256 == 0, group.name
        assert group.blocks_per_slab >= 1
        assert 0 <= layout.slab_bytes - group.blocks_per_slab * group.block_bytes < group.block_bytes, group.name
        assert len(group.layers) == 1 if group.unit == "token" else len(group.layers) >= 1
        assert all(len(names) == len(group.places) for names in group.layers), group.name
    names = [name for group in layout.groups for layer in group.layers for name in layer]
    assert len(set(names)) == len(names), "a need has two places"


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_those_of_the_cost_model(name: str) -> None:
    needs = real(name).spec.cache()
    cost = cache_cost(real(name).spec, "bf16")
    layout = lay_out(needs, dtype="bf16")
    check_offsets(layout)
    got = (layout.token_bytes, layout.sequence_bytes, layout.window_bytes)
    assert got == (cost.per_token, cost.per_sequence, cost.window)
    assert layout.page_tokens == 64
    assert [g.unit for g in layout.groups] == sorted((g.unit for g in layout.groups), reverse=True)
    for need in needs:
        group, place, layer = layout.locate(need.name)
        assert (group.unit, place.shape) == (need.unit, need.shape)
        assert need.name in group.layers[layer] and place.need in need.name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_at_most_a_twentieth_of_a_slab_is_unused(name: str, dtype: str) -> None:
    layout = lay_out(real(name).spec.cache(), dtype=dtype)  # type: ignore[arg-type]
    assert all(0 <= layout.unused(group) <= 0.05 for group in layout.groups), layout.lines()


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_every_row_doubles_and_float32_states_stay(name: str) -> None:
    needs = real(name).spec.cache()
    narrow, wide = lay_out(needs, dtype="bf16"), lay_out(needs, dtype="f32")
    assert wide.token_bytes == 2 * narrow.token_bytes and wide.window_bytes == 2 * narrow.window_bytes
    kept = sum(4 * need.numel for need in needs if need.unit == "state" and need.element == "f32")
    assert wide.sequence_bytes - kept == 2 * (narrow.sequence_bytes - kept)
    assert lay_out(needs, dtype="f16").sequence_bytes == narrow.sequence_bytes


def test_a_large_hybrid() -> None:
    """24 latent layers of 576 values, 69 recurrent layers: the numbers of its release."""
    layout = lay_out(real("kimi_k3").spec.cache(), dtype="bf16")
    assert (layout.token_bytes, layout.sequence_bytes) == (27_648, 449_372_160)
    rows, state = layout.groups
    assert (rows.name, rows.block_bytes, rows.blocks_per_slab, rows.sequence_blocks) == ("tokens", 27_648 * 64, 7, 0)
    assert (state.name, state.block_bytes, state.blocks_per_slab) == ("state", 449_372_160 // 69, 2)
    assert (state.sequence_blocks, layout.state_footprint) == (69, 449_372_160)
    assert layout.slab_bytes == 2 * state.block_bytes, "one block a slab would leave 18 % unused with 3 pages"
    assert [place.need for place in state.places] == [f"mixer.{n}" for n in ("state", "q_conv", "k_conv", "v_conv")]
    assert [place.element for place in state.places] == ["f32", "bf16", "bf16", "bf16"]
    text = dict(layout.lines())
    assert text["cache group tokens"] == "24 needs, 27,648 B a token; block 1.69 MiB, 7 a slab, 4.9% unused"
    assert text["cache group state"] == "69 layers, 428.55 MiB a sequence; block 6.21 MiB, 2 a slab, 0.0% unused"


def test_windows_are_groups_of_their_own() -> None:
    layout = lay_out(real("gpt_oss_20b").spec.cache(), dtype="bf16")
    assert [(g.name, g.window) for g in layout.groups] == [("tokens", None), ("tokens.w128", 128)]


def test_state_shapes_are_groups_of_their_own() -> None:
    layout = LAYOUTS["hybrid with windows"]
    assert [g.name for g in layout.groups] == ["tokens", "tokens.w6", "state", "state.1"]
    assert layout.group("state").layers == (
        ("layers.30.mixer.state", "layers.30.mixer.conv"),
        ("layers.31.mixer.state", "layers.31.mixer.conv"),
    )
    assert layout.group("state.1").layers == (("layers.40.mixer.state",),)
    assert layout.locate("layers.31.mixer.conv")[1:] == (layout.group("state").places[1], 1)


@pytest.mark.parametrize(
    ("need", "layer"),
    [
        ("layers.3.mixer.state", "layers.3"), ("layers.12.mixer.index.k", "layers.12"), ("draft.0.x", "draft.0"),
        ("mixer.state", "mixer"), ("state", ""), ("layers.3", "layers"),
    ],
)  # fmt: skip
def test_the_layer_of_a_need(need: str, layer: str) -> None:
    assert layer_of(need) == layer


def group_of(layout: Layout, need: str) -> Group:
    return layout.locate(need)[0]


def test_shared_storage_is_one_allocation_with_the_largest_window() -> None:
    """The last layers read the KV of an earlier one, some through another layer that does so too."""
    owner = tokens_need("layers.0.mixer.k", 8, window=16)
    other = tokens_need("layers.1.mixer.k", 8, window=16)
    reader = tokens_need("layers.2.mixer.k", 8, window=32, shares="layers.0.mixer.k")
    second = tokens_need("layers.3.mixer.k", 8, window=4, shares="layers.2.mixer.k")
    layout = lay_out([owner, other, reader, second], dtype="bf16", page_tokens=4)
    assert layout.aliases == {"layers.2.mixer.k": "layers.0.mixer.k", "layers.3.mixer.k": "layers.0.mixer.k"}
    assert [(g.name, g.layers) for g in layout.groups] == [
        ("tokens.w16", (("layers.1.mixer.k",),)),
        ("tokens.w32", (("layers.0.mixer.k",),)),
    ]
    assert layout.locate("layers.3.mixer.k") == layout.locate("layers.0.mixer.k")
    assert layout.window_bytes == 16 * (16 + 32)
    assert ("cache aliases", "2 needs in another layer's storage") in layout.lines()
    unbounded = CacheNeed(**{f: getattr(reader, f) for f in reader.__slots__} | {"window": None})
    assert group_of(lay_out([owner, unbounded], dtype="bf16"), owner.name).window is None


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ([], "keeps nothing"),
        ([tokens_need("a.k"), tokens_need("a.k")], "same name a.k"),
        ([tokens_need("a.k", shares="b.k")], "a.k shares the storage of b.k, which no layer declares"),
        ([tokens_need("a.k", shares="b.k"), tokens_need("b.k", shares="a.k")], "circle: a.k, b.k"),
        ([tokens_need("a.k", shares="a.k")], "circle"),
        ([tokens_need("a.k", 4), tokens_need("b.k", 8, shares="a.k")], r"its shape is \(8,\), not \(4,\)"),
        ([state_need("a.k", 8), tokens_need("b.k", 8, shares="a.k")], "its unit is token, not state"),
        ([tokens_need("a.k", window=0)], "window of 0 tokens"),
    ],
)
def test_needs_that_contradict_each_other(needs: list[CacheNeed], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        lay_out(needs, dtype="bf16")


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 600), st.sampled_from([None, 1, 7, 128])), max_size=4),
    states=st.lists(st.tuples(st.integers(1, 100_000), st.sampled_from(["f32", "bf16"])), max_size=4),
    page_tokens=st.integers(1, 64),
)
def test_any_needs(rows: list[tuple[int, int | None]], states: list[tuple[int, str]], page_tokens: int) -> None:
    needs = [tokens_need(f"layers.{i}.a", width, window) for i, (width, window) in enumerate(rows)]
    needs += [state_need(f"layers.9{i}.s", width, element) for i, (width, element) in enumerate(states)]
    if needs:
        layout = lay_out(needs, dtype="bf16", page_tokens=page_tokens)
        check_offsets(layout)
        assert layout.slab_bytes <= 8 * max(g.block_bytes for g in layout.groups)
        padding = [1 - g.blocks_per_slab * g.block_bytes / layout.slab_bytes for g in layout.groups]
        if max(padding) > 0.05:  # then no multiple does better
            largest = max(g.block_bytes for g in layout.groups)
            worst = [max((m * largest % g.block_bytes) / (m * largest) for g in layout.groups) for m in range(1, 9)]
            assert min(worst) > 0.05 and max(padding) == pytest.approx(min(worst))
