"""The plain forward of Kimi K3 and K3.1 against values worked out by hand and equalities that its formulas imply."""

from __future__ import annotations

import math
import sys

import k3_by_hand as tiny
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(tiny.ORACLES))  # its process finds the files beside it so
import kimi_k3 as plain
from decode import open_checkpoint
from run_plain import Watched

TOKENS = [3, 96, 14, 15, 92, 6, 5, 35, 8, 9, 79, 3, 2]
ROUNDING = 2.0**-24 * 64  # a few dozen float32 sums of at most some hundred terms, relative to the largest value


@pytest.fixture(scope="module")
def values():
    return tiny.tensors(index=True)


def run(folder, values, settings, tokens=TOKENS, images=()):
    """(logits, sites, reader) of one forward over a checkpoint made of ``values``."""
    reader = Watched(tiny.write(folder, values, settings))
    sites = {}
    logits = plain.forward(reader, settings, tokens, sites.__setitem__, images)
    return logits, sites, reader


def close(a, b):
    return float((a - b).abs().max() / b.abs().max()) < ROUNDING


# --- attention residuals ------------------------------------------------------------------------------------------


def test_mix_without_bank_is_identity():
    p = torch.randn(5, 7)
    assert torch.equal(plain.mix(p, [], torch.randn(7).double(), 1e-5), p)


def test_mix_takes_values_as_they_are():
    # Keys (1, 1) and (1, -1) whatever the sizes; scores +-ln(3)/2, so shares 3/4 and 1/4 of (1, 1) and (5, -5).
    query = torch.tensor([0.0, math.log(3) / 2]).double()
    mixed = plain.mix(torch.tensor([[5.0, -5.0]]), [torch.tensor([[1.0, 1.0]])], query, 0.0)
    assert torch.allclose(mixed, torch.tensor([[2.0, -0.5]]), atol=1e-7)


def test_bank_holds_block_starts_and_sums(tmp_path, values):
    _, sites, _ = run(tmp_path, values, tiny.config())
    banks = [sites[f"layers.{i}.carry.bank"] for i in range(5)]
    assert [bank.shape[1] for bank in banks] == [1, 1, 2, 2, 3]
    assert torch.equal(banks[4][:, 0], sites["embed"])
    assert torch.equal(banks[4][:, 1], sites["layers.1"])
    assert torch.equal(banks[4][:, 2], sites["layers.3"])
    assert close(sites["layers.4"], sites["layers.4.mixer"] + sites["layers.4.channel"])


# --- KDA ----------------------------------------------------------------------------------------------------------


def test_gate_is_bounded_and_per_head():
    z = torch.tensor([[[0.0, math.log(3) / 2], [0.0, math.log(3) / 2]]])
    gate = plain.bounded_gate(z, torch.tensor([math.log(2.0), 0.0]), -5.0)
    expected = torch.tensor([[[-2.5, -3.75], [-2.5, -5 * 3**0.5 / (1 + 3**0.5)]]])
    assert torch.allclose(gate, expected, atol=1e-6)


def test_padding_of_a_log_is_never_read(tmp_path, values):
    before, _, _ = run(tmp_path / "a", values, tiny.config())
    changed = dict(values)
    for name in (n for n in values if n.endswith("A_log")):
        changed[name] = torch.cat((values[name][: tiny.HEADS], torch.full((tiny.SIZE - tiny.HEADS,), 3.0)))
    assert torch.equal(run(tmp_path / "b", changed, tiny.config())[0], before)
    changed[name] = values[name] + 1.0
    assert not torch.equal(run(tmp_path / "c", changed, tiny.config())[0], before)


def test_convolution_ends_with_the_newest_tap():
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    y = plain.convolve(x, torch.tensor([[4.0, 3.0, 2.0, 1.0]]))
    assert y[:, 0].tolist() == [1.0, 12.0, 123.0, 1234.0, 12340.0]


def test_unit_sums_and_keeps_its_small_number_inside_the_root():
    row = torch.full((1, 1, 4), 5e-4)  # the sum of squares is 1e-6, as the small number: 1/sqrt(2) of length 1
    assert torch.allclose(plain.unit(row), torch.full((1, 1, 4), 0.5 / 2**0.5), atol=1e-6)


def drawn(num_tokens, heads=3, size=6):
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(num_tokens, heads, size, generator=draw, dtype=torch.float64) for _ in range(3))
    gate = -5 * torch.rand(num_tokens, heads, size, generator=draw, dtype=torch.float64)
    beta = torch.rand(num_tokens, heads, generator=draw, dtype=torch.float64)
    state = torch.randn(heads, size, size, generator=draw, dtype=torch.float64)
    return q, plain.unit(k), v, gate, beta, state


def test_recurrence_in_pieces_is_the_recurrence():
    *rows, state = drawn(11)
    whole, end = plain.delta_rule(*rows, state)
    first, between = plain.delta_rule(*(x[:7] for x in rows), state)
    rest, last = plain.delta_rule(*(x[7:] for x in rows), between)
    assert torch.equal(torch.cat((first, rest)), whole)
    assert torch.equal(last, end)


def test_recurrence_is_the_chunk_form():
    q, k, v, gate, beta, state = drawn(9)
    outs, end = plain.delta_rule(q, k, v, gate, beta, state)
    for h in range(3):
        reach = gate[:, h].cumsum(0)
        pair = torch.exp((reach[:, None] - reach[None]).clamp_max(0))
        keys = torch.einsum("ic,jc,ijc->ij", k[:, h], k[:, h], pair).tril(-1)
        solve = torch.linalg.inv(torch.eye(9).double() + beta[:, h, None] * keys) * beta[None, :, h]
        u = solve @ (v[:, h] - (reach.exp() * k[:, h]) @ state[h])
        queries = torch.einsum("ic,jc,ijc->ij", q[:, h], k[:, h], pair).tril()
        expected = (reach.exp() * q[:, h]) @ state[h] + queries @ u
        assert torch.allclose(outs[:, h].double(), expected, atol=1e-5)  # the outputs are rounded to float32
        closing = reach[-1].exp()[:, None] * state[h] + ((reach[-1] - reach).exp() * k[:, h]).T @ u
        assert torch.allclose(end[h], closing, atol=1e-13)


def test_forgetting_everything_leaves_one_outer_product():
    q, k, v, gate, beta, state = drawn(1)
    outs, end = plain.delta_rule(q, k, v, torch.full_like(gate, -1e4), beta, state)
    u = beta[0, :, None] * v[0]
    assert torch.allclose(end, k[0][:, :, None] * u[:, None, :])
    assert torch.allclose(outs[0].double(), (q[0] * k[0]).sum(-1, keepdim=True) * u, atol=1e-6)


# --- latent attention and its index -------------------------------------------------------------------------------


def test_earlier_logits_do_not_know_later_tokens(tmp_path, values):
    for index in (False, True):
        whole, _, _ = run(tmp_path, values, tiny.config(index, top_k=3))
        part, _, _ = run(tmp_path, values, tiny.config(index, top_k=3), TOKENS[:8])
        assert close(part, whole[:8])


def test_index_of_everything_is_no_index(tmp_path, values):
    dense, _, _ = run(tmp_path, values, tiny.config())
    full, sites, _ = run(tmp_path, values, tiny.config(True, top_k=len(TOKENS)))
    assert torch.equal(full, dense)
    for t, row in enumerate(sites["layers.1.index"].tolist()):
        assert [i for i in row if i >= 0] == list(range(t + 1))
    few, sites, _ = run(tmp_path, values, tiny.config(True, top_k=3))
    assert sites["layers.4.index"].shape == (len(TOKENS), 3)
    assert close(few[:3], dense[:3])
    assert not close(few[3:], dense[3:])


def test_index_keys_may_be_spelt_as_related_configs_do(tmp_path, values):
    settings = tiny.config(True, top_k=3)
    want, _, _ = run(tmp_path, values, settings)
    spelt = {"layers": [2, 4, 5], "index_n_heads": 4, "index_head_dim": 8, "index_topk": 3}
    text = settings["text_config"]
    got, _, _ = run(tmp_path, values, settings | {"text_config": text | {"dsa_config": spelt}})
    assert torch.equal(got, want)
    del spelt["index_topk"]
    with pytest.raises(ValueError, match="dsa_config has the keys"):
        run(tmp_path, values, settings | {"text_config": text | {"dsa_config": spelt}})


def test_index_key_norm_may_have_a_bias(tmp_path, values):
    bare, sites, _ = run(tmp_path, values, tiny.config(True, top_k=3))
    name = "language_model.model.layers.1.self_attn.indexer.k_norm.bias"
    zero, _, _ = run(tmp_path, values | {name: torch.zeros(8)}, tiny.config(True, top_k=3))
    assert torch.equal(zero, bare)
    _, moved, reader = run(tmp_path, values | {name: torch.linspace(-3, 3, 8)}, tiny.config(True, top_k=3))
    assert name in reader.taken
    assert not torch.equal(moved["layers.1.index"], sites["layers.1.index"])


def test_largest_prefers_the_lower_id_and_skips_what_is_hidden():
    score = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, -0.0, 0.0, -1.0, -math.inf], [-math.inf] * 4 + [1.0]])
    chosen = plain.largest(score, 2)
    assert plain.ids_of(chosen, 3).tolist() == [[1, 2, -1], [0, 1, -1], [4, -1, -1]]
    assert plain.ids_of(plain.largest(score, 9), 9)[1].tolist() == [0, 1, 2, 3] + [-1] * 5


def test_blocks_of_queries_do_not_matter(tmp_path, values, monkeypatch):
    settings = tiny.config(True, top_k=3)
    whole, sites, _ = run(tmp_path, values, settings)
    monkeypatch.setattr(plain, "QUERIES_AT_ONCE", 4)
    parts, again, _ = run(tmp_path, values, settings)
    assert close(parts, whole)
    assert torch.equal(again["layers.1.index"], sites["layers.1.index"])


# --- channels -----------------------------------------------------------------------------------------------------


def test_situ_saturates_in_both_factors():
    big = torch.tensor(1e4)
    assert plain.situ(big, big, 4.0, 25.0).item() == pytest.approx(100.0)
    assert plain.situ(-big, big, 4.0, 25.0).item() == pytest.approx(0.0)
    expected = 4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(-0.2)
    assert plain.situ(torch.tensor(2.0), torch.tensor(-5.0), 4.0, 25.0).item() == pytest.approx(expected, rel=1e-6)


def test_router_bias_chooses_and_does_not_weigh():
    gate = torch.tensor([[0.0], [math.log(3)], [-math.log(3)]])  # scores 1/2, 3/4, 1/4
    chosen, share = plain.route(torch.ones(1, 1), gate, torch.tensor([0.0, 0.0, 0.6]), 2, 1.0)
    assert chosen.tolist() == [[False, True, True]]
    assert torch.allclose(share, torch.tensor([[0.0, 0.75, 0.25]]), atol=1e-6)
    assert torch.allclose(plain.route(torch.ones(1, 1), gate, torch.zeros(3), 2, 2.446)[1].sum(), torch.tensor(2.446))


def test_router_bias_is_float32_and_ties_go_to_the_lower_id():
    gate, x = torch.zeros(4, 1), torch.ones(1, 1)
    assert plain.route(x, gate, torch.ones(4), 2, 1.0)[0].tolist() == [[True, True, False, False]]
    finer = torch.tensor([1.0, 1.0, 1.0 + 2**-12, 1.0 + 2**-12])  # bf16 knows nothing between 1 and 1 + 2^-7
    assert plain.route(x, gate, finer, 2, 1.0)[0].tolist() == [[False, False, True, True]]


def test_mxfp4_codes_order_and_scales():
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    row = sizes + [-s for s in sizes]
    assert plain.decode_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8)).tolist() == [row * 2]
    scaled = plain.decode_mxfp4(packed.repeat(1, 2), torch.tensor([[130, 120]], dtype=torch.uint8))
    assert scaled.tolist() == [[8 * v for v in row * 2] + [v / 128 for v in row * 2]]
    with pytest.raises(ValueError, match="NaN"):
        plain.decode_mxfp4(packed, torch.tensor([[255]], dtype=torch.uint8))


def test_mxfp4_is_decoded_as_the_other_decoder_does(tmp_path):
    draw = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (17, 48), generator=draw).to(torch.uint8)
    scale = torch.randint(0, 255, (17, 3), generator=draw).to(torch.uint8)
    save_file({"w.weight_packed": packed, "w.weight_scale": scale}, tmp_path / "x.safetensors")
    assert torch.equal(open_checkpoint(tmp_path).tensor("w.weight"), plain.decode_mxfp4(packed, scale))


# --- the whole ----------------------------------------------------------------------------------------------------


def test_every_tensor_is_read_or_spared(tmp_path, values):
    pixels = torch.randint(0, 256, (4, 8, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    tokens = [*TOKENS, tiny.PLACEHOLDER, tiny.PLACEHOLDER, 4]
    _, sites, reader = run(tmp_path, values, tiny.config(True), tokens, [pixels])
    held = {n.removesuffix("_packed").replace("weight_scale", "weight") for n in reader.names()}
    assert held <= {n.removesuffix("_packed") for n in reader.taken}
    spared = {n for n in reader.taken if n.endswith((".w1.weight", ".w2.weight", ".w3.weight"))}
    chosen = {i for row in sites["layers.1.experts"].tolist() for i in row}
    of_layer = {n for n in spared if ".layers.1." in n}
    assert of_layer == {n for n in of_layer if int(n.split(".")[-3]) not in chosen}, "an expert was read and spared"
    assert sites["layers.1.experts"].shape == (len(tokens), 3)


def test_the_text_part_may_stand_alone(tmp_path, values):
    """Without the wrapper: its config at the top, its tensors without the prefix."""
    want, _, _ = run(tmp_path / "a", values, tiny.config())
    bare = {name.removeprefix("language_model."): value for name, value in values.items()}
    assert torch.equal(run(tmp_path / "b", bare, tiny.TEXT)[0], want)


def test_unknown_variants_are_refused(tmp_path, values):
    settings = tiny.config()
    for change in ({"hidden_act": "silu"}, {"num_expert_group": 2}, {"mla_use_nope": False}):
        other = settings | {"text_config": settings["text_config"] | change}
        with pytest.raises(ValueError, match=next(iter(change))):
            run(tmp_path, values, other)


def test_rows_of_images_take_the_places_of_placeholders(tmp_path, values):
    pixels = torch.randint(0, 256, (4, 8, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    tokens = [1, tiny.PLACEHOLDER, tiny.PLACEHOLDER, 4]
    _, sites, reader = run(tmp_path, values, tiny.config(), tokens, [pixels])
    assert torch.equal(sites["embed"][1:3], plain.image_rows(reader, tiny.config(), [plain.normalised(pixels)]))
    assert sites["vision.embed"].shape == sites["vision.blocks.1"].shape == (8, 16)
    with pytest.raises(ValueError, match="1 placeholder tokens, but the images give 2 rows"):
        run(tmp_path, values, tiny.config(), tokens[:2], [pixels])
