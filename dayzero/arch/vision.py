"""Vision towers as data: parameters, operators, what an image costs, and how pixels become its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.arch.norms import Norm
from dayzero.arch.pixels import PixelRule
from dayzero.decl import OpUse, ParamDecl

SCORE_TILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PatchTower:
    """A ViT over the patches of one image with fused qkv, attention among all patches, a learned grid of positions and
    rotation by row and column, and a projector that merges neighbouring patches into one token of the text model.

    dim, inner, heads, layers: of the tower; qkv_dim: total width of q (k and v alike). patch: pixels a side.
    grid: learned positions down and across; flat: stored as one list. merge: patches a side that become one token.
    out_dim: width of the text model. norm: of every block and before the merge. out_norm: behind the projector.
    bias: of every matrix. frames: equal frames that a still image stands for, None: the patch embedding knows no time.
    corners: how positions are stretched (``vision.positions``). style, first: of the rotation (``rope.grid``).
    pixels: the publisher's way from an image to pixels. pad_id: the placeholder token of images in a prompt. place:
    how positions of text count past an image: ``line``, token by token; ``grid``, an image having a row and a column
    position for each token and counting as much as its longer side (m-rope).
    """

    dim: int
    inner: int
    heads: int
    layers: int
    qkv_dim: int
    patch: int
    grid: tuple[int, int]
    merge: int
    out_dim: int
    norm: Norm
    out_norm: Norm | None
    pixels: PixelRule
    pad_id: int
    bias: bool = False
    frames: int | None = None
    flat: bool = False
    corners: bool = False
    style: Literal["half", "interleaved"] = "interleaved"
    first: Literal["row", "column"] = "column"
    theta: float = 10000.0
    place: Literal["line", "grid"] = "line"

    @property
    def head_dim(self) -> int:
        return self.qkv_dim // self.heads

    def inv_freq(self) -> tuple[float, ...]:
        """head_dim / 4 angular frequencies in radians a patch, the same for rows and columns."""
        return tuple(self.theta ** (-4.0 * i / self.head_dim) for i in range(self.head_dim // 4))

    def params(self) -> list[ParamDecl]:
        d, merged = self.dim, self.dim * self.merge**2
        time = () if self.frames is None else (self.frames,)
        down, across = self.grid
        out = [
            ParamDecl("vision.patch", (d, 3, *time, self.patch, self.patch), "conv"),
            *self._bias("vision.patch", d),
            ParamDecl("vision.positions", (down * across, d) if self.flat else (down, across, d), "embed"),
            *self.norm.params("vision.final_norm"),
        ]
        for i in range(self.layers):
            b = f"vision.blocks.{i}"
            out += [*self.norm.params(f"{b}.norm0"), *self.norm.params(f"{b}.norm1")]
            out += self._matrix(f"{b}.qkv", 3 * self.qkv_dim, d) + self._matrix(f"{b}.o", d, self.qkv_dim)
            out += self._matrix(f"{b}.fc0", self.inner, d) + self._matrix(f"{b}.fc1", d, self.inner)
        out += self._matrix("projector.fc0", merged, merged) + self._matrix("projector.fc1", self.out_dim, merged)
        return out + ([] if self.out_norm is None else self.out_norm.params("projector.norm"))

    def _matrix(self, name: str, rows: int, columns: int) -> list[ParamDecl]:
        return [ParamDecl(name, (rows, columns)), *self._bias(name, rows)]

    def _bias(self, name: str, size: int) -> list[ParamDecl]:
        return [ParamDecl(f"{name}_bias", (size,), "bias")] if self.bias else []

    def contracts(self) -> list[OpUse]:
        frames = (("bias", self.bias), ("frames", self.frames or 1))
        out = [
            OpUse("vision.patches", "vision.patch", frames),
            OpUse("vision.positions", "vision.positions", (("corners", self.corners),)),
            OpUse("residual.add", "vision.add"),
            self.norm.use("vision.final_norm"),
        ]
        for i in range(self.layers):
            b = f"vision.blocks.{i}"
            out += [self.norm.use(f"{b}.norm0"), self.norm.use(f"{b}.norm1")]
            out += [self._linear(f"{b}.{name}") for name in ("qkv", "o", "fc0", "fc1")]
            out += [
                OpUse("rope.grid", f"{b}.rope", (("first", self.first), ("style", self.style))),
                OpUse("attention.full", f"{b}.attend"),
                OpUse("activation.gelu", f"{b}.act", (("form", "tanh"),)),
                OpUse("residual.add", f"{b}.add"),
            ]
        out += [self._linear("projector.fc0"), self._linear("projector.fc1")]
        out.append(OpUse("activation.gelu", "projector.act", (("form", "erf"),)))
        return out + ([] if self.out_norm is None else [self.out_norm.use("projector.norm")])

    def _linear(self, site: str) -> OpUse:
        return OpUse("linear.matmul", site, (("bias", True),) if self.bias else ())

    def flops(self, patches: int) -> float:
        """Multiply-adds x 2 of one image of that many patches."""
        matrices = sum(d.numel for d in self.params() if d.name.startswith("vision.") and len(d.shape) > 1)
        matrices -= self.grid[0] * self.grid[1] * self.dim
        projector = (self.dim * self.merge**2) * (self.dim * self.merge**2 + self.out_dim)
        attention = 2.0 * patches * self.qkv_dim * self.layers
        return 2.0 * patches * (matrices + attention) + 2.0 * projector * patches / self.merge**2

    def workspace_bytes(self, element_bytes: int = 2) -> int:
        """What the largest image takes while it is encoded: the stream and the widest values beside it, of every patch,
        and a tile of scores. The rows that come out are counted too; pixels are not, they lie on the host."""
        patches = self.pixels.most_patches
        widest = max(4 * self.qkv_dim, 2 * self.inner, 2 * self.dim)
        rows = patches // self.merge**2 * (2 * self.dim * self.merge**2 + self.out_dim)
        return element_bytes * (patches * (2 * self.dim + widest) + rows) + SCORE_TILE_BYTES


Vision = PatchTower
