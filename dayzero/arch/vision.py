"""Vision towers as data. For the paper half: what parameters a tower has and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.decl import ParamDecl


@dataclass(frozen=True, slots=True)
class PatchTower:
    """A ViT over patches with fused qkv, a learned position grid, and a projector that merges patches.

    dim, inner, heads, layers: of the tower; qkv_dim: total width of q (k and v alike). patch: pixels a side.
    grid: learned positions a side. merge: patches a side that become one token. out_dim: width of the text model.
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

    def params(self) -> list[ParamDecl]:
        p, d = "vision", self.dim
        out = [
            ParamDecl(f"{p}.patch", (d, 3, self.patch, self.patch), "conv"),
            ParamDecl(f"{p}.positions", (*self.grid, d), "embed"),
            ParamDecl(f"{p}.final_norm", (d,), "norm"),
        ]
        for i in range(self.layers):
            b = f"{p}.blocks.{i}"
            out += [
                ParamDecl(f"{b}.norm0", (d,), "norm"),
                ParamDecl(f"{b}.norm1", (d,), "norm"),
                ParamDecl(f"{b}.qkv", (3 * self.qkv_dim, d)),
                ParamDecl(f"{b}.o", (d, self.qkv_dim)),
                ParamDecl(f"{b}.fc0", (self.inner, d)),
                ParamDecl(f"{b}.fc1", (d, self.inner)),
            ]
        merged = d * self.merge**2
        out += [
            ParamDecl("projector.fc0", (merged, merged)),
            ParamDecl("projector.fc1", (self.out_dim, merged)),
            ParamDecl("projector.norm", (self.out_dim,), "norm"),
        ]
        return out


Vision = PatchTower
