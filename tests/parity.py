"""How a variant is compared with its reference, on whatever device: used by tests/cpu, tests/interpreter, tests/gpu."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks, Mxfp4
from dayzero.ops.bind import prepack_of, resolve
from dayzero.ops.cases import traits_of
from dayzero.ops.catalog import CATALOG, REFERENCE, Line, lacking
from dayzero.ops.contract import CONTRACTS, Case, relative_l2

FORMS: dict[type, str] = {Mxfp4: "mxfp4", Fp8Blocks: "fp8_block"}
ELEMENT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

for _line in CATALOG.lines.values():  # a contract is known once its module is imported
    if _line.variant == REFERENCE:
        resolve(_line)


def close(got: Tensor, want: Tensor, bound: float) -> None:
    """Relative L2 distance within ``bound``; infinities must stand in the same places."""
    infinite = ~torch.isfinite(want)
    assert got.shape == want.shape
    assert torch.equal(got[infinite].double(), want[infinite].double())
    error = relative_l2(got.masked_fill(infinite, 0), want.masked_fill(infinite, 0))
    assert error <= bound, f"relative L2 error {error:.3g}, allowed {bound:.3g}"


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result or of inputs: tuples, lists, mappings and dataclasses are walked through."""
    return list(_walk(result))


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _walk(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))


def moved(value: Any, device: str) -> Any:
    """A copy on another device: strides, overlapping views and what lies between elements included."""
    if isinstance(value, Tensor):
        storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        copy = storage.to(device, copy=True).view(value.dtype)
        return copy.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Mapping):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    if isinstance(value, torch.device):
        return torch.device(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def element_of(inputs: Mapping[str, Any]) -> str:
    """The narrowest float type among the inputs; where none is a tensor itself, among those of the first one."""
    given = [value for value in inputs.values() if isinstance(value, Tensor)] or tensors(next(iter(inputs.values())))
    found = {ELEMENT[x.dtype] for x in given if x.dtype in ELEMENT} - {"f32"}
    return next(iter(found), "f32")


def fits(line: Line, inputs: Mapping[str, Any]) -> bool:
    kind = {"kind": inputs["kind"]} if "kind" in inputs else {}
    right_dtype = not line.dtypes or element_of(inputs) in line.dtypes
    packed = {FORMS[type(value)] for value in inputs.values() if type(value) in FORMS}
    return right_dtype and packed.issubset(line.packed) and not lacking(line, traits_of(dict(inputs)) | kind)


def check_parity(line: Line, case: Case, seed: int, device: str = "cpu") -> None:
    """The variant's results, and what it leaves in the tensors it was given, against the reference's; both on
    ``device``."""
    inputs, given = (moved(case.make(seed), device) for _ in range(2))
    before = [x.clone() for x in tensors(inputs)]
    reference = resolve(CATALOG.lines[line.contract, REFERENCE])  # declares the contract too, if nothing has yet
    wants = tensors(reference(**inputs))
    prepack = prepack_of(line)
    if prepack is not None:  # the variant takes the packed weight under a name of its own, in the same place
        gots = tensors(resolve(line)(*[prepack(v) if k == "w_NK" else v for k, v in given.items()]))
    else:
        gots = tensors(resolve(line)(**given))
    contract = CONTRACTS[line.contract]
    bound = contract.bound[element_of(inputs)].value
    assert len(gots) == len(wants)
    for got, want in zip(gots, wants):
        assert got.dtype == want.dtype
        if contract.compare is None or line.target in ("any", "cpu"):
            close(got, want, bound)
    if contract.compare is not None and line.target not in ("any", "cpu"):
        wrong = contract.compare(inputs, gots, wants)
        assert not wrong, wrong
    for old, left, right in zip(before, tensors(inputs), tensors(given)):
        if bitwise_equal(old, left):
            assert bitwise_equal(left, right), "the variant wrote to an input that the reference leaves alone"
        else:  # the pool around what was written may hold NaN: it has to be untouched
            assert torch.equal(left.isnan(), right.isnan()), "the variant wrote elsewhere than the reference"
            close(right.nan_to_num(), left.nan_to_num(), bound)


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Same shape, and every byte the same: NaN equals the same NaN."""
    packed = (x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for x in (one, other))
    return one.shape == other.shape and torch.equal(*packed)
