"""Vision towers against the publishers' arithmetic: the plain forward of K3's, and transformers' K2.5 tower with its
norms and its interpolation set to what K3's are.

Both sides run in float32; ours rounds once per operator from float64. Two layers over widths of about 100 differ by
some 1e-6 of the rows' norm; 1e-5 leaves room, and fails for a wrong axis, order, eps of 1e-2, activation or padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file
from small_models import write_small
from torch import Tensor, nn
from transformers.models.kimi_k25 import configuration_kimi_k25 as k25_config
from transformers.models.kimi_k25 import modeling_kimi_k25 as k25

from dayzero.arch.norms import Norm
from dayzero.arch.pixels import FitAndPad
from dayzero.arch.vision import PatchTower
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.site import Site, reference
from dayzero.blocks.stack import Stack
from dayzero.blocks.vision import Tower
from dayzero.ops.contract import relative_l2
from tests.cpu.vision_support import normalised, oracle_file, random_pixels

GRIDS = [(2, 2), (4, 10), (14, 6), (8, 8), (2, 30)]  # rows and columns of patches; (8, 8) is the learned grid itself
BOUND = 1e-5


class Reader:
    """The checkpoint's plain tensors, as a plain forward reads them."""

    def __init__(self, folder: Path) -> None:
        self._tensors = {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("kimi_k3", tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return open_model(str(folder))


def test_the_tower_equals_the_plain_forward(folder: Path, model: LoadedModel) -> None:
    stack, plain, reader = Stack(model.spec, model.loader.load), oracle_file("kimi_k3_vision"), Reader(folder)
    tower = model.spec.vision
    assert tower is not None and tower.head_dim * tower.heads != tower.dim, "the twin keeps a width of its own for q"
    for rows, columns in GRIDS:
        pixels = random_pixels(rows, columns, tower.patch, rows)
        want = plain.image_rows(reader, dict(model.config), [normalised(pixels)])
        got = stack.encode_image(pixels)
        assert got.shape == (rows * columns // 4, model.spec.dim)
        assert relative_l2(got, want) < BOUND, (rows, columns)


def test_images_of_one_size_in_another_place_give_the_same_rows(model: LoadedModel) -> None:
    """Nothing of one image stays for the next."""
    stack = Stack(model.spec, model.loader.load)
    one, two = (random_pixels(4, 6, 4, seed) for seed in (1, 2))
    first = stack.encode_image(one)
    other = stack.encode_image(two)
    assert torch.equal(stack.encode_image(one), first) and torch.equal(stack.encode_image(two), other)
    assert relative_l2(first, other) > 0.1


def test_declared_operators_are_bound_operators(model: LoadedModel) -> None:
    bound: set[tuple[str, str]] = set()

    def recording(contract: str, site: str) -> Callable[..., Any]:
        bound.add((contract, site))
        return reference(contract, site)

    assert model.spec.vision is not None
    Stack(model.spec, model.loader.load, bind=recording).encode_image(random_pixels(2, 2, 4, 0))
    assert bound == {(use.contract, use.site) for use in model.spec.vision.contracts()}


def _k25(seed: int) -> tuple[k25.Kimi_K25VisionModel, k25.Kimi_K25MultimodalProjection, nn.RMSNorm]:
    """transformers' tower and projector with RMS norms in the place of layer norms, no biases, bilinear positions, and
    the projector's norm behind it."""
    vision = k25_config.Kimi_K25VisionConfig(
        patch_size=4, pos_emb_height=8, pos_emb_width=8, num_attention_heads=3, num_hidden_layers=2, hidden_size=48,
        intermediate_size=56,
    )  # fmt: skip
    vision._attn_implementation = "eager"
    text = {"model_type": "deepseek_v3", "hidden_size": 40}
    config = k25_config.Kimi_K25Config(vision_config=vision, text_config=text, projection_hidden_size=48)
    torch.manual_seed(seed)
    tower = k25.Kimi_K25VisionModel._from_config(vision, attn_implementation="eager")
    projector, out_norm = k25.Kimi_K25MultimodalProjection(config), nn.RMSNorm(40, eps=1e-5)
    tower.patch_embed.pos_emb.interpolation_mode = "bilinear"
    for layer in tower.layers:
        layer.norm1, layer.norm2 = nn.RMSNorm(48, eps=2**-23), nn.RMSNorm(48, eps=2**-23)
    tower.final_layernorm, projector.pre_norm = nn.RMSNorm(48, eps=2**-23), nn.Identity()
    with torch.no_grad():
        for part in (tower, projector, out_norm):
            for name, value in part.named_parameters():
                noise = torch.randn(value.shape)
                value.copy_(1 + 0.1 * noise if value.dim() == 1 else noise * value[0].numel() ** -0.5)
                if name.endswith("bias"):
                    value.zero_()
    return tower.float().eval(), projector.eval(), out_norm


def _pairs_together(weight: Tensor, heads: int) -> Tensor:
    """Rows (p, p + K/2) of each head, as transformers pairs them, side by side, as the publisher stores them."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def test_the_tower_equals_transformers_where_the_two_coincide() -> None:
    theirs, projector, out_norm = _k25(3)
    spec = PatchTower(
        dim=48, inner=56, heads=3, layers=2, qkv_dim=48, patch=4, grid=(8, 8), merge=2, out_dim=40,
        norm=Norm(48, 2**-23, scale_in="f32"), out_norm=Norm(40, 1e-5, scale_in="f32"),
        pixels=FitAndPad(4, 2, 65536, 512), pad_id=1,
    )  # fmt: skip
    params = {
        "vision.patch": theirs.patch_embed.proj.weight, "vision.final_norm": theirs.final_layernorm.weight,
        "vision.positions": theirs.patch_embed.pos_emb.position_embeddings,
        "projector.fc0": projector.in_proj.weight, "projector.fc1": projector.out_proj.weight,
        "projector.norm": out_norm.weight,
    }  # fmt: skip
    for i, layer in enumerate(theirs.layers):
        at, attn = f"vision.blocks.{i}", layer.attn
        q, k = (_pairs_together(part.weight, 3) for part in (attn.q_proj, attn.k_proj))
        params |= {
            f"{at}.norm0": layer.norm1.weight, f"{at}.norm1": layer.norm2.weight,
            f"{at}.qkv": torch.cat((q, k, attn.v_proj.weight)), f"{at}.o": attn.proj.weight,
            f"{at}.fc0": layer.mlp.fc1.weight, f"{at}.fc1": layer.mlp.fc2.weight,
        }  # fmt: skip
    ours = Tower(spec, {name: value.detach() for name, value in params.items()}, Site(""))
    for rows, columns in GRIDS:
        pixels = random_pixels(rows, columns, 4, columns)
        patches = normalised(pixels).unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)
        with torch.no_grad():
            grid = torch.tensor([[1, rows, columns]])
            pooled = theirs(patches.flatten(0, 2), grid_thw=grid).pooler_output
            want = out_norm(projector(pooled).squeeze(1))
        assert relative_l2(ours.forward(pixels), want) < BOUND, (rows, columns)


# --- each known pitfall of this tower, by name: what falls into it is far beyond the bound --------------------------

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
PITFALLS: dict[str, Callable[[PatchTower], PatchTower]] = {
    "colours normalised as CLIP does": lambda tower: replace(tower, pixels=replace(tower.pixels, **CLIP)),
    "rows turned in the place of columns": lambda tower: replace(tower, first="row"),
    "halves of a head paired": lambda tower: replace(tower, style="half"),
    "the eps of bfloat16 in its norms": lambda tower: replace(tower, norm=replace(tower.norm, eps=2.0**-7)),
    "positions stretched from corner to corner": lambda tower: replace(tower, corners=True),
}
GELU = {"vision": "the exact gelu in the tower", "projector": "the approximate gelu in the projector"}


@pytest.mark.parametrize("name", [*PITFALLS, *GELU.values()])
def test_pitfall(folder: Path, model: LoadedModel, name: str) -> None:
    tower = model.spec.vision
    assert tower is not None
    pixels = random_pixels(4, 10, tower.patch, 5)
    plain = oracle_file("kimi_k3_vision")
    want = plain.image_rows(Reader(folder), dict(model.config), [normalised(pixels)])

    def swapped(contract: str, site: str) -> Callable[..., Any]:
        op, part = reference(contract, site), site.partition(".")[0]
        if contract != "activation.gelu" or GELU.get(part) != name:
            return op
        return lambda x, form: op(x, form="erf" if form == "tanh" else "tanh")

    params = {key: value for part in ("vision", "projector") for key, value in model.loader.load(part).items()}
    wrong = Tower(PITFALLS.get(name, lambda same: same)(tower), params, Site("", swapped))
    assert relative_l2(wrong.forward(pixels), want) > 5 * BOUND
