"""Hostile inputs for every contract: odd sizes, non-contiguous tensors, ties, empty and single rows, real statistics.

``CASES[contract]`` are the inputs any variant is compared on. Sizes stay small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dayzero.ops.cases_delta import DELTA_CASES
from dayzero.ops.cases_experts import EXPERT_CASES
from dayzero.ops.cases_fp8 import LINEAR_FP8_CASES
from dayzero.ops.cases_mixers import MIXER_CASES
from dayzero.ops.cases_paged import PAGED_CASES
from dayzero.ops.cases_records import RECORD_CASES
from dayzero.ops.cases_residual import RESIDUAL_CASES
from dayzero.ops.cases_sample import SAMPLE_CASES
from dayzero.ops.cases_sparse import SPARSE_CASES
from dayzero.ops.cases_vision import VISION_CASES
from dayzero.ops.contract import Case
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.records import RowCodec
from dayzero.ops.router import Choosing
from dayzero.ops.sparse_index import Pooling
from dayzero.view import Paged

BF16, F32 = torch.bfloat16, torch.float32


def _case(name: str, make: Callable[[Inputs], dict[str, Any]]) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def _norms(kind: str) -> tuple[Case, ...]:
    def make(rows: int, dtype: torch.dtype, loose: bool) -> Callable[[Inputs], dict[str, Any]]:
        def inputs(r: Inputs) -> dict[str, Any]:
            x = r.normal(rows, 33, dtype=dtype) * 30
            x = strided(x) if loose else x
            if rows:
                x[0] = 0  # a row whose norm is nothing but eps
            out: dict[str, Any] = {"x": x, "eps": 1e-6}
            if kind != "norm.l2":
                out["weight_D"] = 1 + r.normal(33) / 8
            if kind == "norm.layer":
                out["bias_D"] = r.normal(33)
            if kind == "norm.rms_gated":
                out |= {"gate": r.normal(rows, 33, dtype=dtype) * 6, "act": "silu" if loose else "sigmoid"}
            return out

        return inputs

    sizes = [(1, F32, False), (63, BF16, True), (65, F32, True), (0, F32, False)]
    cases = [_case(f"{n} rows {d} {'strided' if s else 'packed'}", make(n, d, s)) for n, d, s in sizes]
    if kind == "norm.rms":
        cases += [
            _case("1 + w", lambda r: {"x": r.normal(7, 33), "weight_D": r.normal(33), "eps": 1e-6, "offset": True}),
            _case("no weight", lambda r: {"x": r.normal(7, 33), "eps": 1e-20}),
            _case("rounded before the weight", lambda r: {
                "x": r.normal(7, 33, dtype=BF16), "weight_D": r.normal(33, dtype=BF16), "eps": 1e-5,
                "scale_in": "dtype",
            }),
        ]  # fmt: skip
    return tuple(cases)


def _rope() -> tuple[Case, ...]:
    def make(tokens: int, style: str, part: str, dtype: torch.dtype) -> Callable[[Inputs], dict[str, Any]]:
        return lambda r: {
            "x_THD": strided(r.normal(tokens, 3, 24, dtype=dtype)), "positions": r.integers(0, 1_000_000, tokens),
            "inv_freq_F": 10_000.0 ** (-torch.arange(8) / 8), "style": style, "part": part, "factor": 1.1,
        }  # fmt: skip

    plain = [make(t, s, p, d) for t, s, p, d in (
        (7, "half", "first", F32), (63, "interleaved", "last", BF16), (1, "interleaved", "first", F32),
        (0, "half", "last", F32),
    )]  # fmt: skip
    mrope = _case("three axes", lambda r: {
        "x_THD": r.normal(65, 2, 22), "positions": r.integers(0, 999, 3, 65), "sections": (5, 3, 3),
        "inv_freq_F": 1e7 ** (-torch.arange(11) / 11), "style": "half",
    })  # fmt: skip
    text = _case("one axis of three", lambda r: {
        "x_THD": r.normal(7, 2, 22), "positions": r.integers(0, 999, 7), "sections": (5, 3, 3),
        "inv_freq_F": 1e7 ** (-torch.arange(11) / 11), "style": "half",
    })  # fmt: skip
    back = _case("inverse", lambda r: make(7, "half", "last", F32)(r) | {"inverse": True})
    return (*(_case(f"plain {i}", m) for i, m in enumerate(plain)), mrope, text, back)


def _linear(grouped: bool) -> tuple[Case, ...]:
    def make(rows: int, dtype: torch.dtype, bias: bool) -> Callable[[Inputs], dict[str, Any]]:
        def inputs(r: Inputs) -> dict[str, Any]:
            if grouped:
                return {"x_TGK": strided(r.normal(rows, 3, 65, dtype=dtype)), "w_GNK": r.normal(3, 31, 65, dtype=dtype)}
            return {
                "x_TK": strided(r.normal(rows, 65, dtype=dtype)), "w_NK": strided(r.normal(33, 65, dtype=dtype)),
                "bias_N": r.normal(33, dtype=dtype) if bias else None,
            }  # fmt: skip

        return inputs

    sizes = [(0, F32, False), (1, F32, True), (7, BF16, False), (63, BF16, True), (65, F32, False)]
    return tuple(_case(f"{n} rows {d} bias {b}", make(n, d, b)) for n, d, b in sizes)


GLUS: tuple[dict[str, Any], ...] = (
    {"kind": "silu"}, {"kind": "gelu_tanh"}, {"kind": "clamped", "limit": 7.0, "alpha": 1.702},
    {"kind": "silu_clamped", "limit": 10.0}, {"kind": "situ", "beta": 4.0, "linear_beta": 25.0},
)  # fmt: skip


def _matmul_glu() -> tuple[Case, ...]:
    def make(
        rows: int, width: int, inner: int, dtype: torch.dtype, act: dict[str, Any]
    ) -> Callable[[Inputs], dict[str, Any]]:
        # Gates of some sigma, so that clamps and saturations are reached.
        return lambda r: {
            "x_TK": strided(r.normal(rows, width, dtype=dtype)) * 4,
            "w_NK": r.normal(2 * inner, width, dtype=dtype) * width**-0.5, "activation": act,
        }  # fmt: skip

    sizes = ((1, 64, 40), (7, 136, 17), (8, 520, 264), (9, 65, 33), (33, 24, 8))
    cases = [_case(f"{n} rows {a['kind']} bf16", make(n, k, i, BF16, a)) for (n, k, i), a in zip(sizes, GLUS)]
    return (*cases, _case("f32", make(7, 65, 9, F32, GLUS[0])), _case("no rows", make(0, 64, 8, BF16, GLUS[0])))


def _matmul_add() -> tuple[Case, ...]:
    def make(rows: int, dtype: torch.dtype, width: int = 65) -> Callable[[Inputs], dict[str, Any]]:
        return lambda r: {
            "x_TK": strided(r.normal(rows, width, dtype=dtype)), "w_NK": r.normal(33, width, dtype=dtype),
            "added_TN": r.normal(rows, 33, dtype=dtype) * 9,
        }  # fmt: skip

    sizes = ((0, F32, 65), (1, BF16, 64), (7, BF16, 65), (13, BF16, 520), (63, BF16, 65), (65, F32, 65))
    return tuple(_case(f"{n} rows {d} {k} wide", make(n, d, k)) for n, d, k in sizes)


def _glu() -> tuple[Case, ...]:
    def make(kind: dict[str, Any], dtype: torch.dtype) -> Callable[[Inputs], dict[str, Any]]:
        # 40 sigma reaches every clamp and both tanh saturations.
        return lambda r: (
            {"gate_TI": r.normal(63, 7, dtype=dtype) * 40, "up_TI": r.normal(63, 7, dtype=dtype) * 40} | kind
        )

    return tuple(_case(f"{k['kind']} {d}", make(k, d)) for k in GLUS for d in (F32, BF16))


def _route() -> tuple[Case, ...]:
    def big_bias(r: Inputs) -> dict[str, Any]:
        # A trained correction bias dwarfs the scores: 7 + U(0, 0.25) has steps of 5e-7 in f32 but of 3e-2 in bf16.
        return {"logits_TE": r.normal(65, 96), "top_k": 7, "score": "sigmoid", "bias_E": 7 + r.uniform(96) / 4,
                "scale": 2.5, "eps": 1e-20}  # fmt: skip

    def ties(r: Inputs) -> dict[str, Any]:
        return {"logits_TE": r.integers(0, 3, 63, 16).float(), "top_k": 5, "score": "softmax"}

    return (
        _case("large bias", big_bias),
        _case("groups", lambda r: big_bias(r) | {"groups": (8, 3)}),
        _case("ties", ties),
        _case("ties over the chosen", lambda r: ties(r) | {"score": "softmax_topk"}),
        _case("no renormalising", lambda r: ties(r) | {"renormalise": False, "score": "sigmoid"}),
        _case("no rows", lambda r: {"logits_TE": r.normal(0, 16), "top_k": 4, "score": "sigmoid"}),
    )


def _router() -> tuple[Case, ...]:
    def make(
        tokens: int, experts: int, width: int, dtype: torch.dtype, **how: Any
    ) -> Callable[[Inputs], dict[str, Any]]:
        """bias: which of the two there is. exact: sums of eighths, which tie or lie apart, in any order."""
        bias, exact = how.pop("bias", ""), how.pop("exact", False)

        def inputs(r: Inputs) -> dict[str, Any]:
            if exact:
                x, w = r.integers(-2, 3, tokens, width).to(dtype), r.integers(-1, 2, experts, width).to(dtype) / 8
            else:
                x, w = strided(r.normal(tokens, width, dtype=dtype)), r.normal(experts, width, dtype=dtype) / width**0.5
            out: dict[str, Any] = {
                "x_TD": x,
                "w_ED": w,
                "choosing": Choosing(**{"top_k": 4, "score": "softmax", **how}),
            }
            if bias == "select":
                out["select_bias_E"] = 7 + r.uniform(experts) / 4
            return out | ({"logit_bias_E": r.normal(experts, dtype=dtype)} if bias == "logit" else {})

        return inputs

    return (
        _case("one token, its bias", make(1, 32, 720, BF16, score="softmax_topk", bias="logit")),
        _case("ties", make(17, 40, 65, BF16, exact=True, score="sigmoid", scale=2.5, eps=1e-20)),
        _case("ties, packed", make(33, 96, 1088, BF16, exact=True, score="softmax_topk", top_k=6)),
        _case("groups", make(63, 96, 320, BF16, score="sigmoid", bias="select", groups=(8, 3), top_k=7, eps=1e-20)),
        _case("no renormalising", make(65, 33, 130, BF16, renormalise=False, top_k=3)),
        _case("f32", make(7, 16, 33, F32)),
        _case("no tokens", make(0, 16, 64, BF16)),
    )


def traits_of(inputs: dict[str, Any]) -> dict[str, object]:
    """The options that a case's inputs use and that a variant may lack, as the catalog names them."""
    found: dict[str, object] = {}
    for argument, option in (("sinks_H", "sinks"), ("biases", "bias"), ("allowed_TA", "index")):
        if inputs.get(argument) is not None:
            found[option] = True
    if isinstance(inputs.get("raw"), Raw):
        found |= _delta_traits(inputs["raw"], inputs["weights"], inputs["kept"], inputs)
    for given in inputs.values():
        if isinstance(given, Paged | RowCodec) and given.record:
            found["record"] = given.record
    if inputs.get("value_dim"):
        found["latent"] = True
        if "listed_TN" not in inputs:
            found["latent_width"] = inputs["value_dim"]
    if "kv_b" in inputs and "rows" in inputs:
        found["latent_width"] = inputs["kv_b"].shape[1]
    if isinstance(pooling := inputs.get("pooling"), Pooling):
        how = "max" if pooling.gates is None else "gated"
        found |= {"how": how, "local": pooling.local > 0, "tail": pooling.tail}
    for option in ("window", "softcap"):
        if inputs.get(option) and "scores_TL" not in inputs:
            found[option] = True
    return found


def _delta_traits(raw: Raw, weights: Weights, kept: Kept, options: dict[str, Any]) -> dict[str, object]:
    key_width, value_width = kept.state_NHKV.shape[2:]
    return {
        "decay": "channel" if raw.z.dim() == 3 else "head",
        "gate": "softplus" if options.get("lower") is None else "bounded",
        "act": options["act"],
        "grouped": raw.q_TC.shape[1] // key_width != kept.state_NHKV.shape[1],
        "key_width": key_width,
        "value_width": value_width,
        "taps": weights.q_taps_CW.shape[1],
    }


CASES: dict[str, tuple[Case, ...]] = {
    **{kind: _norms(kind) for kind in ("norm.rms", "norm.layer", "norm.rms_gated", "norm.l2")},
    "rope.apply": _rope(),
    "embed.lookup": (
        _case(
            "repeated and last", lambda r: {"ids_T": torch.tensor([6, 0, 6, 3]), "table_VH": strided(r.normal(7, 5))}
        ),
        _case("no tokens", lambda r: {"ids_T": r.integers(0, 7, 0), "table_VH": r.normal(7, 5, dtype=BF16)}),
    ),
    "linear.matmul": (*_linear(False), *LINEAR_FP8_CASES["linear.matmul"]),
    "linear.matmul_f32": (*_linear(False), *LINEAR_FP8_CASES["linear.matmul_f32"]),
    "linear.matmul_glu": (*_matmul_glu(), *LINEAR_FP8_CASES["linear.matmul_glu"]),
    "linear.matmul_add": (*_matmul_add(), *LINEAR_FP8_CASES["linear.matmul_add"]),
    "linear.matmul_fp8_128": (*_linear(False), *LINEAR_FP8_CASES["linear.matmul"]),
    "linear.grouped": _linear(True),
    "activation.glu": _glu(),
    "moe.route": _route(),
    "moe.matmul_route": _router(),
    **EXPERT_CASES,
    **RESIDUAL_CASES,
    **MIXER_CASES,
    **DELTA_CASES,
    **PAGED_CASES,
    **SAMPLE_CASES,
    **SPARSE_CASES,
    **VISION_CASES,
}
for _contract, _more in RECORD_CASES.items():
    CASES[_contract] = (*CASES.get(_contract, ()), *_more)
