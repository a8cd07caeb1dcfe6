"""Exact reference decoders of every storage format, and the encoders that write twins.

Decoding is done in float32 with one multiplication or division that can round. Elements have at most 4 significant
bits and e8m0, e4m3 and bf16 scales at most 8, so products of these are exact; a further factor (an f32 block scale,
a tensor scale) rounds the product once, correctly. The f32 value is then rounded once to the asked dtype, which is
what loaders do.

Shape letters: E experts (or none), R rows (out), C columns (in), G groups of columns, N all rows of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from dayzero.checkpoint.formats import parts as stored_parts
from dayzero.checkpoint.formats import why_not
from dayzero.decl import Format, Fp8Blocks, Mxfp4, Packed
from dayzero.errors import CheckpointError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX, E4M3_MAX, INT4_MAX = 6.0, 448.0, 7
_LARGEST = {"e2m1": E2M1_MAX, "e4m3": E4M3_MAX, "int4": 8.0}
_SURE_SCALE = 252  # 6 * 2^(252 - 127) fits float32 and bfloat16; a larger scale may not, and 255 is NaN
_CHUNK_ELEMENTS = 1 << 17  # bounds scratch memory, about 40 bytes an element, and keeps it in the processor's cache
_DEVICE_CHUNK_ELEMENTS = 1 << 25  # an accelerator's: enough for its launches not to count

_TORCH = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def e2m1_table() -> Tensor:
    """f32 [16]: the value of every e2m1 code, bit 3 the sign."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32)


def e8m0_table() -> Tensor:
    """f32 [256]: 2^(code - 127); code 255 is NaN. Code 0, 2^-127, is a subnormal f32 and exact."""
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    table[255] = torch.nan
    return table


def e4m3_table() -> Tensor:
    """f32 [256]: the value of every e4m3fn code: bias 7, no infinities, 0x7f and 0xff NaN."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        if code & 127 == 127:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.tensor(values, dtype=torch.float32)


def int4_table() -> Tensor:
    """f32 [16]: the value of every packed int4 code: offset binary, code 8 is zero."""
    return torch.arange(-8, 8, dtype=torch.float32)


def dequantize(
    fmt: Format,
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    tensor: str = "tensor",
) -> Tensor:
    """The logical tensor of ``shape`` ([R, C] or [E, R, C]) and ``dtype`` that the stored parts hold.

    parts: role to tensor, as ``formats.parts`` names them; views need not be contiguous and are not changed.
    Optional parts are not read. tensor: the name used in messages.
    Errors: CheckpointError for a missing part, a wrong dtype or shape, a scale that is NaN, infinite or (as a divisor)
    zero, and a value that overflows ``dtype``. A NaN element code decodes to NaN.
    """
    _check_parts(fmt, parts, shape, tensor)
    if not fmt.quantized:
        return parts["weight"].to(dtype)
    scale = _scale_f32(parts["scale"], tensor)
    whole = _tensor_scale_f32(fmt, parts, tensor)
    decode = _rows_of_blocks if fmt.element == "e4m3" else _rows_of_groups
    out = decode(fmt, parts["weight"], scale, whole, shape, dtype)
    _check_overflow(fmt, out, scale, whole, tensor)
    return out


def keep_packed(fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], tensor: str = "tensor") -> Packed:
    """The tensor of ``shape`` that ``parts`` hold, in the form that the format has, as it is: views of them, but for
    block scales of FP8, which become f32, exactly.

    Errors: CheckpointError, where decoding it to float32 or bfloat16 raises one.
    """
    _check_parts(fmt, parts, shape, tensor)
    assert fmt.form is not None, f"{tensor}: {fmt.name} is no form that operators take"
    if fmt.form == "fp8_block":
        return _keep_blocks(fmt, parts, shape, tensor)
    scales = parts["scale"].view(torch.uint8)
    if scales.numel() and int(scales.amax()) > _SURE_SCALE:
        dequantize(fmt, parts, shape, torch.bfloat16, tensor)
    return Mxfp4(parts["weight"].view(torch.uint8).reshape(*shape[:-1], shape[-1] // 2), scales)


def _keep_blocks(fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], tensor: str) -> Fp8Blocks:
    scales = _scales_unchecked(parts["scale"])
    largest = float(scales.abs().amax()) * E4M3_MAX  # NaN where one is
    if not largest <= torch.finfo(torch.bfloat16).max:
        dequantize(fmt, parts, shape, torch.bfloat16, tensor)
    return Fp8Blocks(parts["weight"], scales)


def quantize(fmt: Format, weight: Tensor) -> dict[str, Tensor]:
    """Stored parts (required ones) of a finite ``weight`` [R, C] or [E, R, C], elements to the nearest, ties to even.

    Quantising what ``dequantize`` returns (in f32) gives the same values again. To that end power-of-two scales put
    each group's maximum in (3, 6] (e2m1) or (224, 448] (e4m3) of its scale, f32 scales keep 16 significant bits and
    tensor scales 8, so that no product needs more than f32 has.
    """
    shape = tuple(weight.shape)
    if not fmt.quantized:
        return {"weight": weight.to(_TORCH[stored_parts(fmt, "t", shape)[0].dtype[0]])}
    reason = why_not(fmt, shape)
    if reason:
        raise ValueError(reason)
    if not weight.isfinite().all():
        raise ValueError(f"only finite values can be stored as {fmt.name}")
    return _quantize_blocks(fmt, weight) if fmt.element == "e4m3" else _quantize_groups(fmt, weight)


# -- decoding ---------------------------------------------------------------------------------------------------------


def _check_parts(fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], tensor: str) -> None:
    reason = why_not(fmt, shape)
    if reason:
        raise CheckpointError(f"{tensor}: {reason}")
    codes = {dtype: code for code, dtype in _TORCH.items()}
    for part in stored_parts(fmt, tensor, shape):
        if part.optional:
            continue
        held = parts.get(part.role)
        if held is None:
            raise CheckpointError(f"{tensor}: {part.name} is missing; {fmt.name} needs it")
        if not fmt.quantized and held.is_floating_point() and tuple(held.shape) == shape:
            continue
        misfit = part.misfit(codes.get(held.dtype, str(held.dtype)), tuple(held.shape))
        if misfit:
            raise CheckpointError(f"{part.name} {misfit}")
        if part.role == "shape" and tuple(held.tolist()) != shape:
            raise CheckpointError(f"{part.name} says {held.tolist()}, but the tensor is {list(shape)}")


def _scale_f32(scale: Tensor, tensor: str) -> Tensor:
    """Block scales in f32; CheckpointError at the first that is not finite."""
    values = _scales_unchecked(scale)
    _check_finite(values, tensor, "scale")
    return values


def _scales_unchecked(scale: Tensor) -> Tensor:
    """f32, exactly; NaN where e8m0's code says so."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return e8m0_table().to(scale.device)[scale.view(torch.uint8).long()]
    return scale.float()


def _check_finite(values: Tensor, tensor: str, what: str) -> None:
    finite = values.isfinite()
    if not finite.all():
        index = [int(i) for i in (~finite).nonzero()[0]]
        raise CheckpointError(
            f"{tensor}: {what} at index {index} is {values[tuple(index)].item()}; the file is damaged or mislabelled"
        )


def _tensor_scale_f32(fmt: Format, parts: Mapping[str, Tensor], tensor: str) -> Tensor | None:
    """f32 [E] or [1], or None where the format has none."""
    if fmt.tensor_scale is None:
        return None
    values = parts["tensor_scale"].float().reshape(-1)
    _check_finite(values, tensor, "tensor scale")
    if fmt.tensor_scale == "divide" and (values == 0).any():
        raise CheckpointError(f"{tensor}: tensor scale is 0, and this format divides by it")
    return values


def _rows_of_blocks(
    fmt: Format, weight: Tensor, scale: Tensor, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    assert fmt.block is not None and whole is None
    block_rows, block_columns = fmt.block
    num_columns = shape[-1]
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    weights_ERC, scales_ERG = weight.reshape(-1, *shape[-2:]), scale.reshape(-1, *scale.shape[-2:])
    step = max(1, _chunk_elements(weight) // (block_rows * num_columns))  # rows of blocks
    for e, out_RC in enumerate(out.view(-1, *shape[-2:])):
        for i in range(0, scale.shape[-2], step):
            rows = slice(i * block_rows, (i + step) * block_rows)
            scale_GC = scales_ERG[e, i : i + step].repeat_interleave(block_columns, dim=1)[:, :num_columns]
            scale_RC = scale_GC.repeat_interleave(block_rows, dim=0) if step > 1 else scale_GC
            weight_RC = weights_ERC[e, rows].float()
            out_RC[rows] = weight_RC * scale_RC[: len(weight_RC)]
    return out


def _rows_of_groups(
    fmt: Format, weight: Tensor, scale: Tensor, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    assert fmt.block is not None
    num_rows, num_columns, group = prod(shape[:-1]), shape[-1], fmt.block[1]
    packed_NB = weight.reshape(num_rows, -1)
    scale_NG = scale.reshape(num_rows, -1, 1)
    values = (int4_table() if fmt.element == "int4" else e2m1_table()).to(weight.device)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    out_NC = out.view(num_rows, num_columns)
    whole_N = None if whole is None else whole.repeat_interleave(num_rows // whole.numel()).view(-1, 1)
    for rows in _row_chunks(num_rows, num_columns, _chunk_elements(weight)):
        codes_NC = _codes(packed_NB[rows])
        exact_NC = (values[codes_NC].view(len(codes_NC), -1, group) * scale_NG[rows]).flatten(1)
        if whole_N is not None:
            exact_NC = exact_NC * whole_N[rows] if fmt.tensor_scale == "multiply" else exact_NC / whole_N[rows]
        out_NC[rows] = exact_NC
    return out


def _codes(packed_NB: Tensor) -> Tensor:
    """int64 [N, C] 4-bit codes of bytes or int32 words; the element that comes first sits in the lowest bits."""
    if packed_NB.dtype == torch.int32:
        return torch.stack([packed_NB >> 4 * j & 15 for j in range(8)], dim=-1).flatten(1).long()
    bytes_NB = packed_NB.contiguous().view(torch.uint8)
    return torch.stack([bytes_NB & 15, bytes_NB >> 4], dim=-1).flatten(1).long()


def _chunk_elements(weight: Tensor) -> int:
    return _CHUNK_ELEMENTS if weight.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS


def _row_chunks(num_rows: int, num_columns: int, elements: int = _CHUNK_ELEMENTS) -> Iterator[slice]:
    step = max(1, elements // num_columns)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _check_overflow(fmt: Format, out: Tensor, scale: Tensor, whole: Tensor | None, tensor: str) -> None:
    bound = scale.abs().amax().double() * _LARGEST[fmt.element]
    if whole is not None:
        factor = whole.abs().double()
        bound = bound * factor.amax() if fmt.tensor_scale == "multiply" else bound / factor.amin()
    if bound > torch.finfo(out.dtype).max and out.isinf().any():
        index = [int(i) for i in out.isinf().nonzero()[0]]
        raise CheckpointError(
            f"{tensor}: the value at index {index} is too large for {out.dtype}; the scales are damaged"
        )


# -- encoding ---------------------------------------------------------------------------------------------------------


def round_to_e2m1(values: Tensor) -> Tensor:
    """uint8 codes of the nearest e2m1 values, ties to the even code, magnitudes above 6 to 6."""
    magnitude = values.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for low in range(7):
        middle = (E2M1_VALUES[low] + E2M1_VALUES[low + 1]) / 2
        # An even lower code keeps its tie; an odd one gives it to the even code above.
        code += magnitude > middle if low % 2 == 0 else magnitude >= middle
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _pow2_exponent(amax: Tensor, largest: float) -> Tensor:
    """Smallest integer k with amax <= largest * 2^k, within e8m0's -127..127; 0 where amax is 0. Exact."""
    mantissa, exponent = torch.frexp(amax.double())
    top_mantissa, top_exponent = torch.frexp(torch.tensor(largest, dtype=torch.float64))
    k = exponent - top_exponent + (mantissa > top_mantissa)
    return torch.where(amax == 0, 0, k.clamp(-127, 127))


def _significant(values: Tensor, num_bits: int) -> Tensor:
    """float64 values rounded to ``num_bits`` significant bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 2**num_bits), exponent - num_bits)


def _quantize_blocks(fmt: Format, weight: Tensor) -> dict[str, Tensor]:
    assert fmt.block is not None
    (block_rows, block_columns), (num_rows, num_columns) = fmt.block, weight.shape[-2:]
    w_ERC = weight.detach().reshape(-1, num_rows, num_columns).float()
    padded = torch.nn.functional.pad(w_ERC, (0, -num_columns % block_columns, 0, -num_rows % block_rows))
    blocks = padded.view(
        len(w_ERC), padded.shape[1] // block_rows, block_rows, padded.shape[2] // block_columns, block_columns
    )
    amax_ERG = blocks.abs().amax((2, 4)).double()
    if fmt.scale == "e8m0":
        exponent = _pow2_exponent(amax_ERG, E4M3_MAX)
        stored, scale_ERG = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), torch.exp2(exponent.double())
    else:
        # Below 2^-100 an f32 scale would lose bits to the subnormals; there all codes are small, which is harmless.
        scale_ERG = _significant((amax_ERG / E4M3_MAX).clamp(min=2.0**-100), 16).where(amax_ERG > 0, 1.0)
        stored = scale_ERG.float()
    scaled = (blocks / scale_ERG.float()[:, :, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).flatten(3, 4).flatten(1, 2)[:, :num_rows, :num_columns]
    stack = weight.shape[:-2]
    return {"weight": codes.reshape(weight.shape).contiguous(), "scale": stored.reshape(*stack, *stored.shape[1:])}


def _quantize_groups(fmt: Format, weight: Tensor) -> dict[str, Tensor]:
    assert fmt.block is not None
    shape, num_columns = tuple(weight.shape), weight.shape[-1]
    w_NC = weight.detach().reshape(-1, num_columns)
    stack = shape[0] if len(shape) == 3 else 1
    whole, scaled = _tensor_scale_for(fmt, weight.detach().reshape(stack, -1).abs().amax(1).double())
    # Dividing by a power of two is exact in f32 already; other scales get the room to round only once.
    compute = torch.float32 if fmt.scale == "e8m0" else torch.float64
    whole_N = scaled.repeat_interleave(w_NC.shape[0] // stack).view(-1, 1, 1).to(compute)
    make = {"e8m0": _e8m0_scales, "e4m3": _e4m3_scales, "bf16": _bf16_scales}[fmt.scale or ""]
    packed, scales = [], []
    for rows in _row_chunks(*w_NC.shape):
        groups_NGC = w_NC[rows].to(compute).reshape(-1, num_columns // fmt.block[1], fmt.block[1]) * whole_N[rows]
        stored, value_NG = make(groups_NGC.abs().amax(-1))
        scales.append(stored)
        packed.append(_pack(fmt, (groups_NGC / value_NG[..., None].to(compute)).flatten(1)))
    made: dict[str, Tensor] = {"weight": torch.cat(packed), "scale": torch.cat(scales)}
    if whole is not None:
        made["tensor_scale"] = whole
    if fmt.layout == "packed_shape":
        made["shape"] = torch.tensor(shape, dtype=torch.int64)
    for part in stored_parts(fmt, "t", shape):
        if part.role in made:
            made[part.role] = made[part.role].view(_TORCH[part.dtype[0]]).reshape(part.shape)
    return made


def _tensor_scale_for(fmt: Format, amax_E: Tensor) -> tuple[Tensor | None, Tensor]:
    """(stored f32 tensor scale, factor that brings the weights to the range of block scales), float64 [E]."""
    if fmt.tensor_scale is None:
        return None, torch.ones_like(amax_E)
    top = E2M1_MAX * E4M3_MAX
    safe_E = amax_E.where(amax_E > 0, top).clamp(min=2.0**-80)
    # 8 significant bits: products with element and block scale then fit f32, and making it again gives the same.
    if fmt.tensor_scale == "divide":
        factor_E = _significant(top / safe_E, 8)
        return factor_E.float(), factor_E
    step_E = _significant(safe_E / top, 8)
    return step_E.float(), 1 / step_E


def _e8m0_scales(amax_NG: Tensor) -> tuple[Tensor, Tensor]:
    exponent = _pow2_exponent(amax_NG, E2M1_MAX)
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent.double())


def _e4m3_scales(amax_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest e4m3 to amax/6. Among e4m3's subnormals only powers of two: a coarser step there would not come back to
    the same values, because a group's largest code could be 4."""
    wanted = (amax_NG / E2M1_MAX).clamp(max=E4M3_MAX)
    mantissa, exponent = torch.frexp(wanted * (1 - 2.0**-20))
    small = torch.exp2(exponent.double()).clamp(min=2.0**-9)
    chosen = torch.where(amax_NG == 0, 1.0, torch.where(small <= 2.0**-6, small, wanted))
    stored = chosen.float().to(torch.float8_e4m3fn)
    return stored, stored.double()


def _bf16_scales(amax_NG: Tensor) -> tuple[Tensor, Tensor]:
    stored = (amax_NG / INT4_MAX).clamp(min=2.0**-100).where(amax_NG > 0, 1.0).to(torch.bfloat16)
    return stored, stored.double()


def _pack(fmt: Format, scaled_NC: Tensor) -> Tensor:
    if fmt.element == "int4":
        codes = (torch.round(scaled_NC).clamp(-8, INT4_MAX) + 8).to(torch.uint8)
    else:
        codes = round_to_e2m1(scaled_NC)
    # Two codes a byte, the first in the low half; read as little-endian words this is eight codes an int32 as well.
    return codes[:, 0::2] | codes[:, 1::2] << 4
