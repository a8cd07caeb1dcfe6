"""A vision tower over the patches of one image, and the projector that makes tokens of them.

N patches, row by row; M = N / merge^2 tokens; D tower width, H heads, K head width, E width of the text model. Images
are encoded one at a time: none sees another, and a token's row depends on its own image alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.arch.vision import PatchTower
from dayzero.blocks.site import Params, Site

PARTS = ("vision", "projector")  # prefixes of the tower's parameters


class _Block:
    """x += o(attend(norm0 x)); x += fc1(gelu(fc0(norm1 x)))."""

    def __init__(self, spec: PatchTower, params: Params, site: Site) -> None:
        self.spec = spec
        self.norms = [site.norm(spec.norm, params, name) for name in ("norm0", "norm1")]
        names = ("qkv", "o", "fc0", "fc1")
        self.qkv, self.o, self.fc0, self.fc1 = (site.linear(params, name, bias=spec.bias) for name in names)
        self.rope, self.attend = site.op("rope.grid", "rope"), site.op("attention.full", "attend")
        self.act, self.add = site.op("activation.gelu", "act"), site.op("residual.add", "add")
        self.freq_F = torch.tensor(spec.inv_freq(), dtype=torch.float64).float()

    def forward(self, x_ND: Tensor, columns: int) -> Tensor:
        spec = self.spec
        heads = self.qkv(self.norms[0](x_ND)).unflatten(-1, (3, spec.heads, spec.head_dim))
        q_NHK, k_NHK = (
            self.rope(heads[:, i], self.freq_F, columns=columns, style=spec.style, first=spec.first) for i in (0, 1)
        )
        out_NHK, _ = self.attend(q_NHK, k_NHK, heads[:, 2], scale=spec.head_dim**-0.5)
        x_ND = self.add(x_ND, self.o(out_NHK.flatten(1)))
        return self.add(x_ND, self.fc1(self.act(self.fc0(self.norms[1](x_ND)), form="tanh")))


class Tower:
    """The block of ``PatchTower``. params: by full name, ``vision.…`` and ``projector.…``. Taps: ``vision.embed``
    [N, D], ``vision.blocks.{i}`` [N, D], ``vision`` (rows [M, E])."""

    def __init__(self, spec: PatchTower, params: Mapping[str, Tensor], site: Site) -> None:
        given = Params(params)
        self.spec, self.site = spec, site
        below, own = site.below("vision"), given.below("vision")
        self.patch, self.patches = own["patch"], below.op("vision.patches", "patch")
        self.patch_bias = own["patch_bias"] if spec.bias else None
        self.table = own["positions"].unflatten(0, spec.grid) if spec.flat else own["positions"]
        self.positions, self.add = below.op("vision.positions", "positions"), below.op("residual.add", "add")
        self.blocks = [_Block(spec, own.below(f"blocks.{i}"), below.below(f"blocks.{i}")) for i in range(spec.layers)]
        self.final_norm = below.norm(spec.norm, own, "final_norm")
        out, projector = site.below("projector"), given.below("projector")
        self.fc0, self.fc1 = (out.linear(projector, name, bias=spec.bias) for name in ("fc0", "fc1"))
        self.act = out.op("activation.gelu", "act")
        self.out_norm = None if spec.out_norm is None else out.norm(spec.out_norm, projector, "norm")
        assert not given.left_over(), f"no block uses {', '.join(given.left_over())}"

    @torch.inference_mode()
    def forward(self, pixels_YXC: Tensor) -> Tensor:
        """uint8 pixels [height, width, 3], whole tokens in both directions, -> rows [M, E], row by row."""
        spec = self.spec
        rows, columns = (size // spec.patch for size in pixels_YXC.shape[:2])
        x_ND = self.patches(pixels_YXC, self.patch, self.patch_bias, mean=spec.pixels.mean, std=spec.pixels.std)
        x_ND = self.add(x_ND, self.positions(self.table, rows=rows, columns=columns, corners=spec.corners))
        self.site.show("vision.embed", x_ND)
        for number, block in enumerate(self.blocks):
            x_ND = block.forward(x_ND, columns)
            self.site.show(f"vision.blocks.{number}", x_ND)
        merged = self.final_norm(x_ND).unflatten(0, (rows // spec.merge, spec.merge, columns // spec.merge, spec.merge))
        y_ME = self.fc1(self.act(self.fc0(merged.transpose(1, 2).flatten(2).flatten(0, 1)), form="erf"))
        if self.out_norm is not None:
            y_ME = self.out_norm(y_ME)
        self.site.show("vision", y_ME)
        return y_ME
