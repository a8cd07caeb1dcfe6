"""Nouns every room shares: how numbers are stored, what a parameter is, what a layer keeps between steps.

Nothing here imports torch; nothing here knows a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["tp", "ep", "pp", "cp", "dp"]
Form = Literal["mxfp4", "fp8_block"]  # of a matrix as it is stored: ``Mxfp4``, ``Fp8Blocks``


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored: its elements and the scales beside them.

    element: ``f32 bf16 f16 e4m3 e2m1 int4``. bits: bits an element takes. block: (rows, columns) that share one
    scale; None when there is no scale. scale: element type of the scales. tensor_scale: whether a further scale for
    the whole tensor multiplies or divides. layout: which tensors of a checkpoint hold it (see checkpoint/formats).
    """

    name: str
    element: str
    bits: int
    block: tuple[int, int] | None = None
    scale: str | None = None
    tensor_scale: Literal["multiply", "divide"] | None = None
    layout: str = "plain"

    @property
    def quantized(self) -> bool:
        return self.block is not None

    @property
    def form(self) -> Form | None:
        """The form in which operators may take a matrix as this format stores it; None where it has to be decoded."""
        return _FORMS.get((self.element, self.block, self.scale)) if self.tensor_scale is None else None


FP8_SIZE = 128  # rows, and columns, of a scale block of FP8
_FORMS: dict[tuple[str, tuple[int, int] | None, str | None], Form] = {
    ("e2m1", (1, 32), "e8m0"): "mxfp4",
    ("e4m3", (FP8_SIZE, FP8_SIZE), "f32"): "fp8_block",
    ("e4m3", (FP8_SIZE, FP8_SIZE), "e8m0"): "fp8_block",
}


F32 = Format("f32", "f32", 32)
BF16 = Format("bf16", "bf16", 16)
F16 = Format("f16", "f16", 16)
FP8_BLOCK = Format("fp8_block", "e4m3", 8, (128, 128), "f32", layout="scale_inv")
FP8_BLOCK_E8M0 = Format("fp8_block_e8m0", "e4m3", 8, (128, 128), "e8m0", layout="scale")
FP8_BLOCK_WEIGHT_SCALE = Format("fp8_block_weight_scale", "e4m3", 8, (128, 128), "f32", layout="weight_scale")
MXFP4_SCALE = Format("mxfp4_scale", "e2m1", 4, (1, 32), "e8m0", layout="scale")
MXFP4_INTERLEAVED = Format("mxfp4_interleaved", "e2m1", 4, (1, 32), "e8m0", layout="blocks")
MXFP4_PACK = Format("mxfp4_pack", "e2m1", 4, (1, 32), "e8m0", layout="packed")
NVFP4_PACK = Format("nvfp4_pack", "e2m1", 4, (1, 16), "e4m3", "divide", layout="packed_global")
NVFP4_MODELOPT = Format("nvfp4_modelopt", "e2m1", 4, (1, 16), "e4m3", "multiply", layout="weight_scale_2")
INT4_PACK = Format("int4_pack", "int4", 4, (1, 32), "bf16", layout="packed_shape")

PLAIN_FORMATS = (F32, BF16, F16)
QUANTIZED_FORMATS = (
    FP8_BLOCK, FP8_BLOCK_E8M0, FP8_BLOCK_WEIGHT_SCALE, MXFP4_SCALE, MXFP4_INTERLEAVED, MXFP4_PACK, NVFP4_PACK,
    NVFP4_MODELOPT, INT4_PACK,
)  # fmt: skip
FORMATS = {f.name: f for f in PLAIN_FORMATS + QUANTIZED_FORMATS}


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A matrix [R, C], or a stack of them [E, R, C], in the 4 bits an element that a checkpoint stores.

    codes: uint8 [..., R, C / 2], two e2m1 codes a byte, the first column in the low half. scales: uint8
    [..., R, C / 32], the exponents (e8m0, biased by 127) of groups along a row; none is NaN (255). Both may be views,
    of any strides.
    Indexed by a number it gives that slice, by a slice these rows or matrices, as a tensor does.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, number: int | slice) -> Mxfp4:
        return Mxfp4(self.codes[number], self.scales[number])


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A matrix [R, C], or a stack of them [E, R, C], in the 8 bits an element that a checkpoint stores.

    codes: float8_e4m3fn [..., R, C]. scales: f32 [..., ceil(R / 128), ceil(C / 128)], finite: a value is its code times
    the scale of its block of 128 rows and 128 columns; the last block of a row or column may be short. Both may be
    views, of any strides.
    Indexed by a number it gives that matrix of a stack, by a slice these matrices, as a tensor does.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, number: int | slice) -> Fp8Blocks:
        assert self.codes.dim() == 3, "rows of a matrix share their scales: it is not indexed"
        return Fp8Blocks(self.codes[number], self.scales[number])


Packed = Mxfp4 | Fp8Blocks


@dataclass(frozen=True, slots=True)
class Cut:
    """Mesh axis ``axis`` cuts dimension ``dim`` into equal runs of whole units.

    unit: smallest piece kept whole, in elements (a head, a scale block). repeat: with more ranks than units, a unit is
    held by several ranks (KV heads) instead of making the layout illegal.
    """

    dim: int
    axis: Axis
    unit: int = 1
    repeat: bool = False


Role = Literal["linear", "embed", "norm", "bias", "conv", "scalar", "router"]


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """A parameter of the model, by our name, as the blocks want it.

    shape: logical shape, matrices as [out, in], stacked experts as [experts, out, in].
    role: ``linear`` may be stored quantised; everything else is plain. keep: ``f32`` for values that must never be
    rounded to the activation dtype (router bias, decay rates); None follows the activation dtype.
    stored: element type the publisher's files must have, when a narrower one would be damage (``f32`` router bias).
    cuts: how mesh axes may cut it. Replicated on every rank where no cut's axis is used.
    center: mean that trained values lie around, where there is a convention to hold them to (norm weights: 1, or 0
    where the model multiplies by 1 + w).
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "linear"
    keep: Literal["f32"] | None = None
    stored: Literal["f32"] | None = None
    cuts: tuple[Cut, ...] = ()
    center: float | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A token's row of a cache kept as e4m3 codes with scales, to the byte; little-endian.

    record: its name. shape: of the row, flattened: what it is without ``plain`` last elements is ``num_codes`` codes.
    Every ``tile`` codes share a scale; the last tile of a row may be short. scale: ``f32``; ``pow2``, an f32 that is a
    power of two; ``e8m0``, one byte e for 2^(e - 127), 255 for NaN. plain: last elements of the row that stay bf16.
    planar: a page keeps the codes of all its tokens and then the scales of all, so that each token's codes begin as
    aligned as their number; else one token's codes, scales and plain elements lie together, padded with zeros so that
    scales begin on multiples of 4 and tokens on multiples of 16.
    Sources: 512 codes, 4 scales, 64 plain is FlashMLA's row of 656 bytes; pages by planes are DeepGEMM's.
    """

    record: str
    shape: tuple[int, ...]
    tile: int
    scale: Literal["f32", "pow2", "e8m0"]
    plain: int = 0
    planar: bool = True

    @property
    def num_codes(self) -> int:
        return prod(self.shape) - self.plain

    @property
    def num_scales(self) -> int:
        return -(-self.num_codes // self.tile)

    @property
    def scale_bytes(self) -> int:
        """Of all scales of a row."""
        return self.num_scales * (1 if self.scale == "e8m0" else 4)

    @property
    def scales_at(self) -> int:
        """Where the scales of a row begin that lies together."""
        return -(-self.num_codes // 4) * 4

    @property
    def plain_at(self) -> int:
        """Where the plain elements of a row begin that lies together."""
        return self.scales_at + self.scale_bytes

    @property
    def num_bytes(self) -> int:
        """Of one token; a page takes so many times its tokens."""
        if self.planar:
            return self.num_codes + self.scale_bytes
        return -(-(self.plain_at + 2 * self.plain) // 16) * 16

    @property
    def padded(self) -> bool:
        """Whether a token's bytes hold zeros between or behind its parts."""
        return self.num_bytes > self.num_codes + self.scale_bytes + 2 * self.plain


PACKED_PAGE_TOKENS = 16  # a page of packed rows has a multiple of so many, so that its planes are aligned
TILE, MX_TILE = 128, 32  # elements that share a scale
LATENT_PARTS = (512, 64)  # latent and shared key of a row of 656 bytes


def packed_row(record: str, shape: tuple[int, ...], parts: tuple[int, ...] = ()) -> PackedRow | None:
    """How a row [*shape] lies in ``record``; None for plain elements. parts: as in ``decl.CacheNeed``.

    Tiles of 128 and 32 end with the row's last dimension; of K and V each head is a tile of its own.
    """
    if record.startswith("mla_fp8"):
        assert len(shape) == 1 and sum(parts) == shape[0], (shape, parts)
        assert record != "mla_fp8_656" or parts == LATENT_PARTS, (record, parts)
        return PackedRow(record, shape, TILE, "pow2", plain=parts[1], planar=False)
    if record == "kv_fp8":
        return PackedRow(record, shape, shape[-1], "f32")
    if record == "idx_fp8_128":
        return PackedRow(record, shape, TILE, "f32")
    return PackedRow(record, shape, MX_TILE, "e8m0") if record == "idx_mxfp8_32" else None


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a layer keeps between steps.

    name: ``layers.3.mixer.latent``. shape: per token (unit ``token``) or per sequence (unit ``state``).
    element: ``bf16``, ``f32``…, the reference record's element type. record: name of the record format, e.g.
    ``mla_bf16``; a variant names what it reads and a plan refuses a mismatch. window: tokens that stay visible,
    the current one included. shares: name of the need whose storage this one aliases.
    rewind: how a state goes back to an earlier token when a draft is rejected.
    parts: how the last dimension divides into pieces that are stored differently (latent, shared key).
    packed: how a token's row is kept where that is not as plain elements.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    record: str
    unit: Literal["token", "state"] = "token"
    cuts: tuple[Cut, ...] = ()
    window: int | None = None
    shares: str | None = None
    rewind: Literal["truncate", "copies", "replay"] = "truncate"
    parts: tuple[int, ...] = ()
    packed: PackedRow | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpUse:
    """One use of an operator contract by a spec: which contract, with which traits, at which site.

    contract: name in ops/catalog, e.g. ``attention.paged``. traits: options that a variant must support, as sorted
    (key, value) pairs, e.g. (("sinks", True), ("window", 128)). parts: of a composed contract (``ops/contract``), the
    places of the uses that it runs in turn: a variant of it stands for them. beside: those of them that run by
    themselves as well, whatever it is bound to.
    """

    contract: str
    site: str
    traits: tuple[tuple[str, object], ...] = ()
    parts: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """``contract@site``, as bindings name it."""
        return f"{self.contract}@{self.site}"
