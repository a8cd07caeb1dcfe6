"""Faults of stored values: scales, padding, dtypes, constants; and layouts that do not fit a model."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.cpu.faults.catalogue import Command, Edit, Fault
from tests.cpu.faults.edit import Tensor, alter, bf16_of_f32, drop, transposed


def _each_f32(change: Callable[[int, float], float]) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        code, shape, data = tensor
        assert code == "F32"
        values = struct.unpack(f"<{len(data) // 4}f", data)
        return code, shape, struct.pack(f"<{len(values)}f", *(change(i, v) for i, v in enumerate(values)))

    return changed


def _shifted_bf16(by: float) -> Callable[[Tensor], Tensor]:
    """bf16 values plus ``by``, rounded towards zero."""

    def changed(tensor: Tensor) -> Tensor:
        code, shape, data = tensor
        assert code == "BF16"
        wide = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        values = struct.unpack(f"<{len(data) // 2}f", wide)
        return code, shape, bf16_of_f32(struct.pack(f"<{len(values)}f", *(v + by for v in values)))

    return changed


def _first_bytes(new: bytes) -> Callable[[Tensor], Tensor]:
    return lambda tensor: (tensor[0], tensor[1], new + tensor[2][len(new) :])


def _filled(value: bytes) -> Callable[[Tensor], Tensor]:
    return lambda tensor: (tensor[0], tensor[1], value * (len(tensor[2]) // len(value)))


def _floor_grid(tensor: Tensor) -> Tensor:
    """A scale grid that counts whole blocks only: its ragged last column is gone."""
    code, (rows, columns), data = tensor
    assert columns > 1
    row = len(data) // rows
    return code, (rows, columns - 1), b"".join(data[r * row : r * row + row - row // columns] for r in range(rows))


def _as_bf16(tensor: Tensor) -> Tensor:
    assert tensor[0] == "F32"
    return "BF16", tensor[1], bf16_of_f32(tensor[2])


def _longer(tensor: Tensor) -> Tensor:
    code, shape, data = tensor
    return code, (2 * shape[0], *shape[1:]), data + bytes(len(data))


def _unpadded(tensor: Tensor) -> Tensor:
    """The file holds no padding where the family has some."""
    return tensor[0], (4,), tensor[2][:16]


SQUARE = "both decoders read the file as it is, and the transposed grid is as valid: only a measured quality would tell"
SMALL = (
    "a value that is merely wrong is in the publisher's right; hashes (--hash) tell a changed file, nothing else does"
)

# (name, kind, report, twin, command, pattern, edit, why it is missed)
TABLE: tuple[tuple[str, str, str, str, Command, str, Edit, str], ...] = (
    ("all-zero matrix", "A", "parallax#444", "dense", "load", r"weights\.constant.*layers\.2\.mixer\.o is all zero",
     alter("layers.2.self_attn.o_proj", _filled(b"\0")), ""),
    ("constant matrix", "A", "parallax#444", "dense", "load", r"weights\.constant.*layers\.1\.channel\.up is constant",
     alter("layers.1.mlp.up_proj", _filled(b"\x80\x3f")), ""),
    ("one expert of zeros", "A", "", "head_delta", "load",
     r"weights\.constant.*expert 5 of layers\.1\.channel\.experts\.down",
     alter("layers.1.mlp.experts.down_proj", lambda t: (
         t[0], t[1], t[2][: 5 * len(t[2]) // 16] + bytes(len(t[2]) // 16) + t[2][6 * len(t[2]) // 16 :])), ""),
    ("NaN in a matrix", "A", "", "dense", "load", r"weights\.not_finite.*layers\.0\.mixer\.v holds NaN",
     alter("layers.0.self_attn.v_proj", _first_bytes(b"\xc0\x7f")), ""),
    ("padding of A_log is not zero", "A", "sglang-jax#1559", "depth", "load",
     r"layers\.1\.self_attn\.A_log.*row 4 of the\s+padding",
     alter("layers.1.self_attn.A_log", _each_f32(lambda i, v: v if i < 4 else 1.0)), ""),
    ("A_log padded to another length", "A", "sglang-jax#1559", "depth", "inspect",
     r"tensors\.misfit.*layers\.1\.self_attn\.A_log",
     alter("layers.1.self_attn.A_log", _longer), ""),
    ("A_log without its padding", "A", "sglang-jax#1559", "depth", "inspect",
     r"tensors\.misfit.*layers\.1\.self_attn\.A_log",
     alter("layers.1.self_attn.A_log", _unpadded), ""),
    ("head left at zero", "B", "parallax#444", "dense", "load", r"weights\.constant.*head is all zero",
     alter("lm_head", _filled(b"\0")), ""),
    ("scale grid counted by floor", "D", "FastDeploy#3486", "latent", "inspect",
     r"tensors\.misfit.*layers\.0\.mlp\.gate_proj\.weight_scale_inv",
     alter("layers.0.mlp.gate_proj.weight_scale_inv", _floor_grid), ""),
    ("scale grid transposed", "D", "", "latent", "inspect",
     r"tensors\.misfit.*layers\.0\.mlp\.gate_proj\.weight_scale_inv",
     alter("layers.0.mlp.gate_proj.weight_scale_inv", transposed), ""),
    ("square scale grid transposed", "D", "", "latent", "inspect", "kv_a_proj",
     alter("layers.4.mlp.experts.3.up_proj.weight_scale_inv", transposed), SQUARE),
    ("NaN scale, f32", "D", "", "latent", "inspect",
     r"quantization\.scale.*layers\.1\.self_attn\.o_proj\.weight_scale_inv",
     alter("layers.1.self_attn.o_proj.weight_scale_inv", _first_bytes(struct.pack("<f", float("nan")))), ""),
    ("NaN scale, e8m0 255", "D", "", "sinks", "inspect",
     r"quantization\.scale.*layers\.1\.mlp\.experts\.down_proj_scales",
     alter("layers.1.mlp.experts.down_proj_scales", _first_bytes(b"\xff")), ""),
    ("all scales zero", "D", "sglang#20705", "latent", "inspect",
     r"quantization\.scale.*all fp8_block scales read are zero",
     alter("weight_scale_inv", _filled(b"\0")), ""),
    ("scale missing", "D", "vllm#35299", "latent", "inspect",
     r"tensors\.missing.*layers\.3\.mlp\.experts\.7\.up_proj\.weight_scale_inv",
     drop("layers.3.mlp.experts.7.up_proj.weight_scale_inv"), ""),
    ("global scale missing", "D", "sglang#29151", "nvfp4", "inspect",
     r"tensors\.missing.*experts\.2\.gate_proj\.weight_scale_2",
     drop("layers.1.mlp.experts.2.gate_proj.weight_scale_2"), ""),
    ("global scale is infinite", "D", "sglang#29151", "nvfp4", "inspect", r"quantization\.scale.*weight_scale_2",
     alter("layers.1.mlp.experts.2.gate_proj.weight_scale_2", _filled(struct.pack("<f", float("inf")))), ""),
    ("one scale doubled in the file", "D", "", "latent", "inspect", "o_proj",
     alter("layers.1.self_attn.o_proj.weight_scale_inv", _each_f32(lambda i, v: 2 * v if i == 0 else v)), SMALL),
    ("plain norms stored around 0", "F", "mlx-vlm#2041", "dense", "load", r"weights\.norm_mean.*layers\.1\.mixer_norm",
     alter("norm", _shifted_bf16(-1.0)), ""),
    ("1 + w norms stored around 1", "F", "mlx-vlm#2041", "head_delta", "load",
     r"weights\.norm_mean.*layers\.1\.mixer_norm",
     alter("layernorm", _shifted_bf16(1.0)), ""),
    ("router bias stored in bf16", "G", "sglang#37133", "latent", "inspect",
     r"tensors\.narrowed.*e_score_correction_bias",
     alter("e_score_correction_bias", _as_bf16), ""),
    ("decay rates stored in bf16", "F", "", "channel_delta", "inspect", r"tensors\.narrowed.*A_log",
     alter("A_log", _as_bf16), ""),
)  # fmt: skip

FAULTS = (
    *(Fault(n, k, r, t, c, p, edit=e, missed=m) for n, k, r, t, c, p, e, m in TABLE),
    Fault(
        "experts cut through a scale block", "D", "ktransformers#2036", "latent", "plan", r"plan\.fit.*128",
        call={"hardware": "h100x4", "tp": 4, "ep": 1, "pp": 1, "cp": 1, "dp": 1},
    ),
    Fault(
        "packed input cut within a group", "D", "ATOM#917", "sinks", "plan", r"plan\.fit.*(32|group|block)",
        call={"hardware": "h100x4", "tp": 4, "ep": 1, "pp": 1, "cp": 1, "dp": 1},
    ),
    Fault(
        "rehearsal without the window", "E", "vllm#3385", "sinks", "twin", "window",
        call={"layer_types": ["full_attention"] * 4},
    ),
    Fault(
        "rehearsal without shared indexes", "A", "ATOM#1260", "shared_index", "twin", "shared",
        call={"index_topk_freq": 1},
    ),
)  # fmt: skip
